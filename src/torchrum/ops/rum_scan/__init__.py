"""Scan of a RUM: from the projected inputs of a sequence and an initial state to all states."""

import torch
from torch import Tensor

from torchrum.ops._dispatch import Backend, Choice, choose_reference
from torchrum.ops.kernels.flops import register_flops
from torchrum.ops.kernels.machine import autocasts, is_unobserved
from torchrum.ops.kernels.masks import draw_seed
from torchrum.ops.rum_scan import native
from torchrum.ops.rum_scan.designs import choose_design
from torchrum.ops.rum_scan.op import rum_scan_op
from torchrum.ops.rum_scan.options import ACTIVATIONS, RumOptions
from torchrum.ops.rum_scan.reference import rum_scan_reference, rum_step_reference
from torchrum.ops.rum_scan.scan_form import rum_scan_form
from torchrum.ops.rum_scan.types import Copies, Gradients, LayerInputs, Residuals, Results, ScanInputs, StepWeights

__all__ = [
    "ACTIVATIONS",
    "Copies",
    "Gradients",
    "LayerInputs",
    "Residuals",
    "Results",
    "RumOptions",
    "ScanInputs",
    "StepWeights",
    "native",
    "rum_scan",
    "rum_scan_choice",
    "rum_scan_form",
    "rum_scan_reference",
    "rum_step_reference",
]


MASKED = "state_dropout is at work, and only the reference has it"


def rum_scan_choice(
    xp: Tensor, options: RumOptions, *, learnable_lam: bool = False, masked: bool = False, backend: Backend = "auto"
) -> Choice:
    """Return the backend that ``rum_scan`` takes for ``xp``, and the reason: its design, and why no faster one."""
    if masked:
        return choose_reference(backend, MASKED)
    design, reason = choose_design(ScanInputs.shaped_like(xp, options), options, backend, learnable_lam=learnable_lam)
    return Choice(design.backend, reason)


def rum_scan(
    inputs: ScanInputs,
    options: RumOptions,
    *,
    lam: Tensor | None = None,
    mask: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Run a RUM over a sequence of projected inputs.

    Args:
        inputs: the tensors; the seed is drawn if zoneout needs it and it is None.
        options: the options of a step.
        lam: a learnable exponent, instead of ``options.lam``.
        mask: ``(B, H)``, multiplies the h that the matmul of every step reads (state dropout).
        backend: ``"auto"`` takes the fastest backend that can run; ``"fused"``, ``"native"``, ``"torch"`` or
            ``"reference"`` insists on one, and ``"persistent"``, ``"stepwise"`` or ``"lam1"`` on one design of the
            fused backend.

    Returns:
        All states ``(T, B, H)``, the last of which is the final state, and the final R, or None with lam 0.
    """
    xp, seed = inputs.xp, inputs.seed
    if seed is None and options.draws:
        seed = draw_seed(xp.device)
    # under autocast the projected input has the lower precision
    inputs = inputs._replace(weight_hh=inputs.weight_hh.to(xp.dtype), seed=seed)
    if mask is not None:
        choose_reference(backend, MASKED)  # raises if another backend is requested
        return rum_scan_reference(inputs, options, lam, mask)
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        return rum_scan_form(inputs, options)
    design, _ = choose_design(inputs, options, backend, learnable_lam=lam is not None)
    if design.module is None:
        return rum_scan_reference(inputs, options, lam=lam)
    if not torch.is_grad_enabled() and is_unobserved((xp, inputs.h0, inputs.weight_hh)) and not autocasts(xp):
        out, R, _ = design.module.forward(inputs, options, save=False)
        return out, R
    if not torch.compiler.is_compiling():
        register_flops()
    # the operator itself chooses the design of a backend: an exported program may run on another machine or batch size
    return rum_scan_op(inputs, options, design.name if backend == design.name else design.backend)
