"""Label files of a flat validation folder: which class each image has, in the formats that ImageNet is handed out with.

- `LOC_val_solution.csv` (Kaggle): ImageId,PredictionString, whose first word is the class;
- one class name a line, in the order of the images' names (`imagenet_2012_validation_synset_labels.txt`);
- "IMAGE CLASS" or "IMAGE,CLASS", the image with or without its suffix;
- "IMAGE NUMBER" (Caffe's val.txt): numbers from 0, in the byte order of the class names;
- one number a line, in the order of the images' names (`ILSVRC2012_validation_ground_truth.txt`): the development kit's
  own numbering, from 1, which is not the order of the class names; its map (`map_clsloc.txt` or `meta.mat`) must lie
  beside it.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from attngeo.errors import UserError

KAGGLE_HEADER = "imageid,predictionstring"
KIT_MAPS = ("map_clsloc.txt", "meta.mat")
KNOWN_NAMES = (
    "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
    "ILSVRC2012_validation_ground_truth.txt",
    "val_labels.txt",
    "val.txt",
)


def read_labels(path: Path, images: Sequence[str], classes: Sequence[str]) -> tuple[list[str], str]:
    """The class of each of `images` (file names in byte order), and the rule in words.

    UserError for a file of no known format, an image without a label, or a label that is none of `classes`.
    """
    lines = _lines(path)
    pairs, ordered = _parse(path, lines)
    if ordered is not None:
        if len(ordered) != len(images):
            raise UserError(
                f"{path} has {len(ordered)} labels for {len(images)} validation images",
                "give the label file of exactly these images",
            )
        found, rule = ordered, "one label a line, in the order of the images' names"
    else:
        missing = [name for name in images if name not in pairs and PurePosixPath(name).stem not in pairs]
        if missing:
            raise UserError(
                f"{path} has no label for {len(missing)} of {len(images)} validation images (the first: {missing[0]})",
                "give the label file of these images, or remove those without a label",
            )
        found = [pairs[name] if name in pairs else pairs[PurePosixPath(name).stem] for name in images]
        rule = "a label for each image's name"
    named, numbering = _named(path, found, classes, ordered is not None)
    return named, f"{path.name}: {rule}{numbering}"


def known_label_files(root: Path) -> list[Path]:
    """Label files of the usual names in `root`, and where the official archives have them."""
    folders = (root, root / "val", *sorted(root.glob("ILSVRC2012_devkit*/data")), root.parent)
    return [folder / name for folder in folders for name in KNOWN_NAMES if (folder / name).is_file()]


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UserError(f"the label file {path} cannot be read ({error.strerror})", "give the path of a file") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError(f"the label file {path} is empty", "give the label file of the validation images")
    return lines


def _parse(path: Path, lines: list[str]) -> tuple[dict[str, str], list[str] | None]:
    """(labels by image name, None) or ({}, labels in order)."""
    if lines[0].lower().replace(" ", "") == KAGGLE_HEADER:
        rows = [line.split(",", 1) for line in lines[1:]]
        if any(len(row) != 2 or not row[1].split() for row in rows):
            raise UserError(f"{path} has lines without a class", "download it again")
        return {image: prediction.split()[0] for image, prediction in rows}, None
    separator = "," if all("," in line for line in lines) else None
    parts = [line.rsplit(separator, 1) for line in lines]
    if all(len(part) == 1 for part in parts):
        return {}, [part[0] for part in parts]
    if all(len(part) == 2 for part in parts):
        return {image.strip(): label.strip() for image, label in parts}, None
    raise UserError(
        f"{path} is of no known format: some lines have one word and some two",
        "write a line IMAGE CLASS for each validation image",
    )


def _named(path: Path, labels: list[str], classes: Sequence[str], ordered: bool) -> tuple[list[str], str]:
    """Labels as class names, and what their numbers meant."""
    known = set(classes)
    strange = [label for label in labels if label not in known]
    if not strange:
        return labels, ""
    if not all(label.isdecimal() for label in labels):
        raise UserError(
            f"{path} names {strange[0]!r}, which is no class folder of train/",
            "give train/ and the label file the same class names",
        )
    numbers = [int(label) for label in labels]
    if ordered:
        names, map_file = _kit_names(path)
        unknown = [number for number in numbers if names.get(number) not in known]
        if unknown:
            raise UserError(
                f"{path}: number {unknown[0]} is no class of train/ by {map_file}",
                "give the map of the same release, and all its classes in train/",
            )
        return [names[number] for number in numbers], f", numbered as in {map_file.name}"
    if max(numbers) >= len(classes) or min(numbers) != 0:
        raise UserError(
            f"{path} numbers its images' classes from {min(numbers)} to {max(numbers)}, and train/ has {len(classes)} "
            "classes, counted from 0",
            "write class names instead of numbers: a line IMAGE CLASS for each validation image",
        )
    return [classes[number] for number in numbers], ", numbers from 0 in the byte order of the class names"


def _kit_names(path: Path) -> tuple[dict[int, str], Path]:
    """Class names by the development kit's numbers, from the map beside the label file."""
    for name in KIT_MAPS:
        map_file = path.parent / name
        if map_file.is_file():
            return (_text_map(map_file) if map_file.suffix == ".txt" else _matlab_map(map_file)), map_file
    raise UserError(
        f"{path} numbers the classes as the development kit does, which is not the order of the class names",
        f"put the kit's {' or '.join(KIT_MAPS)} beside it (both are in the folder data of the kit)",
    )


def _text_map(path: Path) -> dict[int, str]:
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        return {int(row[1]): row[0] for row in rows}
    except (IndexError, ValueError) as error:
        raise UserError(f"{path} is no map of classes ({error})", "take it from the development kit") from None


def _matlab_map(path: Path) -> dict[int, str]:
    from scipy.io import loadmat

    try:
        table = loadmat(path, squeeze_me=True)["synsets"]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
    except Exception as error:  # SciPy raises many kinds on what is no MATLAB file
        raise UserError(f"{path} is no map of classes ({error})", "take it from the development kit") from None
