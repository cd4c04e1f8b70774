"""HMLSTMCell against numbers computed elsewhere, against its three cases written out, and counted parameters.

The code is in cells/lstm_variants.py.
"""

import math

import numpy as np
import pytest
import torch

from equations import normalised, sigmoid
from golden import DIGITS, fill, sines
from tolerances import ORTHOGONAL, TOL
from torchrum.cells.lstm_variants import HMLSTMCell
from torchrum.layers.registry import build_layer

I, H, N, B, T = 3, 4, 5, 6, 7


def written_out(cell, xs):
    """Outputs and last boundaries of one row ``xs`` ``(T, I)``, and which of the paper's three cases were met."""
    P, L, n = {name: value.numpy() for name, value in cell.state_dict().items()}, cell.num_levels, cell.level_size
    h, c, z, outputs, cases = np.zeros((L, n)), np.zeros((L, n)), [0] * L, [], set()
    for x in xs:
        new_h, new_c, new_z = np.zeros((L, n)), np.zeros((L, n)), [0] * L
        for l in range(L):
            U = P[f"weight_hh.{l}"]
            s = U[:, :n] @ h[l] + P[f"bias.{l}"]
            if l < L - 1:
                s = s + z[l] * (U[:, n : 2 * n] @ h[l + 1])
            z_below = 1 if l == 0 else new_z[l - 1]
            s = s + z_below * (P["weight_ih"] @ x if l == 0 else U[:, -n:] @ new_h[l - 1])
            gates = np.split(s[: 4 * n], 4)
            if cell.layer_norm:
                gains, shifts = np.split(P["ln_weight"][l], 4), np.split(P["ln_bias"][l], 4)
                gates = [normalised(*gate) for gate in zip(gates, gains, shifts, strict=True)]
            f, i, o, g = sigmoid(gates[0] + cell.forget_bias), sigmoid(gates[1]), sigmoid(gates[2]), np.tanh(gates[3])
            cases.add("flush" if z[l] == 1 else "update" if z_below == 1 else "copy")
            if z[l] == 0 and z_below == 0:
                new_h[l], new_c[l] = h[l], c[l]
            else:
                new_c[l] = i * g if z[l] == 1 else f * c[l] + i * g
                seen = new_c[l]
                if cell.layer_norm:
                    seen = normalised(seen, P["ln_weight_c"][l], P["ln_bias_c"][l])
                new_h[l] = o * np.tanh(seen)
            if l < L - 1:
                new_z[l] = int(s[4 * n] > 0)
        h, c, z = new_h, new_c, new_z
        gate = sigmoid(P["gate_weight"] @ h.ravel())
        parts = [gate[l] * (P["output_weight"][:, l * n : (l + 1) * n] @ h[l]) for l in range(L)]
        outputs.append(np.maximum(0, sum(parts)))
    return np.stack(outputs), z[:-1], cases


def golden_run(slope):
    cell = HMLSTMCell(2, 2, layer_norm=False, forget_bias=0.0, dtype=torch.float64)
    cell.slope.fill_(slope)
    for level in range(3):
        blocks = [sines(10 + 100 * level, 2, 9, scale=1.0)]
        if level < 2:
            blocks.append(sines(40 + 100 * level, 2, 9, scale=1.0))
        below = sines(70 + 100 * level, 2, 9, scale=1.0)
        if level > 0:
            blocks.append(below)
        else:
            fill(cell.weight_ih, below)
        rows = cell.bias[level].shape[0]  # the top level has no boundary
        fill(cell.weight_hh[level], torch.cat(blocks)[:, :rows])
        fill(cell.bias[level], sines(159 + 100 * level, 9, scale=1.0)[:rows])
    state, boundaries = cell.initial_state(1, device="cpu", dtype=torch.float64), []
    for x in sines(1, 6, 1, 2, scale=1.0):
        _, state = cell(x, state)
        boundaries.append("".join(str(int(z)) for z in state[2][0]))
    return cell, state, boundaries


def test_cell_gives_the_numbers_computed_elsewhere():
    _, (h, c, _), boundaries = golden_run(1.0)
    assert boundaries == ["01", "10", "01", "00", "11", "00"]
    expected_h = [[0.08062761, -0.03857644], [0.09653731, 0.09844226], [0.14521015, 0.20862435]]
    expected_c = [[0.14543784, -0.0591009], [0.28717235, 0.18605686], [0.59880119, 0.5871816]]
    torch.testing.assert_close(h[0], h.new_tensor(expected_h), **DIGITS)
    torch.testing.assert_close(c[0], c.new_tensor(expected_c), **DIGITS)


@pytest.mark.parametrize("slope, gradient", [(1.0, 0.00300544), (2.0, 0.0036649)])
def test_boundary_gets_the_gradient_of_the_choice(slope, gradient):
    cell, (h, _, _), _ = golden_run(slope)
    h[0, 2].sum().backward()
    assert cell.bias[0].grad[8].item() == pytest.approx(gradient, abs=1e-7)


