"""SIGINT, SIGTERM and SIGHUP as a stop request that the training loop can read between two steps."""

import signal
import threading
import time
from types import FrameType
from typing import Any

AT_ONCE = 1.0
"""Seconds in which more signals are the same request: ``timeout``, for one, tells the process and then its group."""


class Interrupts:
    """While active, the first signal is noted; one that comes after ``AT_ONCE`` acts as it always does."""

    WATCHED = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

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
                if number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup: the run is to outlive its terminal
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received and not self.heeded and failure is None:
            signal.raise_signal(self.received)
