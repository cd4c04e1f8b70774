"""Launches of Triton kernels: parallel compilation, launch options, time steps replayed as CUDA graphs.

The graphs serve every sequence length and every address. Each holds a fixed number of steps, a power of two, and a
sequence is a series of replays. Kernels read the first step and the addresses of this call's tensors from a small table
on the device, filled before the replays, and matmuls use only buffers that live as long as the graph. So neither a new
T nor new tensors need a new capture.
"""

import ctypes
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrum.ops.kernels.cuda import recording
from torchrum.ops.kernels.rows import INTERPRET

THREADS_PER_CORE = 2  # each waits half of the time for the GIL, the assembler or the C compiler
MAX_THREADS = 32

Launch = Callable[[], Any]
"""A launch with all of its arguments; calling it enqueues one kernel."""

_this_thread = threading.local()


def is_dry_run() -> bool:
    """Return whether launches of this thread only compile."""
    return getattr(_this_thread, "is_dry_run", False)


def prepare(kernel: Any, grid: tuple[int, ...], *args: Any, **flags: Any) -> Launch:
    """Prepare the launch of a Triton kernel, which returns the compiled kernel; in a dry run it only compiles."""
    if is_dry_run():  # with the same arguments, so that the launch finds the compiled kernel
        return functools.partial(kernel.warmup, *args, grid=grid, **flags)
    return functools.partial(kernel[grid], *args, **flags)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **flags: Any) -> None:
    """Launch a Triton kernel; in a dry run, only compile it."""
    prepare(kernel, grid, *args, **flags)()


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels for one device, and build and load their launchers."""

    def __init__(self, device: int) -> None:
        super().__init__(min(MAX_THREADS, THREADS_PER_CORE * (os.cpu_count() or 1)))
        self.device = device

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._compile, fn, *args, **kwargs)

    def _compile(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(self.device):
            kernel = compiled(*args, **kwargs)
            kernel.run  # noqa: B018 -- a property that builds the launcher and loads the launcher and the kernel
        return kernel


def compile_in_parallel(dry_run: Callable[[], object]) -> None:
    """Compile every kernel that ``dry_run`` launches, in parallel; all are ready on return.

    A kernel that fails here is compiled at its launch; so is every kernel if Triton has no asynchronous compilation.
    """
    if INTERPRET.value or is_dry_run():
        return
    _this_thread.is_dry_run = True
    try:
        from triton import AsyncCompileMode

        with _Compilers(torch.cuda.current_device()) as compilers, AsyncCompileMode(compilers, ignore_errors=True):
            dry_run()
    except Exception:  # the launch will raise the error again
        pass
    finally:
        _this_thread.is_dry_run = False


# Tuning, read when a scan's buffers are built (clear_graphs() frees them).
LANES_PER_WARP = 256  # lanes of a row per warp
MAX_WARPS = 8
ROW_REGISTERS = 40 * 1024  # of a multiprocessor's 64 * 1024, with PDL: the rest is for a matmul's tile
PDL = True  # programmatic dependent launch: start each kernel while the previous one drains


def padded(H: int) -> int:
    """Return the padded length of the hidden axis inside matmuls: cuBLAS is several times slower on unaligned rows."""
    return -(-H // 64) * 64


def pdl_runs(x: Tensor) -> bool:
    """Return whether dependent launch is enabled and supported by the device of ``x``."""
    return PDL and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def takes_pdl(operand: Tensor) -> bool:
    """Return whether a matmul of ``operand`` and its row kernels are launched while the previous kernel drains.

    This is for 16-bit dtypes only: float32 uses cuBLAS, which does not support it.
    """
    return operand.dtype != torch.float32 and pdl_runs(operand)


def row_flags(H: int, pdl: bool, max_warps: int = MAX_WARPS) -> dict[str, Any]:
    """Return the compile-time arguments that every row kernel takes."""
    block = max(32, triton.next_power_of_2(H))
    warps = min(max_warps, max(1, block // LANES_PER_WARP))
    flags = {"H": H, "HP": padded(H), "BLOCK": block, "PDL": pdl, "num_warps": warps}
    if pdl:
        flags["launch_pdl"] = True
    return flags


def row_registers(num_warps: int) -> int:
    """Return the number of registers per thread that leaves space for a matmul's tile beside the row."""
    return min(255, ROW_REGISTERS // (32 * num_warps))


LARGEST_CHUNK = 128  # steps in the longest graph
SHORTEST_GRAPHED = 4  # fewer steps are launched one by one
MAX_CACHED_SCANS = 24  # beyond this number the least recently used scans free their graphs and buffers
TABLE_SLOTS = 10  # even, so that the slots of a chain's cells are on 16-byte boundaries


# Addresses are kernel arguments: no host copy, no synchronisation, correct on any stream. They are passed as integers,
# so that one kernel serves tensors of every dtype.
@triton.jit(do_not_specialize=["step", "a", "b", "c", "d", "e", "f", "T", "g"])
def fill_table_kernel(
    table, step: tl.int64, a: tl.int64, b: tl.int64, c: tl.int64, d: tl.int64, e: tl.int64, f: tl.int64, T: tl.int64,
    g: tl.int64,
):  # fmt: skip
    tl.store(table, step)
    tl.store(table + 1, a)
    tl.store(table + 2, b)
    tl.store(table + 3, c)
    tl.store(table + 4, d)
    tl.store(table + 5, e)
    tl.store(table + 6, f)
    tl.store(table + 7, T)
    tl.store(table + 8, g)


def fill_table(table: Tensor, step: int, T: int, *tensors: Tensor | None) -> None:
    """Write the first step, the addresses and T into ``table``; the tensors must be ``aligned``."""
    addresses = [0 if x is None else x.data_ptr() for x in (*tensors, *[None] * (7 - len(tensors)))]
    launch(fill_table_kernel, (1,), table, step, *addresses[:6], T, addresses[6], num_warps=1)


@triton.jit
def tensor_at(table, slot: tl.constexpr, dtype: tl.constexpr):
    """Return the pointer to the tensor whose address ``fill_table`` wrote into ``slot``; the tensor is ``aligned``."""
    return tl.multiple_of(tl.load(table + slot).to(tl.pointer_type(dtype)), 16)


@functools.cache
def _prefer_shared(function: int) -> None:
    SHARED_MEMORY_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), SHARED_MEMORY_CARVEOUT, 100)


