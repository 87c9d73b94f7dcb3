"""How fast training images come: this project's loaders beside torchvision's, checked before they are timed.

Everyone reads the same JPEG files, or what `attngeo pack` made of them, crops at random (area 0.08 to 1, aspect 3/4 to
4/3), resizes, mirrors and normalises, in full batches, with the same number of workers and one thread that takes the
batches. Epochs are taken in turn, so that a change of the machine's speed meets everyone; the first epoch of each,
which compiles code and starts processes, is told apart.
"""

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from attngeo.data import ffcv_available
from attngeo.data.batches import Batches, open_batches
from attngeo.data.images import decode_image as decode_with_pillow
from attngeo.data.manifest import read_manifest
from attngeo.data.packing import pack
from attngeo.data.transforms import random_crops, random_flips, uniform_draws
from attngeo.errors import UserError

Row = dict[str, Any]
Epochs = Callable[[int], Iterator[tuple[Tensor, Tensor]]]

FFCV_JPEG, FFCV_RAW = "FFCV, JPEG", "FFCV, raw"
FFCV_JPEG_BICUBIC, FFCV_RAW_BICUBIC = "FFCV, JPEG, bicubic", "FFCV, raw, bicubic"
OUR_TORCH = "torch loader, files"
PILLOW = "torchvision, Pillow"  # ImageFolder, the first transforms, DataLoader: the usual way
DECODE_JPEG = "torchvision, decode_jpeg"  # transforms v2 on uint8, normalised by the batch: the fastest plain way

SEED = 3
CLASSES = 100
CELL = 250  # pixels; the embedded images are squares of this side
JPEG_QUALITY = 90
CHECKED_BATCHES = 2
DRAWING_REPEATS = 5
# Mean |difference| of 255 between the decoders of JPEG, both resized alike: 1.3 on photographs.
DECODER_BOUND = 2.0
# Between resizing by area and bicubically: 2.2 on the textile images, where a crop that is one pixel off makes 16.
RESIZING_BOUND = 6.0


@dataclass(frozen=True)
class Setting:
    """What is read and how: so many JPEG files of these (height, width), in pixels."""

    images: int = 1024
    sides: tuple[tuple[int, int], ...] = ((375, 500), (500, 375), (333, 500), (500, 500))
    image_size: int = 224
    batch_size: int = 64
    workers: int = 2
    repeats: int = 7


QUICK = Setting(images=8, sides=((48, 64), (61, 47)), image_size=16, batch_size=4, repeats=1)


@dataclass(frozen=True)
class Contestant:
    """A loader: `epochs(number)` gives the batches of an epoch, (images float32 [B, 3, S, S], labels int64 [B])."""

    name: str
    role: Literal["ours", "peer"]
    epochs: Epochs


@dataclass(frozen=True)
class Goal:
    """A number to reach: `value` of the rows at least `bound`, or at most."""

    text: str
    bound: float
    value: Callable[[Sequence[Row]], float]
    at_most: bool = False

    def verdict(self, rows: Sequence[Row]) -> str:
        """met, missed or not measured."""
        value = self.value(rows)
        if math.isnan(value):
            return "not measured"
        return "met" if (value <= self.bound if self.at_most else value >= self.bound) else "missed"


def _found(metric: str, contestant: str, against: str, rows: Sequence[Row]) -> float:
    wanted = {"metric": metric, "contestant": contestant, "against": against}
    values = [row["value"] for row in rows if all(row.get(key, "") == value for key, value in wanted.items())]
    return float(values[0]) if values else math.nan


GOALS = (
    *(
        Goal(f"{ours} / {peer} at least {bound:g}", bound, partial(_found, "ratio", ours, peer))
        for ours, peer, bound in ((FFCV_JPEG, PILLOW, 2.0), (FFCV_RAW, PILLOW, 4.0), (FFCV_JPEG, DECODE_JPEG, 1.4))
    ),
    *(
        Goal(
            f"{ours}: drawing crops and flips by (seed, epoch, index) takes at most 0.03 of the time",
            0.03,
            partial(_found, "drawing_share", ours, ""),
            at_most=True,
        )
        for ours in (FFCV_RAW, OUR_TORCH)
    ),
)


class DecodedFiles(Dataset[tuple[Tensor, int]]):
    """JPEG files decoded by torchvision, cropped and mirrored as uint8 [3, S, S]."""

    def __init__(self, samples: Sequence[tuple[str, int]], size: int) -> None:
        self.samples = samples
        self.transform = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        return self.transform(decode_image(path, mode=ImageReadMode.RGB)), label


