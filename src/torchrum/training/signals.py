"""SIGINT and SIGTERM as a wish that the training loop can read between two steps."""

import signal
import threading
import time
from types import FrameType
from typing import Any

AT_ONCE = 1.0
"""Seconds in which more signals are the same wish: ``timeout``, for one, tells the process and then its group."""


class Interrupts:
    """While active, the first signal is noted; one that comes after ``AT_ONCE`` acts as it always does."""

    WATCHED = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int = 0
        """Number of the signal; 0 while there was none."""
        self.heeded = False
        """Set by whoever ends its work because of the signal; otherwise the signal acts after all, at the end."""
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > AT_ONCE:
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            for number in self.WATCHED:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received and not self.heeded and failure is None:
            signal.raise_signal(self.received)
