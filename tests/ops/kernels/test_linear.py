"""The gradient of a recurrent weight against its definition, in every layout that a design hands over."""

import pytest
import torch
from torch import Tensor

from torchrum.ops.kernels import linear
from torchrum.ops.kernels.linear import recurrent_weight_gradient


def wanted(grads: Tensor, rows: int, h0: Tensor, out: Tensor) -> Tensor:
    return torch.einsum("tbg,tbh->gh", grads[..., :rows], torch.cat([h0[None], out])[:-1])


@pytest.mark.parametrize("T", [1, 2, 5])
@pytest.mark.parametrize("B", [0, 1, 3])
@pytest.mark.parametrize("rows", [10, 15])
@pytest.mark.parametrize("layout", ["own", "inside", "transposed"])
def test_it_is_the_sum_over_steps(T, B, rows, layout):
    def draw(*shape: int) -> Tensor:
        if layout == "inside":  # a part of a larger memory
            return torch.randn(2 + shape[0], *shape[1:], dtype=torch.float64)[2:]
        if layout == "transposed":
            return torch.randn(*reversed(shape), dtype=torch.float64).permute(2, 1, 0)
        return torch.randn(shape, dtype=torch.float64)

    grads, out, h0 = draw(T, B, 15), draw(T, B, 5), torch.randn(B, 5, dtype=torch.float64)
    torch.testing.assert_close(recurrent_weight_gradient(grads, rows, h0, out), wanted(grads, rows, h0, out))
    zero = torch.zeros_like(h0)
    torch.testing.assert_close(recurrent_weight_gradient(grads, rows, None, out), wanted(grads, rows, zero, out))


def test_no_step_gives_zeros():
    grads, out = torch.randn(0, 3, 15), torch.randn(0, 3, 5)
    assert torch.equal(recurrent_weight_gradient(grads, 10, torch.randn(3, 5), out), torch.zeros(10, 5))


def test_rows_that_were_padded_are_cut_again(monkeypatch):
    monkeypatch.setattr(linear, "_misaligned", lambda *_: True)  # as on a GPU, at sizes that are worth it
    grads, out, h0 = torch.randn(4, 3, 15), torch.randn(4, 3, 5), torch.randn(3, 5)
    for start in (h0, None):
        found = recurrent_weight_gradient(grads, 10, start, out)
        torch.testing.assert_close(found, wanted(grads, 10, torch.zeros_like(h0) if start is None else h0, out))
