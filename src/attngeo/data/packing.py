"""Packs an image set for training: .beton files (FFCV), arrays in memory, or a checked list of the original files."""

import csv
import importlib.metadata
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from attngeo.data import embedded, ffcv_available, images, manifest
from attngeo.data.beton import Beton
from attngeo.data.download import sha256_of
from attngeo.data.ffcv_writer import FFCVMissing, Problems, versions, write_betons
from attngeo.data.folders import SPLITS, ImageFile, ImageFolder, scan, shown
from attngeo.data.images import UnreadableImage, decode_image
from attngeo.data.index import write_index
from attngeo.errors import UserError
from attngeo.files import explain_os_errors, sha256_file, write_aside, write_json

LARGEST_RESOLUTION = 16384
STATISTICS_IMAGES = 2048
DEFAULT_MIN_CROP_AREA = 0.08


@dataclass(frozen=True)
class PackOptions:
    """How images are written; sizes in pixels."""

    write_mode: str
    max_resolution: int
    jpeg_quality: int
    workers: int


def pack(
    source: Path | str,
    out: Path,
    *,
    storage: Literal["auto", "beton", "arrays", "folder"] = "auto",
    max_resolution: int = 512,
    write_mode: Literal["jpg", "raw"] = "jpg",
    jpeg_quality: int = 90,
    workers: int = 1,
    min_crop_area: float | None = None,
    name: str | None = None,
) -> Path:
    """Pack `source` (an image folder or the name of an embedded set) into the folder `out`; the path of its manifest.

    "auto" keeps arrays in memory as they are, and makes .beton files of an image folder if FFCV is installed, else a
    list of the files (the manifest says why). Images whose longer side exceeds `max_resolution` pixels are reduced.
    With one worker the packed bytes are the same each time. `min_crop_area` is the smallest share of an image that
    training may crop, a property of the data: a defect must not be cut away. What is left out, and why, is in
    refused.csv. The manifest is written last. Raises UserError for sets that cannot be used.
    """
    _check_options(max_resolution, write_mode, jpeg_quality, workers, min_crop_area)
    with explain_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    (out / manifest.FILE_NAME).unlink(missing_ok=True)
    embedded_name = str(source) if str(source) in embedded.sources() else None
    if embedded_name is None and not Path(source).is_dir():
        known = [entry.name for entry in embedded.sources().values() if entry.kind == "images"]
        raise UserError(
            f"{shown(str(source))} is neither a folder nor an embedded set", f"give a folder or {', '.join(known)}"
        )
    entry = embedded.source_of(embedded_name) if embedded_name else None
    if entry is not None and entry.kind != "images":
        raise UserError(f"{entry.name} is a {entry.kind}, not an image set", "give an image set or an image folder")
    root = embedded.fetch(entry.name) if entry else Path(source)
    is_arrays = (root / "arrays.npz").is_file()
    chosen, why = _choose_storage(storage, is_arrays)
    described: dict[str, Any]
    if chosen == "arrays":
        described = _describe_arrays(root, entry.classes if entry else ())
        _write_refused(out, [])
    else:
        options = PackOptions(write_mode, max_resolution, jpeg_quality, workers)
        try:
            described = _pack_folder(root, out, chosen, options)
        except FFCVMissing as error:
            chosen, why = _without_ffcv(storage, f"ffcv does not import ({error})")
            described = _pack_folder(root, out, chosen, options)
    described = {
        "format": manifest.FORMAT,
        "dataset": name or (entry.name if entry else shown(root.absolute().name)),
        "storage": chosen,
        "why_storage": why,
        "root": {"embedded": entry.name} if entry else {"uri": root.absolute().as_uri()},
        "licence": entry.licence if entry else "that of the folder's owner",
        "min_crop_area": _min_crop_area(min_crop_area, entry),
        **described,
    }
    target = out / manifest.FILE_NAME
    write_json(target, described)
    return target


def _check_options(max_resolution: int, write_mode: str, quality: int, workers: int, min_area: float | None) -> None:
    allowed: list[tuple[str, object, bool, str]] = [
        (
            "max_resolution",
            max_resolution,
            1 <= max_resolution <= LARGEST_RESOLUTION,
            f"1 to {LARGEST_RESOLUTION} pixels",
        ),
        ("write_mode", write_mode, write_mode in ("jpg", "raw"), "jpg or raw"),
        ("jpeg_quality", quality, 1 <= quality <= 100, "1 to 100"),
        ("workers", workers, workers >= 1, "1 or more"),
        ("min_crop_area", min_area, min_area is None or 0 < min_area <= 1, "above 0 and at most 1"),
    ]
    for option, value, fits, words in allowed:
        if not fits:
            raise UserError(f"{option} is {value!r}", f"give {words}")


