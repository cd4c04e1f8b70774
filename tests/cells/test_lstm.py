"""LSTMCell against torch.nn.LSTM, and its layer norm and zoneout against the equations written out."""

import numpy as np
import pytest
import torch
from torch import nn

from equations import normalised, sigmoid
from golden import DIGITS, X, fill, shuffled, sines
from tolerances import ORTHOGONAL, TOL
from torchrum.cells.lstm import LSTMCell
from torchrum.layers.registry import build_layer

I, H, B, T = 3, 5, 4, 6
EXACT = TOL[torch.float64]


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def with_weights_of(cell, other):
    other.load_state_dict(cell.state_dict())
    return other


def written_out(cell, x, h, c):
    """One step of one sample, gate by gate, in numpy."""
    W, U, b = (p.detach().numpy() for p in (cell.weight_ih, cell.weight_hh, cell.bias))
    options = cell.options
    z = np.split(W @ x + U @ h + b, 4)
    if options.layer_norm:
        gains, shifts = np.split(cell.ln_weight.detach().numpy(), 4), np.split(cell.ln_bias.detach().numpy(), 4)
        z = [normalised(*each, options.ln_eps) for each in zip(z, gains, shifts, strict=True)]
    i, j, f, o = z
    c = c * sigmoid(f + options.forget_bias) + sigmoid(i) * np.tanh(j)
    seen = c
    if options.layer_norm:
        seen = normalised(c, cell.ln_weight_c.detach().numpy(), cell.ln_bias_c.detach().numpy(), options.ln_eps)
    return np.tanh(seen) * sigmoid(o), c


@pytest.mark.parametrize("forget_bias", [0.0, 1.0, -0.5])
def test_plain_cell_is_torchs(forget_bias):
    cell, torchs = shuffled(LSTMCell(I, H, forget_bias=forget_bias).double()), nn.LSTM(I, H).double()
    order = torch.arange(4 * H).view(4, H)[[0, 2, 1, 3]].flatten()  # i, j, f, o -> i, f, g, o
    with torch.no_grad():
        torchs.weight_ih_l0.copy_(cell.weight_ih[order])
        torchs.weight_hh_l0.copy_(cell.weight_hh[order])
        torchs.bias_ih_l0.copy_(cell.bias[order])
        torchs.bias_hh_l0.zero_()
        torchs.bias_hh_l0[H : 2 * H] = forget_bias
    x, h, c = draw(T, B, I), draw(B, H), draw(B, H)
    output, state = cell.scan(x, (h, c))
    expected, (h_n, c_n) = torchs(x, (h[None], c[None]))
    torch.testing.assert_close(output, expected, **EXACT)
    torch.testing.assert_close(state, (h_n[0], c_n[0]), **EXACT)


@pytest.mark.parametrize("ln_eps", [1e-3, 0.5])
def test_layer_norm_is_the_equations(ln_eps):
    cell = shuffled(LSTMCell(I, H, layer_norm=True, ln_eps=ln_eps).double())
    x, h, c = draw(B, I), draw(B, H), draw(B, H)
    output, (new_h, new_c) = cell(x, (h, c))
    for row in range(B):
        expected_h, expected_c = written_out(cell, *(part[row].numpy() for part in (x, h, c)))
        np.testing.assert_allclose(output[row].detach(), expected_h, **TOL[torch.float64])
        np.testing.assert_allclose(new_h[row].detach(), expected_h, **TOL[torch.float64])
        np.testing.assert_allclose(new_c[row].detach(), expected_c, **TOL[torch.float64])  # stored without layer norm


def test_zoneout_lstm_gives_the_numbers_computed_elsewhere():
    cell = LSTMCell(2, 3, zoneout=0.05, zoneout_cell=0.5, dtype=torch.float64).eval()
    order = torch.arange(12).view(4, 3)[[0, 2, 1, 3]].flatten()  # the numbers are for i, f, g, o
    for parameter, values in (
        (cell.weight_ih, sines(10, 2, 12)),
        (cell.weight_hh, sines(40, 3, 12)),
        (cell.bias, sines(80, 12)),
    ):
        fill(parameter, values[..., order])
    _, (h, c) = cell.scan(X, cell.initial_state(1, device="cpu", dtype=torch.float64))
    torch.testing.assert_close(h, h.new_tensor([[-0.19760576, -0.03080741, 0.12307027]]), **DIGITS)
    torch.testing.assert_close(c, c.new_tensor([[-0.24733619, -0.10848407, 0.18936382]]), **DIGITS)


