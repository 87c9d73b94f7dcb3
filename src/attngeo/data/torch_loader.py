"""Batches through torch's DataLoader and Pillow: from the original files, from .beton files without FFCV, or from
arrays.

The pixels of an image depend on (seed, pass, index) alone; worker processes draw nothing at random, and the global
generators are not touched, so that the randomness of the model is the same with any loader.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as vision

from attngeo.data import array_loader
from attngeo.data.augmentation import Augmenter
from attngeo.data.batches import Batches
from attngeo.data.beton import Beton
from attngeo.data.download import sha256_of
from attngeo.data.folders import shown
from attngeo.data.images import UnreadableImage, decode_image, read_bytes
from attngeo.data.index import read_index
from attngeo.data.manifest import Manifest, Split
from attngeo.data.transforms import (
    Order,
    Segment,
    central_crops,
    normalise,
    random_crops,
    random_flips,
    uniform_draws,
)
from attngeo.errors import UserError

Sample = tuple[Tensor, bool, int]


class Pixels(Protocol):
    """A set of images: `[i]` is (uint8 [H, W, 3], label)."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]: ...


class FolderPixels:
    """The original files that an index lists, each refused unless it has the SHA-256 it had when it was packed."""

    def __init__(self, root: Path, index: Path, max_resolution: int) -> None:
        self.root = root
        self.index = index
        self.files = read_index(index)
        self.max_resolution = max_resolution

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        file = self.files[index]
        path = self.root / file.path
        try:
            content = read_bytes(path)
            if sha256_of(content) != file.sha256:
                raise UserError(
                    f"{shown(path)} has changed since it was packed: its SHA-256 is not the one in {self.index}",
                    f"restore the file, or delete {self.index.parent} and pack the images again",
                )
            return decode_image(content, self.max_resolution), file.label
        except UnreadableImage as error:
            raise UserError(
                f"{shown(path)} could be read when the set was packed and cannot now ({error})",
                "restore the file, or pack the images again",
            ) from error


