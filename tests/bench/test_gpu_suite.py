"""The GPU suite end to end at tiny sizes; every contestant must come out with a time."""

import contextlib
from dataclasses import replace

import pytest
import torch

from torchrum.bench import gpu, gpu_cases
from torchrum.bench.gpu import run_gpu
from torchrum.bench.gpu_cases import Case
from torchrum.bench.measure import time_cpu
from torchrum.bench.records import Report, read_report
from torchrum.bench.training_steps import penn_treebank_step, recall_step
from torchrum.bench.work import Shape
from torchrum.models.answering import AnsweringModel


@pytest.mark.gpu
def test_quick_suite(tmp_path):
    report = Report("gpu", {}, path=tmp_path / "gpu.json")
    run_gpu(report, quick=True, samples=3)
    assert [row.failed for row in report.rows if row.failed] == []
    assert all(row.times.samples == 3 and row.first_call_seconds > 0 for row in report.rows)
    assert {row.case for row in read_report(report.path).rows} == {"quick-eta", "quick-lam1", "quick-recall"}
    assert all(row.error < 5e-3 and row.error_ieee < 2e-5 for row in report.rows if row.error is not None)


@pytest.fixture
def on_cpu(monkeypatch):
    """The suite with its tiny cases on the CPU: everything but the device events, the graphs and the fused kernels."""
    cases = [replace(case, shape=replace(case.shape, device="cpu")) for case in gpu_cases.quick_cases()]
    monkeypatch.setattr(gpu, "quick_cases", lambda: cases)
    monkeypatch.setattr(gpu, "time_cuda", lambda runs, samples, warmups: time_cpu(runs, samples))
    monkeypatch.setattr(gpu, "captured", lambda run: run)
    monkeypatch.setattr(gpu, "_free", lambda: None)
    monkeypatch.setattr(gpu, "_start_cuda", lambda: None)
    monkeypatch.setattr(gpu, "_own_stream", contextlib.nullcontext)
    monkeypatch.setattr(gpu, "peak_cuda_bytes", lambda run, before: before + 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 6)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_failures_stay_with_their_contestant(on_cpu, tmp_path):
    report = Report("gpu", {}, path=tmp_path / "gpu.json")
    run_gpu(report, quick=True, samples=2, log=lambda text: None)
    failed = {(row.case, row.contestant): row.failed for row in report.rows}
    assert failed["quick-eta", "fused"] == (
        "ValueError: backend='fused' cannot run: the input is on cpu. Pass backend='auto' to fall back."
    )
    assert failed["quick-eta", "gru graphed"] is None
    assert failed["quick-lam1", "authors graphed"] is None
    timed = [row for row in report.rows if not row.failed]
    assert len(timed) == 2 * 2 + 2
    assert all(row.times.samples == 2 and row.peak_bytes == 7 and row.first_call_seconds > 0 for row in timed)
    assert report.environment["float32_matmul_precision"] == "high"
    assert read_report(report.path).rows == report.rows


def test_error_is_measured_in_both_precisions(on_cpu):
    case = replace(gpu.quick_cases()[0], contestants=("torch", "gru"))
    ours, theirs = gpu.measure_case(case, "forward_backward", 2)
    assert 0 < ours.error < 2e-5
    assert 0 < ours.error_ieee < 2e-5
    assert theirs.error is None


def test_time_runs_out(on_cpu):
    report, said = Report("gpu", {}), []
    run_gpu(report, quick=True, samples=2, seconds=-1, log=said.append)
    assert report.rows == []
    assert len(said) == 3
    assert "left out" in said[0]


def test_a_case_without_a_device_leaves_its_reason(monkeypatch):
    def nothing_works(*unused):
        raise RuntimeError("no device\nmore")

    monkeypatch.setattr(gpu, "_prepare", nothing_works)
    monkeypatch.setattr(gpu, "_free", lambda: None)
    case = Case("a", Shape(N=4, T=2), {"lam": 0}, ("fused", "gru"))
    rows = gpu.measure_case(case, "forward_backward", 3)
    assert [row.failed for row in rows] == ["RuntimeError: no device"] * 2
    assert [row.options for row in rows] == [{"lam": 0}, {}]


def test_recall_step_moves_every_weight():
    step = recall_step(Shape(N=8, T=7, B=4), "torch")
    model = _model(step)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step()
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def _model(step) -> torch.nn.Module:
    parts = [cell.cell_contents for cell in step.__closure__]
    return next(part for part in parts if isinstance(part, AnsweringModel | torch.nn.ModuleList))


def test_penn_treebank_step_moves_every_weight():
    step = penn_treebank_step(Shape(N=8, T=2, B=2))
    model = _model(step)
    step()
    assert all(parameter.grad is not None for parameter in model.parameters())
