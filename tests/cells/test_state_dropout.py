"""State dropout of every cell that has it: one mask per call on the h that the recurrent matmul reads."""

import pytest
import torch

from tolerances import TOL
from torchrum import RUM, RUMCell
from torchrum.cells.fast_slow import FastSlowCell, fast_slow
from torchrum.cells.lstm import GRUCell, LSTMCell
from torchrum.cells.lstm_variants import NASCell
from torchrum.cells.rhn import RHNCell
from torchrum.layers.registry import build_layer

I, H, B, T = 3, 6, 2, 5
MATRICES = ("weight_hh", "weight_hc")
CELLS = {
    "lstm": lambda **words: LSTMCell(I, H, **words),
    "lstm, layer norm": lambda **words: LSTMCell(I, H, layer_norm=True, **words),
    "gru": lambda **words: GRUCell(I, H, **words),
    "gru, reset after": lambda **words: GRUCell(I, H, reset_after=True, **words),
    "rum": lambda **words: RUMCell(I, H, head_size=2, **words),
    "rum, paper": lambda **words: RUMCell(I, H, form="paper", layer_norm=True, eta=1.0, **words),
    "rum, lam 1": lambda **words: RUMCell(I, H, lam=1.0, **words),
    "nas": lambda **words: NASCell(I, H, **words),
}
each = pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def start(cell, rows=B):
    state = cell.initial_state(rows, device="cpu", dtype=torch.float64)
    return (draw(rows, H), *state[1:])


@torch.no_grad()
def by_masked_weights(cell, x, state, mask):
    """The outputs ``(T, H)`` of one row, by the cell in evaluation with the mask in the columns of its matrices."""
    kept = {name: weight.clone() for name, weight in cell.named_parameters()}
    for name, weight in cell.named_parameters():
        if name in MATRICES:
            weight.mul_(mask)
    output, _ = cell.eval().scan(x, state)
    cell.train().load_state_dict(kept)
    return output


@each
def test_one_mask_per_row_hides_units_from_the_matmul_at_every_step(make):
    cell = make(state_dropout=0.5, dtype=torch.float64)
    x, state = draw(T, B, I), start(cell)
    torch.manual_seed(3)
    output, last = cell.scan(x, state)
    torch.manual_seed(3)
    mask = cell.draw_mask(x)
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    for row in range(B):
        rows = slice(row, row + 1)
        alone = by_masked_weights(cell, x[:, rows], tuple(part[rows] for part in state), mask[row])
        torch.testing.assert_close(output[:, rows].detach(), alone, **TOL[torch.float64])
    torch.testing.assert_close(last[0], output[-1])


@each
def test_scan_is_its_steps_with_one_mask(make):
    cell = make(state_dropout=0.5, dtype=torch.float64)
    x, state = draw(T, B, I), start(cell)
    torch.manual_seed(3)
    output, last = cell.scan(x, state)
    torch.manual_seed(3)
    for t, given in enumerate(cell.prepare(x)):
        stepped, state = cell.step(given, state)
        torch.testing.assert_close(output[t], stepped, **TOL[torch.float64])
    torch.testing.assert_close(last, state, **TOL[torch.float64])


@each
def test_it_acts_in_training_only_and_is_drawn_for_each_call(make):
    cell = make(state_dropout=0.5, dtype=torch.float64)
    x, state = draw(T, B, I), start(cell)
    one, other = cell.scan(x, state)[0], cell.scan(x, state)[0]
    assert not torch.allclose(one, other)
    plain = make(dtype=torch.float64)
    plain.load_state_dict(cell.state_dict())
    torch.testing.assert_close(cell.eval().scan(x, state)[0], plain.eval().scan(x, state)[0])
    with pytest.raises(ValueError, match=r"state_dropout=1\.1 is not allowed; it must be a number from 0 to 1"):
        make(state_dropout=1.1)
    assert "state_dropout=0.5" in repr(cell)


def test_all_hidden_is_a_cell_without_recurrent_matrix():
    cell = LSTMCell(I, H, state_dropout=1.0, dtype=torch.float64)
    x, state = draw(T, B, I), start(cell)
    torch.testing.assert_close(cell.scan(x, state)[0][:, :1], by_masked_weights(cell, x[:, :1], start_of(state), 0.0))


def start_of(state):
    return tuple(part[:1] for part in state)


