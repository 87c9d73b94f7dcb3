"""What a person sees of long work on images: a bar on a terminal, a line now and then everywhere else."""

import sys
import time
from typing import Any, Self, TextIO

from tqdm import tqdm

LINE_EVERY_S = 30.0


class Progress:
    """Counts up to `total` on standard error; `what` is what is counted."""

    def __init__(self, total: int, what: str, *, shown: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total, self._what, self._shown = total, what, shown
        # Only where it is seen: even a disabled bar starts a thread, and processes are forked while this counts.
        self._bar: tqdm[Any] | None = None
        if shown and self._stream.isatty():
            self._bar = tqdm(total=total, desc=what, unit="img", dynamic_ncols=True, leave=False, file=self._stream)
        self._begun = self._told = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def reach(self, count: int) -> None:
        """So many are done in all."""
        if self._bar is not None:
            self._bar.update(count - self._bar.n)
            return
        now = time.monotonic()
        if self._shown and now - self._told >= LINE_EVERY_S:
            self._told = now
            rate = count / (now - self._begun)
            left = f", {(self._total - count) / rate / 60:.0f} minutes left" if count else ""
            self._stream.write(f"{count} of {self._total} {self._what}, {rate:.0f} img/s{left}\n")
            self._stream.flush()
