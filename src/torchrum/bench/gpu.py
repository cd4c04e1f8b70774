"""The GPU suite: RUM beside cuDNN's GRU and LSTM and the authors' way, eager and in CUDA graphs.

tests/ops must be green with ``-m gpu`` first: a wrong kernel can be fast.
"""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from typing import Any

import torch

from ..layers.rum import RUM
from .accuracy import relative_error
from .gpu_cases import Case, gpu_cases, quick_cases
from .measure import Run, captured, first_call_seconds, peak_cuda_bytes, time_cuda
from .records import Report, Row
from .targets import gpu_targets
from .training_steps import penn_treebank_step, recall_step
from .work import Work, make_layer

RUMS = ("authors", "reference", "torch", "fused")
WARMUPS = 10


def run_gpu(
    report: Report,
    *,
    quick: bool = False,
    samples: int = 30,
    cases: str = "*",
    seconds: float = 150,
    log: Callable[[str], None] = print,
) -> None:
    """Measure the suite into ``report``; a contestant that fails leaves its reason in its row.

    Args:
        report: takes the rows and the targets.
        quick: tiny sizes, to see that everything runs.
        samples: timed calls of each contestant; slow cases take fewer.
        cases: pattern that a case's name must match.
        seconds: no case begins after this.
        log: told what is being measured.
    """
    torch.set_float32_matmul_precision("high")  # TF32, as cuDNN's layers do by default
    torch.backends.cudnn.allow_tf32 = True
    report.environment |= {"float32_matmul_precision": "high", "cudnn_allow_tf32": True}
    with _own_stream():
        _start_cuda()
        begin = time.perf_counter()
        for case in quick_cases() if quick else gpu_cases():
            if not fnmatch(case.name, cases):
                continue
            past = time.perf_counter() - begin
            if past > seconds:
                log(f"{case.name}: left out, {past:.0f} s are over")
                continue
            log(f"{past:6.1f} s  {case.name}: {', '.join(case.contestants)}")
            for mode in case.modes:
                report.add(*measure_case(case, mode, case.samples or samples))
            report.targets = gpu_targets(report)
            report.write()


def measure_case(case: Case, mode: str, samples: int) -> list[Row]:
    """Build every contestant, then time those that could be built in turns."""
    rows = {name: Row(case.name, name, mode, case.shape, _options(case, name)) for name in case.contestants}
    runs: dict[str, Run] = {}
    for name, row in rows.items():
        try:
            runs[name] = _prepare(case, name, mode, row)
        except Exception as error:  # one that cannot run must not take the others with it
            row.failed = _reason(error)
    try:
        for name, times in time_cuda(runs, samples, WARMUPS).items():
            rows[name].times = times
    except Exception as error:
        for name in runs:
            rows[name].failed = rows[name].failed or _reason(error)
    runs.clear()
    _free()
    return list(rows.values())


def _prepare(case: Case, name: str, mode: str, row: Row) -> Run:
    """The function to time, after its first call, its memory and its error were measured."""
    _free()
    before = torch.cuda.memory_allocated()
    kind = name.removesuffix(" graphed").removesuffix(" compiled")
    if case.kind == "layer":
        work = Work(lambda: _layer(name, kind, case), case.shape)
        row.num_parameters = work.num_parameters
        run: Run = work.run("forward" if mode == "forward" else "forward_backward")
    elif case.kind == "recall":
        run = recall_step(case.shape, kind)
    else:
        run = penn_treebank_step(case.shape)
    row.first_call_seconds = first_call_seconds(run)
    row.peak_bytes = peak_cuda_bytes(run, before)
    if case.check_error and kind in ("fused", "torch") and mode == "forward_backward" and not name.endswith("graphed"):
        assert isinstance(work.layer, RUM)
        row.error = relative_error(work.layer, case.shape)
        if case.shape.dtype == "float32":
            row.error_ieee = relative_error(work.layer, case.shape, "highest")
    return captured(run) if name.endswith(" graphed") else run


def _layer(name: str, kind: str, case: Case) -> torch.nn.Module:
    layer: Any = make_layer(kind, case.shape, **_options(case, name))
    if name.endswith(" compiled"):
        for cell in layer.cells:
            cell.step = torch.compile(cell.step)
    return layer


def _options(case: Case, name: str) -> dict:
    kind = name.removesuffix(" graphed").removesuffix(" compiled")
    return dict(case.options) if kind in RUMS else {}


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def _own_stream() -> AbstractContextManager:
    """What autograd has touched on the default stream cannot be captured afterwards, so nothing runs there."""
    return torch.cuda.stream(torch.cuda.Stream())


def _start_cuda() -> None:
    """Load CUDA and its libraries: their start is no part of a layer's first call."""
    layer = torch.nn.GRU(8, 8, device="cuda")
    layer(torch.ones(2, 2, 8, device="cuda"))[0].sum().backward()


def _free() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
