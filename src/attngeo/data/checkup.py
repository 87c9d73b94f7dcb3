"""A dry check of an image folder before it is packed: names are listed, some images are read, nothing is written."""

import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from attngeo.data.folders import SPLITS, list_split, shown
from attngeo.data.images import UnreadableImage, decode_image
from attngeo.data.label_files import known_label_files, read_labels
from attngeo.doctor import Check
from attngeo.errors import UserError

SAMPLED_IMAGES = 96
READING_S = 10.0  # after which no further sample is read
PACKED_SIDE = 500
WORDNET = re.compile(r"n\d{8}")
KIT_NUMBER = re.compile(r"0*[1-9]\d*")
NAMED = 3  # examples in a message


def check_folder(root: Path, val_labels: Path | None = None) -> list[Check]:
    """What is right and wrong with an image folder, each wrong thing with its remedy; reads at most 96 images."""
    root = root.expanduser()
    if not root.is_dir():
        return [
            Check("folder", "missing", f"{shown(root)} is not a folder", "give the folder that holds train/ and val/")
        ]
    present = [split for split in SPLITS if (root / split).is_dir()]
    if not present:
        return _one_level(root)
    if len(present) == 1:
        return [_half(root, present[0])]
    strays: list[tuple[str, str]] = []
    train, val = (list_split(root, split, strays) for split in SPLITS)
    names = sorted(train.classes, key=os.fsencode)
    checks = [
        Check("folder", "ok", f"{shown(root.absolute())} with train/ and val/"),
        _training(train.classes, train.flat),
        _validation(root, names, val.classes, val.flat, val_labels),
        _class_sets(names, val.classes, bool(val.flat)),
        _strays(strays),
    ]
    images = {
        "train": [path for paths in train.classes.values() for path in paths],
        "val": [path for paths in val.classes.values() for path in paths] + val.flat,
    }
    return [*checks, *_samples_and_space(root, images)]


def _one_level(root: Path) -> list[Check]:
    strays: list[tuple[str, str]] = []
    listed = list_split(root, "", strays)
    if not listed.classes:
        archives = [name for name in sorted(os.listdir(root)) if name.endswith((".tar", ".zip"))]
        remedy = f"unpack {shown(archives[0])} first" if archives else "give the folder that holds train/ and val/"
        return [Check("folder", "missing", f"{shown(root)} has no train/, no val/ and no class folders", remedy)]
    inner = [name for name in listed.classes if (root / name / "train").is_dir()]
    if inner:
        return [
            Check("folder", "missing", f"train/ lies in {shown(root / inner[0])}", f"give {shown(root / inner[0])}")
        ]
    paths = [path for found in listed.classes.values() for path in found]
    checks = [
        Check(
            "folder",
            "ok",
            f"{len(listed.classes)} class folders without train/ and val/: a fifth is kept for validation",
        ),
        _training(listed.classes, listed.flat),
        _strays(strays),
    ]
    return [*checks, *_samples_and_space(root, {"train": paths, "val": []})]


def _half(root: Path, present: str) -> Check:
    missing = next(split for split in SPLITS if split != present)
    alike = [name for name in ("validation", "valid", "test", "training") if (root / name).is_dir()]
    remedy = f"rename or link {alike[0]}/ to {missing}/" if alike else f"add {missing}/ with the same class folders"
    return Check("folder", "missing", f"{shown(root)} has {present}/ but no {missing}/", remedy)