def prefer_shared(kernel: Any) -> None:
    """Hint to the driver that a compiled kernel needs little L1 cache.

    A multiprocessor divides one memory between the L1 cache and shared memory, and runs two kernels at once only if
    they request the same division. Under dependent launch a row kernel should start beside a matmul.
    """
    function = getattr(kernel, "function", None)
    if function is not None:
        _prefer_shared(function)


def aligned(x: Tensor) -> Tensor:
    """Return ``x`` contiguous and on a 16-byte boundary, copied only if needed."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


class Steps(Protocol):
    """One direction of a scan with its own buffers."""

    table: Tensor | None
    stride: int
    """+1 or -1, the direction in which the table's step moves."""

    def launches(self, t: int) -> Iterable[Launch]:
        """Return the launches of one step, in order; ``t`` counts in the scan's direction from the table's step."""

    def warm_up(self) -> None:
        """Enqueue each kernel once, in every variant that a later call may capture."""

    def release_tensors(self) -> None:
        """Drop the tensors of this call."""


S = TypeVar("S", bound=Steps)
R = TypeVar("R")


@dataclass(frozen=True)
class Pass(Generic[S, R]):
    """One direction of a scan in one call."""

    key: Callable[[], Hashable]
    """Everything that the graphs depend on, device included."""
    build: Callable[[bool], S]
    """Build the buffers for a new key; the argument is True if graphs will capture the steps."""
    begin: Callable[[S], None]
    """Load this call's data into the buffers and the table."""
    finish: Callable[[S], R]
    """Copy the results out of the buffers, which the next call overwrites."""
    next_pass: Callable[[], object] | None = None
    """Run the next scan, so that its kernels are compiled together with this scan's."""


class _GraphedScan:
    """A scan's buffers and its graphs, one for each chunk length used so far."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.warm = False

    @contextmanager
    def chunk(self, length: int, resources: "_DeviceResources") -> Iterator[None]:
        """Record the steps launched inside as the graph of ``length`` steps; at its end the table's step advances."""
        graph = torch.cuda.CUDAGraph()
        with recording(graph, resources.pool, resources.stream, other_threads=True):
            yield
            self.steps.table[:1].add_(self.steps.stride * length)
        self.graphs[length] = graph


