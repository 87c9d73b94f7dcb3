"""The list of a split's images: one JSON line each, in the order of the set: path, label and, where the file itself is
what is stored, its SHA-256.

Paths are ASCII in the file: characters beyond, and bytes that are no UTF-8, are escaped, so that any name survives.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from attngeo.data.folders import ImageFile
from attngeo.errors import UserError
from attngeo.files import write_aside


def write_index(path: Path, files: Sequence[ImageFile]) -> None:
    """Write the list."""
    with write_aside(path) as stream:
        for file in files:
            entry: dict[str, str | int] = {"path": file.path, "label": file.label}
            if file.sha256 is not None:
                entry["sha256"] = file.sha256
            stream.write(json.dumps(entry) + "\n")


def read_index(path: Path) -> list[ImageFile]:
    """Read the list; UserError naming the file when it is damaged."""
    try:
        with path.open(encoding="ascii") as stream:
            return [
                ImageFile(entry["path"], int(entry["label"]), entry.get("sha256")) for entry in map(json.loads, stream)
            ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error})", "delete its folder and pack the images again") from error
