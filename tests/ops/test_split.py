"""Float32 matmuls as three of bfloat16."""

import pytest
import torch
import torch.nn.functional as F

from torchrum.ops.kernels.bf16x3 import bf16x3_linear, split_left, split_right

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def relative(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 33), (1, 1, 1), (0, 4)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients(device, shape, with_bias):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=device), torch.randn(6, shape[-1], device=device)]
    inputs += [torch.randn(6, device=device)] * with_bias
    mine = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    found, wanted = bf16x3_linear(*mine), F.linear(*exact)
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    if not found.numel():
        return
    assert relative(found, wanted) <= 2e-5  # a matmul of heads alone: 2e-3
    grads = torch.autograd.grad(found.square().sum(), mine), torch.autograd.grad(wanted.square().sum(), exact)
    for m, w in zip(*grads, strict=True):
        assert relative(m, w) <= 1e-4


def test_large_and_small_numbers_keep_their_digits(device):
    scale = torch.tensor([1e-30, 1.0, 1e30], device=device)[:, None]
    x, weight = torch.randn(3, 20, device=device) * scale, torch.randn(4, 20, device=device)
    assert (
        (bf16x3_linear(x, weight) - F.linear(x.double(), weight.double())).norm(dim=1) <= 3e-5 * scale[:, 0] * 20
    ).all()


def test_twice_differentiable_mapped_and_forward():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 4), torch.randn(2, 4)
    mapped = torch.vmap(bf16x3_linear, (0, None))(x, weight)
    assert torch.equal(mapped, bf16x3_linear(x, weight))
    per_sample = torch.vmap(torch.func.grad(lambda w, x: bf16x3_linear(x, w).sin().sum()), (None, 0))(weight, x)
    summed = torch.func.grad(lambda w: bf16x3_linear(x, w).sin().sum())(weight)
    torch.testing.assert_close(per_sample.sum(0), summed)
    tangents = torch.randn_like(x), torch.randn_like(weight)
    _, found = torch.func.jvp(bf16x3_linear, (x, weight), tangents)
    torch.testing.assert_close(found, F.linear(tangents[0], weight) + F.linear(x, tangents[1]))
    hessian = torch.func.hessian(lambda w: bf16x3_linear(x, w).square().sum())(weight)
    wanted = torch.func.hessian(lambda w: F.linear(x, w).square().sum())(weight)
    torch.testing.assert_close(hessian, wanted)


def test_pieces_stand_as_described():
    x = torch.tensor([[1 + 2.0**-10]])
    assert split_left(x).tolist() == [[1.0, 2.0**-10, 1.0]]
    assert split_right(x).tolist() == [[1.0, 1.0, 2.0**-10]]