class _DeviceResources:
    """The stream, memory pool and event that all scans on one device share.

    The graphs share cuBLAS's workspace of the capturing stream, so two replays must not overlap: each scan waits for
    the event that the previous scan recorded. On a single stream this wait is free.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.done = torch.cuda.Event()
        # a graph that is never freed keeps the pool, and so cuBLAS's workspace, for the lifetime of the process
        self.anchor = torch.cuda.CUDAGraph()
        self.anchored = torch.zeros(1, device="cuda")
        with recording(self.anchor, self.pool, self.stream, other_threads=True):
            self.anchored.zero_()


_lock = threading.RLock()  # autograd runs the backward in its own thread
_device_resources: dict[torch.device, _DeviceResources] = {}
_scans: "OrderedDict[Hashable, _GraphedScan]" = OrderedDict()


def can_graph(x: Tensor, T: int) -> bool:
    """Return whether to use graphs: on CUDA, outside another capture, and for enough steps to be worthwhile."""
    return x.is_cuda and T >= SHORTEST_GRAPHED and not torch.cuda.is_current_stream_capturing()


def chunk_lengths(T: int) -> list[int]:
    """Return powers of two that add up to ``T``, largest first."""
    lengths = [LARGEST_CHUNK] * (T // LARGEST_CHUNK)
    return lengths + [1 << bit for bit in range(LARGEST_CHUNK.bit_length() - 2, -1, -1) if T >> bit & 1]


def run_pass(scan_pass: Pass[S, R], x: Tensor, T: int) -> R:
    """Run the ``T`` steps on the current stream of the device of ``x``: as graphs if possible, else one by one."""
    if not can_graph(x, T):
        steps = scan_pass.build(False)
        scan_pass.begin(steps)
        for t in range(T)[:: steps.stride]:
            for enqueue in steps.launches(t):
                enqueue()
        return scan_pass.finish(steps)
    with _lock:
        resources, scan = _find_scan(scan_pass)
        if is_dry_run():
            return _dry_run(scan, scan_pass)
        try:
            if not scan.warm:
                _warm_up(scan, scan_pass)
            scan_pass.begin(scan.steps)
            lengths = chunk_lengths(T)
            for length in lengths:
                if length not in scan.graphs:
                    with scan.chunk(length, resources):
                        for t in range(length):
                            for enqueue in scan.steps.launches(t):
                                enqueue()
            for length in lengths:
                scan.graphs[length].replay()
            return scan_pass.finish(scan.steps)
        finally:  # even after an error: launched kernels may still be running, and a scan on another stream must wait
            scan.steps.release_tensors()
            resources.done.record()


def _find_scan(scan_pass: Pass[S, R]) -> tuple[_DeviceResources, _GraphedScan]:
    """Find or build the buffers and graphs of a pass on the current device, and wait until the buffers are free."""
    device, key = torch.device("cuda", torch.cuda.current_device()), scan_pass.key()
    if device not in _device_resources:
        _device_resources[device] = _DeviceResources()
    resources = _device_resources[device]
    torch.cuda.current_stream().wait_event(resources.done)
    scan = _scans.get(key)
    if scan is None:
        with torch.inference_mode(False), torch.no_grad():  # the buffers outlive the first call and its mode
            scan = _scans[key] = _GraphedScan(scan_pass.build(True))
        _evict()
    _scans.move_to_end(key)
    return resources, scan


def _warm_up(scan: _GraphedScan, scan_pass: Pass[S, R]) -> None:
    """Compile and load the kernels, since neither may happen during a capture."""
    compile_in_parallel(lambda: _dry_run(scan, scan_pass, with_next=True))
    scan_pass.begin(scan.steps)
    scan.steps.warm_up()
    scan.warm = True


def _dry_run(scan: _GraphedScan, scan_pass: Pass[S, R], with_next: bool = False) -> R:
    """Compile every launch of a call and, if ``with_next``, of the next scan; the results are meaningless."""
    scan_pass.begin(scan.steps)
    scan.steps.warm_up()
    result = scan_pass.finish(scan.steps)
    scan.steps.release_tensors()
    if with_next and scan_pass.next_pass is not None:
        scan_pass.next_pass()
    return result


def _evict() -> None:
    while len(_scans) > MAX_CACHED_SCANS:
        _wait_for_all()
        _scans.popitem(last=False)


def _wait_for_all() -> None:
    for resources in _device_resources.values():
        resources.done.synchronize()  # after this the buffers are unused


def clear_graphs() -> None:
    """Free every graph and buffer; later calls capture again."""
    with _lock:
        _wait_for_all()
        _scans.clear()


@contextmanager
def plain_mode(x: Tensor) -> Iterator[None]:
    """Turn autograd and autocast off, and make the device of ``x`` current."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        if x.is_cuda:
            with torch.cuda.device(x.device):
                yield
        else:
            yield
