"""Batches from arrays in memory: small grey images, padded to the size of the model and shifted by a few pixels."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attngeo.data.batches import Batches
from attngeo.data.manifest import Manifest, Split
from attngeo.data.transforms import Order, normalise, random_flips, random_shifts, uniform_draws

SHIFT_SHARE = 8  # shifts reach one eighth of the image's side


def place(images: np.ndarray, size: int, shifts: np.ndarray | None) -> Tensor:
    """Grey uint8 [B, H, W] on a black square, centred, moved by `shifts` [B, 2] (down, right): uint8 [B, 1, S, S].

    What is moved over the edge is lost. Images larger than the square are reduced first (bilinear, antialiased).
    """
    count, height, width = images.shape
    if max(height, width) > size:
        scale = size / max(height, width)
        target = (max(1, round(height * scale)), max(1, round(width * scale)))
        floats = torch.from_numpy(images).unsqueeze(1).to(torch.float32)
        reduced = torch.nn.functional.interpolate(floats, target, mode="bilinear", antialias=True)
        images = np.asarray(reduced.round().clamp(0, 255).to(torch.uint8).squeeze(1))
        height, width = target
    top, left = (size - height) // 2, (size - width) // 2
    if shifts is None:
        shifts = np.zeros((count, 2), np.int64)
    margin = int(np.abs(shifts).max(initial=0))
    canvas = np.zeros((count, size + 2 * margin, size + 2 * margin), np.uint8)
    for image, area, (down, right) in zip(images, canvas, (shifts + margin).tolist(), strict=True):
        area[top + down : top + down + height, left + right : left + right + width] = image
    return torch.from_numpy(canvas[:, margin : margin + size, margin : margin + size]).unsqueeze(1)


def read_arrays(path: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, H, W] and labels int64 [n] of a split."""
    with np.load(path) as arrays:
        return arrays[f"{split}_images"], arrays[f"{split}_labels"].astype(np.int64)


def augmented(
    images: np.ndarray, indices: np.ndarray, size: int, seed: int, pass_number: int, augment: bool
) -> tuple[Tensor, Tensor | None]:
    """Place the images of `indices` as training (shifted) or validation sees them; which are to be mirrored."""
    if not augment:
        return place(images, size, None), None
    draws = uniform_draws(seed, pass_number, indices)
    return place(images, size, random_shifts(draws, size // SHIFT_SHARE)), torch.from_numpy(random_flips(draws))


class ArrayBatches(Batches):
    """Batches cut from arrays in memory."""

    loader = "arrays"

    def __init__(self, manifest: Manifest, split: Split, order: Order, *, path: Path, **options: Any) -> None:
        super().__init__(manifest, split, order, **options)
        self._images, self._labels = read_arrays(path, split)

    def _iterate(self, epoch: int, skip_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.order.batches(epoch, skip_batches):
            parts = []
            for segment in batch:
                pixels, flips = augmented(
                    self._images[segment.indices],
                    segment.indices,
                    self.image_size,
                    self.order.seed,
                    segment.pass_number,
                    self.augment,
                )
                if self.augmenter.changes_pixels:
                    pixels = self.augmenter.colour_and_shape(pixels.expand(-1, 3, -1, -1), segment)
                channels = pixels.shape[1]
                parts.append(normalise(pixels, flips, self.mean[:channels], self.std[:channels]))
            indices = np.concatenate([segment.indices for segment in batch])
            images = parts[0] if len(parts) == 1 else torch.cat(parts)
            images = images.expand(-1, 3, -1, -1).contiguous()
            yield self.augmenter.erase(images, batch), torch.from_numpy(self._labels[indices])

    def _pixel_rule(self) -> str:
        return pixel_rule(self.image_size, self.augment)


def pixel_rule(size: int, augment: bool) -> str:
    """How arrays become tensors, in words."""
    moved = f"shifted by up to {size // SHIFT_SHARE} pixels, mirrored with probability 1/2; " if augment else ""
    return f"grey padded with black (reduced if larger) to {size} x {size}; {moved}three equal channels"