def test_layer_norm_lstm_gives_the_numbers_computed_elsewhere():
    cell = LSTMCell(2, 3, layer_norm=True, dtype=torch.float64)
    fill(cell.weight_ih, sines(10, 2, 12))
    fill(cell.weight_hh, sines(40, 3, 12))
    fill(cell.bias, sines(80, 12))
    _, (h, c) = cell.scan(X, cell.initial_state(1, device="cpu", dtype=torch.float64))
    torch.testing.assert_close(h, h.new_tensor([[0.5808697, 0.17674135, -0.23377532]]), **DIGITS)
    torch.testing.assert_close(c, c.new_tensor([[0.19017051, -0.14736407, -1.39555936]]), **DIGITS)


def test_published_zoneout_lstm_can_be_built():
    """One layer of 1000 on one-hot input with a softmax over 50 symbols; the authors also train the initial state."""
    words = {"layer_norm": False, "zoneout": 0.05, "zoneout_cell": 0.5, "init": "block_orthogonal", "device": "meta"}
    layer = build_layer("ln_lstm", 50, 1000, **words)
    assert sum(p.numel() for p in layer.parameters()) + 1001 * 50 == 4_256_050 - 2 * 1000


def test_zoneout_in_evaluation_is_the_mean_of_old_and_new():
    cell = shuffled(LSTMCell(I, H, layer_norm=True, zoneout=0.1, zoneout_cell=0.5).double()).eval()
    x, h, c = draw(B, I), draw(B, H), draw(B, H)
    output, (new_h, new_c) = cell(x, (h, c))
    for row in range(B):
        plain_h, plain_c = written_out(cell, *(part[row].numpy() for part in (x, h, c)))
        np.testing.assert_allclose(output[row].detach(), 0.9 * plain_h + 0.1 * h[row].numpy(), **TOL[torch.float64])
        np.testing.assert_allclose(new_h[row].detach(), output[row].detach())
        np.testing.assert_allclose(new_c[row].detach(), 0.5 * plain_c + 0.5 * c[row].numpy(), **TOL[torch.float64])


@pytest.mark.parametrize("chances", [(0.1, 0.5), (0.5, 0.1)])
def test_zoneout_in_training_takes_old_or_new_with_its_chance(chances):
    torch.manual_seed(0)
    cell, rows = shuffled(LSTMCell(I, H, zoneout=chances[0], zoneout_cell=chances[1])).train(), 5_000
    x, state = torch.randn(rows, I), (torch.randn(rows, H), torch.randn(rows, H))
    _, first = cell(x, state)
    _, plain = with_weights_of(cell, LSTMCell(I, H))(x, state)
    _, again = cell(x, state)
    for old, new, mixed, other, chance in zip(state, plain, first, again, chances, strict=True):
        assert ((mixed == old) | torch.isclose(mixed, new)).all()
        assert abs((mixed == old).float().mean().item() - chance) < 0.01
        assert not torch.equal(mixed, other)  # fresh each time


@pytest.mark.parametrize("words", [{}, {"layer_norm": True, "forget_bias": 0.3}, {"zoneout": 0.2, "zoneout_cell": 0.4}])
def test_sequence_is_its_steps(words):
    cell = shuffled(LSTMCell(I, H, **words).double()).eval()
    x, state = draw(T, B, I), (draw(B, H), draw(B, H))
    lengths = torch.tensor([T, 3, 1, 0])
    output, last = cell.scan(x, state, lengths)
    for t in range(T):
        step, new = cell(x[t], state)
        going = (t < lengths)[:, None]
        torch.testing.assert_close(torch.where(going, output[t], 0), torch.where(going, step, 0), **EXACT)
        state = tuple(torch.where(going, part, before) for part, before in zip(new, state, strict=True))
    torch.testing.assert_close(last, state, **EXACT)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_under_autocast_the_matmuls_are_in_bfloat16_and_the_state_in_float32(layer_norm):
    cell, x = shuffled(LSTMCell(I, H, layer_norm=layer_norm)), torch.randn(T, B, I)
    state = (torch.randn(B, H), torch.randn(B, H))
    wanted, _ = cell.scan(x, state)
    with torch.autocast("cpu", torch.bfloat16):
        output, last = cell.scan(x, state)
    assert {part.dtype for part in last} == {torch.float32}
    assert 1e-4 < (output - wanted).abs().max() < 0.1


