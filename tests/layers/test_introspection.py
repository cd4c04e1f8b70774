"""What is observed of a RUM, against its equations."""

import pytest
import torch

from grids import form_of
from torchrum import RUM, RUMCell, rotate, rotation_angle
from torchrum.layers import recurrent
from torchrum.layers.introspection import diagonal_dominance, observe, recurrent_blocks
from torchrum.layers.registry import CellLayer, build_layer


def test_the_vectors_give_back_the_candidate():
    """With the update gate off and no eta the state is relu(eps + R h): what is observed must reproduce it."""
    torch.manual_seed(0)
    rum = RUM(3, 6, form="paper", update_gate=False)
    (seen,) = observe(rum, lambda: rum(torch.randn(7, 2, 3)))
    before = torch.cat((torch.zeros(1, 2, 6), seen.state[:-1]))
    torch.testing.assert_close(torch.relu(seen.eps + rotate(seen.eps, seen.tau, before)), seen.state)
    torch.testing.assert_close(seen.theta, rotation_angle(seen.eps, seen.tau))


def test_the_accumulated_rotation_is_the_layers_own():
    torch.manual_seed(0)
    rum = RUM(3, 6, lam=1, num_layers=2)
    x = torch.randn(9, 2, 3)
    first, second = observe(rum, lambda: rum(x))
    _, (_, R) = rum(x)
    for layer, seen in enumerate((first, second)):
        assert seen.name == f"l{layer}"
        torch.testing.assert_close(list(seen.rotations())[-1].float(), R[layer].detach(), atol=1e-5, rtol=0)


def test_the_two_directions_are_observed_apart_each_in_its_own_order(monkeypatch):
    monkeypatch.setattr(recurrent, "WORTH_GROUPING", 1)  # the layer would run the shorter row in another call
    torch.manual_seed(0)
    rum = RUM(3, 6, lam=1, num_layers=2, bidirectional=True)
    x, lengths = torch.randn(9, 2, 3), torch.tensor([9, 5])
    seen = {found.name: found for found in observe(rum, lambda: rum(x))}
    assert list(seen) == ["l0", "l0_reverse", "l1", "l1_reverse"]
    output, (_, R) = rum(x)
    ahead, back = output.detach().chunk(2, -1)
    torch.testing.assert_close(seen["l1"].state, ahead)
    torch.testing.assert_close(seen["l1_reverse"].state, back.flip(0))
    for place, found in enumerate(seen.values()):
        torch.testing.assert_close(list(found.rotations())[-1].float(), R[place].detach(), atol=1e-5, rtol=0)
    for length in (7, 2):
        lengths[1] = length
        first, last = observe(rum, lambda: rum(x, lengths=lengths))[2:]
        output = rum(x, lengths=lengths)[0].detach()
        torch.testing.assert_close(first.state[:length, 1], output[:length, 1, :6])
        torch.testing.assert_close(last.state[:length, 1], output[:length, 1, 6:].flip(0))


def test_one_pass_is_observed():
    rum, cell, x = RUM(3, 6, bidirectional=True), RUMCell(3, 6), torch.randn(4, 2, 3)
    reset = torch.tensor([[False, False], [False, False], [True, False], [False, False]])
    for call in (lambda: (rum(x), rum(x)), lambda: rum(x, reset=reset)):
        with pytest.raises(ValueError, match="l0 ran 2 times, and not each time from the state in which it had ended;"):
            observe(rum, call)
    with pytest.raises(ValueError, match=r"cell ran 2 times, .* pass its state on"):
        observe(cell, lambda: (cell(x[0]), cell(x[0, :1])))
    with pytest.raises(
        TypeError, match="call is a tuple; it must be a function without arguments, such as lambda: model"
    ):
        observe(rum, rum(x))
    assert not {"scan", "step", "_advance", "_native_steps"} & (vars(rum).keys() | vars(cell).keys())


