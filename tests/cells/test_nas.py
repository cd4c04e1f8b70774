"""NASCell against numbers computed elsewhere, against its tree of operations node by node, and published sizes.

The code is in cells/lstm_variants.py.
"""

import math

import pytest
import torch

from equations import sigmoid
from golden import DIGITS, X, fill, sines
from tolerances import TOL
from torchrum.cells.lstm_variants import NASCell
from torchrum.layers.registry import build_layer

I, H, B, T = 3, 5, 4, 6


def written_out(cell, x, h, c):
    """One step of one row, unit by unit."""
    W, U = cell.weight_ih.tolist(), cell.weight_hh.tolist()
    b = cell.bias.tolist() if cell.bias is not None else [0.0] * len(W)
    new_h, new_c = [], []
    for unit in range(len(h)):
        a, r = [], []
        for block in range(8):
            row = block * len(h) + unit
            a.append(sum(w * value for w, value in zip(W[row], x, strict=True)))
            r.append(sum(u * value for u, value in zip(U[row], h, strict=True)) + b[row])
        leaves = [
            sigmoid(a[0] + r[0]),
            max(0.0, a[1] + r[1]),
            sigmoid(a[2] + r[2]),
            max(0.0, a[3] * r[3]),
            math.tanh(a[4] + r[4]),
            sigmoid(a[5] + r[5]),
            math.tanh(a[6] + r[6]),
            sigmoid(a[7] + r[7]),
        ]
        memory = math.tanh(math.tanh(leaves[0] * leaves[1]) + c[unit])
        new_c.append(memory * math.tanh(leaves[2] + leaves[3]))
        shown = math.tanh(math.tanh(leaves[4] * leaves[5]) + sigmoid(leaves[6] + leaves[7]))
        new_h.append(math.tanh(new_c[-1] * shown))
    return new_h, new_c


def test_cell_gives_the_numbers_computed_elsewhere():
    cell = NASCell(2, 3, dtype=torch.float64)
    fill(cell.weight_ih, sines(10, 2, 24))
    fill(cell.weight_hh, sines(60, 3, 24))
    _, (h, c) = cell.scan(X, cell.initial_state(1, device="cpu", dtype=torch.float64))
    torch.testing.assert_close(h, h.new_tensor([[0.01042693, 0.0119427, 0.01448623]]), **DIGITS)
    torch.testing.assert_close(c, c.new_tensor([[0.02164089, 0.01758026, 0.02048411]]), **DIGITS)


@pytest.mark.parametrize("bias", [False, True])
def test_cell_is_its_tree_of_operations(bias):
    cell = NASCell(I, H, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x, h, c = (torch.randn(B, size, dtype=torch.float64) for size in (I, H, H))
    output, state = cell(x, (h, c))
    for row in range(B):
        expected = written_out(cell, *(part[row].tolist() for part in (x, h, c)))
        torch.testing.assert_close(torch.stack(state)[:, row], h.new_tensor(expected), **TOL[torch.float64])
    assert output is state[0]


def test_state_dropout_hides_the_same_units_at_every_step():
    cell = NASCell(I, H, state_dropout=0.5, dtype=torch.float64)
    x, h, c = (torch.randn(T, B, I, dtype=torch.float64), *torch.randn(2, B, H, dtype=torch.float64))
    torch.manual_seed(3)
    output, _ = cell.scan(x, (h, c))
    torch.manual_seed(3)
    mask = cell.prepare(x)[..., 8 * H :]
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(mask, mask[:1].expand_as(mask))
    plain = NASCell(I, H, dtype=torch.float64)
    state = (h, c)
    for t in range(T):  # the plain cell, with the mask in the weight of each row
        rows = []
        for row in range(B):
            with torch.no_grad():
                plain.weight_ih.copy_(cell.weight_ih)
                plain.weight_hh.copy_(cell.weight_hh * mask[0, row])
            rows.append(plain(x[t, row], tuple(part[row] for part in state))[1])
        state = tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
        torch.testing.assert_close(output[t], state[0], **TOL[torch.float64])
    cell.eval()
    with torch.no_grad():
        plain.weight_hh.copy_(cell.weight_hh)
    torch.testing.assert_close(cell.scan(x, (h, c))[0], plain.scan(x, (h, c))[0])


def test_sizes_are_the_published_ones():
    """Two layers of 800 on an embedding of 128 are 16.2M with the softmax, two of 514 on one-hot input 6.57M."""

    def count(*sizes, **words):
        layer = build_layer("nas", *sizes, **words, device="meta")
        return sum(p.numel() for p in layer.parameters())

    assert count(128, 800, 2) + 50 * 128 + 801 * 50 == 16_225_650
    assert count(128, 800, 2, bias=True) + 50 * 128 + 801 * 50 == 16_238_450
    assert count(50, 514, 2) + 515 * 50 == 6_572_054


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"NASCell: state_dropout=1.5 is not allowed"):
        NASCell(I, H, state_dropout=1.5)
    with pytest.raises(ValueError, match="hidden_size=0"):
        NASCell(I, 0)
    assert "bias=True, state_dropout=0.25" in repr(NASCell(I, H, bias=True, state_dropout=0.25))
