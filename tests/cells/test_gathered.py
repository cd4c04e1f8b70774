"""Scans whose weight gradients are gathered, against the plain loop: outputs and all gradients.

The code is in cells/base.py.
"""

import copy
from functools import partial

import pytest
import torch

from tolerances import DEEP, NORM_ERROR
from torchrum.cells.base import GatherableCell, GatheredScan, pack
from torchrum.cells.lstm_variants import HMLSTMCell, HyperLSTMCell, NASCell
from torchrum.cells.rhn import RHNCell

T, B, I, H = 6, 3, 5, 7
CELLS = {
    "hm_lstm": lambda: HMLSTMCell(I, H, boundary="soft"),
    "hyper_lstm": lambda: HyperLSTMCell(I, H, hyper_size=3, embedding_size=2),
    "nas": lambda: NASCell(I, H, bias=True),
    "nas, no bias": lambda: NASCell(I, H),
    "rhn": lambda: RHNCell(I, H, depth=3, transform_bias=-0.5, init_range=0.4),
    "rhn, masks": lambda: RHNCell(I, H, depth=2, input_dropout=0.3, state_dropout=0.3, init_range=0.4),
}


def make(name: str, dtype: torch.dtype = torch.float64) -> GatherableCell:
    torch.manual_seed(0)
    cell = CELLS[name]().to(dtype)
    with torch.no_grad():
        for parameter in cell.parameters():  # zeros would hide what reaches them
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return cell


def learn(
    scan, cell: GatherableCell, lengths: torch.Tensor | None = None, autocast: bool = False
) -> list[torch.Tensor]:
    """Outputs, last state, and the gradients of input, first state and weights."""
    dtype = next(cell.parameters()).dtype
    torch.manual_seed(1)
    x = torch.randn(T, B, I, dtype=dtype, requires_grad=True)
    start = [
        torch.randn_like(part).requires_grad_()
        for part in cell.initial_state(B, device=torch.device("cpu"), dtype=dtype)
    ]
    with torch.autocast("cpu", enabled=autocast):
        output, state = scan(x, tuple(start), lengths)
    loss = sum((part.double() * torch.randn(part.shape, dtype=torch.float64)).sum() for part in (output, *state))
    reached = [x, *start, *cell.parameters()]
    return [output, *state, *torch.autograd.grad(loss, reached)]


def gathered(cell: GatherableCell, **how) -> list[torch.Tensor]:
    with torch.compiler.set_stance("force_eager"):
        return learn(GatheredScan(cell), cell, **how)


@pytest.mark.parametrize("lengths", [None, [6, 2, 4]])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_those_of_the_plain_loop(name, lengths):
    cell, given = make(name), None if lengths is None else torch.tensor(lengths)
    ours, theirs = gathered(cell, lengths=given), learn(cell.scan, cell, lengths=given)
    torch.testing.assert_close(ours, theirs, **DEEP[torch.float64])


@pytest.mark.parametrize("name", CELLS)
def test_autocast_rounds_no_more_than_in_the_plain_loop(name):
    cell = make(name, torch.float32)
    exact, ours, theirs = learn(cell.scan, cell), gathered(cell, autocast=True), learn(cell.scan, cell, autocast=True)
    for right, one, other in zip(exact, ours, theirs, strict=True):
        assert (one - right).norm() <= 1.5 * (other - right).norm() + NORM_ERROR[torch.bfloat16] * right.norm()


def test_the_step_can_be_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    cell = make("rhn")
    torch.testing.assert_close(learn(GatheredScan(cell), cell), learn(cell.scan, cell), **DEEP[torch.float64])


def test_weights_that_are_not_trained_have_no_taps(monkeypatch):
    cell = make("rhn").requires_grad_(False)
    monkeypatch.setattr("torchrum.cells.base.make_taps", None)
    x, state = torch.randn(T, B, I).double(), cell.initial_state(B, device=torch.device("cpu"), dtype=torch.float64)
    assert torch.equal(GatheredScan(cell)(x, state)[0], cell.scan(x, state)[0])
    with torch.no_grad():
        assert torch.equal(GatheredScan(cell.requires_grad_())(x, state)[0], cell.scan(x, state)[0])


def test_a_copy_scans_with_its_own_weights():
    cell = make("rhn")
    cell.scan = GatheredScan(cell)
    twin = copy.deepcopy(cell)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    with torch.compiler.set_stance("force_eager"):
        ours = learn(twin.scan, twin)
    plain = make("rhn")
    plain.load_state_dict(twin.state_dict())
    torch.testing.assert_close(ours, learn(plain.scan, plain), **DEEP[torch.float64])


@pytest.mark.parametrize("dtype, shape", [(torch.float32, (8, 8)), (torch.bfloat16, (8, 16))])
def test_rows_are_aligned_to_16_bytes(dtype, shape):
    weight = torch.randn(5, 8 if dtype is torch.float32 else 9)
    packed = pack(weight, dtype)
    assert packed.shape == shape
    assert torch.equal(packed[:5, : weight.shape[1]], weight.to(dtype))
    assert packed[5:].abs().sum() == 0 == packed[:, weight.shape[1] :].abs().sum()
