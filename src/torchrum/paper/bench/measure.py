"""Times as medians with quartiles. Implementations take turns, so that what disturbs the machine hits all alike."""

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from torchrum.ops.kernels.cuda import recording

Run = Callable[[], object]

CUDA_BLOCK = 5  # timed calls in a row, after one that is not timed; a sixth of all of them where that is more
CPU_BLOCK = 3  # samples in a row, likewise
FEWEST = 3  # samples of an implementation that is too slow for more
SHORT_MS = 200  # a call up to which threads that another implementation left spinning would show


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    samples: int
    cpu: float | None = None
    """Median of the CPU time of the whole process, all threads; it hardly feels other programs."""


def summarise(samples: list[float], cpu: list[float] | None = None) -> Times:
    """Median and quartiles of times in milliseconds."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return Times(median, low, high, len(samples), statistics.median(cpu) if cpu else None)


def time_cpu(
    runs: Mapping[str, Run],
    samples: int,
    warmups: int = 1,
    calls: int = 1,
    seconds: float = math.inf,
    settle: bool = False,
) -> dict[str, Times]:
    """Time every implementation ``samples`` times, each in turn.

    Args:
        runs: the implementations.
        samples: of each; a sample is the mean of ``calls`` calls.
        warmups: calls of each before.
        calls: in a sample.
        seconds: a slow implementation gets no more samples once it has three and has taken this long.
        settle: take a few samples in a row, after a call that is not timed: the threads of torch's matmuls spin for
            some milliseconds after the last one, on the cores of whoever comes next.
    """
    last = dict.fromkeys(runs, 0.0)  # milliseconds of one call
    for name, run in runs.items():
        for _ in range(warmups):
            start = time.perf_counter()
            run()
            last[name] = (time.perf_counter() - start) * 1e3
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    with _uncollected():
        waiting = list(runs)
        while waiting:
            for name in waiting:
                run, rest = runs[name], samples - len(wall[name])
                if settle and last[name] < SHORT_MS:
                    run()
                for _ in range(min(rest, CPU_BLOCK) if settle else min(rest, 1)):
                    start, start_cpu = time.perf_counter(), time.process_time()
                    for _ in range(calls):
                        run()
                    cpu[name].append((time.process_time() - start_cpu) * 1e3 / calls)
                    wall[name].append((time.perf_counter() - start) * 1e3 / calls)
                    last[name] = wall[name][-1]
            waiting = [
                name
                for name in waiting
                if len(wall[name]) < samples and (len(wall[name]) < FEWEST or sum(wall[name]) * calls < seconds * 1e3)
            ]
    return {name: summarise(wall[name], cpu[name]) for name in runs}


class ImplementationError(RuntimeError):
    """A call of one implementation failed; ``__cause__`` is how."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def time_cuda(runs: Mapping[str, Run], samples: int = 30, warmups: int = 10, seconds: float = 2.0) -> dict[str, Times]:
    """Time every implementation with device events, a few calls in a row of each in turn.

    The calls of a block queue up behind each other as in training, so a graph's launch is hidden where it would be,
    and a layer that is bound by its launches shows it.

    Args:
        runs: the implementations.
        samples: timed calls of each.
        warmups: calls of each before.
        seconds: a slow implementation warms up for at most half of this, and gets no more samples once it has five.

    Raises:
        ImplementationError: a call failed; the others are not to blame.
    """
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    spent, block = dict.fromkeys(runs, 0.0), max(CUDA_BLOCK, samples // 6)
    for name, run in runs.items():
        with _blaming(name):
            start = time.perf_counter()
            for count in range(warmups):
                run()
                if count >= 2:
                    torch.cuda.synchronize()
                    if time.perf_counter() - start > seconds / 2:
                        break
    with _uncollected():
        waiting = list(runs)
        while waiting:
            for name in waiting:
                with _blaming(name):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    runs[name]()
                    for _ in range(min(block, samples - len(pairs[name]))):
                        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                        begin.record()
                        runs[name]()
                        end.record()
                        pairs[name].append((begin, end))
                    torch.cuda.synchronize()
                    spent[name] += time.perf_counter() - start
            waiting = [name for name in waiting if len(pairs[name]) < samples and spent[name] < seconds]
    return {name: summarise([begin.elapsed_time(end) for begin, end in pairs[name]]) for name in runs}


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection inside: its time would fall on whoever runs just then."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _blaming(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ImplementationError(name) from error


class Captured:
    """``run`` recorded as one CUDA graph; a call replays it.

    Replays read the weights and the data at the addresses they had: ``run``, which owns them, must live as long.
    """

    def __init__(self, run: Run, warmups: int = 3) -> None:
        self.run = run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels compile and autograd makes its buffers before the recording
            for _ in range(warmups):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with recording(self.graph, stream=side):
            run()
        torch.cuda.synchronize()

    def __call__(self) -> None:
        self.graph.replay()


def device_works() -> bool:
    """Whether the device still computes and draws random numbers: a failed assert or a failed recording ends either."""
    try:
        torch.cuda.synchronize()
        return bool(torch.rand(8, device="cuda").sum().item() >= 0)
    except Exception:  # whatever it is, the process is of no more use
        return False


def first_call_seconds(run: Run) -> float:
    """Wall time of a call that has to compile and capture first."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_cuda_bytes(run: Run, before: int) -> int:
    """Most device memory that tensors took during ``run``, above ``before``."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
