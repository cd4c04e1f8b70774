"""The suites: RUM beside the original implementation and torch's layers, on a CPU and on a GPU.

The GPU cases with a target come first, so that a run that is cut short has them. Run tests/ops with ``-m gpu`` before:
a wrong kernel can be fast. Called as a script with the layer, shape and options of a case as JSON, this module prints
the peak memory of a forward and backward pass in bytes, in a new process that nothing else has grown.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.lab.training.distributed import threads
from torchrum.layers.rum import RUM
from torchrum.ops.rum_scan import ScanInputs
from torchrum.ops.rum_scan.designs import choose_design
from torchrum.paper.bench.layers import DTYPES, MODES, Case, Shape, Work, penn_treebank_step, recall_step
from torchrum.paper.bench.measure import Cuda, ImplementationError, Run, clocks, time_cpu
from torchrum.paper.bench.records import Report, Row

BATCH, STEPS = 128, 150
SIZES = (100, 250, 256, 704, 1000, 1024, 2000)
TARGET_SIZES = (704, 1000, 1024, 2000, 256)
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

TARGETED = ("fused", "fused graphed", "gru graphed")
BASELINES = ("gru", "lstm", "lstm graphed")
FEATURES: dict[str, dict[str, Any]] = {
    "eta": {"lam": 0, "eta": 1.0},
    "norms": {"lam": 0, "eta": 1.0, "layer_norm": True, "zoneout": 0.1},
    "lam1": {"lam": 1},
    "plain": {"lam": 0},
    "gated": {"form": "gated"},
}


def layer_case(
    features: str, N: int, dtype: str, implementations: tuple[str, ...], T: int = STEPS, suffix: str = "", **more: Any
) -> Case:
    """Build a case with its usual name, such as ``eta-bf16-n1000``."""
    name = f"{features}-{SHORT[dtype]}-n{N}" + (f"-t{T}" if T != STEPS else "") + suffix
    return Case(name, Shape(N, T, BATCH, dtype, "cuda"), FEATURES[features], implementations, **more)


def target_cases() -> list[Case]:
    """List the cases that have a target, the surest and the most telling first."""
    cases = [layer_case("eta", N, "bfloat16", TARGETED) for N in TARGET_SIZES]
    # matmuls in FP32: a memory that is turned a thousand times needs every digit
    exact: dict[str, Any] = {"precision": "highest"}
    cases.append(layer_case("lam1", 100, "float32", ("fused", "fused graphed"), T=1020, **exact))
    recall, ours = Shape(N=50, T=53, B=BATCH, dtype="float32", device="cuda"), ("fused graphed", "fused")
    cases.append(Case("recall-n50", recall, FEATURES["lam1"], ours, modes=("training_step",), kind="recall", **exact))
    penn = Shape(N=1000, T=STEPS, B=BATCH, dtype="bfloat16", device="cuda")
    cases.append(Case("ptb-fs-rum", penn, {}, ours, modes=("training_step",), kind="penn_treebank"))
    cases.append(layer_case("eta", 250, "float32", TARGETED, T=220))
    cases += [layer_case("norms", N, "bfloat16", TARGETED) for N in TARGET_SIZES]
    return cases


def plain_cases() -> list[Case]:
    """List plain calls, which spend most of their time in Python and in launches."""

    def case(name: str, features: str, N: int, T: int, B: int, mode: str = "forward_backward") -> Case:
        shape = Shape(N, T, B, "float32", "cuda")
        return Case(f"plain-{name}", shape, FEATURES[features], ("fused", "gru"), modes=(mode,), samples=300)

    return [
        case("lam1-n50", "lam1", 50, 53, BATCH),
        case("n100", "plain", 100, 100, BATCH),
        case("n128-b16", "plain", 128, 32, 16),
        case("step", "plain", 64, 1, 1, "forward"),
    ]


def gated_cases() -> list[Case]:
    """The library's default form, plain and captured."""
    sizes = (("float32", 128), ("float32", 256), ("bfloat16", 256), ("bfloat16", 1000))
    return [layer_case("gated", N, dtype, ("fused", "fused graphed", "gru", "gru graphed")) for dtype, N in sizes]


