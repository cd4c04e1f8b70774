"""The rotational LSTM against its equations written out with a dense rotation matrix."""

import numpy as np
import pytest
import torch

from equations import normalised, sigmoid
from golden import shuffled
from tolerances import TOL
from torchrum.cells.fast_slow import fast_slow
from torchrum.cells.lstm import LSTMCell
from torchrum.layers.registry import build_layer

I, H, B, T = 3, 5, 4, 6


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def rotational(**words):
    return shuffled(LSTMCell(I, H, rotational=True, **words).double())


def dense_rotation(a, b):
    """The matrix that turns ``a`` to ``b`` in their plane, from an orthonormal basis of it; not as the library does."""
    u = a / np.linalg.norm(a)
    v = b - (u @ b) * u
    v /= np.linalg.norm(v)
    cos = u @ b / np.linalg.norm(b)
    sin = v @ b / np.linalg.norm(b)
    plane = np.outer(u, u) + np.outer(v, v)
    return np.eye(len(a)) - plane + cos * plane + sin * (np.outer(v, u) - np.outer(u, v))


def written_out(cell, x, h, c):
    """One step of one sample in numpy."""
    W, U, b = (p.detach().numpy() for p in (cell.weight_ih, cell.weight_hh, cell.bias))
    given, options = W @ x + b, cell.options
    i, tau, f, o = np.split(given[: 4 * H] + U @ h, 4)
    eps = given[4 * H :]

    def norm(z, gain, shift):
        return normalised(z, gain.detach().numpy(), shift.detach().numpy(), options.ln_eps)

    if options.layer_norm:
        pairs = zip(cell.ln_weight.chunk(4), cell.ln_bias.chunk(4), strict=True)
        i, tau, f, o = (norm(z, *pair) for z, pair in zip((i, tau, f, o), pairs, strict=True))
    candidate = eps + dense_rotation(eps, tau) @ h
    if options.layer_norm:
        candidate = norm(candidate, cell.ln_weight_j, cell.ln_bias_j)
    c = c * sigmoid(f + options.forget_bias) + sigmoid(i) * np.tanh(candidate)
    seen = norm(c, cell.ln_weight_c, cell.ln_bias_c) if options.layer_norm else c
    return np.tanh(seen) * sigmoid(o), c


@pytest.mark.parametrize("layer_norm", [False, True])
def test_cell_is_its_equations(layer_norm):
    cell = rotational(layer_norm=layer_norm, forget_bias=0.3)
    x, h, c = draw(B, I), draw(B, H), draw(B, H)
    output, (new_h, new_c) = cell(x, (h, c))
    for row in range(B):
        expected_h, expected_c = written_out(cell, *(part[row].numpy() for part in (x, h, c)))
        np.testing.assert_allclose(output[row].detach(), expected_h, **TOL[torch.float64])
        np.testing.assert_allclose(new_h[row].detach(), expected_h, **TOL[torch.float64])
        np.testing.assert_allclose(new_c[row].detach(), expected_c, **TOL[torch.float64])


def test_zoneout_in_evaluation_is_the_mean_of_old_and_new():
    cell = rotational(layer_norm=True, zoneout=0.1, zoneout_cell=0.5).eval()
    x, h, c = draw(B, I), draw(B, H), draw(B, H)
    _, (new_h, new_c) = cell(x, (h, c))
    for row in range(B):
        plain_h, plain_c = written_out(cell, *(part[row].numpy() for part in (x, h, c)))
        np.testing.assert_allclose(new_h[row].detach(), 0.9 * plain_h + 0.1 * h[row].numpy(), **TOL[torch.float64])
        np.testing.assert_allclose(new_c[row].detach(), 0.5 * plain_c + 0.5 * c[row].numpy(), **TOL[torch.float64])


