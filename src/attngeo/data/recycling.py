"""Memory for batches that is used again once nothing refers to the batch."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

KEPT = 2


class Recycled:
    """Lends memory for float32 tensors and takes it back when the last tensor or array that shares it is gone.

    For a batch of ImageNet's size the system would clear new pages every time, which takes longer than to normalise it.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def empty(self, shape: Sequence[int]) -> Tensor:
        """A contiguous tensor of any values on the CPU."""
        owner = torch.empty(shape, dtype=torch.float32)  # costs nothing until it is written
        while self._free:
            free = self._free.pop()
            if free.shape == owner.shape:
                owner = free
                break
        lent = owner.numpy()
        # The tensor's memory holds this array, and so does every view of the tensor; the owner lives until it is gone.
        weakref.finalize(lent, self._take_back, owner).atexit = False
        return torch.from_numpy(lent)

    def _take_back(self, owner: Tensor) -> None:
        if len(self._free) < KEPT:
            self._free.append(owner)
