"""The designs of the gated scan, fastest first, and the choice among them.

Each design is a module with three functions::

    obstacle(inputs, options) -> the reason why it cannot run, or None; depends only on shapes, dtype and device
    forward(inputs, options, save=True) -> (states, gates), as ``GatedInputs.empty_results`` allocates them
    backward(grad_out, inputs, out, gates, options) -> GatedGradients
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchrum.ops._dispatch import REFERENCE, Design, choose_backend
from torchrum.ops.gated_scan import native, stepwise, torch_backend
from torchrum.ops.gated_scan.types import GatedGradients, GatedInputs, GatedOptions

DESIGNS = (
    Design("stepwise", "fused", stepwise),
    Design("native", "native", native),
    Design("torch", "torch", torch_backend),
)


def choose_design(
    inputs: GatedInputs, options: GatedOptions, requested: str, *, strict: bool = True
) -> tuple[Design, str]:
    """Choose the design that runs a scan.

    Args:
        inputs, options: the scan.
        requested: ``"auto"`` or a backend.
        strict: raise ``ValueError`` if ``requested`` cannot run. An operator call passes False and takes the next
            slower design instead: a program may be exported on a machine with the backend and used on one without it.

    Returns:
        The design, ``REFERENCE`` if no other can run, and the reason.
    """
    common = None
    if strict and forward_ad._current_level >= 0:  # torch.func.jvp enters a level too
        common = "forward-mode differentiation is on, and the operator is differentiated in reverse mode only"
    first = 0
    if not strict:
        first, requested = next((i for i, design in enumerate(DESIGNS) if requested == design.backend), 0), "auto"
    return choose_backend(
        requested,
        (*DESIGNS[first:], REFERENCE),
        lambda design: None if design is REFERENCE else common or design.module.obstacle(inputs, options),
    )


def run_forward(design: Design, inputs: GatedInputs, options: GatedOptions, save: bool) -> tuple[Tensor, Tensor]:
    """Run the forward of a design; scans without steps or rows are handled here."""
    if inputs.xp.numel() == 0:
        return inputs.empty_results(save)
    return design.module.forward(inputs, options, save)


def run_backward(
    design: Design, grad_out: Tensor, inputs: GatedInputs, out: Tensor, gates: Tensor, options: GatedOptions
) -> GatedGradients:
    """Run the backward of a design; scans without steps or rows are handled here."""
    if inputs.xp.numel() == 0:
        return GatedGradients(*(None if part is None else torch.zeros_like(part) for part in inputs[:4]))  # type: ignore[arg-type]
    return design.module.backward(grad_out, inputs, out, gates, options)
