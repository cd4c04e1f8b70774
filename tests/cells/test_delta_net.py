"""DeltaNet's chunked scan against its steps, and the steps against what the delta rule promises.

The code is in cells/memory.py.
"""

import pytest
import torch

from tolerances import TOL
from torchrum.cells.memory import CHUNK, DeltaNetCell

I, H, B = 3, 5, 2


def states(cell, B=B):
    torch.manual_seed(1)
    return (torch.randn(B, cell.hidden_size, cell.hidden_size, dtype=cell.weight_ih.dtype),)


@pytest.mark.parametrize("T", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
@pytest.mark.parametrize("bias", [False, True])
def test_scan_in_chunks_equals_the_steps(T, bias):
    torch.manual_seed(0)
    cell = DeltaNetCell(I, H, bias=bias, dtype=torch.float64)
    x = torch.randn(T, B, I, dtype=torch.float64)
    state = states(cell)
    output, (S,) = cell.scan(x, state)
    for row, given in zip(output, x, strict=True):
        expected, state = cell(given, state)
        torch.testing.assert_close(row, expected, **TOL[torch.float64])
    torch.testing.assert_close(S, state[0], **TOL[torch.float64])


def test_gradients_of_the_scan_equal_those_of_the_steps():
    torch.manual_seed(0)
    cell = DeltaNetCell(I, H, dtype=torch.float64)
    x = torch.randn(CHUNK + 5, B, I, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(cell.scan(x, states(cell))[0].square().sum(), [x, *cell.parameters()])
    state, total = states(cell), 0
    for given in x:
        output, state = cell(given, state)
        total = total + output.square().sum()
    for one, other in zip(found, torch.autograd.grad(total, [x, *cell.parameters()]), strict=True):
        torch.testing.assert_close(one, other, **TOL[torch.float64])


def test_a_key_with_full_strength_recalls_its_last_value():
    cell = DeltaNetCell(I, H, dtype=torch.float64)
    k, first, second = torch.eye(H, dtype=torch.float64)[:1], *torch.rand(2, 1, H, dtype=torch.float64)
    cell._parts = lambda given: given  # the step on parts of our own
    one = torch.ones(1, 1, dtype=torch.float64)
    _, state = cell.step((k, k, first, one), (torch.zeros(1, H, H, dtype=torch.float64),))
    output, _ = cell.step((k, k, second, one), state)
    torch.testing.assert_close(output, second, **TOL[torch.float64])


def test_rows_past_their_length_keep_their_state():
    cell = DeltaNetCell(I, H, dtype=torch.float64)
    x, state = torch.randn(9, B, I, dtype=torch.float64), states(cell)
    _, (S,) = cell.scan(x, state, torch.tensor([4, 9]))
    torch.testing.assert_close(S[:1], cell.scan(x[:4, :1], (state[0][:1],))[1][0], **TOL[torch.float64])


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="hidden_size=0"):
        DeltaNetCell(I, 0)
    assert "bias=False" in repr(DeltaNetCell(I, H))
