"""Image folders in the layout SPLIT/CLASS/FILE: what is in them, what is odd about them, and how they are split.

Rules, the same whatever reads the images later: classes are the sub-folders in order of their names' bytes; images
are found at any depth in a class folder; symbolic links are followed, a link that leads nowhere or round in a circle
is reported; hidden files and files without an image's suffix are reported and left out. Names are bytes to the
system: those that are not UTF-8 are kept as they are and shown with escapes. The classes are those of train/: one
that has no validation image keeps its label and is reported.
"""

import hashlib
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from attngeo.data import holding_out
from attngeo.data.label_files import known_label_files, read_labels
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
    """What was found under `root`: class names, images by split, odd files and odd classes as (path, reason)."""

    root: Path
    classes: list[str]
    splits: dict[str, list[ImageFile]]
    split_rule: str
    strays: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    label_rule: str = "a class is the index of its folder's name in byte order"


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


@dataclass
class Split:
    """The folder of a split: images by class folder (paths from the root), and images outside of class folders."""

    classes: dict[str, list[str]]
    flat: list[str]


def scan(root: Path, val_labels: Path | None = None, hold_out: float = 0.0) -> ImageFolder:
    """List the images of `root`, which has train/ and val/ folders of class folders, or class folders only.

    The images of val/ may also lie flat in it, if `val_labels` names the file of their labels (`label_files`). With
    `hold_out`, validation is that share of the training images (`holding_out`); val/ and the labels are not looked at.
    Raises UserError when there are no classes, a class has no training image, images lie flat without labels, or val/
    has a class that train/ has not.
    """
    if not root.is_dir():
        raise UserError(
            f"{shown(root)} is not a folder", "give a folder with train/ and val/, or with one folder a class"
        )
    strays: list[tuple[str, str]] = []
    present = [split for split in SPLITS if (root / split).is_dir()]
    if len(present) == 1 and not (hold_out and present == ["train"]):
        missing = next(split for split in SPLITS if split not in present)
        raise UserError(
            f"{shown(root)} has {present[0]}/ but no {missing}/",
            f"add {missing}/ with the same class folders, or give {shown(root / present[0])} to have that split",
        )
    if val_labels is not None and not present:
        raise UserError(f"{shown(root)} has no val/ that labels could be for", "leave the label file out")
    found = ImageFolder(root, [], {}, "folders train/ and val/", strays)
    train = list_split(root, "train" if present else "", strays)
    by_class = {"train": _filled_classes(root / ("train" if present else ""), train)}
    found.classes = sorted(by_class["train"], key=os.fsencode)
    if present:
        if not hold_out:
            by_class["val"] = _validation(found, list_split(root, "val", strays), val_labels)
        for name in sorted(os.listdir(root), key=os.fsencode):
            if name not in SPLITS:
                strays.append((name, "hidden" if name.startswith(".") else "neither train/ nor val/"))
    else:
        held_out = split_by_hash([path for paths in by_class["train"].values() for path in paths])
        for name, paths in by_class["train"].items():
            if len(paths) < 2:
                raise UserError(
                    f"class {shown(name)} has one image, which cannot be split into training and validation",
                    "add images to the class, remove it, or make train/ and val/ folders yourself",
                )
        by_class["val"] = {name: [p for p in paths if p in held_out] for name, paths in by_class["train"].items()}
        by_class["train"] = {name: [p for p in paths if p not in held_out] for name, paths in by_class["train"].items()}
        found.split_rule = (
            "one fifth of each class for validation, those with the smallest SHA-256 of their relative path"
        )
    found.splits = {
        split: [
            ImageFile(path, label)
            for label, name in enumerate(found.classes)
            for path in by_class.get(split, {}).get(name, [])
        ]
        for split in SPLITS
    }
    if hold_out:
        files = found.splits["train"]
        names = [shown(name) for name in found.classes]
        chosen = holding_out.held_out([file.label for file in files], hold_out, names)
        for split, wanted in (("train", False), ("val", True)):
            found.splits[split] = [file for file, held in zip(files, chosen, strict=True) if held == wanted]
        found.split_rule = holding_out.rule(hold_out)
    return found


def _filled_classes(base: Path, split: Split) -> dict[str, list[str]]:
    """The class folders of training images; UserError if images lie beside them, or one is empty."""
    if split.flat:
        raise UserError(
            f"{shown(base)} holds {len(split.flat)} images beside or instead of class folders",
            "move each image into a folder named after its class",
        )
    if not split.classes:
        raise UserError(f"{shown(base)} has no class folders", "give a folder with one folder a class, images inside")
    for name, paths in split.classes.items():
        if not paths:
            raise UserError(f"class folder {shown(base / name)} holds no image", "put images into it or remove it")
    return split.classes


def _validation(found: ImageFolder, split: Split, val_labels: Path | None) -> dict[str, list[str]]:
    """Validation images by class; notes in `found` how they got their labels and which classes have none."""
    base = found.root / "val"
    by_class = {name: paths for name, paths in split.classes.items() if paths}
    if split.flat and (by_class or val_labels is None):
        candidates = known_label_files(found.root) if not by_class else []
        raise UserError(
            f"{shown(base)} holds {len(split.flat)} images beside or instead of class folders",
            f"name their label file, perhaps: --val-labels {shown(candidates[0])}"
            if candidates
            else "name the file of their labels (--val-labels FILE), or move each image into a folder named after its "
            "class, as in train/",
        )
    if not split.flat and val_labels is not None:
        raise UserError(f"{shown(base)} has class folders, which give the labels", "leave the label file out")
    if not split.flat and not by_class:
        raise UserError(f"{shown(base)} holds no image", "add validation images in folders of the same names as train/")
    if split.flat and val_labels is not None:
        names = [path.removeprefix("val/") for path in split.flat]
        labels, rule = read_labels(val_labels, names, found.classes)
        found.label_rule += f"; of validation images by {rule}"
        by_class = defaultdict(list)
        for path, label in zip(split.flat, labels, strict=True):
            by_class[label].append(path)
    unknown = sorted(set(by_class) - set(found.classes), key=os.fsencode)
    missing = [name for name in found.classes if name not in by_class]
    if unknown:
        only = f"only in val/: {', '.join(map(shown, unknown[:5]))}"
        if missing:
            only = f"only in train/: {', '.join(map(shown, missing[:5]))}; {only}"
        raise UserError(
            f"{shown(found.root)}: the classes of train/ and val/ differ ({only})",
            "give both the same class folders; names decide which label a class gets, so they must match exactly",
        )
    found.warnings += [(f"val/{name}", "the class has no validation image; labels are not shifted") for name in missing]
    return dict(by_class)


def list_split(root: Path, split: str, strays: list[tuple[str, str]]) -> Split:
    """What lies in root/split (in `root` itself for ""): nothing is read; odd files are added to `strays`."""
    base = root / split if split else root
    prefix = f"{split}/" if split else ""
    listed = Split({}, [])
    for entry in sorted(os.scandir(base), key=lambda item: os.fsencode(item.name)):
        path = prefix + entry.name
        if entry.name.startswith("."):
            strays.append((path, "hidden"))
        elif entry.is_dir():
            listed.classes[entry.name] = _scan_images(root, path, strays)
        elif not entry.is_file():  # reading a pipe or a device would wait for ever
            strays.append((path, "dangling link" if entry.is_symlink() else "not a regular file"))
        elif Path(entry.name).suffix.lower() in IMAGE_SUFFIXES:
            listed.flat.append(path)
        else:
            strays.append((path, "not an image"))
    return listed


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