def test_without_an_angle_the_candidate_adds_the_state():
    """With eps along tau nothing turns."""
    cell = rotational()
    with torch.no_grad():
        cell.weight_hh[H : 2 * H] = 0
        cell.weight_ih[4 * H :] = 2 * cell.weight_ih[H : 2 * H]
        cell.bias[4 * H :] = 2 * cell.bias[H : 2 * H]
    x, h, c = draw(B, I), draw(B, H), draw(B, H)
    _, (_, new_c) = cell(x, (h, c))
    i, _, f, _ = (cell.project(x)[:, : 4 * H] + h @ cell.weight_hh.T).chunk(4, -1)
    eps = cell.project(x)[:, 4 * H :]
    expected = c * torch.sigmoid(f + 1) + torch.sigmoid(i) * torch.tanh(eps + h)
    torch.testing.assert_close(new_c, expected, **TOL[torch.float64])


@pytest.mark.parametrize("words", [{}, {"layer_norm": True}, {"zoneout": 0.2, "zoneout_cell": 0.4}])
def test_sequence_is_its_steps(words):
    cell = rotational(**words).eval()
    x, state = draw(T, B, I), (draw(B, H), draw(B, H))
    output, last = cell.scan(x, state)
    for t in range(T):
        step, state = cell(x[t], state)
        torch.testing.assert_close(output[t], step, **TOL[torch.float64])
    torch.testing.assert_close(last, state, **TOL[torch.float64])


def test_it_starts_as_an_lstm_does():
    layer = build_layer("rotational_lstm", I, 20)
    (cell,) = layer.cells
    assert [tuple(weight.shape) for weight in (cell.weight_ih, cell.weight_hh)] == [(100, I), (80, 20)]
    for weight in (cell.weight_ih, cell.weight_hh):
        torch.testing.assert_close(weight.T @ weight, torch.eye(weight.shape[1]))
    assert not cell.bias.any()
    assert all((gain == 1).all() for gain in (cell.ln_weight, cell.ln_weight_c, cell.ln_weight_j))
    assert all((shift == 0).all() for shift in (cell.ln_bias, cell.ln_bias_c, cell.ln_bias_j))
    assert "rotational=True" in repr(cell)
    assert "rotational" not in repr(LSTMCell(I, H))
    with pytest.raises(ValueError, match="LSTMCell: rotational='yes'"):
        LSTMCell(I, H, rotational="yes")


def test_it_learns_to_recall_across_a_gap():
    """The first symbol of three is asked for after a gap; an untrained model is right one time in three."""
    torch.manual_seed(1)
    layer, readout = build_layer("rotational_lstm", 4, 16), torch.nn.Linear(16, 3)
    optimizer = torch.optim.Adam([*layer.parameters(), *readout.parameters()], lr=1e-2)
    for _ in range(100):
        symbols = torch.randint(3, (32,))
        x = torch.zeros(8, 32, 4)
        x[0, torch.arange(32), symbols] = 1
        x[1:, :, 3] = 1
        scores = readout(layer(x)[0][-1])
        loss = torch.nn.functional.cross_entropy(scores, symbols)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (scores.argmax(-1) == symbols).all()


@pytest.mark.parametrize("slow, fast", [("rotational_lstm", "lstm"), ("rotational_lstm", "rotational_lstm")])
def test_it_takes_any_place_in_a_fast_slow_rnn(slow, fast):
    cell = fast_slow(I, H, slow_size=4, slow=slow, fast=fast, zoneout=0.1, slow_zoneout=0.0, zoneout_cell=0.5)
    assert cell.slow.options.rotational
    assert (cell.slow.options.zoneout, cell.slow.options.zoneout_cell) == (0.0, 0.5)
    assert [part.options.rotational for part in cell.fast] == [fast == "rotational_lstm"] * 2
    output, _ = cell.scan(torch.randn(T, B, I), cell.initial_state(B, device="cpu", dtype=torch.float32))
    output.sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in cell.parameters())
    with pytest.raises(ValueError, match="need a slow RUM"):
        fast_slow(I, H, slow="rotational_lstm", eta=1.0)
    with pytest.raises(ValueError, match="fast='rum'"):
        fast_slow(I, H, fast="rum")
