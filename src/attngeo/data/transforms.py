"""The order of images and their augmentation, as pure functions of (seed, pass, index) that every loader shares.

The training stream is endless: the permutation of pass 0, then that of pass 1, and so on; epochs are cut from it. What
happens to an image depends on the seed, the number of its pass and its index in the set, never on workers or batches.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from attngeo.training.seeding import derive_seed, numpy_generator

CROP_ASPECTS = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10
# Per image: area and aspect of each attempt, vertical and horizontal position, flip.
DRAWS_PER_IMAGE = 2 * CROP_ATTEMPTS + 3
VALIDATION_CROP = 224 / 256
GOLDEN = 0x9E3779B97F4A7C15
NORMALISED_AT_ONCE = 2**17  # values, so that they are still in the cache in the next step


@dataclass(frozen=True)
class Segment:
    """A run of images of one pass: their indices in the set, in order."""

    pass_number: int
    indices: np.ndarray


@dataclass(frozen=True)
class Order:
    """Which images a split yields in each epoch.

    Training (`shuffled`) cuts the endless stream into epochs of `images_per_epoch` (None: the whole set) and drops the
    images of an epoch that do not fill a batch. Validation goes through the set once, in order, and drops nothing.
    """

    num_images: int
    batch_size: int
    seed: int
    shuffled: bool
    images_per_epoch: int | None = None

    def __len__(self) -> int:
        """Batches in an epoch."""
        if not self.shuffled:
            return -(-self.num_images // self.batch_size)
        return (self.images_per_epoch or self.num_images) // self.batch_size

    def batches(self, epoch: int, skip_batches: int = 0) -> list[list[Segment]]:
        """The batches of an epoch from number `skip_batches` on; a batch across two passes has two segments."""
        return [list(self._batch(epoch, number)) for number in range(skip_batches, len(self))]

    def _batch(self, epoch: int, number: int) -> Iterator[Segment]:
        if not self.shuffled:
            stop = min(self.num_images, (number + 1) * self.batch_size)
            yield Segment(0, np.arange(number * self.batch_size, stop))
            return
        start = epoch * (self.images_per_epoch or self.num_images) + number * self.batch_size
        stop = start + self.batch_size
        while start < stop:
            pass_number, offset = divmod(start, self.num_images)
            count = min(stop - start, self.num_images - offset)
            yield Segment(pass_number, permutation(self.seed, pass_number, self.num_images)[offset : offset + count])
            start += count


@lru_cache(maxsize=4)
def permutation(seed: int, pass_number: int, num_images: int) -> np.ndarray:
    """The order of one pass over the training set, int64 [n], read-only."""
    order = numpy_generator(seed, "image order", pass_number).permutation(num_images)
    order.setflags(write=False)
    return order


def uniform_draws(seed: int, pass_number: int, indices: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 [n, DRAWS_PER_IMAGE]: row i depends on (seed, pass, indices[i]) alone.

    Counter-based (the output function of SplitMix64 on key + counter * golden ratio), so that any image can be drawn
    alone.
    """
    key = np.uint64(derive_seed(seed, "augmentation", pass_number))
    counters: np.ndarray = np.asarray(indices, dtype=np.uint64)[:, None] * np.uint64(DRAWS_PER_IMAGE)
    counters = counters + np.arange(1, DRAWS_PER_IMAGE + 1, dtype=np.uint64)
    state: np.ndarray = key + counters * np.uint64(GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    return np.ldexp((state >> np.uint64(11)).astype(np.float64), -53)


def random_crops(draws: np.ndarray, heights: np.ndarray, widths: np.ndarray, min_area: float) -> np.ndarray:
    """Crop boxes (top, left, height, width), int32 [n, 4], of random area in [min_area, 1] and aspect in [3/4, 4/3].

    The first of ten attempts that fits counts; if none fits, the largest centred box whose aspect is within the
    bounds.
    """
    heights = np.asarray(heights, dtype=np.int64)
    widths = np.asarray(widths, dtype=np.int64)
    areas = (min_area + (1 - min_area) * draws[:, :CROP_ATTEMPTS]) * (heights * widths)[:, None]
    low, high = np.log(CROP_ASPECTS)
    aspects = np.exp(low + (high - low) * draws[:, CROP_ATTEMPTS : 2 * CROP_ATTEMPTS])
    crop_widths = np.rint(np.sqrt(areas * aspects)).astype(np.int64)
    crop_heights = np.rint(np.sqrt(areas / aspects)).astype(np.int64)
    fits = (
        (crop_widths >= 1) & (crop_widths <= widths[:, None]) & (crop_heights >= 1) & (crop_heights <= heights[:, None])
    )
    chosen = fits.argmax(axis=1)
    rows = np.arange(len(draws))
    height, width = crop_heights[rows, chosen], crop_widths[rows, chosen]
    top = np.floor(draws[:, -3] * (heights - height + 1)).astype(np.int64)
    left = np.floor(draws[:, -2] * (widths - width + 1)).astype(np.int64)

    none_fits = ~fits.any(axis=1)
    widest = np.maximum(1, np.minimum(widths, np.rint(heights * CROP_ASPECTS[1]).astype(np.int64)))
    highest = np.maximum(1, np.minimum(heights, np.rint(widths / CROP_ASPECTS[0]).astype(np.int64)))
    height, width = np.where(none_fits, highest, height), np.where(none_fits, widest, width)
    top, left = np.where(none_fits, (heights - height) // 2, top), np.where(none_fits, (widths - width) // 2, left)
    return np.stack([top, left, height, width], axis=1).astype(np.int32)


def central_crops(heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Centred square boxes (top, left, height, width), int32 [n, 4], of 224/256 of the shorter side."""
    heights = np.asarray(heights, dtype=np.int64)
    widths = np.asarray(widths, dtype=np.int64)
    side = np.maximum(1, (VALIDATION_CROP * np.minimum(heights, widths)).astype(np.int64))
    return np.stack([(heights - side) // 2, (widths - side) // 2, side, side], axis=1).astype(np.int32)


def random_flips(draws: np.ndarray) -> np.ndarray:
    """Which images are mirrored left to right, bool [n], each with probability 1/2."""
    return draws[:, -1] < 0.5


def random_shifts(draws: np.ndarray, reach: int) -> np.ndarray:
    """Shifts (down, right) in pixels, int64 [n, 2], uniform in [-reach, reach]."""
    return np.floor(draws[:, -3:-1] * (2 * reach + 1)).astype(np.int64) - reach


def normalise(images: Tensor, flips: Tensor | None, mean: Tensor, std: Tensor, output: Tensor | None = None) -> Tensor:
    """uint8 [B, C, H, W] to float32, mirrored where `flips` [B] says so: (x / 255 - mean) / std with mean, std [C].

    Written to `output`, contiguous, if that is given.
    """
    scale = (1 / (255 * std)).view(-1, 1, 1)
    shift = (mean / std).view(-1, 1, 1)
    normalised = torch.empty(images.shape, dtype=torch.float32) if output is None else output
    count = max(1, NORMALISED_AT_ONCE // max(1, math.prod(images.shape[1:])))
    for start in range(0, len(images), count):
        piece = images[start : start + count]
        mirrored = flips[start : start + count] if flips is not None else None
        if mirrored is not None and bool(mirrored.all()):
            piece = piece.flip(-1)
        elif mirrored is not None and bool(mirrored.any()):
            piece = torch.where(mirrored.view(-1, 1, 1, 1), piece.flip(-1), piece)
        normalised[start : start + count].copy_(piece).mul_(scale).sub_(shift)
    return normalised
