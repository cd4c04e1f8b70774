"""GRUCell against torch.nn.GRU (reset after) and against its equations written out (reset before).

The code is in cells/lstm.py.
"""

import numpy as np
import pytest
import torch
from torch import nn

from golden import shuffled
from tolerances import ORTHOGONAL, TOL
from torchrum.cells.lstm import GRUCell

I, H, B, T = 3, 5, 4, 6


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_reset_after_is_torchs():
    cell, torchs = shuffled(GRUCell(I, H, reset_after=True).double()), nn.GRU(I, H).double()
    with torch.no_grad():
        torchs.weight_ih_l0.copy_(cell.weight_ih)
        torchs.weight_hh_l0.copy_(torch.cat((cell.weight_hh, cell.weight_hc)))
        torchs.bias_ih_l0.copy_(cell.bias)
        torchs.bias_hh_l0.zero_()
        torchs.bias_hh_l0[2 * H :] = cell.bias_hc
    x, h = draw(T, B, I), draw(B, H)
    output, (last,) = cell.scan(x, (h,))
    expected, h_n = torchs(x, h[None])
    torch.testing.assert_close(output, expected, **TOL[torch.float64])
    torch.testing.assert_close(last, h_n[0], **TOL[torch.float64])


def test_reset_before_is_the_equations():
    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    cell = shuffled(GRUCell(I, H).double())
    x, h = draw(B, I), draw(B, H)
    output, _ = cell(x, (h,))
    W_r, W_u, W_c = np.split(cell.weight_ih.detach().numpy(), 3)
    U_r, U_u = np.split(cell.weight_hh.detach().numpy(), 2)
    U_c = cell.weight_hc.detach().numpy()
    b_r, b_u, b_c = np.split(cell.bias.detach().numpy(), 3)
    for row, (xs, hs) in enumerate(zip(x.numpy(), h.numpy(), strict=True)):
        r, u = sigmoid(W_r @ xs + U_r @ hs + b_r), sigmoid(W_u @ xs + U_u @ hs + b_u)
        candidate = np.tanh(W_c @ xs + U_c @ (r * hs) + b_c)
        np.testing.assert_allclose(output[row].detach(), u * hs + (1 - u) * candidate, **TOL[torch.float64])


def test_initialisations():
    cell = GRUCell(3, 8, init="orthogonal", gate_bias=0.25)
    assert (cell.bias[:16] == 0.25).all()
    assert not cell.bias[16:].any()
    gates = torch.cat((cell.weight_ih[:16], cell.weight_hh), 1)  # (2H, I + H): tall, orthonormal columns
    torch.testing.assert_close(gates.T @ gates, torch.eye(11), **ORTHOGONAL[torch.float32])
    candidate = torch.cat((cell.weight_ih[16:], cell.weight_hc), 1)  # (H, I + H): wide, orthonormal rows
    torch.testing.assert_close(candidate @ candidate.T, torch.eye(8), **ORTHOGONAL[torch.float32])
    assert not torch.allclose(GRUCell(3, 8).weight_hc.T @ GRUCell(3, 8).weight_hc, torch.eye(8), atol=0.1)
    assert (GRUCell(3, 8).bias[:16] == 1).all()


def test_parameter_count_of_the_copying_table():
    cell, readout = GRUCell(10, 100), nn.Linear(100, 9)
    assert sum(p.numel() for part in (cell, readout) for p in part.parameters()) == 34_209


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="'glorot'"):
        GRUCell(I, H, init="glorott")
    with pytest.raises(ValueError, match="input_size=0"):
        GRUCell(0, H)
    assert "reset_after=True" in repr(GRUCell(I, H, reset_after=True))