class CroppedImages(Dataset[Sample]):
    """Samples by (pass, index): a random crop, or the central one, resized with antialiasing, and augmented."""

    def __init__(
        self,
        pixels: Pixels,
        *,
        size: int,
        seed: int,
        augment: bool,
        min_area: float,
        interpolation: str,
        augmenter: Augmenter,
    ) -> None:
        self.pixels = pixels
        self.interpolation = interpolation
        self.augmenter = augmenter
        self.size = size
        self.seed = seed
        self.augment = augment
        self.min_area = min_area

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        pass_number, index = key
        pixels, label = self.pixels[index]
        height, width = pixels.shape[:2]
        flip = False
        if self.augment:
            draws = uniform_draws(self.seed, pass_number, np.array([index]))
            box = random_crops(draws, np.array([height]), np.array([width]), self.min_area)[0]
            flip = bool(random_flips(draws)[0])
        else:
            box = central_crops(np.array([height]), np.array([width]))[0]
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        cropped = self._resized(image, *box.tolist())
        return _augmented(self.augmenter, cropped, key), flip, label

    def _resized(self, image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
        size = [self.size, self.size]
        if self.interpolation == "auto":
            return vision.resized_crop(image, top, left, height, width, size=size, antialias=True)
        # Not torchvision's: on some processors that resizes in floating point.
        crop = image[:, top : top + height, left : left + width].unsqueeze(0)
        return torch.nn.functional.interpolate(crop, size, mode=self.interpolation, antialias=True).squeeze(0)


def _augmented(augmenter: Augmenter, image: Tensor, key: tuple[int, int]) -> Tensor:
    """RandAugment and jitter of one image uint8 [3, S, S] with key (pass, index)."""
    if not augmenter.changes_pixels:
        return image
    return augmenter.colour_and_shape(image.unsqueeze(0), Segment(key[0], np.array([key[1]]))).squeeze(0)


class PlacedArrays(Dataset[Sample]):
    """Samples by (pass, index) from arrays in memory, as the array loader makes them."""

    def __init__(self, path: Path, split: Split, *, size: int, seed: int, augment: bool, augmenter: Augmenter) -> None:
        self.augmenter = augmenter
        self.images, self.labels = array_loader.read_arrays(path, split)
        self.size = size
        self.seed = seed
        self.augment = augment

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        pass_number, index = key
        image, flips = array_loader.augmented(
            self.images[index : index + 1], np.array([index]), self.size, self.seed, pass_number, self.augment
        )
        pixels = _augmented(self.augmenter, image[0].expand(3, -1, -1), key)
        return pixels, flips is not None and bool(flips[0]), int(self.labels[index])


def _collate(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    images, flips, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(flips), torch.tensor(labels, dtype=torch.int64)


class _Carrying(Dataset[Sample | UserError]):
    """A set whose UserErrors are returned: DataLoader would turn one raised in a worker into a RuntimeError."""

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> Sample | UserError:
        try:
            return self.dataset[key]
        except UserError as error:
            return error


def _collate_carried(samples: Sequence[Sample | UserError]) -> tuple[Tensor, Tensor, Tensor] | UserError:
    whole: list[Sample] = []
    for sample in samples:
        if isinstance(sample, UserError):
            return sample
        whole.append(sample)
    return _collate(whole)


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)


class TorchBatches(Batches):
    """Batches of any storage; with `workers` = 0 in this process, else in that many others."""

    loader = "torch"

    def __init__(
        self, manifest: Manifest, split: Split, order: Order, *, path: Path, workers: int, **options: Any
    ) -> None:
        super().__init__(manifest, split, order, **options)
        self.workers = workers
        common: dict[str, Any] = {
            "size": self.image_size,
            "seed": order.seed,
            "augment": self.augment,
            "augmenter": self.augmenter,
        }
        self._dataset: Dataset[Sample]
        if manifest.storage == "arrays":
            self._dataset = PlacedArrays(path, split, **common)
        else:
            pixels: Pixels
            if manifest.storage == "beton":
                pixels = Beton(path)
            else:
                pixels = FolderPixels(manifest.source_root(), path, manifest.raw["max_resolution"])
            self._dataset = CroppedImages(
                pixels, min_area=manifest.raw["min_crop_area"], interpolation=self.interpolation, **common
            )

    def _iterate(self, epoch: int, skip_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self.order.batches(epoch, skip_batches)
        keys = [
            [(segment.pass_number, int(index)) for segment in batch for index in segment.indices] for batch in batches
        ]
        for batch, (images, flips, labels) in zip(batches, self._samples(keys), strict=True):
            mirrored = flips if self.augment else None
            normalised = normalise(images, mirrored, self.mean, self.std, self._memory.empty(images.shape))
            yield self.augmenter.erase(normalised, batch), labels

    def _samples(self, keys: list[list[tuple[int, int]]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        if self.workers == 0 or not keys:
            for batch in keys:
                yield _collate([self._dataset[key] for key in batch])
            return
        for batch_or_error in DataLoader(
            _Carrying(self._dataset),
            batch_sampler=keys,
            num_workers=self.workers,
            collate_fn=_collate_carried,
            worker_init_fn=_one_thread,
            # Without one of its own, DataLoader would draw from the global generator that dropout uses.
            generator=torch.Generator(),
        ):
            if isinstance(batch_or_error, UserError):
                raise batch_or_error
            yield batch_or_error

    def _pixel_rule(self) -> str:
        if self.manifest.storage == "arrays":
            return array_loader.pixel_rule(self.image_size, self.augment)
        stored = "JPEG decoded by Pillow" if self.manifest.raw["write_mode"] != "raw" else "stored pixels"
        kind = "bilinear" if self.interpolation == "auto" else self.interpolation
        return f"{stored}; {crop_rule(self.augment, self.manifest.raw['min_crop_area'])}; {kind} with antialiasing"

    def describe(self) -> dict[str, Any]:
        """What runs, for the record of a run."""
        return super().describe() | {"workers": self.workers}


def crop_rule(augment: bool, min_area: float) -> str:
    """Which part of an image is used, in words."""
    if not augment:
        return "central square of 224/256 of the shorter side"
    return f"crop of {min_area:g} to 1 of the area and aspect 3/4 to 4/3, mirrored with probability 1/2"