def _choose_storage(storage: str, is_arrays: bool) -> tuple[manifest.Storage, str]:
    """The storage to use and the reason in words."""
    if is_arrays:
        if storage not in ("auto", "arrays"):
            raise UserError(
                f"this set is arrays that fit in memory; storage {storage!r} is for image folders", "use 'auto'"
            )
        return "arrays", "small grey images stay in memory"
    if storage == "arrays":
        raise UserError("storage 'arrays' is for embedded sets of small images, not for image folders", "use 'auto'")
    if storage == "folder":
        return "folder", "asked for"
    if not ffcv_available.is_installed():
        return _without_ffcv(storage, "ffcv is not installed")
    return "beton", f"FFCV {ffcv_available.version()} is installed"


def _without_ffcv(storage: str, reason: str) -> tuple[manifest.Storage, str]:
    """What to do without FFCV: the files themselves, unless .beton files were asked for."""
    if storage == "beton":
        raise UserError(f"storage 'beton' needs FFCV, but {reason}", ffcv_available.INSTALL + "; or use 'auto'")
    return "folder", reason


def _min_crop_area(given: float | None, entry: embedded.Source | None) -> float:
    if given is not None:
        return given
    return entry.min_crop_area if entry and entry.min_crop_area is not None else DEFAULT_MIN_CROP_AREA


def _describe_arrays(root: Path, classes: Sequence[str]) -> dict[str, Any]:
    path = root / "arrays.npz"
    digest = sha256_file(path)
    with np.load(path) as arrays:
        counts = {split: len(arrays[f"{split}_labels"]) for split in SPLITS}
        pixels = arrays["train_images"]
        num_classes = int(max(arrays[f"{split}_labels"].max() for split in SPLITS)) + 1
    mean, std = float(pixels.mean() / 255), float(pixels.std() / 255)
    file = {"path": path.name, "bytes": path.stat().st_size, "sha256": digest}
    return {
        "num_classes": num_classes,
        "classes": list(classes) or [str(label) for label in range(num_classes)],
        **{split: {"n": counts[split], **file} for split in SPLITS},
        "mean": [mean] * 3,
        "std": [std] * 3,
        "statistics": {"images": len(pixels), "of": len(pixels)},
        "image_shape": [1, *pixels.shape[1:]],
        "split_rule": "the set's own",
        "packed_by": {"backend": "none: read as it is", "numpy": np.__version__},
        "refused": 0,
    }


def _pack_folder(root: Path, out: Path, storage: str, options: PackOptions) -> dict[str, Any]:
    """Write both splits of an image folder and say what they are."""
    found = scan(root)
    kept, problems = _write_accepted(found, out, storage, options)
    entries: dict[str, Any] = {}
    for split, files in kept.items():
        index = out / f"{split}.jsonl"
        write_index(index, files)
        target = index if storage == "folder" else out / f"{split}.beton"
        entries[split] = manifest.file_entry(target, count=len(files), relative_to=out)
    packed = out / "train.beton" if storage == "beton" else None
    mean, std, used, shape = _statistics(root, kept["train"], packed, options.max_resolution)
    _write_refused(out, [*problems.refused.items(), *found.strays])
    packed_by = {"backend": "pillow", "pillow": importlib.metadata.version("pillow")}
    if storage == "beton":
        packed_by = {"backend": "ffcv", **versions()}
    return {
        "num_classes": len(found.classes),
        "classes": [shown(name) for name in found.classes],
        **entries,
        "mean": mean,
        "std": std,
        "statistics": {"images": used, "of": entries["train"]["n"]},
        "image_shape": shape,
        "max_resolution": options.max_resolution,
        "write_mode": options.write_mode if storage == "beton" else "original files",
        "jpeg_quality": options.jpeg_quality if storage == "beton" and options.write_mode == "jpg" else None,
        "split_rule": found.split_rule,
        "decode_rule": images.RULE,
        "packed_by": packed_by,
        "refused": len(problems.refused),
        "strays": len(found.strays),
        "notes": {
            "images": len(problems.noted),
            "first": [f"{shown(path)}: {note}" for path, note in list(problems.noted.items())[:3]],
        },
    }