def gpu_cases() -> list[Case]:
    """The cases with a target, plain calls, the default form, their baseline models, then the rest of the grid."""
    cases = [*target_cases(), *plain_cases(), *gated_cases()]
    # bound by launches, so a step costs the same at any T; T is short because autograd keeps 11 MB per step with lam 1
    authors = ("authors", "authors graphed", "torch", "fused graphed", "gru graphed")
    slow: dict[str, Any] = {"T": 30, "suffix": "-authors", "samples": 10}
    cases.append(layer_case("eta", 1000, "float32", authors, **slow))
    cases.append(layer_case("lam1", 100, "float32", authors[:4], **slow))
    cases += [layer_case("eta", N, "bfloat16", BASELINES, suffix="-baselines") for N in TARGET_SIZES]
    cases += [replace(case, modes=("forward",)) for case in cases[: len(TARGET_SIZES)]]
    norms = ("ln_lstm", "ln_lstm graphed", "ln_lstm_fused", "ln_lstm_fused graphed", "fused graphed")
    cases.append(layer_case("norms", 1000, "bfloat16", norms, suffix="-ln-lstm", samples=10))
    everyone = (*TARGETED, *BASELINES)
    cases += [
        layer_case("eta", N, dtype, everyone)
        for dtype in ("float32", "float16", "bfloat16")
        for N in SIZES
        if dtype != "bfloat16" or N in (100, 250)
    ]
    cases.append(layer_case("eta", 100, "float32", authors, **slow))
    return cases


def quick_cases() -> list[Case]:
    """List the same kinds of case at tiny sizes."""
    small = Shape(N=16, T=7, B=4, dtype="float32", device="cuda")
    tiny: dict[str, Any] = {"shape": small, "modes": ("forward", "forward_backward")}
    lam1: dict[str, Any] = {"options": FEATURES["lam1"], "precision": "highest"}
    return [
        Case("quick-eta", options=FEATURES["eta"], implementations=(*TARGETED, "authors"), **tiny),
        Case("quick-lam1", implementations=("fused", "authors graphed"), **lam1, **tiny),
        Case("quick-recall", small, FEATURES["lam1"], ("fused graphed",), modes=("training_step",), kind="recall"),
    ]


Log = Callable[[str], None]


def run_gpu(
    report: Report,
    suite: Sequence[Case],
    *,
    samples: int = 30,
    cases: str = "*",
    seconds: float = 150,
    log: Log = print,
    device: Cuda | None = None,
) -> None:
    """Measure the suite into ``report``; an implementation that fails leaves its reason in its row.

    Args:
        report: takes the rows.
        suite: ``gpu_cases`` or ``quick_cases``.
        samples: timed calls of each implementation; slow ones take fewer.
        cases: pattern that a case's name must match.
        seconds: no case begins after this.
        log: prints the case that is being measured.
        device: a substitute for the current CUDA device, in tests.
    """
    begin, device = time.perf_counter(), device or Cuda()
    report.environment |= {"cudnn_allow_tf32": True, "float32_matmul_precision": "as each row says"}
    with device.session():
        for case in suite:
            for mode in case.modes if fnmatch(case.name, cases) else ():
                if time.perf_counter() - begin > seconds:
                    log(f"{case.name} {mode}: left out, the {seconds:.0f} s are over")
                else:
                    report.add(*measure_case(case, mode, case.samples or samples, log, device))
        report.environment["clocks_at_the_end"] = clocks()
        report.write()


