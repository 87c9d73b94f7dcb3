"""SIGTERM and Ctrl-C, answered between two steps so that the state saved is a whole one."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from attngeo.training.launch import Launch

SAME_WISH_S = 1.0


class Interrupted(SystemExit):
    """A signal asked the run to stop; the exit status is the shell's, 128 + the signal's number (143 for SIGTERM)."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.reason = f"stopped by {signal.Signals(number).name}"


class Interruption:
    """Context in which SIGTERM and SIGINT are noted instead of obeyed; a second one, a second later, is obeyed at once.

    (Sooner it is the same wish told twice: Ctrl-C reaches a process from the terminal and again from torchrun.)
    That torchrun is gone counts as SIGTERM. Outside the main thread, where Python allows no handlers, signals are left
    alone.
    """

    def __init__(self, launch: Launch | None = None) -> None:
        self._launch = launch or Launch()
        self._number: int | None = None
        self._noted_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    @property
    def number(self) -> int:
        """The signal that has come, 0 if none has."""
        if self._number is None and self._launch.abandoned():
            self._number = signal.SIGTERM
        return self._number or 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._number is None:
            self._number, self._noted_at = number, now
        elif now - self._noted_at >= SAME_WISH_S:
            self._restore()
            signal.raise_signal(number)  # to this thread, so that it is obeyed before another step

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