def make_images(folder: Path, sources: Sequence[Path], setting: Setting) -> int:
    """Write an image folder of JPEG files, each a mosaic of `sources` in cells of 250 px; their bytes in all.

    Enlarging small images would make files that are easier to decode than photographs of that size. UserError if a
    source is smaller than a cell.
    """
    names = [f"{number:03d}" for number in range(min(CLASSES, setting.images))]
    for name in names:
        (folder / "train" / name).mkdir(parents=True)
    total, taken = 0, 0
    for number in range(setting.images):
        height, width = setting.sides[number % len(setting.sides)]
        mosaic = np.empty((height, width, 3), np.uint8)
        for top in range(0, height, CELL):
            for left in range(0, width, CELL):
                source = sources[taken % len(sources)]
                tile = decode_with_pillow(source)
                if min(tile.shape[:2]) < CELL:
                    raise UserError(f"{source} is smaller than {CELL} x {CELL} pixels", "give larger images")
                taken += 1
                cell = mosaic[top : top + CELL, left : left + CELL]
                cell[:] = tile[: cell.shape[0], : cell.shape[1]]
        path = folder / "train" / names[number % len(names)] / f"{number:05d}.jpg"
        Image.fromarray(mosaic).save(path, "JPEG", quality=JPEG_QUALITY)
        total += path.stat().st_size
    (folder / "val" / names[0]).mkdir(parents=True)  # packing asks for one
    shutil.copy(path, folder / "val" / names[0])
    return total


def suite(folder: Path, sources: Sequence[Path], setting: Setting, *, tell: Callable[[str], None]) -> list[Row]:
    """Everything that is measured, as rows; files are made in `folder`. With FFCV missing its rows say why.

    A loader of this project that gives wrong batches is a row "wrong", and is not timed.
    """
    sides = ", ".join(f"{width} x {height}" for height, width in setting.sides)
    tell(f"making {setting.images} JPEG files of {sides} px, quality {JPEG_QUALITY}")
    size = make_images(folder / "images", sources, setting)
    missing = ffcv_available.why_unavailable()
    manifests = {"files": pack(folder / "images", folder / "files", storage="folder", workers=max(1, setting.workers))}
    if missing is None:
        modes: tuple[Literal["jpg", "raw"], ...] = ("jpg", "raw")
        for mode in modes:
            tell(f"packing them as {mode}")
            manifests[mode] = pack(
                folder / "images", folder / mode, storage="beton", write_mode=mode, workers=max(1, setting.workers)
            )
    contestants = _contestants(folder / "images", manifests, setting)
    rows: list[Row] = []
    for name in (FFCV_JPEG, FFCV_RAW) if missing else ():
        rows.append(_row("not_timed", math.nan, "1", 0) | {"contestant": name, "role": "ours", "why": missing})
    wrong = _check(contestants, manifests, setting, rows, tell)
    timed = [contestant for contestant in contestants if contestant.name not in wrong]
    rows += _measure(timed, setting.repeats, tell)
    for contestant in timed:
        if contestant.name in (FFCV_RAW, OUR_TORCH):
            rows.append(_drawing_share(contestant, rows, setting.images, manifests["files"]))
    shared = {"images": setting.images, "image_size": setting.image_size, "workers": setting.workers}
    return [row | shared | {"file_kb": size / setting.images / 1e3} for row in rows]


def _measure(contestants: Sequence[Contestant], repeats: int, tell: Callable[[str], None]) -> list[Row]:
    """Rates, processor time, and the ratios of ours to the peers, each within one turn."""
    rates: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    costs: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for repeat in range(repeats):
        tell(f"epoch {repeat + 1} of {repeats} of everyone")
        for contestant in contestants:
            seconds, processor_seconds, images = _timed(contestant, repeat + 1)
            rates[contestant.name].append(images / seconds)
            costs[contestant.name].append(1e3 * processor_seconds / images)
    rows: list[Row] = []
    for contestant in contestants:
        labels = {"contestant": contestant.name, "role": contestant.role}
        rows.append(_of("img_per_s", rates[contestant.name], "img/s") | labels)
        rows.append(_of("cpu_ms_per_image", costs[contestant.name], "ms") | labels)
        for peer in contestants if contestant.role == "ours" else ():
            if peer.role == "peer":
                ratios = [a / b for a, b in zip(rates[contestant.name], rates[peer.name], strict=True)]
                rows.append(_of("ratio", ratios, "1") | labels | {"against": peer.name})
    return rows


