"""GORU against its equations written out.

The code is in cells/unitary.py.
"""

import numpy as np
import pytest
import torch

from equations import sigmoid
from golden import DIGITS, X, sines
from tolerances import ORTHOGONAL, TOL
from torchrum.cells.unitary import GORUCell

I, H, B = 3, 5, 4


@pytest.mark.parametrize("style", ["tunable", "fft"])
def test_cell_is_its_equations(style):
    cell = GORUCell(I, H, style=style, capacity=3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    x, h = torch.randn(B, I, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64)
    output, (state,) = cell(x, (h,))
    Q = cell.rotations.matrix().detach().numpy()
    np.testing.assert_allclose(Q @ Q.T, np.eye(H), **ORTHOGONAL[torch.float64])
    U_r, U_g, U_c = np.split(cell.weight_ih.detach().numpy(), 3)
    W_r, W_g = np.split(cell.weight_hh.detach().numpy(), 2)
    b_r, b_g = np.split(cell.bias.detach().numpy(), 2)
    for row, (xs, hs) in enumerate(zip(x.numpy(), h.numpy(), strict=True)):
        r, g = sigmoid(U_r @ xs + W_r @ hs + b_r), sigmoid(U_g @ xs + W_g @ hs + b_g)
        z = r * (Q @ hs) + U_c @ xs
        c = np.sign(z) * np.maximum(np.abs(z) + cell.bias_c.detach().numpy(), 0)
        np.testing.assert_allclose(output[row].detach(), g * hs + (1 - g) * c, **TOL[torch.float64])
    assert state is output


def test_golden_numbers():
    cell = GORUCell(2, 4, style="fft", modrelu_bias=0.011, dtype=torch.float64)  # theirs adds 0.001 to a bias of 0.01
    order = [0, 2, 1, 3]  # theirs pairs by the highest bit first: the units are the same, numbered by reversed bits
    U_c, U_r, U_g = sines(10, 2, 12).T.chunk(3)
    W_r, W_g = (sines(first, 4, 4).T[order][:, order] for first in (40, 60))
    with torch.no_grad():
        cell.rotations.theta.copy_(-sines(1, 4, scale=3.0))
        cell.weight_ih.copy_(torch.cat((U_r[order], U_g[order], U_c[order])))
        cell.weight_hh.copy_(torch.cat((W_r, W_g)))
        cell.bias[4:].copy_(sines(80, 4)[order])
    Q = cell.rotations.matrix().detach()
    first_row = torch.tensor([-0.74351521, -0.33503444, -0.37266077, -0.44278777], dtype=torch.float64)
    torch.testing.assert_close(Q[order, 0], first_row, **DIGITS)  # theirs acts on rows
    torch.testing.assert_close(Q @ Q.T, torch.eye(4, dtype=torch.float64), **DIGITS)
    _, (h,) = cell.scan(X, cell.initial_state(1, device="cpu", dtype=torch.float64))
    expected = torch.tensor([0.15033192, 0.34735649, 0.22011908, -0.05190069], dtype=torch.float64)
    torch.testing.assert_close(h[0, order], expected, **DIGITS)


def test_parameter_count_of_the_original_copying_script():
    assert sum(p.numel() for p in GORUCell(10, 128, style="fft").parameters()) == 37_440


def test_start_of_the_parameters():
    torch.manual_seed(0)
    cell = GORUCell(10, 50, capacity=4, angle_bound=0.5, reset_bias=1.5, update_bias=-0.5, modrelu_bias=0.25)
    assert (cell.bias[:50] == 1.5).all()
    assert (cell.bias[50:] == -0.5).all()
    assert (cell.bias_c == 0.25).all()
    for weight in (cell.weight_ih, cell.weight_hh):
        assert 0.009 < weight.abs().max() <= 0.01
    assert cell.rotations.capacity == 4
    assert 0.4 < cell.rotations.theta.abs().max() <= 0.5
    assert GORUCell(10, 50).bias[0] == 2
    drawn = GORUCell(10, 300, update_bias=None).bias[300:]
    assert -0.1 <= drawn.min() < -0.09
    assert 0.09 < drawn.max() <= 0.1


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="style='x'"):
        GORUCell(I, H, style="x")
    with pytest.raises(ValueError, match="reset_bias"):
        GORUCell(I, H, reset_bias=float("inf"))
    assert "reset_bias=2.0" in repr(GORUCell(I, H))
