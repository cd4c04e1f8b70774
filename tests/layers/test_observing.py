import pytest
import torch

from torchrum import RUM, RUMCell, rotate, rotation_angle
from torchrum.layers.observing import diagonal_dominance, observe, recurrent_blocks
from torchrum.layers.registry import build_layer


def test_the_vectors_give_back_the_candidate():
    """With the update gate off and no eta the state is relu(eps + R h): what is observed must reproduce it."""
    torch.manual_seed(0)
    rum = RUM(3, 6, update_gate=False, activation="relu", eta=None)
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


def test_planes_hold_their_vectors():
    rum = RUM(3, 6)
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
    cell = RUMCell(3, 4)
    (_, tau, first), (_, u, second) = recurrent_blocks(cell)
    assert (tau, u) == ("tau", "u")
    assert torch.equal(torch.cat((first, second)), cell.weight_hh)
    assert [block for _, block, _ in recurrent_blocks(RUM(3, 4, update_gate=False))] == ["tau"]


def test_dominance_of_known_matrices():
    assert diagonal_dominance(torch.full((5, 5), -2.0)).item() == pytest.approx(1)
    assert diagonal_dominance(torch.full((5, 5), 0.5) + 1.5 * torch.eye(5)).item() == pytest.approx(4)
    assert torch.isfinite(diagonal_dominance(torch.zeros(3, 3)))
    assert torch.isfinite(diagonal_dominance(torch.ones(1, 1)))
