"""What the training loop asks of the data it reads and of those who watch it."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from torch import Tensor


class Segment(Protocol):
    """A run of images of one pass over the set; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    pass_number: int
    indices: np.ndarray  # places in the set, int64 [n]


class Order(Protocol):
    """Which images an epoch hands out; `batch_size` images a batch, the last of an evaluation fewer."""

    batch_size: int

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def batches(self, epoch: int, skip_batches: int = 0) -> list[list[Segment]]:
        """The batches of an epoch from number `skip_batches` on."""
        ...


class Batches(Protocol):
    """Batches of normalised images [B, 3, H, W] and labels [B], repeatable epoch by epoch.

    What is iterated is what `order` says at that moment: a copy with another order reads only part of each batch.
    """

    num_classes: int
    num_images: int
    order: Any  # an Order; a loader may narrow its type

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the epoch set last, without those skipped."""
        ...

    def set_epoch(self, epoch: int, skip_batches: int = 0) -> None:
        """Choose the epoch, and where in it to begin."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the record of the run says about the data and its loader."""
        ...


class Observer(Protocol):
    """Told what happens to a run; must not raise because of troubles of its own."""

    def on_start(self, params: dict[str, Any], resumed: bool) -> None:
        """Before the first step of this process."""
        ...

    def on_epoch(self, metrics: dict[str, Any]) -> None:
        """After each evaluation."""
        ...

    def on_end(self, final: dict[str, Any]) -> None:
        """After all files of the finished run have been written."""
        ...

    def on_stop(self, status: Literal["KILLED", "FAILED"], reason: str) -> None:
        """The run ends before its time: by a signal, or by an error."""
        ...
