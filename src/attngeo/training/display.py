"""What a person sees of a training: a bar with loss, accuracy, images a second and time left on a terminal; a line an
epoch everywhere else."""

import sys
from datetime import timedelta
from typing import Any, Self, TextIO

from tqdm import tqdm


class EpochBar:
    """The bar of one epoch, counted in images; it shows nothing where standard error is no terminal."""

    def __init__(
        self, epoch: int, epochs: int, *, images: int, done: int, shown: bool, stream: TextIO | None = None
    ) -> None:
        stream = stream or sys.stderr
        self._images, self._done, self._taken = images, done, 0
        self._epochs_left = epochs - epoch - 1
        self._bar = tqdm(
            total=images,
            initial=done,
            desc=f"epoch {epoch + 1}/{epochs}",
            unit="img",
            unit_scale=True,
            dynamic_ncols=True,
            leave=False,
            file=stream,
            disable=not (shown and stream.isatty()),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def advance(self, images: int, loss: float, accuracy: float) -> None:
        """Count the images of one step; mean loss and top-1 accuracy (percent) of the epoch so far."""
        if self._bar.disable:
            return
        self._taken += images
        left = self._images * (1 + self._epochs_left) - self._done - self._taken
        ends = timedelta(seconds=round(left * self._bar.format_dict["elapsed"] / self._taken))
        self._bar.set_postfix_str(f"loss {loss:.4f}, top-1 {accuracy:.1f} %, run ends in {ends}", refresh=False)
        self._bar.update(images)


def step_bar(steps: int, done: int) -> Any:
    """The bar of a training that counts in steps; it shows nothing where standard error is no terminal."""
    return tqdm(
        total=steps, initial=done, unit="step", dynamic_ncols=True, leave=False, disable=not sys.stderr.isatty()
    )


def say(text: str) -> None:
    """Print a line without tearing the bar."""
    tqdm.write(text)