def measure_case(case: Case, mode: str, samples: int, log: Log, device: Cuda) -> list[Row]:
    """Build every implementation, then time in turns the ones that could be built."""
    log(f"{case.name} {mode}: {', '.join(case.implementations)}")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(case.precision)
    rows = {
        name: Row(case.name, name, mode, case.shape, case.options_of(name), precision=case.precision)
        for name in case.implementations
    }
    runs: dict[str, Run] = {}
    try:
        for name, row in rows.items():
            try:
                runs[name] = _prepare(case, name, mode, row, device)
            except Exception as error:  # one that cannot run must not take the others with it
                row.failed = _reason(error)
        while runs:
            try:
                for name, times in device.time(runs, samples).items():
                    rows[name].times = times
                break
            except ImplementationError as error:
                rows[error.name].failed = _reason(error.__cause__ or error)
                del runs[error.name]
    finally:
        runs.clear()
        torch.set_float32_matmul_precision(before)
    return list(rows.values())


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def _prepare(case: Case, name: str, mode: str, row: Row, device: Cuda) -> Run:
    """Build the function to time, and measure its first call and its memory."""
    before = device.allocated()
    kind, *graphed = name.split()
    run: Run
    if case.kind == "layer":
        work = Work(kind, case.shape, **row.options)
        row.num_parameters = work.num_parameters
        ours: Any = work.layer if isinstance(work.layer, RUM) else next(iter(getattr(work.layer, "cells", [])), None)
        row.backend = None if ours is None else ours.explain_backend(work.x).backend
        run = work.run(mode)
    else:
        run = step = (recall_step if case.kind == "recall" else penn_treebank_step)(case.shape, kind)
        row.backend = step.backend
    if row.backend == "fused":
        row.design = _design(case)
    row.first_call_seconds = device.first_call_seconds(run)
    row.peak_bytes = device.peak_bytes(run, before)
    return device.capture(run) if graphed else run


def _design(case: Case) -> str:
    """Name the design that the fused backend takes in a case."""
    if case.options.get("lam") == 1:
        return "one launch"
    if case.kind != "layer" or case.options.get("form") == "gated":
        return "stepwise"
    shape = case.shape
    layer = RUM(1, shape.N, **{**PAPER_OPTIONS, **case.options}, device="meta")
    xp = torch.empty(1, device=shape.device, dtype=DTYPES[shape.dtype])
    options = layer.options.with_training(True)
    inputs = ScanInputs.shaped_like(xp.expand(shape.T, shape.B, options.num_inputs * shape.N), options)
    return choose_design(inputs, options, "auto")[0].name


IMPLEMENTATIONS = ("authors", "reference", "torch", "native", "gru", "lstm")
FAST = ("torch", "native", "gru", "lstm")
LAM0, LAM1 = {"lam": 0}, {"lam": 1}

# the copying task's ten inputs, a layer in the middle of a stack, the recall task's sizes, and a step of serving
CASES: list[Case] = [
    Case("lam0-n100-t100", Shape(N=100, T=100, I=10), LAM0, IMPLEMENTATIONS, MODES, peak=True),
    Case("lam1-n100-t100", Shape(N=100, T=100, I=10), LAM1, IMPLEMENTATIONS, MODES, peak=True),
    Case("lam0-n100-t100-wide", Shape(N=100, T=100, I=100), LAM0, IMPLEMENTATIONS, MODES),
    Case("lam1-n100-t100-wide", Shape(N=100, T=100, I=100), LAM1, IMPLEMENTATIONS, MODES),
    Case("lam0-n256-t100", Shape(N=256, T=100, I=10), LAM0, FAST, MODES, peak=True),
    Case("lam1-n50-t53", Shape(N=50, T=53, I=36), LAM1, FAST, MODES, peak=True),
    Case("step-n256", Shape(N=256, T=1, B=1), LAM0, FAST, ("forward",), calls=100),
    Case("lam0-n100-t100-1thread", Shape(N=100, T=100, I=10), LAM0, FAST, MODES, threads=1),
    Case("lam1-n100-t100-1thread", Shape(N=100, T=100, I=10), LAM1, FAST, MODES, threads=1),
    Case("lam0-n256-t100-1thread", Shape(N=256, T=100, I=10), LAM0, FAST, MODES, threads=1),
    Case("lam1-n50-t53-1thread", Shape(N=50, T=53, I=36), LAM1, FAST, MODES, threads=1),
    Case("step-n256-1thread", Shape(N=256, T=1, B=1), LAM0, FAST, ("forward",), threads=1, calls=100),
]
QUICK: list[Case] = [
    Case("lam0-quick", Shape(N=8, T=5, B=4), LAM0, IMPLEMENTATIONS, MODES, peak=True),
    Case("lam1-quick", Shape(N=8, T=5, B=4), LAM1, IMPLEMENTATIONS, MODES, peak=True),
]
LONG = ("lam1-n100-t1000-memory", LAM1, Shape(N=100, T=1000, I=10))
"""Name, options and shape of the memory case; the original implementation needs about 11 GB here."""
SECONDS = 1.0
"""Seconds of timed calls after which a slow implementation of a case gets no more of them."""
# glibc otherwise carves large tensors out of a heap full of holes, which triples the peak of the original
# implementation; so each is mapped by itself, and the peak is that of the tensors
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
STATUS = Path("/proc/self/status")