@pytest.mark.parametrize("options", [{}, {"form": "paper"}, {"lam": 1.0}], ids=str)
def test_a_layer_of_rum_draws_a_mask_for_each_recurrence(options):
    words = {"num_layers": 2, "bidirectional": True, "dtype": torch.float64, **options}
    rum, x = RUM(I, H, state_dropout=0.5, **words), draw(T, B, I)
    torch.manual_seed(4)
    output, _ = rum(x)
    torch.manual_seed(4)
    assert torch.equal(rum(x)[0], output)
    assert not torch.allclose(rum(x)[0], output)
    plain = RUM(I, H, **words)
    plain.load_state_dict(rum.state_dict())
    torch.testing.assert_close(rum.eval()(x)[0], plain(x)[0])
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in rum.parameters() if parameter.dim() > 1)


def test_rum_says_which_backend_runs_it():
    for form in ("gated", "paper"):
        rum, x = RUM(I, H, form=form, state_dropout=0.1), torch.randn(T, B, I)
        assert rum.explain_backend(x).backend == "reference"
        assert "state_dropout" in rum.explain_backend(x).reason
        assert rum.eval().explain_backend(x).backend != "reference"
        insisting = RUM(I, H, form=form, state_dropout=0.1, backend="torch")
        with pytest.raises(ValueError, match="backend='torch' cannot run: state_dropout is at work"):
            insisting(x)
        with pytest.raises(ValueError, match="backend='torch' cannot run: state_dropout is at work"):
            insisting.explain_backend(x)


def test_without_gradients_a_long_sequence_has_one_mask_too():
    rum, x = RUM(1, 2, state_dropout=0.5), torch.randn(3000, 1, 1)
    torch.manual_seed(0)
    wanted, _ = rum(x)
    torch.manual_seed(0)
    with torch.no_grad():
        torch.testing.assert_close(rum(x)[0], wanted)


@pytest.mark.parametrize("slow", ["lstm", "rum"])
def test_each_cell_of_a_fast_slow_rnn_has_a_mask_of_its_own(slow):
    cell = fast_slow(I, H, slow_size=4, num_fast=3, slow=slow, state_dropout=0.5, dtype=torch.float64)
    x, state = draw(T, B, I), cell.initial_state(B, device="cpu", dtype=torch.float64)
    torch.manual_seed(5)
    output, _ = cell.scan(x, state)
    torch.manual_seed(5)
    masks = [part.draw_mask(x) for part in (cell.fast[0], cell.slow, *cell.fast[1:])]
    assert cell.mask_size == sum(mask.shape[1] for mask in masks) == 3 * H + 4
    for row in range(B):
        plain = fast_slow(I, H, slow_size=4, num_fast=3, slow=slow, dtype=torch.float64)
        plain.load_state_dict(cell.state_dict())
        with torch.no_grad():
            for part, mask in zip((plain.fast[0], plain.slow, *plain.fast[1:]), masks, strict=True):
                part.weight_hh.mul_(mask[row])
        rows = slice(row, row + 1)
        alone, _ = plain.scan(x[:, rows], tuple(part[rows] for part in state))
        torch.testing.assert_close(output[:, rows], alone, **TOL[torch.float64])


def test_the_slow_cell_may_have_a_state_dropout_of_its_own():
    cell = fast_slow(I, H, slow_size=4, state_dropout=0.2, slow_state_dropout=0.0)
    assert (cell.fast[0].state_dropout, cell.fast[1].state_dropout, cell.slow.state_dropout) == (0.2, 0.2, 0.0)
    assert cell.mask_size == 2 * H
    assert cell.eval().mask_size == 0
    with pytest.raises(ValueError, match=r"slow_state_dropout=2 is not allowed"):
        fast_slow(I, H, slow_state_dropout=2)


def test_any_cell_of_a_fast_slow_rnn_keeps_its_mask_for_the_sequence():
    """Also one that a user brings: its steps get what ``prepare`` would give them."""
    slow = RHNCell(H, 4, depth=2, state_dropout=0.5, init_range=1.0, dtype=torch.float64)
    fast = [LSTMCell(size, H, dtype=torch.float64) for size in (I, 4)]
    seen = []
    step_with = slow.step_with
    slow.step_with = lambda x, *rest: seen.append(x[:, -4:]) or step_with(x, *rest)
    cell = FastSlowCell(fast, slow)
    cell.scan(draw(T, B, I), cell.initial_state(B, device="cpu", dtype=torch.float64))
    assert len(seen) == T
    assert all(torch.equal(mask, seen[0]) for mask in seen)
    assert set(seen[0].unique().tolist()) <= {0.0, 2.0}


def test_layers_of_the_registry_have_it_by_one_name():
    for name in ("rum", "rum-gated", "ln_lstm", "gru_tf", "nas", "rhn", "fs"):
        layer, x = build_layer(name, I, H, state_dropout=0.5), torch.randn(T, B, I)
        assert not torch.allclose(layer(x)[0], layer(x)[0])
