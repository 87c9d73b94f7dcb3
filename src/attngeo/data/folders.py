"""Image folders in the layout SPLIT/CLASS/FILE: what is in them, what is odd about them, and how they are split.

Rules, the same whatever reads the images later: classes are the sub-folders in order of their names' bytes; images
are found at any depth in a class folder; symbolic links are followed, a link that leads nowhere or round in a circle
is reported; hidden files and files without an image's suffix are reported and left out. Names are bytes to the
system: those that are not UTF-8 are kept as they are and shown with escapes.
"""

import hashlib
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from attngeo.errors import UserError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
SPLITS = ("train", "val")


@dataclass(frozen=True)
class ImageFile:
    """One image: path relative to the root of the set, the index of its class and, once it was read, its SHA-256."""

    path: str
    label: int
    sha256: str | None = None


@dataclass
class ImageFolder:
    """What was found under `root`: class names, images by split, and odd files as (path, reason)."""

    root: Path
    classes: list[str]
    splits: dict[str, list[ImageFile]]
    split_rule: str
    strays: list[tuple[str, str]] = field(default_factory=list)


def shown(name: str | os.PathLike[str]) -> str:
    """A file name as text that any log or file can hold; bytes that are not UTF-8 become escapes like \\xf1."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def split_by_hash(paths: list[str], share: float = 0.2) -> set[str]:
    """The paths (CLASS/FILE) held out: in each class, the `share` with the smallest SHA-256 of their path.

    A function of the names alone: the same on every machine and in any order of listing. A class of one image keeps
    it for training.
    """
    by_class: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        by_class[path.split("/")[0]].append(path)
    held_out: set[str] = set()
    for members in by_class.values():
        ranked = sorted(members, key=lambda path: hashlib.sha256(os.fsencode(path)).digest())
        count = 0 if len(ranked) < 2 else max(1, round(share * len(ranked)))
        held_out.update(ranked[:count])
    return held_out


def scan(root: Path) -> ImageFolder:
    """List the images of `root`, which has train/ and val/ folders of class folders, or class folders only.

    Raises UserError when there are no classes, a class is empty, validation images lie flat in their folder, or the
    two splits do not have the same classes.
    """
    if not root.is_dir():
        raise UserError(
            f"{shown(root)} is not a folder", "give a folder with train/ and val/, or with one folder a class"
        )
    strays: list[tuple[str, str]] = []
    present = [split for split in SPLITS if (root / split).is_dir()]
    if len(present) == 1:
        missing = next(split for split in SPLITS if split not in present)
        raise UserError(
            f"{shown(root)} has {present[0]}/ but no {missing}/",
            f"add {missing}/ with the same class folders, or give {shown(root / present[0])} to have that split",
        )
    if present:
        found = {split: _scan_classes(root, split, strays) for split in SPLITS}
        for name in sorted(os.listdir(root), key=os.fsencode):
            if name not in SPLITS:
                strays.append((name, "neither train/ nor val/"))
        rule = "folders train/ and val/"
    else:
        found = {"train": _scan_classes(root, "", strays)}
        held_out = split_by_hash([path for paths in found["train"].values() for path in paths])
        for name, paths in found["train"].items():
            if len(paths) < 2:
                raise UserError(
                    f"class {shown(name)} has one image, which cannot be split into training and validation",
                    "add images to the class, remove it, or make train/ and val/ folders yourself",
                )
        found["val"] = {name: [p for p in paths if p in held_out] for name, paths in found["train"].items()}
        found["train"] = {name: [p for p in paths if p not in held_out] for name, paths in found["train"].items()}
        rule = "one fifth of each class for validation, those with the smallest SHA-256 of their relative path"
    classes = _common_classes(root, found)
    splits = {
        split: [ImageFile(path, label) for label, name in enumerate(classes) for path in found[split][name]]
        for split in SPLITS
    }
    return ImageFolder(root, classes, splits, rule, strays)


def _common_classes(root: Path, found: dict[str, dict[str, list[str]]]) -> list[str]:
    """Class names in byte order, the same in both splits; UserError naming the difference."""
    train, val = set(found["train"]), set(found["val"])
    if train != val:
        only = [
            f"only in {split}/: {', '.join(sorted(map(shown, names))[:5])}"
            for split, names in (("train", train - val), ("val", val - train))
            if names
        ]
        raise UserError(
            f"{shown(root)}: the classes of train/ and val/ differ ({'; '.join(only)})",
            "give both the same class folders; names decide which label a class gets, so they must match exactly",
        )
    return sorted(train, key=os.fsencode)


def _scan_classes(root: Path, split: str, strays: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Image paths relative to `root`, by class, for the class folders in root/split."""
    base = root / split if split else root
    prefix = f"{split}/" if split else ""
    classes: dict[str, list[str]] = {}
    flat = 0
    for entry in sorted(os.scandir(base), key=lambda item: os.fsencode(item.name)):
        path = prefix + entry.name
        if entry.name.startswith("."):
            strays.append((path, "hidden"))
        elif entry.is_dir():
            paths = _scan_images(root, path, strays)
            if not paths:
                raise UserError(f"class folder {shown(root / path)} holds no image", "put images into it or remove it")
            classes[entry.name] = paths
        elif Path(entry.name).suffix.lower() in IMAGE_SUFFIXES:
            flat += 1
        else:
            strays.append(
                (path, "dangling link" if entry.is_symlink() and not os.path.exists(entry.path) else "not an image")
            )
    if flat:
        raise UserError(
            f"{shown(base)} holds {flat} images beside or instead of class folders",
            "move each image into a folder named after its class, the same names as in train/",
        )
    if not classes:
        raise UserError(f"{shown(base)} has no class folders", "give a folder with one folder a class, images inside")
    return classes


def _scan_images(root: Path, folder: str, strays: list[tuple[str, str]]) -> list[str]:
    """Image paths relative to `root` below `folder`, in byte order; links to folders are followed once."""
    found: list[str] = []
    pending: list[tuple[str, tuple[str, ...]]] = [(folder, (os.path.realpath(root / folder),))]
    while pending:
        current, ancestors = pending.pop()
        for entry in os.scandir(root / current):
            path = f"{current}/{entry.name}"
            if entry.name.startswith("."):
                strays.append((path, "hidden"))
            elif entry.is_dir():
                real = os.path.realpath(entry.path)
                if real in ancestors:
                    strays.append((path, "link to a folder that contains it"))
                else:
                    pending.append((path, (*ancestors, real)))
            elif not entry.is_file():  # reading a pipe or a device would wait for ever
                strays.append((path, "dangling link" if entry.is_symlink() else "not a regular file"))
            elif Path(entry.name).suffix.lower() in IMAGE_SUFFIXES:
                found.append(path)
            else:
                strays.append((path, "not an image"))
    return sorted(found, key=os.fsencode)