@pytest.mark.parametrize("lam", [None, 0, 1])
def test_a_loop_over_the_steps_is_the_same_sequence(lam):
    torch.manual_seed(0)
    cell, x = RUMCell(3, 6, **form_of(lam)), torch.randn(5, 2, 3)
    layer = CellLayer(lambda inputs: cell, 3, 6)

    def loop():
        state = None
        for x_t in x:
            state = cell(x_t, state)

    (by_steps,), (at_once,) = observe(cell, loop), observe(layer, lambda: layer(x))
    assert (by_steps.name, at_once.name) == ("cell", "cells.0")
    for name in ("eps", "tau", "state", "theta"):
        torch.testing.assert_close(getattr(by_steps, name), getattr(at_once, name))
    torch.testing.assert_close(at_once.state, layer(x)[0].detach())
    for one, other in zip(by_steps.rotations(), at_once.rotations(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_planes_hold_their_vectors():
    rum = RUM(3, 6, form="paper")
    (seen,) = observe(rum, lambda: rum(torch.randn(4, 2, 3)))
    planes = seen.planes()
    for vector in (seen.eps, seen.tau):
        inside = (planes @ (planes.mT @ vector.double().unsqueeze(-1))).squeeze(-1)
        torch.testing.assert_close(inside, vector.double(), atol=1e-6, rtol=0)


def test_a_slow_rum_is_found_inside_a_fast_slow_layer():
    layer = build_layer("fs", 3, 5, slow="rum", slow_size=7)
    (seen,) = observe(layer, lambda: layer(torch.randn(4, 2, 3)))
    assert seen.name.endswith("slow")
    assert seen.state.shape == (4, 2, 7)
    assert [(block, len(matrix)) for _, block, matrix in recurrent_blocks(layer)] == [("tau", 7), ("u", 7)]


def test_observing_leaves_the_model_as_it_was():
    rum = RUM(3, 6, zoneout=0.5, num_layers=2).train()
    with pytest.raises(ValueError, match="must be equal to input_size"):
        observe(rum, lambda: rum(torch.randn(4, 2, 5)))
    assert rum.training
    assert "scan" not in vars(rum)


def test_blocks_are_the_rows_of_the_recurrent_weight():
    cell = RUMCell(3, 4, form="paper")
    (_, tau, first), (_, u, second) = recurrent_blocks(cell)
    assert (tau, u) == ("tau", "u")
    assert torch.equal(torch.cat((first, second)), cell.weight_hh)
    assert [block for _, block, _ in recurrent_blocks(RUM(3, 4, form="paper", update_gate=False))] == ["tau"]
    gated = RUM(3, 4)
    assert [block for _, block, _ in recurrent_blocks(gated)] == ["r", "u", "tau"]
    assert torch.equal(torch.cat([matrix for *_, matrix in recurrent_blocks(gated)]), gated.weight_hh_l0)


@pytest.mark.parametrize("rotated, units", [(0.5, 8), (1.0, 20)])
def test_heads_of_the_gated_form_are_observed_apart(rotated, units):
    """The states follow from what is observed, head by head; the last of three heads is shorter."""
    torch.manual_seed(0)
    rum, x = RUM(3, 20, rotated=rotated), torch.randn(7, 2, 3)
    (seen,) = observe(rum, lambda: rum(x))
    before = torch.cat((torch.zeros(1, 2, 20), seen.state[:-1]))
    heads = [slice(start, min(start + 8, units)) for start in range(0, units, 8)]
    turned = [rotate(seen.eps[..., head], seen.tau[..., head], before[..., head]) for head in heads]
    angles = [rotation_angle(seen.eps[..., head], seen.tau[..., head]) for head in heads]
    torch.testing.assert_close(seen.theta, torch.stack(angles, -1))
    gates = x @ rum.weight_ih_l0[:40].T + rum.bias_ih_l0[:40] + before @ rum.weight_hh_l0[:40].T + rum.bias_hh_l0[:40]
    r, u = torch.sigmoid(gates).chunk(2, -1)
    rest = torch.zeros(7, 2, 20 - units)
    candidate = torch.tanh(seen.eps + r * (seen.tau + torch.cat((*turned, rest), -1)))
    torch.testing.assert_close(u * before + (1 - u) * candidate, seen.state)
    planes = seen.planes()
    assert planes.shape == (7, 2, len(heads), 8, 2)
    for vector in (seen.eps, seen.tau):
        part = vector[..., :8].double().unsqueeze(-1)
        torch.testing.assert_close(planes[:, :, 0] @ (planes[:, :, 0].mT @ part), part, atol=1e-6, rtol=0)


def test_a_gated_rum_without_rotated_units_has_no_angles():
    rum = RUM(3, 8, rotated=0.0)
    (seen,) = observe(rum, lambda: rum(torch.randn(5, 2, 3)))
    assert seen.theta.shape == (5, 2, 0)
    assert not list(seen.rotations())


def test_dominance_of_known_matrices():
    assert diagonal_dominance(torch.full((5, 5), -2.0)).item() == pytest.approx(1)
    assert diagonal_dominance(torch.full((5, 5), 0.5) + 1.5 * torch.eye(5)).item() == pytest.approx(4)
    assert torch.isfinite(diagonal_dominance(torch.zeros(3, 3)))
    assert torch.isfinite(diagonal_dominance(torch.ones(1, 1)))
