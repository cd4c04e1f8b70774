"""How matrices start: the same numbers in every dtype, orthonormal to the precision of the layer's own."""

import pytest
import torch
from torch import nn

from tolerances import ORTHOGONAL, TOL
from torchrum import RUM, RUMCell
from torchrum.cells.init import block_orthogonal_, orthogonal, orthogonal_
from torchrum.cells.rum import PAPER_OPTIONS

SHAPES = [(1, 1), (5, 9), (9, 5), (64, 64), (40, 100), (100, 40)]


def gram(Q):
    """The products of the rows or of the columns, whichever are fewer, in float64."""
    Q = Q.detach().double()
    return Q @ Q.T if Q.shape[0] < Q.shape[1] else Q.T @ Q


def assert_orthonormal(Q, dtype):
    torch.testing.assert_close(gram(Q), torch.eye(min(Q.shape), dtype=torch.float64), **ORTHOGONAL[dtype])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_seed_gives_one_matrix_for_every_dtype(shape):
    torch.manual_seed(0)
    drawn = nn.init.orthogonal_(torch.empty(shape))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        assert torch.equal(orthogonal(*shape, torch.empty(0, dtype=dtype)), drawn)
    torch.manual_seed(0)
    wide = orthogonal(*shape, torch.empty(0, dtype=torch.float64))
    assert_orthonormal(wide, torch.float64)
    torch.testing.assert_close(wide.float(), drawn, **TOL[torch.float32])


def test_blocks_of_float64_are_orthonormal_side_by_side():
    left, right, tiled = (torch.empty(n, m, dtype=torch.float64) for n, m in ((8, 3), (8, 5), (12, 8)))
    orthogonal_(left, right)
    assert_orthonormal(torch.cat((left, right), 1), torch.float64)
    block_orthogonal_(tiled)
    for block in (block for rows in tiled.split(4) for block in rows.split(4, 1)):
        assert_orthonormal(block, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("I, H", [(3, 8), (8, 3)])
def test_rum_starts_orthonormal_in_its_dtype(I, H, dtype):
    cell = RUMCell(I, H, dtype=dtype, **PAPER_OPTIONS)
    for gate in range(2):
        rows = slice(gate * H, (gate + 1) * H)
        assert_orthonormal(torch.cat((cell.weight_ih[rows], cell.weight_hh[rows]), 1), dtype)
    assert_orthonormal(cell.weight_ih[2 * H :], dtype)


def test_the_float32_start_of_rum_is_drawn_in_a_fixed_order():
    """A recorded run must find its start again: tau, u and eps of one recurrence after the other."""
    torch.manual_seed(0)
    rum = RUM(3, 4, num_layers=2, form="paper", gate_scale=0.3)
    torch.manual_seed(0)
    for layer, inputs in ((0, 3), (1, 4)):
        blocks = [0.3 * nn.init.orthogonal_(torch.empty(4, inputs + 4)) for _ in range(2)]
        eps = nn.init.orthogonal_(torch.empty(4, inputs))
        weight_ih, weight_hh = rum.get_parameter(f"weight_ih_l{layer}"), rum.get_parameter(f"weight_hh_l{layer}")
        assert torch.equal(weight_ih, torch.cat([*(block[:, :inputs] for block in blocks), eps]))
        assert torch.equal(weight_hh, torch.cat([block[:, inputs:] for block in blocks]))
