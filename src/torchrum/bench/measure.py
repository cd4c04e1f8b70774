"""Times as medians with quartiles. Contestants take turns, so that what disturbs the machine hits all of them alike."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Run = Callable[[], object]

CUDA_BLOCK = 5  # timed calls in a row, after one that is not timed


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


def time_cpu(runs: Mapping[str, Run], samples: int, warmups: int = 1) -> dict[str, Times]:
    """Time every contestant ``samples`` times, one call of each in turn."""
    for run in runs.values():
        for _ in range(warmups):
            run()
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    try:
        for _ in range(samples):
            for name, run in runs.items():
                start, start_cpu = time.perf_counter(), time.process_time()
                run()
                cpu[name].append((time.process_time() - start_cpu) * 1e3)
                wall[name].append((time.perf_counter() - start) * 1e3)
    finally:
        gc.enable()
    return {name: summarise(wall[name], cpu[name]) for name in runs}


def time_cuda(runs: Mapping[str, Run], samples: int = 30, warmups: int = 10) -> dict[str, Times]:
    """Time every contestant with device events, a few calls in a row of each in turn.

    The calls of a block queue up behind each other as in training, so a graph's launch is hidden where it would be,
    and a layer that is bound by its launches shows it.
    """
    for run in runs.values():
        for _ in range(warmups):
            run()
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    try:
        while min(map(len, pairs.values())) < samples:
            for name, run in runs.items():
                torch.cuda.synchronize()
                run()
                for _ in range(min(CUDA_BLOCK, samples - len(pairs[name]))):
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    run()
                    end.record()
                    pairs[name].append((begin, end))
        torch.cuda.synchronize()
    finally:
        gc.enable()
    return {name: summarise([begin.elapsed_time(end) for begin, end in pairs[name]]) for name in runs}


def captured(run: Run, warmups: int = 3) -> Run:
    """``run`` recorded as one CUDA graph; a call replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels compile and autograd makes its buffers before the recording
        for _ in range(warmups):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run()
    torch.cuda.synchronize()
    return graph.replay


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
