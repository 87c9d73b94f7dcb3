"""SIGTERM and Ctrl-C, answered between two steps so that the state saved is a whole one."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupted(SystemExit):
    """A signal asked the run to stop; the exit status is the shell's, 128 + the signal's number (143 for SIGTERM)."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.reason = f"stopped by {signal.Signals(number).name}"


class Interruption:
    """Context in which SIGTERM and SIGINT are noted instead of obeyed; a second one is obeyed at once.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self._number is not None:
            raise Interrupted(self._number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