def _write_accepted(
    found: ImageFolder, out: Path, storage: str, options: PackOptions
) -> tuple[dict[str, list[ImageFile]], Problems]:
    """Write the splits without what cannot be read: images kept, and problems. UserError if a class has none left."""
    kept = dict(found.splits)
    problems = Problems({}, {})
    pending = list(kept)
    while pending:
        files = {split: kept[split] for split in pending}
        met: dict[str, Problems] = {}
        if storage == "folder":
            for split in pending:
                kept[split], met[split] = check_images(found.root, files[split], options)
        else:
            met = write_betons(found.root, files, out, **asdict(options))
        for split in pending:
            problems.refused.update(met[split].refused)
            problems.noted.update(met[split].noted)
            kept[split] = [file for file in kept[split] if file.path not in met[split].refused]
            counts = Counter(file.label for file in kept[split])
            empty = [shown(name) for label, name in enumerate(found.classes) if not counts[label]]
            if empty:
                path, reason = next(iter(met[split].refused.items()))
                raise UserError(
                    f"no image of class {empty[0]} can be read for {split} (for example {shown(path)}: {reason})",
                    "replace the images of that class, or remove its folder from both splits",
                )
        pending = [split for split in pending if met[split].refused]
    return kept, problems


def check_images(root: Path, files: Sequence[ImageFile], options: PackOptions) -> tuple[list[ImageFile], Problems]:
    """Decode every image once: the files with the SHA-256 of what was decoded, and the problems met."""
    check = partial(_check_image, max_resolution=options.max_resolution)
    paths = [str(root / file.path) for file in files]
    if options.workers == 1:
        return _sort_outcomes(files, map(check, paths))
    with ProcessPoolExecutor(options.workers) as pool:
        return _sort_outcomes(files, pool.map(check, paths, chunksize=32))


@dataclass(frozen=True)
class Outcome:
    """What came of decoding a file: why it is refused, what is odd about it, and the SHA-256 of its bytes."""

    refused: str | None = None
    note: str | None = None
    sha256: str | None = None


def _check_image(path: str, max_resolution: int) -> Outcome:
    notes: list[str] = []
    try:
        content = images.read_bytes(path)
        decode_image(content, max_resolution, notes)
    except UnreadableImage as error:
        return Outcome(refused=str(error))
    return Outcome(note=notes[0] if notes else None, sha256=sha256_of(content))


def _sort_outcomes(files: Sequence[ImageFile], outcomes: Iterable[Outcome]) -> tuple[list[ImageFile], Problems]:
    problems = Problems({}, {})
    hashed = []
    for file, outcome in zip(files, outcomes, strict=True):
        hashed.append(replace(file, sha256=outcome.sha256))
        if outcome.refused is not None:
            problems.refused[file.path] = outcome.refused
        elif outcome.note is not None:
            problems.noted[file.path] = outcome.note
    return hashed, problems


def _statistics(
    root: Path, files: Sequence[ImageFile], packed: Path | None, max_resolution: int
) -> tuple[list[float], list[float], int, list[int] | None]:
    """Mean and deviation of each channel, in [0, 1], over evenly spaced training images; their number and shape.

    The shape [3, H, W] is None if it varies. Every image counts the same, whatever its size.
    """
    chosen = np.unique(np.linspace(0, len(files) - 1, min(len(files), STATISTICS_IMAGES)).round().astype(int))
    opened = Beton(packed) if packed else None
    first = np.zeros(3)
    second = np.zeros(3)
    shapes = set()
    for index in chosen:
        pixels = opened[index][0] if opened else decode_image(root / files[index].path, max_resolution)
        values = pixels.reshape(-1, 3).astype(np.float64) / 255
        first += values.mean(axis=0)
        second += np.square(values).mean(axis=0)
        shapes.add(pixels.shape)
    mean = first / len(chosen)
    # A set of one colour has no spread; dividing by it would make the loader emit infinities.
    std = np.sqrt(np.maximum(second / len(chosen) - mean**2, 1e-8))
    height, width, _ = next(iter(shapes))
    shape = [3, int(height), int(width)] if len(shapes) == 1 else None
    return cast(list[float], mean.tolist()), cast(list[float], std.tolist()), len(chosen), shape


def _write_refused(out: Path, rows: Sequence[tuple[str, str]]) -> None:
    with write_aside(out / "refused.csv") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(["path", "reason"])
        table.writerows([shown(path), shown(reason)] for path, reason in rows)