def test_a_compiled_step_is_what_a_sequence_takes(monkeypatch):
    cell, calls = LSTMCell(I, H), []
    monkeypatch.setattr(cell, "step", lambda x, state: calls.append(1) or (state[0], state))
    cell.scan(torch.randn(T, B, I), cell.initial_state(B, device="cpu", dtype=torch.float32))
    assert len(calls) == T


def test_zoneout_of_h_and_of_c_act_on_h_and_on_c():
    x, h, c = draw(B, I), draw(B, H), draw(B, H)
    for words, kept in (({"zoneout": 1.0}, 0), ({"zoneout_cell": 1.0}, 1)):
        cell = shuffled(LSTMCell(I, H, **words).double()).train()
        _, state = cell(x, (h, c))
        torch.testing.assert_close(state[kept], (h, c)[kept])
        for row in range(B):
            plain = written_out(cell, *(part[row].numpy() for part in (x, h, c)))
            np.testing.assert_allclose(state[1 - kept][row].detach(), plain[1 - kept], **TOL[torch.float64])


def test_initialisations():
    torch.manual_seed(0)
    cell = LSTMCell(6, 16, init="orthogonal", layer_norm=True)
    for weight in (cell.weight_ih, cell.weight_hh):  # tall: (4H, I), (4H, H)
        torch.testing.assert_close(weight.T @ weight, torch.eye(weight.shape[1]), **ORTHOGONAL[torch.float32])
    assert not cell.bias.any()
    assert (cell.ln_weight == 1).all()
    assert not cell.ln_bias_c.any()
    cell = LSTMCell(6, 15, init="block_orthogonal")
    for weight, size in ((cell.weight_ih, 6), (cell.weight_hh, 15)):
        for block in (part for rows in weight.split(size) for part in rows.split(size, 1)):
            torch.testing.assert_close(block.T @ block, torch.eye(size), **ORTHOGONAL[torch.float32])
    glorot, bound = LSTMCell(6, 16), (6 / (6 + 16 + 64)) ** 0.5
    for weight in (glorot.weight_ih, glorot.weight_hh):
        assert 0.9 * bound < weight.abs().max() <= bound


def test_cell_without_input_has_no_dead_weights():
    cell = LSTMCell(0, H, layer_norm=True, init="orthogonal").double()
    assert sum(p.numel() for p in cell.parameters()) == 4 * H * (H + 1) + 10 * H
    h, c = draw(B, H), draw(B, H)
    output, _ = cell(draw(B, 0), (h, c))
    expected, _ = written_out(cell, np.zeros(0), h[0].numpy(), c[0].numpy())
    np.testing.assert_allclose(output[0].detach(), expected, **TOL[torch.float64])


def test_wrong_arguments_are_refused():
    for words, message in (
        ({"zoneout": 1.5}, "zoneout=1.5"),
        ({"zoneout_cell": -1}, "zoneout_cell=-1"),
        ({"init": "orthogonel"}, "Did you mean 'orthogonal'"),
        ({"forget_bias": float("nan")}, "forget_bias"),
    ):
        with pytest.raises(ValueError, match=message):
            LSTMCell(I, H, **words)
    with pytest.raises(ValueError, match="hidden_size=0"):
        LSTMCell(I, 0)
    with pytest.raises(ValueError, match="input_size=-1"):
        LSTMCell(-1, H)
    assert "layer_norm=True" in repr(LSTMCell(I, H, layer_norm=True))
