"""The sums over rows of kernels/linear.py, which make the gradient of a bias."""

import pytest
import torch

from torchrum.ops.kernels.linear import sum_by_axis, sum_rows


@pytest.mark.parametrize("T, B", [(3, 40), (40, 3), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_sum_in_turn_is_the_sum(T, B, dtype):
    x = torch.randn(T, B, 6, dtype=torch.float64).to(dtype)
    found, wanted = sum_by_axis(x), x.double().sum((0, 1))
    assert found.dtype is dtype
    # rounded once, in the end
    torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("T, B", [(150, 128), (128, 150), (53, 128), (1020, 8), (3, 5)])
def test_a_sum_over_rows_takes_little_memory(T, B):
    x = torch.randn(T, B, 300, device="cuda")
    sum_rows(x)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = sum_rows(x)
    halfway = x.nbytes // min(T, B)  # the sum over the shorter axis
    assert torch.cuda.max_memory_allocated() - before <= halfway + 2**20
    torch.testing.assert_close(found.double(), x.double().sum((0, 1)), rtol=1e-5, atol=1e-3)
