"""The Fast-Slow RNN against the order of its cells written out, and against the published parameter counts."""

import pytest
import torch
from torch import nn

from golden import DIGITS, X, fill, sines
from tolerances import TOL
from torchrum.cells.fast_slow import FastSlowCell, fast_slow
from torchrum.cells.lstm import GRUCell, LSTMCell
from torchrum.cells.rum import PAPER_OPTIONS, TANH_OPTIONS, RUMCell

I, H, S, B, T = 3, 5, 4, 2, 6


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def count(*modules):
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@pytest.mark.parametrize("num_fast", [2, 3, 4])
@pytest.mark.parametrize("slow", ["lstm", "rum"])
def test_cells_act_in_the_order_of_the_paper(num_fast, slow):
    cell = fast_slow(I, H, slow_size=S, num_fast=num_fast, slow=slow, dtype=torch.float64)
    x = draw(T, B, I)
    output, state = cell.scan(x, cell.initial_state(B, device="cpu", dtype=torch.float64))
    fast = (torch.zeros(B, H).double(),) * 2
    slow_state = cell.slow.initial_state(B, device="cpu", dtype=torch.float64)
    for t in range(T):
        seen, fast = cell.fast[0](x[t], fast)
        told, slow_state = cell.slow.step(cell.slow.project(seen), slow_state)
        seen, fast = cell.fast[1](told, fast)
        for other in cell.fast[2:]:
            seen, fast = other(draw(B, 0), fast)
        torch.testing.assert_close(output[t], seen, **TOL[torch.float64])
    torch.testing.assert_close(state, (*fast, *slow_state), **TOL[torch.float64])


def test_golden_numbers():
    def lstm(inputs, hidden, first):
        cell = LSTMCell(inputs, hidden, layer_norm=True, zoneout=0.1, zoneout_cell=0.5, dtype=torch.float64)
        fill(cell.weight_ih, sines(first, inputs, 4 * hidden))
        fill(cell.weight_hh, sines(first + 100, hidden, 4 * hidden))
        fill(cell.bias, sines(first + 200, 4 * hidden))
        return cell

    cell = FastSlowCell([lstm(2, 3, 1000), lstm(2, 3, 3000)], lstm(3, 2, 2000)).eval()
    _, state = cell.scan(X, cell.initial_state(1, device="cpu", dtype=torch.float64))
    expected = (
        (-0.15820306, 0.18054669, 0.51826562),
        (-0.49211295, -0.17183753, -0.21819841),
        (0.21073842, -0.54949982),
        (0.4652807, -0.49031828),
    )
    for part, values in zip(state, expected, strict=True):  # h and c of the fast cells, then of the slow one
        torch.testing.assert_close(part[0], torch.tensor(values, dtype=torch.float64), **DIGITS)


def test_any_cells_can_be_fast_and_slow():
    cell = FastSlowCell([GRUCell(I, H), GRUCell(S, H)], RUMCell(H, S, lam=1))
    assert cell.state_names == ("fast_h", "slow_h", "slow_R")
    output, state = cell(torch.randn(B, I))
    assert output.shape == (B, H)
    assert [tuple(part.shape) for part in state] == [(B, H), (B, S), (B, S, S)]
    mixed = FastSlowCell([LSTMCell(I, H), LSTMCell(S, H)], GRUCell(H, S))
    assert mixed.state_names == ("fast_h", "fast_c", "slow_h")
    before = mixed.slow.weight_hh.detach().clone()
    mixed.reset_parameters()
    assert not torch.equal(mixed.slow.weight_hh, before)


class Wire(GRUCell):
    """Hands its input on, cut or filled up with ones, and notes it; no weights are involved."""

    def project(self, x):
        return x

    def step(self, x, state):
        self.seen = x
        return torch.ones(len(x), self.hidden_size), state


def test_dropout_acts_at_its_four_places_only():
    torch.manual_seed(0)
    B = 400
    cell = FastSlowCell([Wire(I, H), Wire(S, H)], Wire(H, S), dropout=0.35)
    x = torch.ones(1, B, I)
    state = cell.initial_state(B, device="cpu", dtype=torch.float32)
    output, _ = cell.scan(x, state)
    for place in (cell.fast[0].seen, cell.slow.seen, cell.fast[1].seen, output):
        assert abs((place == 0).float().mean().item() - 0.35) < 0.05
        torch.testing.assert_close(place[place != 0], torch.full_like(place[place != 0], 1 / 0.65))
    cell.eval().scan(x, state)
    assert all((part.seen == 1).all() for part in (cell.fast[0], cell.slow, cell.fast[1]))


def test_published_parameter_counts():
    with torch.device("meta"):
        embedding = nn.Embedding(50, 128)
        lstm_2 = count(embedding, LN(700, 400), nn.Linear(700, 50))
        rum_2 = count(embedding, LN(700, 1000, slow="rum", eta=1.0), nn.Linear(700, 50))
        lstm_4 = count(embedding, LN(500, 400, num_fast=4), nn.Linear(500, 50))
        without = count(embedding, LN(700, 400, layer_norm=False), nn.Linear(700, 50))
    assert lstm_2 == 7_225_050
    assert without == 7_207_050
    assert rum_2 == 11_248_450
    assert lstm_4 == 6_565_050 - 2 * 4 * 500  # less the weight rows that the published F3 and F4 have for a zero


def LN(hidden_size, slow_size, **words):  # noqa: N802
    return fast_slow(128, hidden_size, slow_size=slow_size, **words)


