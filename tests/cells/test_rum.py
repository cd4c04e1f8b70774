"""RUMCell: one step, and the same numbers as the layer."""

import pytest
import torch

from torchrum import RUM, RUMCell, rotation_matrix


@pytest.mark.parametrize("lam", [0, 1, 0.5])
def test_steps_equal_the_layer(lam):
    cell, rum = RUMCell(4, 5, lam=lam, eta=1.0), RUM(4, 5, lam=lam, eta=1.0)
    rum.load_state_dict({f"{name}_l0": p for name, p in cell.named_parameters()})
    x = torch.randn(6, 3, 4)
    outputs, state = [], None
    for x_t in x:
        output, state = cell(x_t, state)
        outputs.append(output)
    expected, last = rum(x)
    torch.testing.assert_close(torch.stack(outputs), expected)
    torch.testing.assert_close(state[0], (last if lam == 0 else last[0])[0])
    scanned, _ = cell.scan(x, cell.initial_state(3, device=x.device, dtype=x.dtype))
    torch.testing.assert_close(scanned, expected)


def test_unbatched_input_and_shapes():
    cell = RUMCell(4, 5, lam=1)
    output, (h, R) = cell(torch.randn(4))
    assert output.shape == (5,)
    assert h.shape == (5,)
    assert R.shape == (5, 5)
    again, _ = cell(torch.randn(4), (h, R))
    assert again.shape == (5,)
    with pytest.raises(ValueError, match=r"input has shape \(3, 7\); expected \(B, 4\) or \(4,\)"):
        cell(torch.randn(3, 7))


def test_equations_with_the_dense_rotation():
    """One step of lam = 1 written out with matrices."""
    cell = RUMCell(4, 5, lam=1, eta=2.0, dtype=torch.float64)
    x, h = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    R = torch.linalg.qr(torch.randn(3, 5, 5, dtype=torch.float64))[0]
    W, U, b = cell.weight_ih, cell.weight_hh, cell.bias_ih
    tau = x @ W[:5].T + h @ U[:5].T + b[:5]
    u = torch.sigmoid(x @ W[5:10].T + h @ U[5:].T + b[5:10])
    eps = x @ W[10:].T + b[10:]
    new_R = R @ rotation_matrix(eps, tau)
    candidate = torch.relu(eps + torch.einsum("bij,bj->bi", new_R, h))
    mixed = u * h + (1 - u) * candidate
    expected = 2 * mixed / mixed.norm(dim=-1, keepdim=True)
    output, state = cell(x, (h, R))
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(state, (expected, new_R))


def test_a_step_can_be_traced_by_finite_differences():
    cell = RUMCell(2, 3, lam=1, layer_norm=True, activation="tanh", dtype=torch.float64)
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: cell(x)[0], x)
