"""What the training loop asks of the data it reads and of those who watch it."""

from collections.abc import Iterator
from typing import Any, Literal, Protocol

from torch import Tensor


class Batches(Protocol):
    """Batches of normalised images [B, 3, H, W] and labels [B], repeatable epoch by epoch."""

    num_classes: int
    num_images: int

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
