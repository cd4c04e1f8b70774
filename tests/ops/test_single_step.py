"""One step of one row in plain PyTorch, and calls without gradients that pass torch's dispatcher by."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from oracle import draw_inputs
from torchrum import RUM
from torchrum.ops.rum_scan import RumOptions, rum_scan_reference, torch_backend
from torchrum.ops.rum_scan.torch_backend import scan
from torchrum.ops.rum_scan.torch_backend.single import single_applies, single_step


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "softsign"])
@pytest.mark.parametrize("update_gate", [True, False])
@pytest.mark.parametrize("eta", [None, 1.5])
def test_the_step_is_the_reference(eta, update_gate, activation, dtype, error):
    options = RumOptions(eta=eta, update_gate=update_gate, activation=activation)
    for H in (2, 3, 64):
        inputs = draw_inputs(1, 1, H, options, dtype)
        assert single_applies(inputs, options)
        found = single_step(inputs, options)
        wide = {name: getattr(inputs, name).double() for name in ("xp", "h0", "weight_hh")}
        exact, _ = rum_scan_reference(inputs._replace(**wide), options)
        assert found.R is None
        assert found.out.dtype == dtype
        assert (found.out - exact).norm() <= error * exact.norm()


@pytest.mark.parametrize("kind", ["no eps", "no tau", "short eps", "opposite", "nearly opposite", "NaN", "infinite"])
def test_what_has_no_ordinary_rotation_is_left_to_the_scan(kind):
    options, H = RumOptions(), 6
    inputs = draw_inputs(1, 1, H, options)
    inputs.weight_hh.zero_()  # tau is its input alone
    tau, eps = inputs.xp[0, 0, :H], inputs.xp[0, 0, 2 * H :]
    if kind == "no eps":
        eps.zero_()
    elif kind == "no tau":
        tau.zero_()
    elif kind == "short eps":
        eps.mul_(1e-14)
    elif kind == "opposite":
        tau.copy_(-2 * eps)
    elif kind == "nearly opposite":
        tau.copy_(0.05 * tau - eps)
    else:
        eps[0] = float("nan" if kind == "NaN" else "inf")
    assert single_step(inputs, options) is None
    found = torch_backend.forward(inputs, options, save=False).out
    torch.testing.assert_close(found, rum_scan_reference(inputs, options)[0], equal_nan=True)


@pytest.mark.parametrize(
    "words",
    [{"layer_norm": True}, {"zoneout": 0.1}, {"lam": 1.0}],
    ids=str,
)
def test_it_applies_to_plain_options_alone(words):
    options = RumOptions(**words)
    assert not single_applies(draw_inputs(1, 1, 4, options), options)


@pytest.mark.parametrize("T, B, H", [(2, 1, 4), (1, 2, 4), (1, 1, 1)])
def test_it_applies_to_one_step_of_one_row_alone(T, B, H):
    assert not single_applies(draw_inputs(T, B, H, RumOptions()), RumOptions())


def test_a_zero_state_stays_zero():
    options, H = RumOptions(eta=2.0, update_gate=False), 4
    inputs = draw_inputs(1, 1, H, options)
    inputs.xp[..., H:] = -inputs.xp[..., H:].abs()  # relu closes every unit
    found = single_step(inputs._replace(h0=torch.zeros(1, H)), options)
    assert torch.equal(found.out, torch.zeros(1, 1, H))


def test_a_layer_takes_it(monkeypatch):
    taken = []
    monkeypatch.setattr(scan, "single_step", lambda *args: taken.append(args) or single_step(*args))
    layer, x = RUM(3, 5, backend="torch"), torch.randn(1, 1, 3)
    wanted = layer(x)[0].detach()
    assert not taken  # gradients are recorded
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0], wanted)
    assert len(taken) == 1


@pytest.mark.parametrize("lam", [0, 1])
def test_who_counts_operators_sees_the_scan(lam):
    layer, x = RUM(3, 5, lam=lam, backend="torch"), torch.randn(2, 1, 3)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    assert any("rum_scan" in str(name) for name in counter.get_flop_counts()["Global"])
