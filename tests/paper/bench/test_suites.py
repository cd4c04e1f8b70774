"""The GPU suite end to end at tiny sizes; every implementation must come out with a time."""

import contextlib
import gc
import weakref
from dataclasses import replace

import pytest
import torch

from torchrum.ops.rum_scan import persistent
from torchrum.paper.bench import suites
from torchrum.paper.bench.layers import Shape, penn_treebank_step, recall_step
from torchrum.paper.bench.measure import Captured, ImplementationError, time_cpu
from torchrum.paper.bench.records import Report, read_report
from torchrum.paper.bench.suites import measure_case, quick_cases, run_gpu


@pytest.mark.gpu
def test_quick_suite(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # the suite sets it; later tests need it as it was
    report = Report("gpu", {}, path=tmp_path / "gpu.json")
    run_gpu(report, quick_cases(), samples=3)
    assert [row.failed for row in report.rows if row.failed] == []
    assert all(row.times.samples == 3 and row.first_call_seconds > 0 for row in report.rows)
    assert {row.case for row in read_report(report.path).rows} == {"quick-eta", "quick-lam1", "quick-recall"}


class Host:
    """The CPU in the place of the device: everything but device events, graphs and fused kernels."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken

    def session(self):
        return contextlib.nullcontext()

    def allocated(self) -> int:
        return 6

    def first_call_seconds(self, run) -> float:
        run()
        return 0.1

    def peak_bytes(self, run, before: int) -> int:
        return before + 1

    def capture(self, run):
        return run

    def time(self, runs, samples):
        if self.broken in runs:
            raise ImplementationError(self.broken) from ValueError("odd")
        return time_cpu(runs, samples)


def quick(report: Report, **options) -> list[str]:
    """Run the tiny cases on the host; return the log."""
    said: list[str] = []
    suite = [replace(case, shape=replace(case.shape, device="cpu")) for case in quick_cases()]
    run_gpu(report, suite, samples=2, log=said.append, device=Host(), **options)
    return said


def test_failures_stay_with_their_implementation(tmp_path):
    report = Report("gpu", {}, path=tmp_path / "gpu.json")
    quick(report)
    failed = {(row.case, row.implementation): row.failed for row in report.rows}
    assert failed["quick-eta", "fused"] == (
        "ValueError: backend='fused' cannot run: the input is on cpu. Pass backend='auto' to fall back."
    )
    assert failed["quick-eta", "gru graphed"] is None
    assert failed["quick-lam1", "authors graphed"] is None
    timed = [row for row in report.rows if not row.failed]
    assert len(timed) == 2 * 2 + 2
    assert all(row.backend is None for row in timed)  # neither the original implementation nor nn.GRU has one
    assert all(row.times.samples == 2 and row.peak_bytes == 7 and row.first_call_seconds > 0 for row in timed)
    assert {row.case: row.precision for row in timed} == {"quick-eta": "high", "quick-lam1": "highest"}
    assert {row.case: row.options for row in timed if "gru" in row.implementation} == {"quick-eta": {}}
    assert read_report(report.path).rows == report.rows


def test_time_runs_out():
    report = Report("gpu", {})
    said = quick(report, seconds=-1)
    assert report.rows == []
    assert len(said) == 5  # one for each mode of each case
    assert "left out" in said[0]


def test_one_that_fails_while_timed_leaves_the_others():
    case = replace(quick_cases()[0], implementations=("torch", "gru", "lstm"))
    case = replace(case, shape=replace(case.shape, device="cpu"))
    rows = measure_case(case, "forward", 2, lambda text: None, Host(broken="gru"))
    assert [row.failed for row in rows] == [None, "ValueError: odd", None]
    assert [row.times is None for row in rows] == [False, True, False]


def test_the_design_of_a_case(monkeypatch):
    eta, lam1, recall = quick_cases()
    asked = []
    monkeypatch.setattr(persistent, "obstacle", lambda inputs, options: asked.append((inputs, options)))
    assert suites._design(replace(eta, shape=replace(eta.shape, device="cpu"))) == "persistent"
    ((inputs, options),) = asked
    assert (inputs.xp.shape, inputs.h0.shape[-1], options.training) == ((7, 4, 48), 16, True)
    assert suites._design(lam1) == suites._design(recall) == "one launch"


@pytest.mark.gpu
def test_a_recording_keeps_what_it_reads():
    """A replay after everything else was freed and written over; it once read the dead recall batch."""
    with torch.cuda.stream(torch.cuda.Stream()):
        step = recall_step(Shape(N=8, T=7, B=4, device="cuda"), "fused")
        weight = step.model.readout.weight
        replay = Captured(step)
        del step
        gc.collect()
        torch.cuda.empty_cache()
        junk = [torch.full((1 << 16,), 1 << 40, device="cuda") for _ in range(64)]
        before = weight.detach().clone()
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
        assert not torch.equal(before, weight)
        assert weight.isfinite().all()
        del junk


def test_recording_owns_its_run(monkeypatch):
    class Graph:
        replays = 0

        def replay(self):
            self.replays += 1

    class Stream:
        def wait_stream(self, other):
            pass

    calls = []
    for name, value in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda side: contextlib.nullcontext(),
        "graph": lambda *where, **mode: contextlib.nullcontext(),
        "CUDAGraph": Graph,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def run():
        calls.append(1)

    kept = weakref.ref(run)
    replay = Captured(run, warmups=3)
    del run
    gc.collect()
    assert kept() is not None
    assert len(calls) == 4
    replay()
    assert replay.graph.replays == 1


def test_recall_step_moves_every_weight():
    step = recall_step(Shape(N=8, T=7, B=4), "torch")
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step()
    assert step.backend == "torch"
    assert not any(torch.equal(old, new) for old, new in zip(before, step.model.parameters(), strict=True))


def test_penn_treebank_step_moves_every_weight():
    step = penn_treebank_step(Shape(N=8, T=2, B=2), "reference")
    step()
    assert step.backend == "reference"
    assert all(parameter.grad is not None for parameter in step.model.parameters())


def test_penn_treebank_insists_on_the_fused_kernels():
    with pytest.raises(ValueError, match="backend='fused' cannot run: the input is on cpu"):
        penn_treebank_step(Shape(N=8, T=2, B=2), "fused")


def test_cases_with_a_target_come_first():
    cases = suites.gpu_cases()
    targeted = suites.target_cases()
    assert cases[: len(targeted)] == targeted
    assert {case.precision for case in targeted if case.options.get("lam") == 1} == {"highest"}