def run_cpu(
    report: Report,
    suite: Sequence[Case],
    *,
    memory: bool = False,
    samples: int = 21,
    cases: str = "*",
    log: Callable[[str], None] = print,
) -> None:
    """Measure the suite into ``report``.

    Args:
        report: takes the rows.
        suite: ``CASES`` or ``QUICK``.
        memory: also the peak memory at T = 1000.
        samples: number of samples of each implementation; fewer if it takes more than ``SECONDS``.
        cases: pattern that a case's name must match.
        log: prints the case that is being measured.
    """
    for case in suite:
        if fnmatch(case.name, cases):
            log(f"{case.name}: {', '.join(case.implementations).replace('authors', 'original')}")
            with threads(case.threads or torch.get_num_threads()):
                report.add(*_rows(case, samples))
    name, options, shape = LONG
    for implementation in ("authors", "torch", "native") if memory and fnmatch(name, cases) else ():
        log(f"{name}: {implementation}")
        row = Row(name, implementation, "forward_backward", shape, options)
        try:
            row.peak_bytes = peak_memory(implementation, shape, options)
        except RuntimeError as error:  # most likely too little memory
            row.failed = str(error)
        report.add(row)


def _rows(case: Case, samples: int) -> list[Row]:
    shape = case.shape
    works = {name: Work(name, shape, **case.options_of(name)) for name in case.implementations}
    rows = []
    for mode in case.modes:
        runs = {name: work.run(mode) for name, work in works.items()}
        times = time_cpu(runs, samples, calls=case.calls, seconds=SECONDS, settle=True)
        for name, work in works.items():
            row = Row(case.name, name, mode, shape, case.options_of(name), times[name])
            row.num_parameters, row.threads = work.num_parameters, case.threads
            rows.append(row)
    works.clear()
    for row in rows if case.peak else ():
        if row.mode == "forward_backward":
            row.peak_bytes = peak_memory(row.implementation, shape, row.options)
    return rows


def peak_memory(name: str, shape: Shape, options: Mapping[str, Any]) -> int:
    """Measure in a new process by how many bytes a forward and backward pass raises its resident memory at the peak."""
    request = json.dumps({"name": name, "options": options, **asdict(shape)})
    here = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH")) if part)
    done = subprocess.run(
        [sys.executable, "-m", "torchrum.paper.bench.suites", request],
        env={**os.environ, **_ALLOCATOR, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or "it was killed").splitlines()[-1]
        raise RuntimeError(f"measuring {name} failed with code {done.returncode}: {last}")
    return int(done.stdout)


def measure_peak(name: str, options: Mapping[str, Any], **shape: Any) -> int:
    """Measure the same in this process."""
    short = Shape(**{**shape, "T": 2})
    Work(name, short, **options).forward_backward()  # libraries load, thread pools and their buffers start
    work = Work(name, Shape(**shape), **options)
    if STATUS.exists():  # on Linux: forget the peak so far
        Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    work.forward_backward()
    return _resident("VmHWM") - before


def _resident(word: str) -> int:
    """Read the resident memory, now (VmRSS) or at its peak (VmHWM); outside Linux always at its peak."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(word))
        return int(line.split()[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    print(measure_peak(**json.loads(sys.argv[1])))