def _contestants(images: Path, manifests: Mapping[str, Path], setting: Setting) -> list[Contestant]:
    """Peers first: their processes are forked before FFCV's threads are there."""
    normalisation = read_manifest(manifests["files"]).raw
    mean, std = normalisation["mean"], normalisation["std"]
    options: dict[str, Any] = {
        "batch_size": setting.batch_size,
        "shuffle": True,
        "drop_last": True,
        "num_workers": setting.workers,
        "persistent_workers": setting.workers > 0,
        "generator": torch.Generator().manual_seed(SEED),
    }
    whole = [
        transforms.RandomResizedCrop(setting.image_size),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(mean, std),
    ]
    folder = ImageFolder(str(images / "train"), transforms.Compose(whole))
    pillow = DataLoader(folder, **options)
    decoded = DataLoader(DecodedFiles(folder.samples, setting.image_size), **options)

    def of_pillow(number: int) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(pillow)

    def of_decode_jpeg(number: int) -> Iterator[tuple[Tensor, Tensor]]:
        for batch, labels in decoded:
            floats = v2.functional.to_dtype(batch, torch.float32, scale=True)
            yield v2.functional.normalize(floats, mean, std, inplace=True), labels

    found = [Contestant(PILLOW, "peer", of_pillow), Contestant(DECODE_JPEG, "peer", of_decode_jpeg)]
    wanted: list[tuple[str, str, dict[str, Any]]] = [(OUR_TORCH, "files", {"loader": "torch"})]
    if "jpg" in manifests:
        wanted += [
            (FFCV_JPEG, "jpg", {"loader": "ffcv"}),
            (FFCV_RAW, "raw", {"loader": "ffcv"}),
            (FFCV_JPEG_BICUBIC, "jpg", {"loader": "ffcv", "interpolation": "bicubic"}),
            (FFCV_RAW_BICUBIC, "raw", {"loader": "ffcv", "interpolation": "bicubic"}),
        ]
    for name, stored, more in wanted:
        batches = _open(manifests[stored], setting, workers=setting.workers, **more)
        found.append(Contestant(name, "ours", partial(_epoch, batches)))
    return found


def _open(manifest: Path, setting: Setting, **options: Any) -> Batches:
    return open_batches(
        manifest,
        "train",
        batch_size=setting.batch_size,
        seed=SEED,
        image_size=setting.image_size,
        augment=True,
        **options,
    )


def _epoch(batches: Batches, number: int) -> Iterator[tuple[Tensor, Tensor]]:
    batches.set_epoch(number)
    return iter(batches)


def _timed(contestant: Contestant, number: int) -> tuple[float, float, int]:
    """Seconds on the wall, processor seconds of everyone involved, and images, of one epoch."""
    images = 0
    processor, start = _processor_seconds(), time.perf_counter()
    for batch, _ in contestant.epochs(number):
        images += len(batch)
    return time.perf_counter() - start, _processor_seconds() - processor, images


