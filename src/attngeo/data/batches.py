"""The one door to training and validation images: `open_batches` checks the data, picks a loader and says which."""

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from attngeo.data import ffcv_available
from attngeo.data.augmentation import Augmentation, Augmenter
from attngeo.data.manifest import Manifest, Split, read_manifest
from attngeo.data.recycling import Recycled
from attngeo.data.resampling import INTERPOLATIONS
from attngeo.data.transforms import Order
from attngeo.errors import UserError

LoaderName = Literal["arrays", "torch", "ffcv"]
Interpolation = Literal["auto", "bilinear", "bicubic"]
NOTHING_MORE = Augmentation()


class Batches(ABC):
    """Iterable of (images float32 [B, 3, S, S], normalised; labels int64 [B]); the same epoch each time it is iterated.

    `set_epoch` chooses the epoch and where in it to start. Training batches are all full; the images of an epoch that
    do not fill one are left out. Validation leaves nothing out, so its last batch may be smaller, down to one image.
    """

    loader: LoaderName

    def __init__(
        self,
        manifest: Manifest,
        split: Split,
        order: Order,
        *,
        image_size: int,
        augment: bool,
        augmentation: Augmentation,
        interpolation: Interpolation,
        why: str,
    ) -> None:
        self.manifest = manifest
        self.split = split
        self.order = order
        self.image_size = image_size
        self.augment = augment
        self.augmentation = augmentation
        self.interpolation: Interpolation = interpolation
        self.augmenter = Augmenter(
            augmentation, seed=order.seed, size=image_size, mean=manifest.raw["mean"], interpolation=interpolation
        )
        self.why = why
        self.num_classes = manifest.num_classes
        self.num_images = order.num_images
        self.batch_size = order.batch_size
        self.mean = torch.tensor(manifest.raw["mean"], dtype=torch.float32)
        self.std = torch.tensor(manifest.raw["std"], dtype=torch.float32)
        self._memory = Recycled()
        self._epoch = 0
        self._skip_batches = 0

    def __len__(self) -> int:
        """Batches in a whole epoch, skipped ones included."""
        return len(self.order)

    def set_epoch(self, epoch: int, skip_batches: int = 0) -> None:
        """Iterate epoch number `epoch` from batch number `skip_batches` on, from now on."""
        if epoch < 0 or not 0 <= skip_batches <= len(self):
            raise ValueError(f"epoch {epoch}, batch {skip_batches}: an epoch has batches 0 to {len(self)}")
        self._epoch = epoch
        self._skip_batches = skip_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._iterate(self._epoch, self._skip_batches)

    @abstractmethod
    def _iterate(self, epoch: int, skip_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from number `skip_batches` on."""

    def describe(self) -> dict[str, Any]:
        """What runs, for the record of a run."""
        return {
            "loader": self.loader,
            "why": self.why,
            "dataset": self.manifest.raw["dataset"],
            "storage": self.manifest.storage,
            "manifest_sha256": self.manifest.sha256,
            "classes": self.manifest.raw["classes"],
            "split": self.split,
            "hold_out": self.manifest.raw.get("hold_out", 0.0),  # sets packed by older versions hold nothing out
            "num_images": self.num_images,
            "images_per_epoch": self.order.images_per_epoch,
            "batch_size": self.batch_size,
            "image_size": self.image_size,
            "order": "permutation of each pass by (seed, pass)" if self.order.shuffled else "sequential",
            "drop_last": self.order.shuffled,
            "seed": self.order.seed,
            "pixels": self._pixel_rule() + self.augmentation.words,
            "versions": self._versions(),
        }

    @abstractmethod
    def _pixel_rule(self) -> str:
        """How stored images become tensors, augmentation included."""

    def _versions(self) -> dict[str, str]:
        names = ("torch", "torchvision", "pillow", "numpy")
        return {name: importlib.metadata.version(name) for name in names}


def open_batches(
    manifest_path: Path,
    split: Split,
    *,
    batch_size: int,
    seed: int,
    image_size: int,
    augment: bool,
    augmentation: Augmentation = NOTHING_MORE,
    interpolation: Interpolation = "auto",
    loader: Literal["auto", "arrays", "torch", "ffcv"] = "auto",
    workers: int = 0,
    images_per_epoch: int | None = None,
) -> Batches:
    """Open a split of a packed image set for training or validation.

    `augment` crops (or shifts) and mirrors at random; `augmentation` is what happens to images besides. With
    `interpolation` "bilinear" or "bicubic" the torch and the FFCV loader resize alike, to the bit; "auto" is each
    loader's own way (torch: bilinear, FFCV: by area).

    Order and augmentation are functions of (seed, pass, index): any loader gives the same order, any number of
    `workers` the same pixels. With `images_per_epoch` an epoch is that long a piece of the endless stream of
    permutations. "auto" takes arrays where the set is arrays, else FFCV for .beton files where it is installed, else
    torch; `describe()` tells which and why. Raises UserError for damaged data, a missing loader, or a set smaller
    than one batch.
    """
    manifest = read_manifest(manifest_path)
    if split not in ("train", "val"):
        raise UserError(f"split {split!r} does not exist", "use 'train' or 'val'")
    shuffled = split == "train"
    for option, value in (
        ("batch_size", batch_size),
        ("image_size", image_size),
        ("images_per_epoch", images_per_epoch),
    ):
        if value is not None and value < 1:
            raise UserError(f"{option} is {value}", "give 1 or more")
    if interpolation not in INTERPOLATIONS:
        raise UserError(f"interpolation is {interpolation!r}", f"use one of {', '.join(INTERPOLATIONS)}")
    if augmentation and not augment:
        raise UserError(
            "augmentation is asked for where augment is false", "set augment, or leave the augmentation out"
        )
    if images_per_epoch is not None and not shuffled:
        raise UserError("images_per_epoch is for training; validation uses every image", "leave it out")
    order = Order(manifest.num_images(split), batch_size, seed, shuffled, images_per_epoch)
    if shuffled and not len(order):
        raise UserError(
            f"an epoch of {images_per_epoch or order.num_images} images has no full batch of {batch_size}",
            f"choose a smaller batch_size in the recipe (config/recipes), or add images: {order.num_images} are there",
        )
    chosen, why = _choose_loader(manifest, loader)
    options: dict[str, Any] = {
        "path": manifest.data_path(split),
        "image_size": image_size,
        "augment": augment,
        "augmentation": augmentation,
        "interpolation": interpolation,
        "why": why,
    }
    if manifest.storage == "arrays" and interpolation != "auto":
        raise UserError(
            f"interpolation {interpolation!r} is for crops of images; small images in memory are placed, not resized",
            "leave interpolation out of the recipe",
        )
    if chosen == "arrays":
        from attngeo.data.array_loader import ArrayBatches

        return ArrayBatches(manifest, split, order, **options)
    if chosen == "ffcv":
        from attngeo.data.ffcv_loader import FFCVBatches

        with ffcv_available.torch_threads_kept():
            return FFCVBatches(manifest, split, order, workers=workers, **options)
    from attngeo.data.torch_loader import TorchBatches

    return TorchBatches(manifest, split, order, workers=workers, **options)


def _choose_loader(manifest: Manifest, asked: str) -> tuple[LoaderName, str]:
    """The loader to use and the reason in words."""
    storage = manifest.storage
    if asked == "arrays":
        if storage != "arrays":
            raise UserError(f"loader 'arrays' cannot read storage {storage!r}", "use loader 'auto'")
        return "arrays", "asked for"
    if asked == "torch":
        return "torch", "asked for"
    if asked == "ffcv":
        if storage != "beton":
            raise UserError(f"loader 'ffcv' reads .beton files; this set is stored as {storage!r}", "use loader 'auto'")
        missing = ffcv_available.why_unavailable()
        if missing:
            raise UserError(f"loader 'ffcv' was asked for, but {missing}", ffcv_available.INSTALL)
        return "ffcv", "asked for"
    if asked != "auto":
        raise UserError(f"loader {asked!r} does not exist", "use auto, arrays, torch or ffcv")
    if storage == "arrays":
        return "arrays", "small images in memory"
    if storage == "folder":
        return "torch", "the images are kept as files"
    missing = ffcv_available.why_unavailable()
    return ("torch", f".beton read by Pillow, since {missing}") if missing else ("ffcv", "FFCV is installed")