@pytest.mark.parametrize("words", [{}, {"layer_norm": False, "num_levels": 2}, {"num_levels": 4, "forget_bias": 0.0}])
def test_cell_is_its_three_cases(words):
    cell = HMLSTMCell(I, H, level_size=N, **words, dtype=torch.float64)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(T, B, I, dtype=torch.float64)
    output, (_, _, z) = cell.scan(x, cell.initial_state(B, device="cpu", dtype=torch.float64))
    met = set()
    for row in range(B):
        expected, boundaries, cases = written_out(cell, x[:, row].numpy())
        np.testing.assert_allclose(output[:, row].detach(), expected, **TOL[torch.float64])
        np.testing.assert_array_equal(z[row].detach(), boundaries)
        met |= cases
    assert met == {"update", "copy", "flush"}


def test_boundaries_are_exactly_zero_or_one():
    cell = HMLSTMCell(I, H)
    v = torch.cat((torch.randn(10_000), torch.tensor([0.0, 1e-30, -1e-30, 3e38, -3e38]))).requires_grad_()
    for slope in (1.0, 1.3, 5.0):
        cell.slope.fill_(slope)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            z = cell._boundary(v.to(dtype))
            assert torch.equal(z, (v.to(dtype) > 0).to(dtype))
        (gradient,) = torch.autograd.grad(cell._boundary(v).sum(), v)
        inside = (slope * v).abs() < 1
        torch.testing.assert_close(gradient, torch.where(inside, slope / 2, 0.0))


def test_soft_boundary_is_the_hard_sigmoid():
    cell = HMLSTMCell(I, H, boundary="soft")
    v = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0])
    torch.testing.assert_close(cell._boundary(v), torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    cell.slope.fill_(1.5)
    torch.testing.assert_close(cell._boundary(v), torch.tensor([0.0, 0.125, 0.5, 0.875, 1.0]))


def test_slope_rises_with_the_training_steps_to_its_end():
    cell, constant = HMLSTMCell(I, H, slope_per_step=0.04, max_slope=2.0), HMLSTMCell(I, H)
    slope = cell.slope
    for step, expected in ((0, 1.0), (10, 1.4), (25, 2.0), (1000, 2.0), (5, 1.2)):
        cell.at_step(step)
        constant.at_step(step)
        assert slope.item() == pytest.approx(expected)  # the same tensor: a captured step reads it
    assert constant.slope.item() == 1
    assert "slope" in cell.state_dict()


def test_levels_without_boundaries_keep_still():
    """Detectors that never fire: the bottom is an LSTM, the levels above copy."""
    cell = HMLSTMCell(I, H, dtype=torch.float64)
    with torch.no_grad():
        for level in range(2):
            cell.bias[level][-1] = -1e3
    x = torch.randn(T, B, I, dtype=torch.float64)
    h, c, z = (torch.randn(B, 3, H), torch.randn(B, 3, H), torch.zeros(B, 2))
    _, (new_h, new_c, new_z) = cell.scan(x, tuple(part.double() for part in (h, c, z)))
    assert not new_z.any()
    torch.testing.assert_close(new_h[:, 1:], h[:, 1:].double(), **TOL[torch.float64])
    torch.testing.assert_close(new_c[:, 1:], c[:, 1:].double(), **TOL[torch.float64])
    assert not torch.allclose(new_h[:, 0], h[:, 0].double())


def test_size_is_the_counted_one():
    """Without layer norm, with an embedding of 128 and a softmax over 50 symbols; the paper prints no count."""
    layer = build_layer("hm_lstm", 128, 512, layer_norm=False, device="meta")
    assert sum(p.numel() for p in layer.parameters()) + 50 * 128 + 513 * 50 == 8_434_100
    assert sum(p.numel() for p in build_layer("hm_lstm", 128, 512, device="meta").buffers()) == 1


def test_weights_start_orthogonal():
    cell = HMLSTMCell(I, H, level_size=N)
    for block in (cell.weight_ih, *(b for weight in cell.weight_hh for b in weight.split(N, 1))):
        torch.testing.assert_close(block.T @ block, torch.eye(block.shape[1]), **ORTHOGONAL[torch.float32])
    assert not any(bias.any() for bias in cell.bias)


def test_wrong_arguments_are_refused():
    for words, message in (
        ({"num_levels": 1}, "num_levels=1 has no boundary to find; it must be 2 or more"),
        ({"level_size": 0}, "level_size=0"),
        ({"boundary": "hard"}, "boundary='hard' is not known; it must be one of 'step', 'soft'"),
        ({"slope_per_step": -0.1}, r"slope_per_step=-0.1, max_slope=5.0; the slope rises from 1"),
        ({"max_slope": 0.5}, "max_slope=0.5"),
        ({"max_slope": math.inf}, "max_slope=inf"),
    ):
        with pytest.raises(ValueError, match=message):
            HMLSTMCell(I, H, **words)
    assert "level_size=4, num_levels=3" in repr(HMLSTMCell(I, H))
