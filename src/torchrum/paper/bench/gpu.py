"""The GPU suite: RUM beside cuDNN's GRU and LSTM and the original implementation, eager and in CUDA graphs.

tests/ops must be green with ``-m gpu`` first: a wrong kernel can be fast.
"""

import dataclasses
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from typing import Any

import torch

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.layers.cells import compile_steps
from torchrum.layers.rum import RUM
from torchrum.ops.rum_scan import ScanInputs
from torchrum.ops.rum_scan.designs import choose_design
from torchrum.paper.bench.accuracy import relative_error
from torchrum.paper.bench.environment import clocks
from torchrum.paper.bench.gpu_cases import Case, gpu_cases, implementation, quick_cases, with_stepwise
from torchrum.paper.bench.measure import (
    Captured,
    ImplementationError,
    Run,
    device_works,
    first_call_seconds,
    peak_cuda_bytes,
    time_cuda,
)
from torchrum.paper.bench.records import Report, Row
from torchrum.paper.bench.training_steps import TrainingStep, penn_treebank_step, recall_step
from torchrum.paper.bench.work import DTYPES, Work, make_layer

RUMS = ("authors", "reference", "torch", "fused")
WARMUPS = 10

Log = Callable[[str], None]


class DeviceLostError(RuntimeError):
    """An implementation left the device or its random numbers unusable for this process; its row has the reason."""

    def __init__(self, row: Row) -> None:
        super().__init__(f"{row.case} {row.implementation}: {row.failed}")
        self.row = row


def run_gpu(
    report: Report,
    *,
    quick: bool = False,
    samples: int = 30,
    cases: str = "*",
    seconds: float = 150,
    designs: bool = False,
    log: Log = print,
) -> bool:
    """Measure the suite into ``report``; an implementation that fails leaves its reason in its row.

    Args:
        report: takes the rows; what it has already is not measured again.
        quick: tiny sizes, to see that everything runs.
        samples: timed calls of each implementation; slow ones take fewer.
        cases: pattern that a case's name must match.
        seconds: no case begins after this.
        designs: where the persistent kernels run, also time the stepwise ones.
        log: told what is being measured.

    Returns:
        Whether the device lived to the end. If not, call again in a fresh process with the same report.
    """
    begin = time.perf_counter()

    def tell(text: str) -> None:
        log(f"{time.perf_counter() - begin:6.1f} s  {text}")

    # a first call compiles: not to be found done by an earlier run
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="torchrum-bench-")
    torch.backends.cudnn.allow_tf32 = True
    report.environment |= {"cudnn_allow_tf32": True, "float32_matmul_precision": "as each row says"}
    with _own_stream():
        _start_cuda()
        for case, mode in _unmeasured(report, quick_cases() if quick else gpu_cases(), cases, designs):
            if time.perf_counter() - begin > seconds:
                tell(f"{case.name} {mode}: left out, the {seconds:.0f} s are over")
                continue
            try:
                report.add(*measure_case(case, mode, case.samples or samples, tell))
            except DeviceLostError as lost:
                report.add(lost.row)
                tell(f"{lost}; the device is lost to this process")
                return False
            finally:
                report.write()
        report.environment["clocks_at_the_end"] = clocks()
        report.write()
    return True


def _unmeasured(report: Report, cases: Sequence[Case], pattern: str, designs: bool) -> Iterator[tuple[Case, str]]:
    """The cases that match, in each of their modes, with only those implementations that the report lacks."""
    for case in cases:
        if not fnmatch(case.name, pattern):
            continue
        case = with_stepwise(case) if designs and _persistent(case) else case
        for mode in case.modes:
            missing = tuple(name for name in case.implementations if not report.has(case.name, name, mode))
            if missing:
                yield dataclasses.replace(case, implementations=missing), mode


