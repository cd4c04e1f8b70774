"""HyperLSTMCell against numbers computed elsewhere, against its equations gate by gate, and published sizes.

The code is in cells/lstm_variants.py.
"""

import numpy as np
import pytest
import torch

from equations import normalised, sigmoid
from golden import DIGITS, X, fill, sines
from tolerances import ORTHOGONAL, TOL
from torchrum.cells.lstm_variants import HyperLSTMCell
from torchrum.layers.registry import build_layer

I, H, Q, Z, B, T = 3, 5, 4, 2, 3, 4


def lstm_state(gates, c, P, prefix):
    """h' and c' from four gates before layer norm."""
    if prefix + "ln_weight" in P:
        gains, shifts = np.split(P[prefix + "ln_weight"], 4), np.split(P[prefix + "ln_bias"], 4)
        gates = [normalised(*gate) for gate in zip(gates, gains, shifts, strict=True)]
    i, g, f, o = gates
    c = c * sigmoid(f + 1) + sigmoid(i) * np.tanh(g)
    seen = c
    if prefix + "ln_weight" in P:
        seen = normalised(c, P[prefix + "ln_weight_c"], P[prefix + "ln_bias_c"])
    return sigmoid(o) * np.tanh(seen), c


def written_out(cell, xs):
    """h after every step of one row ``xs`` ``(T, I)``, in numpy."""
    P = {name: value.numpy() for name, value in cell.state_dict().items()}
    E = P["embed_weight"].reshape(3, 4, Z, Q)  # h, x, b; gates
    e = P["embed_bias"].reshape(2, 4, Z)
    D = P["scale_weight"].reshape(3, 4, Z, H)
    W, U, b = (np.split(P[name], 4) for name in ("weight_ih", "weight_hh", "bias"))
    h, c, q, c_q, outputs = np.zeros(H), np.zeros(H), np.zeros(Q), np.zeros(Q), []
    for x in xs:
        small = P["hyper_weight_ih"] @ x + P["hyper.weight_ih"] @ h + P["hyper.weight_hh"] @ q + P["hyper.bias"]
        new_q, c_q = lstm_state(np.split(small, 4), c_q, P, "hyper.")
        u = new_q if cell.hyper_output == "new" else q
        gates = []
        for gate in range(4):
            d_h = (E[0, gate] @ u + e[0, gate]) @ D[0, gate]
            d_x = (E[1, gate] @ u + e[1, gate]) @ D[1, gate]
            d_b = (E[2, gate] @ u) @ D[2, gate]
            gates.append(d_h * (U[gate] @ h) + d_x * (W[gate] @ x) + d_b + b[gate])
        h, c = lstm_state(gates, c, P, "")
        q = new_q
        outputs.append(h)
    return np.stack(outputs)


def golden_cell(hyper_output):
    cell = HyperLSTMCell(2, 3, hyper_size=2, embedding_size=2, hyper_output=hyper_output, dtype=torch.float64)
    fill(cell.weight_ih, sines(10, 2, 12))
    fill(cell.weight_hh, sines(40, 3, 12))
    fill(cell.bias, sines(80, 12))
    both = sines(200, 5, 8)  # on [x; h]
    fill(cell.hyper_weight_ih, both[:2])
    fill(cell.hyper.weight_ih, both[2:])
    fill(cell.hyper.weight_hh, sines(250, 2, 8))
    fill(cell.hyper.bias, sines(280, 8))
    for place, start in enumerate((400, 300, 500)):  # h, x, b
        for gate in range(4):
            row = 4 * place + gate
            fill(cell.embed_weight[2 * row : 2 * row + 2], sines(start + 20 * gate, 2, 2))
            if place < 2:
                fill(cell.embed_bias[2 * row : 2 * row + 2], sines(start + 10 + 20 * gate, 2))
            fill(cell.scale_weight[row].T, sines(start + 15 + 20 * gate, 2, 3))
    return cell


@pytest.mark.parametrize(
    "hyper_output, h, c, q",
    [
        (
            "new",
            [0.47232826, 0.31789632, -0.19400215],
            [0.42714043, 0.36312492, -1.91595011],
            [-0.55629212, 0.20495176],
        ),
        (
            "previous",
            [0.47415295, 0.31662583, -0.19387216],
            [0.4238061, 0.35042257, -1.9187151],
            [-0.55628514, 0.20494783],
        ),
    ],
)
def test_cell_gives_the_numbers_computed_elsewhere(hyper_output, h, c, q):
    cell = golden_cell(hyper_output)
    _, state = cell.scan(X, cell.initial_state(1, device="cpu", dtype=torch.float64))
    for part, expected in zip(state[:3], (h, c, q), strict=True):
        torch.testing.assert_close(part[0], part.new_tensor(expected), **DIGITS)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("hyper_output", ["new", "previous"])
