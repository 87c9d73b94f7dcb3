"""Which images of each batch this process reads; the others are never loaded here.

Training: every process takes a piece of every batch, so that all take the same number of steps. Where the recipe mixes
images, whole pairs are dealt out (the first image with the last, the second with the last but one, and so on, as the
mixer pairs them), so that several processes mix exactly what one would mix. Evaluation: the images are dealt out one by
one, each to one process; nothing is repeated to make the shares equal.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attngeo.errors import UserError
from attngeo.training.distributed import Team
from attngeo.training.protocols import Batches, Order, Segment
from attngeo.training.recipe import Recipe


class _Shared:
    """An order of images of which one process reads a part; all else is the order's."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._order, name)

    def __len__(self) -> int:
        return len(self._order)

    def batches(self, epoch: int, skip_batches: int = 0) -> list[list[Segment]]:
        raise NotImplementedError


class _TrainingShare(_Shared):
    """A piece of every batch."""

    def __init__(self, order: Order, rank: int, size: int, pairs: bool) -> None:
        super().__init__(order)
        self._rank, self._size, self._pairs = rank, size, pairs

    def batches(self, epoch: int, skip_batches: int = 0) -> list[list[Segment]]:
        whole = self._order.batches(epoch, skip_batches)
        return [_at(batch, positions(_length(batch), self._rank, self._size, self._pairs)) for batch in whole]


class _EvaluationShare(_Shared):
    """Every size-th of the images that are evaluated at all, in batches of the order's own size."""

    def __init__(self, order: Order, rank: int, size: int, chosen: np.ndarray) -> None:
        super().__init__(order)
        self._chosen = chosen[rank::size]

    def __len__(self) -> int:
        return -(-len(self._chosen) // self._order.batch_size)

    def batches(self, epoch: int, skip_batches: int = 0) -> list[list[Segment]]:
        everything = [segment for batch in self._order.batches(epoch) for segment in batch]
        size = self._order.batch_size
        starts = range(skip_batches * size, len(self._chosen), size)
        return [_at(everything, self._chosen[start : start + size]) for start in starts]


def positions(count: int, rank: int, size: int, pairs: bool) -> np.ndarray:
    """Positions in a batch of `count` images that process `rank` takes, ascending; the shares differ by one unit.

    A unit is an image, or with `pairs` the images i and count - 1 - i; the last image of an odd batch, which has no
    partner, goes to the last process.
    """
    if not pairs:
        return np.arange(count * rank // size, count * (rank + 1) // size)
    half = count // 2
    first = np.arange(half * rank // size, half * (rank + 1) // size)
    last = np.arange(2 * half, count if rank == size - 1 else 2 * half)
    return np.concatenate([first, 2 * half - 1 - first[::-1], last])


def training_share(batches: Batches, recipe: Recipe, team: Team) -> Batches:
    """The batches with this process's share of each; UserError if a batch has too few images for every process."""
    if team.size == 1:
        return batches
    mixes = recipe.mixup > 0 or recipe.cutmix > 0
    units = recipe.batch_size // 2 if mixes else recipe.batch_size
    if units < team.size:
        what = f"a batch of {recipe.batch_size} images{', mixed in pairs,' if mixes else ''}"
        raise UserError(f"{what} cannot be shared by {team.size} processes", "raise batch_size, or start fewer")
    return _with_order(batches, _TrainingShare(batches.order, team.rank, team.size, mixes))


def evaluation_share(batches: Batches, max_images: int | None, team: Team) -> Batches:
    """The batches with this process's share of the set, or of `max_images` evenly spaced ones (sets are sorted)."""
    total = batches.num_images
    wanted = total if max_images is None else min(max_images, total)
    if team.size == 1 and wanted == total:
        return batches
    index = np.arange(total)
    chosen = index[(index + 1) * wanted // max(total, 1) > index * wanted // max(total, 1)]
    return _with_order(batches, _EvaluationShare(batches.order, team.rank, team.size, chosen))


def _with_order(batches: Batches, order: Order) -> Batches:
    """The same loader, reading in another order."""
    shared = copy.copy(batches)
    shared.order = order
    return shared


def _length(batch: Sequence[Segment]) -> int:
    return sum(len(segment.indices) for segment in batch)


def _at(segments: Sequence[Segment], wanted: np.ndarray) -> list[Segment]:
    """The images at these ascending positions of a sequence of segments."""
    found, start = [], 0
    for segment in segments:
        stop = start + len(segment.indices)
        inside = wanted[(wanted >= start) & (wanted < stop)] - start
        if len(inside):
            found.append(replace(segment, indices=segment.indices[inside]))
        start = stop
    return found
