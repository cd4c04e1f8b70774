"""Cells made of cells, and the associative memory of a Fast-Slow RNN, against their parts written out."""

import pytest
import torch

from tolerances import TOL
from torchrum.cells.composite import PrecededCell, SideBySideCell
from torchrum.cells.fast_slow import FastSlowCell, fast_slow
from torchrum.cells.lstm import GRUCell, LSTMCell
from torchrum.cells.rum import RUMCell

I, H, M, B, T = 3, 5, 4, 2, 6


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def start(cell):
    return cell.initial_state(B, device="cpu", dtype=torch.float64)


def test_cells_side_by_side_are_each_as_alone():
    lstm, rum = LSTMCell(I, H, dtype=torch.float64), RUMCell(I, M, lam=1.0, dtype=torch.float64)
    cell, x = SideBySideCell(lstm, rum), draw(T, B, I)
    assert (cell.input_size, cell.hidden_size) == (I, H + M)
    assert cell.state_names == ("first_h", "first_c", "second_h", "second_R")
    output, state = cell.scan(x, start(cell))
    (first, own), (second, other) = lstm.scan(x, start(lstm)), rum.scan(x, start(rum))
    torch.testing.assert_close(output, torch.cat((first, second), -1), **TOL[torch.float64])
    torch.testing.assert_close(state, (*own, *other), **TOL[torch.float64])


def test_a_preceded_cell_reads_the_input_and_the_output_of_the_one_in_front():
    rum, gru = RUMCell(I, M, lam=1.0, dtype=torch.float64), GRUCell(I + M, H, dtype=torch.float64)
    cell, x = PrecededCell(rum, gru), draw(T, B, I)
    assert (cell.input_size, cell.hidden_size) == (I, H)
    output, state = cell.scan(x, start(cell))
    told, own = rum.scan(x, start(rum))
    wanted, other = gru.scan(torch.cat((x, told), -1), start(gru))
    torch.testing.assert_close(output, wanted, **TOL[torch.float64])
    torch.testing.assert_close(state, (*own, *other), **TOL[torch.float64])
    stepped = start(cell)
    for t in range(T):
        one, stepped = cell(x[t], stepped)
        torch.testing.assert_close(one, wanted[t], **TOL[torch.float64])


@pytest.mark.parametrize("kind", [SideBySideCell, PrecededCell])
def test_each_part_has_a_mask_of_its_own_for_the_sequence(kind):
    words = {"state_dropout": 0.5, "dtype": torch.float64}
    size = I if kind is SideBySideCell else I + M
    cell, x = kind(GRUCell(I, M, **words), LSTMCell(size, H, **words)), draw(T, B, I)
    assert cell.mask_size == M + H
    state = start(cell)
    torch.manual_seed(2)
    given = cell.prepare(x)
    assert torch.equal(given[0, :, I:], given[-1, :, I:])
    masks = given[0, :, I:].split((M, H), -1)
    outputs = []
    for x_t in given:
        output, state = cell.step(x_t, state)
        outputs.append(output)
    with torch.no_grad():
        for row in range(B):
            plain = kind(GRUCell(I, M, dtype=torch.float64), LSTMCell(size, H, dtype=torch.float64))
            plain.load_state_dict(cell.state_dict())
            plain.first.weight_hh.mul_(masks[0][row])
            plain.first.weight_hc.mul_(masks[0][row])
            plain.second.weight_hh.mul_(masks[1][row])
            rows = slice(row, row + 1)
            alone, _ = plain.scan(x[:, rows], tuple(part[rows] for part in start(plain)))
            torch.testing.assert_close(torch.stack(outputs)[:, rows], alone, **TOL[torch.float64])
    torch.manual_seed(2)
    if kind is SideBySideCell:  # the other scans part by part, and draws part by part
        torch.testing.assert_close(cell.scan(x, start(cell))[0], torch.stack(outputs), **TOL[torch.float64])


def test_weights_are_drawn_again_in_every_part():
    cell = SideBySideCell(LSTMCell(I, H), RUMCell(I, M))
    before = [weight.detach().clone() for weight in (cell.first.weight_hh, cell.second.weight_hh)]
    cell.reset_parameters()
    for weight, old in zip((cell.first.weight_hh, cell.second.weight_hh), before, strict=True):
        assert not torch.equal(weight, old)


@pytest.mark.parametrize("memory", ["slow", "input"])
def test_a_fast_slow_rnn_with_a_memory_binds_by_rotations(memory):
    cell = fast_slow(I, H, slow_size=M, memory_size=6, memory=memory, zoneout=0.1, dtype=torch.float64).train()
    rum = cell.slow.second if memory == "slow" else cell.first
    whole = cell if memory == "slow" else cell.second
    assert isinstance(whole, FastSlowCell)
    assert isinstance(rum, RUMCell)
    assert (rum.options.lam, rum.options.eta, rum.options.zoneout, rum.hidden_size) == (1.0, 1.0, 0.0, 6)
    assert whole.fast[1].input_size == (M + 6 if memory == "slow" else M)
    assert whole.fast[0].input_size == (I if memory == "slow" else I + 6)
    output, state = cell.scan(draw(T, B, I), start(cell))
    R = dict(zip(cell.state_names, state, strict=True))["slow_second_R" if memory == "slow" else "first_R"]
    torch.testing.assert_close(R @ R.mT, torch.eye(6, dtype=torch.float64).expand(B, 6, 6), **TOL[torch.float64])
    output.sum().backward()
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in rum.parameters())


def test_the_memory_in_front_leaves_the_fused_scan_and_the_one_beside_does_not():
    x = torch.zeros(T, B, I + 6)
    front, beside = (fast_slow(I, H, memory_size=6, memory=memory) for memory in ("input", "slow"))
    assert front.second._obstacle(None) is None
    assert "SideBySideCell" in beside.explain_backend(x[..., :I]).reason


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="the cells read 3 and 4 numbers; both must read the same input"):
        SideBySideCell(LSTMCell(I, H), LSTMCell(4, H))
    with pytest.raises(ValueError, match="second cell has input_size=3; it must be 7"):
        PrecededCell(LSTMCell(I, M), LSTMCell(I, H))
    with pytest.raises(ValueError, match="fast_slow: memory_size=-1"):
        fast_slow(I, H, memory_size=-1)
    with pytest.raises(ValueError, match="memory='fast'"):
        fast_slow(I, H, memory="fast")