def _processor_seconds() -> float:
    """Of this process, of its children that have ended, and of those that still run."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for child in psutil.Process().children():
        taken = child.cpu_times()
        total += taken.user + taken.system
    return total


@dataclass(frozen=True)
class Observed:
    """What an epoch gave: labels of all batches, the first images, and in words what is wrong with any batch."""

    labels: Tensor
    images: Tensor
    wrong: str
    seconds: float


def _observe(contestant: Contestant, setting: Setting) -> Observed:
    """Go through epoch 0, which is not timed with the others."""
    shape = (setting.batch_size, 3, setting.image_size, setting.image_size)
    labels, images, wrong = [], [], ""
    start = time.perf_counter()
    for place, (batch, of_batch) in enumerate(contestant.epochs(0)):
        if tuple(batch.shape) != shape or batch.dtype != torch.float32 or not batch.is_contiguous():
            wrong = f"images are {batch.dtype} {list(batch.shape)}"
        if of_batch.shape != shape[:1] or of_batch.dtype != torch.int64:
            wrong = f"labels are {of_batch.dtype} {list(of_batch.shape)}"
        labels.append(of_batch.clone())
        if place < CHECKED_BATCHES:
            images.append(batch.clone())
    return Observed(torch.cat(labels), torch.cat(images), wrong, time.perf_counter() - start)


def _check(
    contestants: Sequence[Contestant],
    manifests: Mapping[str, Path],
    setting: Setting,
    rows: list[Row],
    tell: Callable[[str], None],
) -> set[str]:
    """Names of those whose first epoch is wrong; adds rows of what was found.

    Ours give the same order; bicubically resized, the same pixels as Pillow and torch from raw storage, and from JPEG
    those up to the decoder; resized by area, those up to the resizing.
    """
    seen = {}
    for contestant in contestants:
        tell(f"checking {contestant.name}")
        seen[contestant.name] = _observe(contestant, setting)
        labels = {"contestant": contestant.name, "role": contestant.role}
        rows.append(_row("first_epoch_s", seen[contestant.name].seconds, "s", 1) | labels)
    drawn = (torch.arange(setting.images) % CLASSES).sort().values
    full = setting.images // setting.batch_size * setting.batch_size
    wrong = {name: observed.wrong for name, observed in seen.items() if observed.wrong}
    for contestant in contestants:
        name, observed = contestant.name, seen[contestant.name]
        if len(observed.labels) != full:
            wrong.setdefault(name, f"{len(observed.labels)} images in an epoch instead of {full}")
        if full == setting.images and not torch.equal(observed.labels.sort().values, drawn):
            wrong.setdefault(name, "an image is left out or comes twice")
        if contestant.role == "ours" and not torch.equal(observed.labels, seen[OUR_TORCH].labels):
            wrong.setdefault(name, "another order than the torch loader's")
    for area, bicubic, stored, bound in (
        (FFCV_RAW, FFCV_RAW_BICUBIC, "raw", 0.0),
        (FFCV_JPEG, FFCV_JPEG_BICUBIC, "jpg", DECODER_BOUND),
    ):
        if stored not in manifests:
            continue
        oracle = _open(manifests[stored], setting, loader="torch", interpolation="bicubic")
        expected = torch.cat(
            [images for _, (images, _) in zip(range(CHECKED_BATCHES), _epoch(oracle, 0), strict=False)]
        )
        for name, other, most in ((bicubic, expected, bound), (area, seen[bicubic].images, RESIZING_BOUND)):
            difference = float(((seen[name].images - other).abs() * oracle.std.view(-1, 1, 1)).mean() * 255)
            rows.append(
                _row("pixel_difference", difference, "1/255", len(expected))
                | {"contestant": name, "role": "ours", "bound": most}
            )
            tell(f"  {name}: mean |difference| {difference:.3f} of 255 (at most {most:g})")
            if not difference <= most:
                wrong.setdefault(name, f"pixels differ by {difference:.2f} of 255 on average, not {most:g}")
    for name, why in wrong.items():
        role = next(contestant.role for contestant in contestants if contestant.name == name)
        rows.append(_row("wrong", math.nan, "1", 1) | {"contestant": name, "role": role, "why": why})
    return set(wrong)


def _drawing_share(contestant: Contestant, rows: Sequence[Row], images: int, manifest: Path) -> Row:
    """What drawing the crops and flips costs, as a share of the time that an image takes.

    The FFCV loader draws those of a whole pass before it reads: a share of the time on the wall. The torch loader
    draws an image's in the process that decodes it: a share of the processor time. Nothing is taken off for what other
    draws would cost.
    """
    min_area = read_manifest(manifest).raw["min_crop_area"]
    indices = np.arange(images)
    sides = np.array([375, 500]), np.array([500, 375])  # the values matter little
    each = contestant.name == OUR_TORCH
    pieces = indices[:, None] if each else indices[None]
    taken = []
    for repeat in range(DRAWING_REPEATS):
        start = time.thread_time()
        for piece in pieces:
            draws = uniform_draws(SEED, repeat, piece)
            random_crops(draws, sides[0][piece % 2], sides[1][piece % 2], min_area)
            random_flips(draws)
        taken.append(1e3 * (time.thread_time() - start) / len(indices))
    if each:
        whole = _found("cpu_ms_per_image", contestant.name, "", rows)
    else:
        whole = 1e3 / _found("img_per_s", contestant.name, "", rows)
    return _of("drawing_share", [drawing / whole for drawing in taken], "1") | {
        "contestant": contestant.name,
        "role": "ours",
    }


def _of(metric: str, values: Sequence[float], unit: str) -> Row:
    """The median of repeats with their range."""
    return _row(metric, statistics.median(values), unit, len(values)) | {
        "spread": max(values) - min(values),
        "spread_kind": "range of the repeats",
    }


def _row(metric: str, value: float, unit: str, n: int) -> Row:
    return {"metric": metric, "value": value, "unit": unit, "n": n}
