"""Ctrl-C while a command starts, before there is anything to save."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torchrum.cli import complain


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process at once, for the imports of a command.

    As an exception it might be lost there: packages catch whatever an import raises, and Python drops what is raised
    in the callbacks of its import locks. The training would begin all the same.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # ignored by a shell's background job, or somebody else's
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    complain("interrupted")
    sys.stdout.flush()
    os._exit(128 + number)
