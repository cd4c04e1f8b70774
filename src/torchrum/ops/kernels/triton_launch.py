"""Launch Triton kernels: compile them in parallel first, and choose the launch options of row kernels."""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor

from torchrum.ops.kernels.rows import INTERPRET

THREADS_PER_CORE = 2  # half of the time each waits for the GIL, the assembler or the C compiler
MOST_THREADS = 32

Launch = Callable[[], Any]
"""A launch with all of its arguments: calling it enqueues one kernel."""

_this_thread = threading.local()


def rehearsing() -> bool:
    """Whether launches of this thread only compile."""
    return getattr(_this_thread, "rehearsing", False)


def prepare(kernel: Any, grid: tuple[int, ...], *args: Any, **flags: Any) -> Launch:
    """Prepare the launch of a Triton kernel, which returns the compiled kernel; in a rehearsal it only compiles."""
    if rehearsing():  # the same arguments, so the launch finds the compiled kernel
        return functools.partial(kernel.warmup, *args, grid=grid, **flags)
    return functools.partial(kernel[grid], *args, **flags)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **flags: Any) -> None:
    """Launch a Triton kernel now; in a rehearsal only compile it."""
    prepare(kernel, grid, *args, **flags)()


class _Compilers(ThreadPoolExecutor):
    """Threads that compile for one device, and build and load the launchers."""

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

    A kernel that fails here is compiled when it is launched; all are, on a Triton without this mode.
    """
    if INTERPRET.value or rehearsing():
        return
    _this_thread.rehearsing = True
    try:
        from triton import AsyncCompileMode

        with _Compilers(torch.cuda.current_device()) as compilers, AsyncCompileMode(compilers, ignore_errors=True):
            rehearse()
    except Exception:  # the launch will raise it again
        pass
    finally:
        _this_thread.rehearsing = False


# Tuning, read when a scan's buffers are made (clear_graphs() frees them).
LANES_PER_WARP = {"forward": 256, "backward": 256}  # of a row
MOST_WARPS = 8
ROW_REGISTERS = 40 * 1024  # of a multiprocessor's 64 * 1024, with PDL: a matmul's tile must fit beside a row
PDL = True  # programmatic dependent launch: start each kernel while the previous one drains
CARVEOUT = True  # with PDL: divide cache and shared memory in row kernels as in matmuls


def padded(H: int) -> int:
    """The hidden axis inside the matmuls: cuBLAS is several times slower on unaligned rows."""
    return -(-H // 64) * 64


def pdl_runs(x: Tensor) -> bool:
    """Whether dependent launch is on and the device of ``x`` has it."""
    return PDL and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def takes_pdl(operand: Tensor) -> bool:
    """Whether a matmul of ``operand`` and its row kernels are launched while the previous kernel drains.

    16-bit dtypes only: float32 goes to cuBLAS, which does not support it.
    """
    return operand.dtype != torch.float32 and pdl_runs(operand)


def row_flags(H: int, direction: str, pdl: bool, most_warps: int | None = None) -> dict[str, Any]:
    """Compile-time arguments that every row kernel takes."""
    block = max(32, triton.next_power_of_2(H))
    warps = min(most_warps or MOST_WARPS, max(1, block // LANES_PER_WARP[direction]))
    flags = {"H": H, "HP": padded(H), "BLOCK": block, "PDL": pdl, "num_warps": warps}
    if pdl:
        flags["launch_pdl"] = True
    return flags


def row_registers(num_warps: int) -> int:
    """Registers of a thread that leave room for a matmul's tile beside the row."""
    return min(255, ROW_REGISTERS // (32 * num_warps))
