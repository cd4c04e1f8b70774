"""The scan's operator inside torch.export, torch.func and torch.compile: the gradients are those of a plain call."""

import pytest
import torch
from torch import Tensor, library
from torch.export import Dim
from torch.func import functional_call, grad, jacrev, vmap

from torchrum import RUM

both = pytest.mark.parametrize("lam", [0, 1])


def make(lam: float, dtype: torch.dtype = torch.float64, **options) -> RUM:
    torch.manual_seed(0)
    return RUM(3, 4, form="paper", lam=lam, activation="tanh", dtype=dtype, **options)


def loss(module, x: Tensor) -> Tensor:
    return module(x)[0].sin().sum()


def gradients(module, x: Tensor) -> list[Tensor]:
    """Of the input and of every parameter."""
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(loss(module, x), [x, *module.parameters()]))


def exported(rum: RUM) -> torch.nn.Module:
    x = torch.randn(5, 2, 3, dtype=rum.weight_ih_l0.dtype)
    return torch.export.export(rum, (x,), dynamic_shapes=({0: Dim("T"), 1: Dim("B")},)).module()


@both
def test_gradients_of_an_exported_program_at_sizes_not_traced(lam):
    rum = make(lam, num_layers=2, bidirectional=True)
    module = exported(rum)
    for T, B in ((1, 1), (5, 2), (17, 3), (40, 1)):
        x = torch.randn(T, B, 3, dtype=torch.float64)
        torch.testing.assert_close(gradients(module, x), gradients(rum, x))


@both
def test_per_sample_gradients_of_an_exported_program(lam):
    rum = make(lam)
    weights, samples = dict(rum.named_parameters()), torch.randn(4, 5, 2, 3, dtype=torch.float64)
    module = exported(rum)

    def of(weights, x):
        return functional_call(module, weights, (x,))[0].sin().sum()

    each = vmap(grad(of), (None, 0))(weights, samples)
    for i, x in enumerate(samples):
        expected = dict(zip(weights, gradients(rum, x)[1:], strict=True))
        torch.testing.assert_close({name: part[i] for name, part in each.items()}, expected)
        torch.testing.assert_close(grad(of)(weights, x), expected)


@both
@pytest.mark.parametrize("through", ["layer", "exported program"])
def test_levels_of_torch_func_are_all_differentiated(lam, through):
    """A Function that turns gradients off would leave the outer levels without them, and say nothing."""
    rum, x = make(lam), torch.randn(3, 2, 3, dtype=torch.float64)
    reference = make(lam, backend="reference")
    module = rum if through == "layer" else exported(rum)

    def second(module):
        return grad(lambda x: grad(lambda x: loss(module, x))(x).sin().sum())

    torch.testing.assert_close(second(module)(x), second(reference)(x))
    torch.testing.assert_close(
        jacrev(grad(lambda x: loss(module, x)))(x), jacrev(grad(lambda x: loss(reference, x)))(x)
    )
    many = torch.stack([x, 2 * x])
    torch.testing.assert_close(vmap(second(module))(many), vmap(second(reference))(many))
    third = grad(lambda x: second(module)(x).sum())(x)
    torch.testing.assert_close(third, grad(lambda x: second(reference)(x).sum())(x))


@both
def test_batched_backward(lam):
    """``is_grads_batched`` runs vmap over a backward that nobody differentiates."""
    rum, x = make(lam), torch.randn(3, 2, 3, dtype=torch.float64)
    vectorised = torch.autograd.functional.jacobian(lambda x: rum(x)[0], x, vectorize=True)
    torch.testing.assert_close(vectorised, torch.autograd.functional.jacobian(lambda x: rum(x)[0], x))


@both
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_gradients(lam, dynamic):
    rum = make(lam)
    torch._dynamo.reset()
    compiled = torch.compile(rum, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for T in (5, 18):
        x = torch.randn(T, 2, 3, dtype=torch.float64)
        torch.testing.assert_close(gradients(compiled, x), gradients(rum, x))


@both
@pytest.mark.parametrize("backend, T", [("torch", 5), ("torch", 16), ("torch", 17), ("native", 5)])
def test_opcheck_with_gradients(lam, backend, T):
    B, H = 2, 4
    tensors = [torch.randn(T, B, 3 * H), torch.randn(B, H), torch.linalg.qr(torch.randn(B, H, H)).Q, torch.randn(8, H)]
    xp, h0, R0, weight_hh = (part.requires_grad_() for part in tensors)
    flags = (float(lam), 1.0, "tanh", True, False, "before", 1e-3, 0.0, False, backend, False)
    args = (xp, h0, R0 if lam else None, weight_hh, None, None, None, None, *flags)
    library.opcheck(torch.ops.torchrum.rum_scan.default, args)


def test_the_operator_itself_is_differentiable():
    rum, x = make(0), torch.randn(5, 2, 12, dtype=torch.float64, requires_grad=True)
    flags = (0.0, None, "tanh", True, False, "before", 1e-3, 0.0, False, "torch", False)
    h0 = torch.zeros(2, 4, dtype=torch.float64)
    out, _, gates, _ = torch.ops.torchrum.rum_scan(x, h0, None, rum.weight_hh_l0, None, None, None, None, *flags)
    assert out.requires_grad
    assert not gates.requires_grad  # what only the backward reads
    assert gates.shape == (5, 2, 8)
    with torch.no_grad():
        out, _, gates, _ = torch.ops.torchrum.rum_scan(x, h0, None, rum.weight_hh_l0, None, None, None, None, *flags)
    assert not out.requires_grad
    assert gates.numel() == 0  # nobody asked for it to be kept
