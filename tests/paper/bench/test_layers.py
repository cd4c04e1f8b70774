"""The original implementation in the benchmark computes what RUM computes, so that their times can be compared."""

import pytest
import torch

from torchrum import RUM, rotation_matrix
from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.paper.bench.layers import AuthorsRUM, dense_rotation, rotate_in_plane


@pytest.mark.parametrize("eta", [None, 1.5])
@pytest.mark.parametrize("lam", [0, 1])
def test_equals_rum(lam, eta):
    torch.manual_seed(0)
    rum = RUM(6, 8, lam=lam, **{**PAPER_OPTIONS, "eta": eta}, dtype=torch.float64)
    authors = AuthorsRUM(rum)
    x = torch.randn(7, 3, 6, dtype=torch.float64, requires_grad=True)
    output, last = authors(x)
    wanted = rum(x)[0]
    # sqrt(1 - cos^2) loses digits where the angle is small
    torch.testing.assert_close(output, wanted, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(last[0], output[-1])
    weight = torch.randn_like(output)  # with eta the sum of squares is constant
    (found,), (expected,) = (torch.autograd.grad((out * weight).sum(), x) for out in (output, wanted))
    assert expected.abs().mean() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_rotations_agree_with_the_matrix():
    torch.manual_seed(0)
    a, b, h = torch.randn(3, 5, 4, dtype=torch.float64)
    matrix = rotation_matrix(a, b)
    torch.testing.assert_close(dense_rotation(a, b), matrix)
    torch.testing.assert_close(rotate_in_plane(a, b, h), (matrix @ h.unsqueeze(-1)).squeeze(-1))
