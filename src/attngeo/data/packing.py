"""Packs an image set for training: .beton files (FFCV), arrays in memory, or a checked list of the original files."""

import csv
import importlib.metadata
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from attngeo.data import embedded, ffcv_available, holding_out, images, manifest
from attngeo.data.beton import Beton
from attngeo.data.download import sha256_of
from attngeo.data.ffcv_writer import FFCVMissing, Problems, versions, write_betons
from attngeo.data.folders import SPLITS, ImageFile, ImageFolder, scan, shown
from attngeo.data.images import UnreadableImage, decode_image
from attngeo.data.index import write_index
from attngeo.data.layout import ARRAYS, Names, publish, working_folder, write_classes
from attngeo.data.progress import Progress
from attngeo.errors import UserError
from attngeo.files import sha256_file, write_aside, write_json

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
    val_labels: Path | None = None,
    hold_out: float = 0.0,
    name: str | None = None,
) -> Path:
    """Pack `source` (an image folder or the name of an embedded set) as `out`; the path of its manifest.

    `out` is a folder, or a name that ends in .beton: then that file holds the training images, and its neighbours of
    the same name the rest (`layout.Names`). "auto" keeps arrays in memory as they are, and makes .beton files of an
    image folder if FFCV is installed (or `out` is one), else a list of the files (the manifest says why).
    `val_labels` names the label file of validation images that lie flat. With `hold_out` (a share below 1/2) "val" is
    that part of the training images (`holding_out`), to choose settings on; the set's own validation images and their
    labels are not read. Images whose longer side exceeds
    `max_resolution` pixels are reduced. With one worker the packed bytes are the same each time. `min_crop_area` is
    the smallest share of an image that training may crop, a property of the data: a defect must not be cut away.

    Everything is written aside and takes its place at the end, the manifest last; what a killed packing left behind is
    removed by the next one. The report lists every file that was refused, repaired or left out, and why. Raises
    UserError for sets that cannot be used.
    """
    _check_options(max_resolution, write_mode, jpeg_quality, workers, min_crop_area, hold_out)
    names = Names.of(out)
    if names.is_beton and storage == "auto":
        storage = "beton"
    if names.is_beton and storage != "beton":
        raise UserError(f"{shown(out)} ends in .beton, but storage is {storage!r}", "name a folder instead")
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
    is_arrays = (root / ARRAYS).is_file()
    chosen, why = _choose_storage(storage, is_arrays)
    with working_folder(names) as scratch:
        described: dict[str, Any]
        if chosen == "arrays":
            classes = entry.classes if entry else ()
            if hold_out:
                described = _hold_out_of_arrays(root, scratch / ARRAYS, classes, hold_out)
            else:
                described = _describe_arrays(root / ARRAYS, classes)
            _write_report(scratch / names.report, [])
        else:
            options = PackOptions(write_mode, max_resolution, jpeg_quality, workers)
            found = scan(root, val_labels, hold_out)
            try:
                described = _pack_folder(found, scratch, names, chosen, options)
            except FFCVMissing as error:
                chosen, why = _without_ffcv(storage, f"ffcv does not import ({error})")
                described = _pack_folder(found, scratch, names, chosen, options)
        described = {
            "format": manifest.FORMAT,
            "dataset": name or (entry.name if entry else shown(root.absolute().name)),
            "storage": chosen,
            "why_storage": why,
            "root": {"embedded": entry.name} if entry else {"uri": root.absolute().as_uri()},
            "licence": entry.licence if entry else "that of the folder's owner",
            "min_crop_area": _min_crop_area(min_crop_area, entry),
            "hold_out": hold_out,
            **described,
        }
        write_classes(scratch / names.classes, described["classes"])
        described["report"] = names.report
        described["class_order"] = {"path": names.classes, "sha256": sha256_file(scratch / names.classes)}
        write_json(scratch / names.manifest, described)
        publish(scratch, names)
    return names.folder / names.manifest


def summary(path: Path) -> list[str]:
    """What was packed, in a few lines for a person."""
    packed = manifest.read_manifest(path)
    raw = packed.raw
    kind = "held-out" if raw["hold_out"] else "validation"
    lines = [
        f"{path}: {raw['train']['n']} training and {raw['val']['n']} {kind} images of {raw['num_classes']} "
        f"classes, stored as {raw['storage']} ({raw['why_storage']})"
    ]
    counts = {"refused": raw["refused"], "repaired": raw["repaired"]["images"], "left out": raw["strays"]}
    told = [f"{count} {what}" for what, count in (counts | {"warnings": raw["warnings"]}).items() if count]
    if told:
        lines.append(f"{', '.join(told)}: see {packed.folder / raw['report']}")
    return lines


def _check_options(
    max_resolution: int, write_mode: str, quality: int, workers: int, min_area: float | None, hold_out: float
) -> None:
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
        ("hold_out", hold_out, 0 <= hold_out < 0.5, "0 (nothing) or more, and less than 0.5"),
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