def test_options_reach_the_cells():
    words = {"zoneout": 0.1, "zoneout_cell": 0.5, "cell_dropout": 0.35, "eta": 0.7, "ln_order": "authors"}
    cell = fast_slow(I, H, slow="rum", **words)
    assert (cell.dropout, cell.slow_dropout) == (0.35, 0.35)
    assert fast_slow(I, H, cell_dropout=0.35, slow_dropout=0).slow_dropout == 0
    assert cell.slow.hidden_size == H  # without slow_size
    assert all((f.options.zoneout, f.options.zoneout_cell) == (0.1, 0.5) for f in cell.fast)
    assert {f.init for f in cell.fast} == {"orthogonal"}
    options = cell.slow.options
    assert (options.eta, options.ln_order, options.zoneout, options.layer_norm) == (0.7, "authors", 0.1, True)
    assert not fast_slow(I, H, layer_norm=False).fast[0].options.layer_norm


@pytest.mark.parametrize("slow", ["rum", "lstm"])
def test_the_slow_cell_may_have_a_zoneout_of_its_own(slow):
    cell = fast_slow(I, H, slow=slow, zoneout=0.1, slow_zoneout=0.0, zoneout_cell=0.5)
    assert cell.slow.options.zoneout == 0
    assert all((f.options.zoneout, f.options.zoneout_cell) == (0.1, 0.5) for f in cell.fast)
    if slow == "lstm":
        assert cell.slow.options.zoneout_cell == 0.5


@pytest.mark.parametrize("slow", ["rum", "lstm"])
def test_what_the_slow_cell_reads_has_a_dropout_of_its_own(slow):
    cell, x = fast_slow(I, H, slow=slow, slow_dropout=1.0), torch.randn(3, 2, I)
    state = cell.initial_state(2, device="cpu", dtype=torch.float32)
    before, evaluated = cell.scan(x, state)[0], cell.eval().scan(x, state)[0]
    nn.init.zeros_(cell.slow.weight_ih)  # of what training zeroes
    assert torch.equal(cell.train().scan(x, state)[0], before)
    assert not torch.allclose(cell.eval().scan(x, state)[0], evaluated)


def test_a_slow_rum_has_the_papers_options_or_bounded_states():
    def slow(**words):
        torch.manual_seed(0)
        return fast_slow(I, H, slow_size=9, layer_norm=False, **words).slow

    assert slow(slow="rum").options == RUMCell(H, 9, **PAPER_OPTIONS).options
    assert slow(slow="rum", eta=0.5).options.eta == 0.5
    assert slow(slow="rum-tanh").options == RUMCell(H, 9, form="paper", **TANH_OPTIONS).options
    assert (slow(slow="rum-tanh").options.activation, slow(slow="rum-tanh").options.eta) == ("tanh", 3.0)
    assert slow(slow="rum-tanh", eta=0.5).options.eta == 0.5
    torch.manual_seed(0)
    LSTMCell(I, H, init="orthogonal"), LSTMCell(9, H, init="orthogonal")
    default = RUMCell(H, 9, form="paper", **TANH_OPTIONS)
    for name, weight in slow(slow="rum-tanh").named_parameters():
        assert torch.equal(weight, default.get_parameter(name))


def test_wrong_arguments_are_refused():
    lstm = LSTMCell(I, H)
    for fast, slow, message in (
        ([lstm], LSTMCell(H, S), "fast has 1 cells"),
        (
            [lstm, LSTMCell(S + 1, H)],
            LSTMCell(H, S),
            "fast cell 2 has input_size=5; it must be 4",
        ),
        ([lstm, LSTMCell(S, H), LSTMCell(S, H)], LSTMCell(H, S), "fast cell 3"),
        ([lstm, LSTMCell(S, H + 1)], LSTMCell(H, S), "all share the state of the first one"),
        ([lstm, GRUCell(S, H)], LSTMCell(H, S), "all share the state of the first one"),
        ([lstm, LSTMCell(S, H)], LSTMCell(H + 1, S), "slow cell has input_size=6; it must be 5"),
    ):
        with pytest.raises(ValueError, match=message):
            FastSlowCell(fast, slow)
    with pytest.raises(ValueError, match="dropout=2"):
        FastSlowCell([lstm, LSTMCell(S, H)], LSTMCell(H, S), dropout=2)
    with pytest.raises(ValueError, match="slow='gru'"):
        fast_slow(I, H, slow="gru")
    with pytest.raises(
        ValueError, match=r"eta=1\.0 and ln_order='before' need a slow RUM of the paper's form; slow='lstm' has"
    ):
        fast_slow(I, H, eta=1.0)
    with pytest.raises(ValueError, match="fast has 1 cells"):
        fast_slow(I, H, num_fast=1)
    assert "dropout=0.5" in repr(fast_slow(I, H, cell_dropout=0.5))
    assert "slow_dropout" not in repr(fast_slow(I, H, cell_dropout=0.5))
    assert "dropout=0.5, slow_dropout=0.0" in repr(fast_slow(I, H, cell_dropout=0.5, slow_dropout=0.0))


@pytest.mark.parametrize(
    "words",
    [
        {"slow": "rum-tanh", "num_fast": 3},
        {"slow": "rum-gated", "state_dropout": 0.2},
        {"slow": "rotational_lstm", "memory_size": 3},
    ],
    ids=str,
)
def test_a_step_is_one_graph_for_the_compiler(words):
    """``compile_steps`` is what makes cells fast that the kernels do not know."""
    cell, x = fast_slow(I, H, slow_size=S, **words), torch.randn(B, I)
    state = cell.initial_state(B, device="cpu", dtype=torch.float32)
    given = cell.prepare(x)
    output, _ = torch.compile(type(cell).step, backend="eager", fullgraph=True)(cell, given, state)
    torch.testing.assert_close(output, cell.step(given, state)[0])
