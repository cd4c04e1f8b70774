"""Targets of the benchmark, and errors against float64."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paper.bench.test_report import GPU, PLACE, full_suite, report, row
from torchrum import RUM
from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.paper.bench.layers import Shape
from torchrum.paper.bench.measure import Times
from torchrum.paper.bench.records import Report, Row, Target, read_report
from torchrum.paper.bench.suites import LONG, gpu_cases

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("the benchmarks are not installed with the package", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import judging.errors  # noqa: E402
from judge import main  # noqa: E402
from judging.errors import clear_of_threshold, relative_error  # noqa: E402
from judging.targets import cpu_targets, gpu_targets  # noqa: E402


def test_targets_take_the_better_of_our_two_ways():
    target = next(target for target in gpu_targets(report()) if target.name.startswith("eta-bf16-n1000"))
    assert target.value == pytest.approx(0.25)
    assert target.reached
    assert not Target("a", 3.0, 2.0, at_least=True).reached
    assert not Target("a", 3.0, None).reached
    names = [target.name for target in gpu_targets(report())]
    assert not any("n704" in name for name in names)  # not measured, so not judged


def test_a_failed_implementation_misses_its_target():
    made = Report("gpu", PLACE, [row("fused", None, failed="x"), row("gru graphed", 6.0)])
    assert [target.value for target in gpu_targets(made)] == [None]


def test_an_error_that_is_not_a_number_misses_its_target():
    rows = [row("fused", 1.0), row("fused graphed", 1.0)]
    for place, error in enumerate((1e-9, math.nan)):
        rows[place].error = error
    [target] = [target for target in gpu_targets(Report("gpu", PLACE, rows)) if "relative error" in target.name]
    assert math.isnan(target.value)
    assert not target.reached


def test_every_gpu_target_has_its_case():
    """All that the targets look for is in the suite: were everything measured, nothing would be left unjudged."""
    made = Report("gpu", PLACE)
    for case in gpu_cases():
        for implementation in case.implementations:
            new = Row(case.name, implementation, case.modes[0], case.shape, case.options, Times(1, 1, 1, 30))
            new.precision = case.precision
            new.first_call_seconds, new.peak_bytes, new.error, new.error_ieee = 1.0, 10**6, 1e-9, 1e-9
            made.rows.append(new)
    found = gpu_targets(made)
    assert len(found) == 5 + 5 + 1 + 2 + 2 + 4 + 1 + 2 + 1
    assert all(target.value is not None for target in found)
    assert len({(case.name, case.modes) for case in gpu_cases()}) == len(gpu_cases())


def test_cpu_targets():
    made = Report("cpu", PLACE)
    for lam in (0, 1):
        case = f"lam{lam}-n100-t100"
        made.rows += [
            Row(case, name, "forward_backward", GPU, {}, Times(ms, ms, ms, 1))
            for name, ms in (("authors", 7), ("torch", 2))
        ]
    made.rows += [
        Row(LONG[0], name, "forward_backward", GPU, peak_bytes=size) for name, size in (("authors", 100), ("torch", 9))
    ]
    made.rows[2].times = Times(6, 6, 6, 1)
    step = [("native", 3), ("gru", 2)]
    made.rows += [Row("step-n256", name, "forward", GPU, {}, Times(ms, ms, ms, 1)) for name, ms in step]
    found = cpu_targets(made)
    values = [(target.value, target.reached) for target in found]
    assert values == [(3.5, True), (3.0, False), (1.5, False), (0.09, True)]


def test_a_report_is_judged_in_its_file(tmp_path, capsys):
    made = full_suite()
    made.path = tmp_path / "gpu.json"
    made.write()
    main([str(made.path)])
    back = read_report(made.path)
    assert back.rows == made.rows
    assert back.targets == gpu_targets(made)
    assert "[reached] eta-bf16-n704" in capsys.readouterr().out
    made.suite = "other"
    made.write()
    with pytest.raises(SystemExit, match="2"):
        main([str(made.path)])
    assert "there are: gpu, cpu" in capsys.readouterr().err


def test_a_report_that_is_not_there_is_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["none.json"])
    assert capsys.readouterr().err.endswith("error: none.json is not a file\n")


def test_error_is_small_for_the_torch_backend_and_large_for_wrong_weights():
    torch.manual_seed(0)
    shape = Shape(N=8, T=30, B=3)
    rum = RUM(8, 8, form="paper", eta=1.0, layer_norm=True, zoneout=0.2, backend="torch")
    assert relative_error(rum, shape) < 2e-5
    assert relative_error(rum.bfloat16(), Shape(N=8, T=30, B=3, dtype="bfloat16")) > 1e-4


def test_samples_near_the_relu_threshold_are_told_from_the_others():
    exact = RUM(2, 3, dtype=torch.float64, backend="reference", **PAPER_OPTIONS)
    with torch.no_grad():
        exact.weight_ih_l0.zero_()
        exact.weight_ih_l0[6:] = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, -1.0]])  # eps, relu's argument from h = 0
        exact.bias_ih_l0.zero_()
    x = torch.tensor([[1, 0], [1e-9, 0], [1e9, 1e9 - 1e3], [1, 1 - 1e-6], [1, 0.999]], dtype=torch.float64)
    assert clear_of_threshold(exact, x[None]).tolist() == [
        True,
        True,
        False,
        False,
        True,
    ]  # at any scale
    below = torch.tensor([-1.0, 0.0], dtype=torch.float64).expand_as(x)  # leaves h at 0
    assert clear_of_threshold(exact, torch.stack((below, x, below))).tolist() == [True, True, False, False, True]
    exact.options = replace(exact.options, activation="tanh")
    assert clear_of_threshold(exact, x[None]).all()


def test_an_error_that_is_not_a_number_is_not_lost(monkeypatch):
    monkeypatch.setattr(judging.errors, "_outputs", lambda rum, x, grad: [torch.ones(2), torch.full((2,), math.nan)])
    assert math.isnan(relative_error(RUM(6, 6, form="paper", backend="torch"), Shape(N=6, T=4, B=3)))
    monkeypatch.setattr(judging.errors, "clear_of_threshold", lambda exact, x: torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="every sample is near the ReLU threshold"):
        relative_error(RUM(6, 6, form="paper", backend="torch"), Shape(N=6, T=4, B=3), exclude_near_threshold=True)


def test_rows_left_out_have_no_gradient(monkeypatch):
    grads, outputs = [], judging.errors._outputs
    monkeypatch.setattr(judging.errors, "_outputs", lambda rum, x, grad: grads.append(grad) or outputs(rum, x, grad))
    monkeypatch.setattr(judging.errors, "clear_of_threshold", lambda exact, x: torch.tensor([True, False, True]))
    rum = RUM(6, 6, form="paper", backend="torch")
    assert relative_error(rum, Shape(N=6, T=4, B=3), exclude_near_threshold=True) < 2e-5
    assert relative_error(rum, Shape(N=6, T=4, B=3)) < 2e-5
    assert [grad.abs().sum((0, 2)).gt(0).tolist() for grad in grads] == 2 * [[True, False, True]] + 2 * [[True] * 3]


def test_errors_are_entered_into_the_rows_of_the_fused_kernels(monkeypatch):
    monkeypatch.setattr(
        judging.errors, "make_layer", lambda name, shape, **options: RUM(8, 8, form="paper", backend="torch")
    )
    small = Shape(N=8, T=4, B=3)
    rows = [Row("eta-fp32-n8", name, "forward_backward", small, precision="high") for name in ("fused", "gru")]
    rows.append(Row("plain-n8", "fused", "forward_backward", small))
    judging.errors.enter_errors(Report("gpu", PLACE, rows))
    assert 0 < rows[0].error < 2e-5 and 0 < rows[0].error_ieee < 2e-5 and 0 < rows[0].error_apart < 2e-5
    assert rows[0].error_smooth is not None
    assert rows[1].error is None and rows[2].error is None