def _examples(names: Sequence[str]) -> str:
    return ", ".join(shown(name) for name in names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def _training(classes: dict[str, list[str]], flat: list[str]) -> Check:
    empty = [name for name, paths in classes.items() if not paths]
    counts = sorted(len(paths) for paths in classes.values() if paths)
    if flat:
        return Check(
            "train",
            "missing",
            f"{len(flat)} images lie outside of class folders",
            "move them into their classes' folders",
        )
    if not counts:
        return Check("train", "missing", "no image in any class folder", "unpack each class's archive into its folder")
    if empty:
        return Check(
            "train",
            "missing",
            f"{len(empty)} of {len(classes)} class folders are empty: {_examples(empty)}",
            "unpack their images, or remove the folders from train/ and val/",
        )
    return Check("train", "ok", f"{sum(counts)} images of {len(counts)} classes, {counts[0]} to {counts[-1]} a class")


def _validation(
    root: Path, names: list[str], classes: dict[str, list[str]], flat: list[str], val_labels: Path | None
) -> Check:
    if flat and any(classes.values()):
        remedy = "move them into their classes' folders, or all images out of the folders"
        return Check("val", "missing", f"{len(flat)} images lie beside class folders", remedy)
    if flat:
        candidates = [val_labels] if val_labels else known_label_files(root)
        for candidate in candidates:
            try:
                _, rule = read_labels(candidate, [path.removeprefix("val/") for path in flat], names)
            except UserError as error:
                return Check("val", "missing", f"{len(flat)} images lie flat; {error.what}", error.remedy)
            if val_labels:
                return Check("val", "ok", f"{len(flat)} images lie flat, labelled by {rule}")
            remedy = f"pack with --val-labels {shown(candidate)}"
            return Check("val", "warn", f"{len(flat)} images lie flat; {rule}", remedy)
        remedy = "pack with --val-labels FILE (Kaggle's LOC_val_solution.csv, or the kit's ground truth and its map)"
        return Check("val", "missing", f"{len(flat)} images lie flat, without labels", remedy)
    counts = sorted(len(paths) for paths in classes.values() if paths)
    if not counts:
        return Check("val", "missing", "no image", "unpack the validation images into folders named as in train/")
    return Check("val", "ok", f"{sum(counts)} images of {len(counts)} classes, {counts[0]} to {counts[-1]} a class")


def _class_sets(names: list[str], val: dict[str, list[str]], flat: bool) -> Check:
    filled = {name for name, paths in val.items() if paths}
    if flat and not filled:
        return Check("classes", "ok", "those of train/")
    only_train = [name for name in names if name not in filled]
    only_val = sorted(filled - set(names), key=os.fsencode)
    if only_val and all(KIT_NUMBER.fullmatch(name) for name in only_val) and any(map(WORDNET.fullmatch, names)):
        return Check(
            "classes",
            "missing",
            f"val/ is sorted by numbers ({_examples(only_val)}), train/ by WordNet names ({_examples(names)})",
            "the development kit's numbers are not the order of the names: rename the folders of val/ by its "
            "map_clsloc.txt or meta.mat",
        )
    if only_val:
        return Check(
            "classes",
            "missing",
            f"{len(only_val)} classes of val/ are not in train/: {_examples(only_val)}"
            + (f"; {len(only_train)} of train/ not in val/: {_examples(only_train)}" if only_train else ""),
            "give both the same class folders: names decide which label a class gets",
        )
    if only_train:
        return Check(
            "classes",
            "warn",
            f"{len(only_train)} classes have no validation image: {_examples(only_train)}",
            "labels are not shifted by it; add their images if there are any",
        )
    return Check("classes", "ok", f"train/ and val/ have the same {len(names)}, labelled in byte order of their names")


def _strays(strays: list[tuple[str, str]]) -> Check:
    if not strays:
        return Check("other files", "ok", "none")
    examples = "; ".join(f"{shown(path)} ({reason})" for path, reason in strays[:NAMED])
    return Check("other files", "ok", f"{len(strays)} are left out: {examples}{'; ...' if len(strays) > NAMED else ''}")


def _samples_and_space(root: Path, images: dict[str, list[str]]) -> list[Check]:
    """Read some images, evenly spaced; whether they can be read, and whether the disk has room for all, packed."""
    paths = [path for found in images.values() for path in found]
    if not paths:
        return []
    step = max(1, len(paths) // SAMPLED_IMAGES)
    bad: list[str] = []
    pixels, file_bytes, read, begun = 0, 0, 0, time.monotonic()
    for path in paths[::step]:
        if time.monotonic() - begun > READING_S:
            break
        read += 1
        try:
            file_bytes += (root / path).stat().st_size
            height, width, _ = decode_image(root / path, PACKED_SIDE).shape
            pixels += height * width
        except (UnreadableImage, OSError) as error:
            bad.append(f"{path} ({error})")
    read_s = time.monotonic() - begun
    if bad:
        readable = Check(
            "images",
            "warn",
            f"{len(bad)} of {read} read cannot be decoded: {_examples(bad)}",
            "they would be left out and listed in report.csv; replace them if there are whole copies",
        )
    else:
        readable = Check("images", "ok", f"{read} of {len(paths)} read, all can be decoded")
    # Measured on photographs: JPEG of quality 90 takes a third of a byte a pixel; raw pixels take three.
    jpeg_gb, raw_gb = (size * pixels / read * len(paths) / 1e9 for size in (0.35, 3.0))
    # Reading is about two thirds of packing.
    hours = 1.5 * read_s / read * len(paths) / 3600
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    detail = (
        f"{len(paths)} images, {file_bytes / read * len(paths) / 1e9:.1f} GB; packed with at most {PACKED_SIDE} pixels "
        f"about {jpeg_gb:.1f} GB as JPEG or {raw_gb:.1f} GB raw, in about {hours:.1f} hours divided by the workers; "
        f"{free_gb:.1f} GB free here"
    )
    if free_gb < jpeg_gb:
        return [readable, Check("space", "warn", detail, "pack onto another disk, or with a smaller --max-resolution")]
    return [readable, Check("space", "ok", detail)]
