"""Measure times, memory, errors and the conditions of a run.

Times are medians with quartiles. Implementations take turns, so that a disturbance of the machine hits all of them.
"""

import contextlib
import datetime
import gc
import math
import os
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchrum.lab.training.run_folder import environment, given_commit
from torchrum.ops.kernels.cuda import recording

T = TypeVar("T")
Run = Callable[[], object]

CUDA_BLOCK = 5  # fewest timed calls in a row, after an untimed one; a sixth of all of them where that is more
CPU_BLOCK = 3  # samples in a row, likewise
FEWEST = 3  # samples of an implementation that is too slow for more
SHORT_MS = 200  # a longer call hides the threads that another implementation left spinning


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
    """Median CPU time of the whole process, all threads; other programs hardly affect it."""


def summarise(samples: list[float], cpu: list[float] | None = None) -> Times:
    """Take median and quartiles of times in milliseconds."""
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
        samples: number of samples of each; a sample is the mean of ``calls`` calls.
        warmups: untimed calls of each at the start.
        calls: calls in a sample.
        seconds: a slow implementation gets no more samples once it has three and has taken this long.
        settle: take a few samples in a row after an untimed call, because the threads of torch's matmuls spin for some
            milliseconds and would slow down the next implementation.
    """

    def sample(name: str, count: int) -> list[tuple[float, float]]:
        start, start_cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            runs[name]()
        cpu = (time.process_time() - start_cpu) * 1e3 / max(count, 1)
        last[name] = (time.perf_counter() - start) * 1e3 / max(count, 1)
        return [(last[name], cpu)]

    def take(name: str, count: int) -> list[tuple[float, float]]:
        if settle and last[name] < SHORT_MS:
            runs[name]()
        return [found for _ in range(count) for found in sample(name, calls)]

    def enough(name: str, taken: Sequence[tuple[float, float]]) -> bool:
        return len(taken) >= FEWEST and sum(wall for wall, _ in taken) * calls >= seconds * 1e3

    last = dict.fromkeys(runs, 0.0)  # milliseconds of one call
    for name in runs:
        sample(name, warmups)
    taken = _in_turns(runs, samples, CPU_BLOCK if settle else 1, take, enough)
    return {name: summarise(*map(list, zip(*found, strict=True))) for name, found in taken.items()}


class ImplementationError(RuntimeError):
    """A call of one implementation failed; ``__cause__`` is the error."""

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
        warmups: untimed calls of each at the start.
        seconds: a slow implementation warms up for at most half of this, and gets no more samples once it has five.

    Raises:
        ImplementationError: a call failed; it names the implementation.
    """
    Pair = tuple[torch.cuda.Event, torch.cuda.Event]

    def take(name: str, count: int) -> list[Pair]:
        with _blaming(name):
            torch.cuda.synchronize()
            start, pairs = time.perf_counter(), []
            runs[name]()
            for _ in range(count):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                runs[name]()
                end.record()
                pairs.append((begin, end))
            torch.cuda.synchronize()
            spent[name] += time.perf_counter() - start
        return pairs

    spent = dict.fromkeys(runs, 0.0)
    for name, run in runs.items():
        with _blaming(name):
            start = time.perf_counter()
            for count in range(warmups):
                run()
                if count >= 2:
                    torch.cuda.synchronize()
                    if time.perf_counter() - start > seconds / 2:
                        break
    block = max(CUDA_BLOCK, samples // 6)
    taken = _in_turns(runs, samples, block, take, lambda name, _: spent[name] >= seconds)
    return {name: summarise([begin.elapsed_time(end) for begin, end in pairs]) for name, pairs in taken.items()}


def _in_turns(
    runs: Iterable[str],
    samples: int,
    block: int,
    take: Callable[[str, int], list[T]],
    enough: Callable[[str, Sequence[T]], bool],
) -> dict[str, list[T]]:
    """Take a block of samples of each implementation in turn until each has all of them, or enough."""
    taken: dict[str, list[T]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()  # a collection would be charged to one of them
    try:
        waiting = list(taken)
        while waiting:
            for name in waiting:
                taken[name] += take(name, min(block, samples - len(taken[name])))
            waiting = [name for name in waiting if len(taken[name]) < samples and not enough(name, taken[name])]
    finally:
        gc.enable()
    return taken


@contextlib.contextmanager
def _blaming(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ImplementationError(name) from error


class Captured:
    """``run`` as one CUDA graph; a call replays it.

    Replays use the addresses of the weights and the data at capture, so ``run``, which owns them, is kept.
    """

    def __init__(self, run: Run, warmups: int = 3) -> None:
        self.run = run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels compile and autograd makes its buffers before the capture
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


class Cuda:
    """The current CUDA device, as the GPU suite uses it."""

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Load the libraries, which no first call should include, and run what follows on a side stream.

        Work that autograd has done on the default stream cannot be captured afterwards. Compiled kernels go to a new
        folder, since a first call must not find them.
        """
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="torchrum-bench-")
        torch.backends.cudnn.allow_tf32 = True
        with torch.cuda.stream(torch.cuda.Stream()):
            layer = torch.nn.GRU(8, 8, device="cuda")
            layer(torch.ones(2, 2, 8, device="cuda"))[0].sum().backward()
            torch.nn.Linear(8, 8, device="cuda")(torch.ones(2, 8, device="cuda")).sum().backward()
            yield

    def allocated(self) -> int:
        """Release unused memory, and return the bytes that are in use."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    def first_call_seconds(self, run: Run) -> float:
        """Measure the wall time of a first call, which compiles and captures."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def peak_bytes(self, run: Run, before: int) -> int:
        """Measure the peak of allocated memory during ``run``, above ``before`` bytes."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def capture(self, run: Run) -> Run:
        """Capture ``run`` as a CUDA graph."""
        return Captured(run)

    def time(self, runs: Mapping[str, Run], samples: int) -> dict[str, Times]:
        """Time every implementation; see :func:`time_cuda`."""
        return time_cuda(runs, samples)


def conditions(commit: str | None = None) -> dict[str, Any]:
    """Describe this machine for a report: the environment of a run, with date, cores, driver and clocks.

    Args:
        commit: commit of the code, if it does not run from a checkout.
    """
    place = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"), processes=1)
    own = None if place.commit is None else place.commit + (" with changes" if place.uncommitted_changes else "")
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(place.command),
        "commit": own if commit is None else given_commit(commit),
        "python": place.python,
        "torch": place.versions["torch"],
        "system": place.system,
        "cpu": place.processor,
        "cores": os.cpu_count(),
        "threads": place.threads,
    }
    if torch.cuda.is_available():
        found |= {"gpu": place.accelerator, "cuda": place.cuda, "cudnn": torch.backends.cudnn.version()}
        found |= {"triton": place.versions["triton"], "driver": query_gpu("driver_version").get("driver_version")}
        found["clocks"] = clocks()
    return found


def clocks() -> dict[str, str]:
    """Read present and maximal clocks, power limit and temperature of the current GPU."""
    return query_gpu("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu")


def query_gpu(*fields: str) -> dict[str, str]:
    """Ask nvidia-smi about the current GPU, and return its answers by field; empty where it fails."""
    if not torch.cuda.is_available():
        return {}
    options = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={torch.cuda.current_device()}"]
    try:
        done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (value.strip() for value in done.stdout.split(",")), strict=True))