def test_cell_is_its_equations(layer_norm, hyper_output):
    words = {"hyper_size": Q, "embedding_size": Z, "layer_norm": layer_norm, "hyper_output": hyper_output}
    cell = HyperLSTMCell(I, H, **words, dtype=torch.float64)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(T, B, I, dtype=torch.float64)
    output, _ = cell.scan(x, cell.initial_state(B, device="cpu", dtype=torch.float64))
    for row in range(B):
        np.testing.assert_allclose(output[:, row].detach(), written_out(cell, x[:, row].numpy()), **TOL[torch.float64])


def test_start_scales_every_gate_by_a_tenth():
    cell = HyperLSTMCell(I, H, hyper_size=Q, embedding_size=Z, dtype=torch.float64)
    d_h, d_x, d_b = cell.scales(torch.randn(B, Q, dtype=torch.float64))
    for scale in (d_h, d_x):
        torch.testing.assert_close(scale, torch.full_like(scale, 0.1), **TOL[torch.float64])
    assert not d_b.any()
    assert cell.embed_weight[8 * Z :].any()  # else D_b and E_b would both be 0 and never learn
    for gate in cell.weight_hh.chunk(4):
        torch.testing.assert_close(gate @ gate.T, torch.eye(H, dtype=torch.float64), **ORTHOGONAL[torch.float64])
    on_both = torch.cat((cell.hyper_weight_ih, cell.hyper.weight_ih), 1)
    torch.testing.assert_close(on_both.T @ on_both, torch.eye(I + H, dtype=torch.float64), **ORTHOGONAL[torch.float64])


def test_recurrent_dropout_acts_on_the_candidate_alone():
    words = {"hyper_size": Q, "embedding_size": Z, "dtype": torch.float64}
    cell = HyperLSTMCell(I, H, recurrent_dropout=1.0, **words)
    x, state = torch.randn(B, I, dtype=torch.float64), torch.randn(4, B, Q, dtype=torch.float64).unbind()
    state = (*(torch.randn(B, H, dtype=torch.float64) for _ in range(2)), *state[2:])
    plain = HyperLSTMCell(I, H, **words)
    plain.load_state_dict(cell.state_dict())
    _, dropped = cell(x, state)
    _, (_, _, q, c_q) = plain(x, state)
    gone = dropped[1] / state[1]  # what is left of c is c * sigmoid(f + 1)
    assert ((gone > 0) & (gone < 1)).all()
    torch.testing.assert_close(dropped[2:], (q, c_q))
    torch.testing.assert_close(cell.eval()(x, state)[1], plain(x, state)[1])


@pytest.mark.parametrize(
    "num_layers, embedding, layer_norm, count",
    [(1, 4, False, 4_911_874), (1, 4, True, 4_923_154), (1, 16, True, 5_085_682), (2, 16, True, 14_407_714)],
)
def test_sizes_are_the_published_ones(num_layers, embedding, layer_norm, count):
    """4.91M, 4.92M and 14.41M with a softmax over 50 symbols on one-hot input; the paper's 5.06M stays unexplained."""
    words = {"embedding_size": embedding, "layer_norm": layer_norm, "device": "meta"}
    layer = build_layer("hyper_lstm", 50, 1000, num_layers, **words)
    assert sum(p.numel() for p in layer.parameters()) + 1001 * 50 == count


def test_wrong_arguments_are_refused():
    for words, message in (
        ({"hyper_size": 0}, "hyper_size=0"),
        ({"embedding_size": -1}, "embedding_size=-1"),
        ({"recurrent_dropout": 1.5}, "recurrent_dropout=1.5"),
        ({"hyper_output": "old"}, "hyper_output='old' is not known; it must be one of 'new', 'previous'"),
    ):
        with pytest.raises(ValueError, match=message):
            HyperLSTMCell(I, H, **words)
    assert "hyper_size=128, embedding_size=4" in repr(HyperLSTMCell(I, H))
