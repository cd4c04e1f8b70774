"""The GPU suite end to end at tiny sizes; every contestant must come out with a time."""

import pytest
import torch

from torchrum.bench.gpu import run_gpu
from torchrum.bench.gpu_cases import Case
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


def test_a_case_without_a_device_leaves_its_reason(monkeypatch):
    from torchrum.bench import gpu

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
