"""Measure times, memory, errors and the conditions of a run.

Times are medians with quartiles. Implementations take turns, so that a disturbance of the machine hits all of them.
"""

import contextlib
import copy
import datetime
import gc
import math
import os
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchrum.lab.training.environment import environment, given_commit
from torchrum.layers.rum import RUM
from torchrum.ops.kernels.cuda import recording
from torchrum.paper.bench.layers import DTYPES, Shape

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


def conditions(commit: str | None = None) -> dict[str, Any]:
    """The environment of this process with what timings need besides: date, cores, driver and clocks.

    Args:
        commit: of the code, where there is no checkout to ask.
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
        found |= {
            "gpu": place.accelerator,
            "cuda": place.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "triton": place.versions["triton"],
            "driver": (query_gpu("driver_version") or {}).get("driver_version"),
            "clocks": clocks(),
        }
    return found


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def clocks() -> dict[str, str] | None:
    """Clocks now and at most, power and temperature of the current GPU, or None where nobody can tell."""
    return query_gpu("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu")


def query_gpu(*fields: str) -> dict[str, str] | None:
    """What nvidia-smi says of the current GPU, by field."""
    if not torch.cuda.is_available():
        return None
    index = str(torch.cuda.current_device())
    said = _ask("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={index}")
    values = [value.strip() for value in said.splitlines()[0].split(",")] if said else []
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else None


CHECKED_STEPS = 20
"""Enough to show a wrong kernel; in float64 more would take long."""


ZONEOUT_SEED = 2
"""Of the device's generator, which zoneout draws its own seed from."""
NEAR_THRESHOLD = 1e-5
"""A unit this near to the ReLU threshold, in standard deviations of its row, may flip its sign in float32."""


def relative_error(
    rum: RUM, shape: Shape, precision: str = "high", activation: str | None = None, exclude_near_threshold: bool = False
) -> float:
    """Largest of the relative errors (in norm) of the output and of every gradient, over a few steps.

    With relu a gradient's error is about the root of the share of units whose sign the rounding turns over: one in
    ten thousand makes 1e-2, whatever the kernel does.

    Args:
        rum: of one layer, on its device; its weights stay as they are.
        shape: of its input; T is cut.
        precision: of float32 matmuls: ``"high"`` is TF32, ``"highest"`` FP32 (TF32 off).
        activation: to take instead of the layer's; a smooth one shows the rounding without sign flips.
        exclude_near_threshold: no gradients of samples with a unit of the reference near the ReLU threshold.
    """
    rum = copy.deepcopy(rum)
    if activation is not None:
        rum.options = replace(rum.options, activation=activation)
    generator = torch.Generator(shape.device).manual_seed(1)
    sizes = (min(shape.T, CHECKED_STEPS), shape.B)
    x = torch.randn(*sizes, rum.input_size, device=shape.device, generator=generator).to(DTYPES[shape.dtype])
    grad = torch.randn(*sizes, rum.hidden_size, device=shape.device, generator=generator).to(x.dtype)
    exact = copy.deepcopy(rum).double()
    exact.backend = "reference"
    if exclude_near_threshold:
        clear = clear_of_threshold(exact, x.double())
        if not clear.any():
            raise ValueError("relative_error: every sample is near the ReLU threshold, so no gradient is left.")
        grad *= clear[:, None]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = _outputs(rum, x, grad)
    finally:
        torch.set_float32_matmul_precision(before)
    wanted = _outputs(exact, x.double(), grad.double())
    errors = [(f.double() - w).norm() / w.norm() for f, w in zip(found, wanted, strict=True)]
    return torch.stack(errors).max().item()  # NaN if one of them is


@torch.no_grad()
def clear_of_threshold(exact: RUM, x: Tensor) -> Tensor:
    """Which rows of the batch keep every argument of relu away from 0, in all steps; ``(B,)``."""
    if exact.options.activation != "relu":
        return x.new_ones(x.shape[1], dtype=torch.bool)
    nearest = []

    def watched(argument: Tensor) -> Tensor:
        nearest.append(argument.abs().amin(-1) / argument.std(-1, correction=0))
        return argument.relu()

    watching = copy.deepcopy(exact)
    watching.options = replace(watching.options, activation=watched)
    torch.manual_seed(ZONEOUT_SEED)
    watching(x)
    return torch.stack(nearest).amin(0) > NEAR_THRESHOLD


def _outputs(rum: RUM, x: Tensor, grad: Tensor) -> list[Tensor]:
    torch.manual_seed(ZONEOUT_SEED)
    x = x.detach().requires_grad_()
    output, _ = rum(x)
    grads = torch.autograd.grad(output, [x, *rum.parameters()], grad)
    return [output.detach(), *grads]
