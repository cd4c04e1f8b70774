"""RHNCell against numbers computed elsewhere, against its equations layer by layer, and published sizes."""

import numpy as np
import pytest
import torch

from equations import sigmoid
from golden import DIGITS, X, fill, sines
from tolerances import TOL
from torchrum.cells.rhn import RHNCell
from torchrum.layers.registry import build_layer

I, H, B, T = 3, 5, 4, 6


def written_out(cell, x, s, mask_x, mask_s):
    """One step of one row, in numpy."""
    W_g, W_t = np.split(cell.weight_ih.detach().numpy(), 2)
    for layer in range(cell.depth):
        U_g, U_t = np.split(cell.weight_hh[layer].detach().numpy(), 2)
        b_g, b_t = np.split(cell.bias[layer].detach().numpy(), 2)
        g, t = U_g @ (s * mask_s) + b_g, U_t @ (s * mask_s) + b_t
        if layer == 0:
            g, t = g + W_g @ (x * mask_x), t + W_t @ (x * mask_x)
        s = np.tanh(g) * sigmoid(t) + s * (1 - sigmoid(t))
    return s


def random_cell(**words):
    return RHNCell(I, H, depth=3, transform_bias=-0.5, init_range=0.8, **words, dtype=torch.float64)


def test_cell_gives_the_numbers_computed_elsewhere():
    cell = RHNCell(2, 3, depth=3, dtype=torch.float64)
    fill(cell.weight_ih, torch.cat((sines(10, 2, 3), sines(20, 2, 3)), 1))
    for layer in range(3):
        fill(cell.weight_hh[layer], torch.cat((sines(100 + 20 * layer, 3, 3), sines(110 + 20 * layer, 3, 3)), 1))
        fill(cell.bias[layer], torch.cat((sines(30 + 10 * layer, 3), sines(35 + 10 * layer, 3) - 2)))
    _, (h,) = cell.scan(X, cell.initial_state(1, device="cpu", dtype=torch.float64))
    torch.testing.assert_close(h, h.new_tensor([[0.02459075, 0.01625647, 0.08480743]]), **DIGITS)


@pytest.mark.parametrize("training", [False, True])
def test_cell_is_its_equations_with_one_mask_per_sequence(training):
    cell = random_cell(input_dropout=0.5, state_dropout=0.25).train(training)
    x, h = torch.randn(T, B, I, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64)
    torch.manual_seed(5)
    output, _ = cell.scan(x, (h,))
    mask_x, mask_s = torch.ones(B, I), torch.ones(B, H)
    if training:
        torch.manual_seed(5)
        mask_x = torch.nn.functional.dropout(torch.ones(B, I, dtype=torch.float64), 0.5)
        mask_s = torch.nn.functional.dropout(torch.ones(B, H, dtype=torch.float64), 0.25)
        assert {0.0} < set(mask_s.unique().tolist())
    for row in range(B):
        s = h[row].numpy()
        for t in range(T):
            s = written_out(cell, x[t, row].numpy(), s, mask_x[row].numpy(), mask_s[row].numpy())
            np.testing.assert_allclose(output[t, row].detach(), s, **TOL[torch.float64])


def test_closed_gates_keep_the_state():
    cell = RHNCell(I, H, transform_bias=-200.0, state_dropout=0.5, dtype=torch.float64)
    h = torch.randn(B, H, dtype=torch.float64)
    output, _ = cell.scan(torch.randn(T, B, I, dtype=torch.float64), (h,))
    torch.testing.assert_close(output[-1], h, **TOL[torch.float64])  # the carried state is not dropped


def test_start_is_the_published_one():
    cell = RHNCell(50, 100)
    for bias in cell.bias:
        assert (bias[100:] == -4).all()
        assert 0.035 < bias[:100].abs().max() <= 0.04
    for weight in (cell.weight_ih, *cell.weight_hh):
        assert 0.039 < weight.abs().max() <= 0.04


@pytest.mark.parametrize(
    "V, N, depth, count",
    [
        (205, 1500, 10, 45_994_730),
        (27, 1500, 10, 45_152_256),
        (205, 1000, 10, 20_677_230),
        (27, 1000, 10, 20_101_756),
        (205, 1500, 5, 23_479_730),
    ],
)
def test_sizes_are_the_published_ones(V, N, depth, count):
    """With an embedding of the vocabulary's size and an untied softmax."""
    layer = build_layer("rhn", V, N, depth=depth, device="meta")
    assert sum(p.numel() for p in layer.parameters()) + V * V + N * V + V == count


def test_wrong_arguments_are_refused():
    for words, message in (
        ({"depth": 0}, "depth=0 is not allowed"),
        ({"state_dropout": -0.1}, "state_dropout=-0.1"),
        ({"input_dropout": 2}, "input_dropout=2"),
        ({"transform_bias": float("inf")}, "transform_bias=inf"),
        ({"init_range": -1.0}, r"init_range=-1.0 is not allowed; it must be 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            RHNCell(I, H, **words)
    assert "depth=10, transform_bias=-4.0" in repr(RHNCell(I, H))