def measure_case(case: Case, mode: str, samples: int, log: Log = print) -> list[Row]:
    """Build every implementation, then time those that could be built in turns.

    Raises:
        DeviceLostError: the device does not work any more.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(case.precision)
    rows = {
        name: Row(case.name, name, mode, case.shape, _options(case, name), precision=case.precision)
        for name in case.implementations
    }
    runs: dict[str, Run] = {}
    try:
        for name, row in rows.items():
            log(f"{case.name} {mode}: {name}")
            try:
                runs[name] = _prepare(case, name, mode, row)
            except Exception as error:  # one that cannot run must not take the others with it
                _note_failure(row, error)
        while runs:
            try:
                for name, times in time_cuda(runs, samples, WARMUPS).items():
                    rows[name].times = times
                break
            except ImplementationError as error:
                _note_failure(rows[error.name], error.__cause__ or error)
                del runs[error.name]
    finally:
        runs.clear()
        torch.set_float32_matmul_precision(before)
    _free()
    for name, row in rows.items():
        log(f"{case.name} {mode}: {name} {row.failed or _words(row)}")
    return list(rows.values())


def _words(row: Row) -> str:
    return "" if row.times is None else f"{row.times.median:.3f} ms, {row.us_per_step:.2f} us per step"


def _note_failure(row: Row, error: BaseException) -> None:
    row.failed = _reason(error)
    if not device_works():
        raise DeviceLostError(row) from error


def _prepare(case: Case, name: str, mode: str, row: Row) -> Run:
    """The function to time, after its first call, its memory and its error were measured."""
    _free()
    before = torch.cuda.memory_allocated()
    how = implementation(name)
    run: Run
    if case.kind == "layer":
        work = Work(lambda: _layer(name, case), case.shape)
        if how.stepwise:
            assert isinstance(work.layer, RUM)
            work.layer.backend = "stepwise"
        row.num_parameters = work.num_parameters
        row.backend = _backend(work)
        run = work.run("forward" if mode == "forward" else "forward_backward")
    else:
        step: TrainingStep = (recall_step if case.kind == "recall" else penn_treebank_step)(case.shape, how.kind)
        row.backend = step.backend
        run = step
    if row.backend == "fused":
        row.design = _design(case, how.stepwise)
    row.first_call_seconds = first_call_seconds(run)
    row.peak_bytes = peak_cuda_bytes(run, before)
    if case.check_error and how.kind in ("fused", "torch") and mode == "forward_backward" and not how.graphed:
        assert isinstance(work.layer, RUM)
        row.error = relative_error(work.layer, case.shape, case.precision)
        if case.shape.dtype == "float32":
            exact = case.precision == "highest"
            row.error_ieee = row.error if exact else relative_error(work.layer, case.shape, "highest")
            row.error_apart = relative_error(work.layer, case.shape, "highest", exclude_near_threshold=True)
            if not exact:
                row.error_smooth = relative_error(work.layer, case.shape, case.precision, "tanh")
    return Captured(run) if how.graphed else run


def _backend(work: Work) -> str | None:
    """The backend that a layer of ours takes."""
    ours: Any = work.layer if isinstance(work.layer, RUM) else next(iter(getattr(work.layer, "cells", [])), None)
    return ours.explain_backend(work.x).backend if ours is not None else None


def _persistent(case: Case) -> bool:
    """Whether the fused backend takes the persistent kernels in a case."""
    if case.kind != "layer" or case.options.get("lam") != 0:
        return False
    shape = case.shape
    layer = RUM(1, shape.N, **{**PAPER_OPTIONS, **case.options}, device="meta")
    xp = torch.empty(1, device=shape.device, dtype=DTYPES[shape.dtype])
    options = layer.options.with_training(True)
    inputs = ScanInputs.shaped_like(xp.expand(shape.T, shape.B, options.num_inputs * shape.N), options)
    return choose_design(inputs, options, "auto")[0].name == "persistent"


def _design(case: Case, stepwise: bool) -> str:
    if case.options.get("lam") == 1:
        return "one launch"
    return "persistent" if not stepwise and _persistent(case) else "stepwise"


def _layer(name: str, case: Case) -> torch.nn.Module:
    how = implementation(name)
    layer: Any = make_layer(how.kind, case.shape, **_options(case, name))
    if how.compiled:
        compile_steps(layer)
    return layer


def _options(case: Case, name: str) -> dict:
    return dict(case.options) if implementation(name).kind in RUMS else {}


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def _own_stream() -> AbstractContextManager:
    """What autograd has touched on the default stream cannot be captured afterwards, so nothing runs there."""
    return torch.cuda.stream(torch.cuda.Stream())


def _start_cuda() -> None:
    """Load CUDA and its libraries: their start is no part of a layer's first call."""
    layer = torch.nn.GRU(8, 8, device="cuda")
    layer(torch.ones(2, 2, 8, device="cuda"))[0].sum().backward()
    torch.nn.Linear(8, 8, device="cuda")(torch.ones(2, 8, device="cuda")).sum().backward()


def _free() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
