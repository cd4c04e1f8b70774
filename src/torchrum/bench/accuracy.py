"""Errors of a layer against the reference in float64."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from ..layers.rum import RUM
from .work import DTYPES, Shape

CHECKED_STEPS = 20
"""Enough to show a wrong kernel; in float64 more would take long."""


def relative_error(rum: RUM, shape: Shape, precision: str = "high", activation: str | None = None) -> float:
    """Largest of the relative errors (in norm) of the output and of every gradient, over a few steps.

    With relu a gradient's error is about the root of the share of units whose sign the rounding turns over: one in
    ten thousand makes 1e-2, whatever the kernel does.

    Args:
        rum: of one layer, on its device; its weights stay as they are.
        shape: of its input; T is cut.
        precision: of float32 products: ``"high"`` is TF32, ``"highest"`` IEEE.
        activation: to take instead of the layer's; a smooth one shows the rounding without the kinks.
    """
    rum = copy.deepcopy(rum)
    if activation is not None:
        rum.options = replace(rum.options, activation=activation)
    generator = torch.Generator(shape.device).manual_seed(1)
    sizes = (min(shape.T, CHECKED_STEPS), shape.B)
    x = torch.randn(*sizes, rum.input_size, device=shape.device, generator=generator).to(DTYPES[shape.dtype])
    grad = torch.randn(*sizes, rum.hidden_size, device=shape.device, generator=generator).to(x.dtype)
    exact = copy.deepcopy(rum).double()
    exact.backend = "reference"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = _outputs(rum, x, grad)
    finally:
        torch.set_float32_matmul_precision(before)
    wanted = _outputs(exact, x.double(), grad.double())
    return max(((f.double() - w).norm() / w.norm()).item() for f, w in zip(found, wanted, strict=True))


def _outputs(rum: RUM, x: Tensor, grad: Tensor) -> list[Tensor]:
    torch.manual_seed(2)  # zoneout draws its seed from the device's generator
    x = x.detach().requires_grad_()
    output, _ = rum(x)
    grads = torch.autograd.grad(output, [x, *rum.parameters()], grad)
    return [output.detach(), *grads]
