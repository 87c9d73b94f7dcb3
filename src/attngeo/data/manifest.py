"""What a packed image set is: manifest.json beside its files, checked against their hashes before anything is read."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import unquote_to_bytes, urlsplit

from attngeo.data.layout import BETON, Names, check_classes
from attngeo.errors import UserError
from attngeo.files import read_json, sha256_file

log = logging.getLogger(__name__)

FORMAT = 1
ANNOUNCED_BYTES = 4 << 30  # hashing more than this takes long enough to be wondered at
Storage = Literal["arrays", "beton", "folder"]
Split = Literal["train", "val"]


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read: `raw` is the JSON object, `path` where it lies, `sha256` that of its own bytes."""

    path: Path
    raw: dict[str, Any]
    sha256: str

    @property
    def folder(self) -> Path:
        """Where the files of the set lie."""
        return self.path.parent

    @property
    def storage(self) -> Storage:
        """How the images are kept: arrays in memory, a .beton file for each split, or the original files."""
        return cast(Storage, self.raw["storage"])

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return int(self.raw["num_classes"])

    def num_images(self, split: Split) -> int:
        """Number of images in a split."""
        return int(self.raw[split]["n"])

    def source_root(self) -> Path:
        """Folder of the original files: the cache of something embedded (fetched if need be), or a user's folder."""
        root = self.raw["root"]
        if "embedded" in root:
            from attngeo.data.embedded import fetch

            return fetch(root["embedded"])
        return path_of_uri(root["uri"])

    def data_path(self, split: Split) -> Path:
        """The file that holds a split (arrays, .beton) or lists it (folder), verified by size and SHA-256.

        Raises UserError when it is missing or not the file that was packed: FFCV would read a damaged one without an
        error.
        """
        entry = self.raw[split]
        # Sets packed by older versions hold nothing out and do not say so.
        as_they_came = self.storage == "arrays" and not self.raw.get("hold_out")
        path = (self.source_root() if as_they_came else self.folder) / entry["path"]
        remedy = f"delete {self.path} and pack the images again"
        if "class_order" in self.raw:  # sets packed by older versions have none
            check_classes(self.folder / self.raw["class_order"]["path"], self.raw["classes"], remedy)
        if not path.is_file():
            raise UserError(f"{path} is missing, which {self.path} lists", remedy)
        size = path.stat().st_size
        if size == entry["bytes"] >= ANNOUNCED_BYTES:
            log.warning("verifying %s (%.1f GB) before it is read", path, size / 1e9)
        if size != entry["bytes"] or sha256_file(path) != entry["sha256"]:
            raise UserError(f"{path} is not the file that was packed (size or SHA-256 differs)", remedy)
        return path


def read_manifest(path: str | Path) -> Manifest:
    """Read a manifest, or that of the packed set `path` (a folder, or NAME.beton).

    UserError when it is missing or of another kind.
    """
    path = manifest_path(path)
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise UserError(f"{path} is not a manifest of a packed image set", "pack the images again with `attngeo pack`")
    return Manifest(path, raw, sha256_file(path))


def manifest_path(path: str | Path) -> Path:
    """Where the manifest of the packed set `path` is or would be; a manifest's own path is returned as it is."""
    path = Path(path)
    if path.suffix == BETON or path.is_dir():
        names = Names.of(path)
        return names.folder / names.manifest
    return path


def path_of_uri(uri: str) -> Path:
    """The path of a file: URI, which carries names of any bytes."""
    return Path(os.fsdecode(unquote_to_bytes(urlsplit(uri).path)))


def file_entry(path: Path, *, count: int, relative_to: Path) -> dict[str, Any]:
    """The lines a manifest has for one file."""
    return {
        "n": count,
        "path": path.relative_to(relative_to).as_posix(),
        "bytes": path.stat().st_size,
        "sha256": sha256_file(path),
    }