def _hold_out_of_arrays(root: Path, out: Path, classes: Sequence[str], share: float) -> dict[str, Any]:
    """Write the training images of a set of arrays as two splits, and say what they are; its validation stays shut."""
    with np.load(root / ARRAYS) as arrays:
        pixels, labels = arrays["train_images"], arrays["train_labels"]
    chosen = holding_out.held_out(labels, share, classes)
    with write_aside(out, "wb") as stream:
        np.savez(
            stream,
            train_images=pixels[~chosen],
            train_labels=labels[~chosen],
            val_images=pixels[chosen],
            val_labels=labels[chosen],
        )
    return _describe_arrays(out, classes) | {
        "split_rule": holding_out.rule(share),
        "packed_by": {"backend": "numpy", "numpy": np.__version__},
    }


def _describe_arrays(path: Path, classes: Sequence[str]) -> dict[str, Any]:
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


def _pack_folder(found: ImageFolder, scratch: Path, names: Names, storage: str, options: PackOptions) -> dict[str, Any]:
    """Write both splits of an image folder into `scratch` and say what they are."""
    kept, problems = _write_accepted(found, scratch, names, storage, options)
    entries: dict[str, Any] = {}
    for split, files in kept.items():
        index = scratch / names.index(split)
        write_index(index, files)
        target = index if storage == "folder" else scratch / names.data(split)
        entries[split] = manifest.file_entry(target, count=len(files), relative_to=scratch)
    packed = scratch / names.data("train") if storage == "beton" else None
    mean, std, used, shape = _statistics(found.root, kept["train"], packed, options.max_resolution)
    _write_report(
        scratch / names.report,
        [
            *((path, "refused", reason) for path, reason in problems.refused.items()),
            *((path, "left out", reason) for path, reason in found.strays),
            *((path, "repaired", reason) for path, reason in problems.repaired.items()),
            *((path, "warning", reason) for path, reason in [*problems.warned.items(), *found.warnings]),
        ],
    )
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
        "label_rule": found.label_rule,
        "decode_rule": images.RULE,
        "packed_by": packed_by,
        "refused": len(problems.refused),
        "strays": len(found.strays),
        "repaired": {
            "images": len(problems.repaired),
            "first": [f"{shown(path)}: {note}" for path, note in list(problems.repaired.items())[:3]],
        },
        "warnings": len(problems.warned) + len(found.warnings),
    }


def _write_accepted(
    found: ImageFolder, scratch: Path, names: Names, storage: str, options: PackOptions
) -> tuple[dict[str, list[ImageFile]], Problems]:
    """Write the splits without what cannot be read: images kept, and problems. UserError if a class has none left."""
    kept = dict(found.splits)
    problems = Problems()
    expected = {split: {file.label for file in files} for split, files in kept.items()}
    pending = list(kept)
    while pending:
        files = {split: kept[split] for split in pending}
        met: dict[str, Problems] = {}
        if storage == "folder":
            for split in pending:
                kept[split], met[split] = check_images(found.root, files[split], options)
        else:
            written = write_betons(found.root, files, scratch, **asdict(options))
            for split in pending:
                met[split] = written[split]
                if not written[split].refused:
                    os.replace(scratch / f"{split}.beton", scratch / names.data(split))
        for split in pending:
            problems.update(met[split])
            kept[split] = [file for file in kept[split] if file.path not in met[split].refused]
            left = {file.label for file in kept[split]}
            empty = [shown(found.classes[label]) for label in sorted(expected[split] - left)]
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
    with Progress(len(files), "images checked") as progress:
        if options.workers == 1:
            return _sort_outcomes(files, map(check, paths), progress)
        with ProcessPoolExecutor(options.workers) as pool:
            return _sort_outcomes(files, pool.map(check, paths, chunksize=32), progress)


@dataclass(frozen=True)
class Outcome:
    """What came of decoding a file: why it is refused, what was repaired or is odd, and the SHA-256 of its bytes."""

    refused: str = ""
    repaired: str = ""
    warning: str = ""
    sha256: str | None = None


def _check_image(path: str, max_resolution: int) -> Outcome:
    try:
        content = images.read_bytes(path)
        image = images.examine(content, path, max_resolution)
    except UnreadableImage as error:
        return Outcome(refused=str(error))
    return Outcome("", image.repaired, image.warning, sha256_of(content))


def _sort_outcomes(
    files: Sequence[ImageFile], outcomes: Iterable[Outcome], progress: Progress
) -> tuple[list[ImageFile], Problems]:
    problems = Problems()
    hashed = []
    for done, (file, outcome) in enumerate(zip(files, outcomes, strict=True), start=1):
        hashed.append(replace(file, sha256=outcome.sha256))
        for kind, reason in (
            (problems.refused, outcome.refused),
            (problems.repaired, outcome.repaired),
            (problems.warned, outcome.warning),
        ):
            if reason:
                kind[file.path] = reason
        progress.reach(done)
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


def _write_report(path: Path, rows: Sequence[tuple[str, str, str]]) -> None:
    """Write the report: file, what became of it (refused, left out, repaired, warning), and why."""
    with write_aside(path) as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(["path", "action", "reason"])
        table.writerows([shown(path), action, shown(reason)] for path, action, reason in rows)
