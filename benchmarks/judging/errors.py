"""Errors of RUM's kernels against float64, on the device at hand, for the reports of ``torchrum bench``."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from torchrum.layers.rum import RUM
from torchrum.paper.bench.layers import DTYPES, Shape, make_layer
from torchrum.paper.bench.records import Report


def enter_errors(report: Report) -> None:
    """Measure the errors of the rows of plain training passes by the fused kernels, and of float32 in four ways."""
    for row in report.rows:
        if (row.implementation, row.mode) != ("fused", "forward_backward") or row.failed or "plain-" in row.case:
            continue
        layer, precision = make_layer("fused", row.shape, **row.options), row.precision or "high"
        assert isinstance(layer, RUM)
        row.error = relative_error(layer, row.shape, precision)
        if row.shape.dtype == "float32":
            row.error_ieee = relative_error(layer, row.shape, "highest")
            row.error_apart = relative_error(layer, row.shape, "highest", exclude_near_threshold=True)
            if precision != "highest":
                row.error_smooth = relative_error(layer, row.shape, precision, "tanh")


CHECKED_STEPS = 20
"""Enough to show a wrong kernel; in float64 more would take long."""


ZONEOUT_SEED = 2
"""Of the device's generator, which zoneout draws its own seed from."""
NEAR_THRESHOLD = 1e-5
"""A unit this near to the ReLU threshold, in standard deviations of its row, may flip its sign in float32."""


def relative_error(
    rum: RUM, shape: Shape, precision: str = "high", activation: str | None = None, exclude_near_threshold: bool = False
) -> float:
    """Largest of the relative errors (in norm) of the output and of every gradient, over a few steps.

    With relu a gradient's error is about the root of the share of units whose sign the rounding turns over: one in
    ten thousand makes 1e-2, whatever the kernel does.

    Args:
        rum: of one layer, on its device; its weights stay as they are.
        shape: of its input; T is cut.
        precision: of float32 matmuls: ``"high"`` is TF32, ``"highest"`` FP32 (TF32 off).
        activation: to take instead of the layer's; a smooth one shows the rounding without sign flips.
        exclude_near_threshold: no gradients of samples with a unit of the reference near the ReLU threshold.
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
    if exclude_near_threshold:
        clear = clear_of_threshold(exact, x.double())
        if not clear.any():
            raise ValueError("relative_error: every sample is near the ReLU threshold, so no gradient is left.")
        grad *= clear[:, None]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = _outputs(rum, x, grad)
    finally:
        torch.set_float32_matmul_precision(before)
    wanted = _outputs(exact, x.double(), grad.double())
    errors = [(f.double() - w).norm() / w.norm() for f, w in zip(found, wanted, strict=True)]
    return torch.stack(errors).max().item()  # NaN if one of them is


@torch.no_grad()
def clear_of_threshold(exact: RUM, x: Tensor) -> Tensor:
    """Which rows of the batch keep every argument of relu away from 0, in all steps; ``(B,)``."""
    if exact.options.activation != "relu":
        return x.new_ones(x.shape[1], dtype=torch.bool)
    nearest = []

    def watched(argument: Tensor) -> Tensor:
        nearest.append(argument.abs().amin(-1) / argument.std(-1, correction=0))
        return argument.relu()

    watching = copy.deepcopy(exact)
    watching.options = replace(watching.options, activation=watched)
    torch.manual_seed(ZONEOUT_SEED)
    watching(x)
    return torch.stack(nearest).amin(0) > NEAR_THRESHOLD


def _outputs(rum: RUM, x: Tensor, grad: Tensor) -> list[Tensor]:
    torch.manual_seed(ZONEOUT_SEED)
    x = x.detach().requires_grad_()
    output, _ = rum(x)
    grads = torch.autograd.grad(output, [x, *rum.parameters()], grad)
    return [output.detach(), *grads]
