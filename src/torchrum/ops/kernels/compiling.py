"""Compiling a scan's kernels side by side, before the first of them is launched.

Triton compiles a kernel when it is first launched, so one after the other, and builds a launcher in C for it. Most of
that runs without Python's lock. A rehearsal goes through the launches of a scan without launching: each only hands its
kernel to other threads.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from torchrum.ops.kernels.rows import INTERPRET

THREADS_PER_CORE = 2  # each waits for Python's lock, for the assembler or for the C compiler half of the time
MOST_THREADS = 32

Launch = Callable[[], Any]
"""A launch with all of its arguments: calling it enqueues one kernel."""

_this_thread = threading.local()


def rehearsing() -> bool:
    """Whether launches of this thread only compile."""
    return getattr(_this_thread, "rehearsing", False)


def prepare(kernel: Any, grid: tuple[int, ...], *args: Any, **flags: Any) -> Launch:
    """The launch of a Triton kernel, which returns the compiled kernel; in a rehearsal it only compiles.

    A ``partial`` is no frame of Python's: whoever calls it launches.
    """
    if rehearsing():  # the same arguments, so the launch will find what is made here
        return functools.partial(kernel.warmup, *args, grid=grid, **flags)
    return functools.partial(kernel[grid], *args, **flags)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **flags: Any) -> None:
    """Launch a Triton kernel now; in a rehearsal compile it for such a launch."""
    prepare(kernel, grid, *args, **flags)()


class _Compilers(ThreadPoolExecutor):
    """Threads that compile for one device, and build and load what a launch needs besides."""

    def __init__(self, device: int) -> None:
        super().__init__(min(MOST_THREADS, THREADS_PER_CORE * (os.cpu_count() or 1)))
        self.device = device

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._compile, fn, *args, **kwargs)

    def _compile(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(self.device):
            kernel = compiled(*args, **kwargs)
            kernel.run  # noqa: B018 -- a property that builds the launcher and loads both
        return kernel


def compile_together(rehearse: Callable[[], object]) -> None:
    """Compile every kernel that ``rehearse`` launches; all are ready on return.

    A kernel that fails here, or all of them on a Triton that cannot do this, compile when they are launched.
    """
    if INTERPRET.value or rehearsing():
        return
    _this_thread.rehearsing = True
    try:
        from triton import AsyncCompileMode

        with _Compilers(torch.cuda.current_device()) as compilers, AsyncCompileMode(compilers, ignore_errors=True):
            rehearse()
    except Exception:  # the launch will meet it again, and say so
        pass
    finally:
        _this_thread.rehearsing = False
