"""The list of a split's images: one JSON line each (path, label), in the order of the set.

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
            stream.write(json.dumps({"path": file.path, "label": file.label}) + "\n")


def read_index(path: Path) -> list[ImageFile]:
    """Read the list; UserError naming the file when it is damaged."""
    try:
        with path.open(encoding="ascii") as stream:
            return [ImageFile(entry["path"], int(entry["label"])) for entry in map(json.loads, stream)]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error})", "delete its folder and pack the images again") from error
