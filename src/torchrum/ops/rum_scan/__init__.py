"""A whole RUM sequence: from projected inputs and an initial state to all states."""

import torch
from torch import Tensor

from .._dispatch import Backend, Choice
from ..kernels.watching import is_unwatched
from . import native
from .designs import choose_design, decide, operator_obstacle
from .flops import register_flops
from .op import rum_scan_op
from .options import RumOptions
from .reference import ACTIVATIONS, rum_scan_reference, rum_step_reference
from .types import ScanInputs, StepWeights

__all__ = [
    "ACTIVATIONS",
    "RumOptions",
    "ScanInputs",
    "StepWeights",
    "native",
    "operator_obstacle",
    "rum_scan",
    "rum_scan_choice",
    "rum_scan_reference",
    "rum_step_reference",
]


def rum_scan_choice(
    xp: Tensor, options: RumOptions, *, learnable_lam: bool = False, backend: Backend = "auto"
) -> Choice:
    """The backend that ``rum_scan`` takes for such an input, and why: which of its designs, and why no faster one."""
    design, reason = choose_design(ScanInputs.shaped_like(xp, options), options, learnable_lam, backend)
    return Choice(design.backend, reason)


def rum_scan(
    xp: Tensor,
    h0: Tensor,
    R0: Tensor | None,
    weight_hh: Tensor,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    *,
    options: RumOptions,
    lengths: Tensor | None = None,
    seed: Tensor | None = None,
    lam: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Run a RUM over a sequence whose inputs are projected already.

    Args:
        xp: ``(T, B, 3H)``, ``x W_ih^T + b`` in blocks tau, u, eps; ``(T, B, 2H)``, tau and eps, without update gate.
        h0: ``(B, H)``. R0: ``(B, H, H)``, the identity if None; only with lam other than 0.
        weight_hh: ``(2H, H)``, rows tau, u; ``(H, H)`` without update gate.
        ln_weight, ln_bias: ``(3H,)``, blocks tau, u, candidate (``(2H,)`` without update gate), with layer norm.
        options: everything a step can vary.
        lengths: ``(B,)`` int64; a row past its length keeps its state.
        seed: int64 scalar that zoneout's masks come from; drawn if None.
        lam: a learnable exponent, instead of ``options.lam``.
        backend: ``"auto"`` takes the fastest that can run; ``"fused"``, ``"native"``, ``"torch"`` or ``"reference"``
            insists.

    Returns:
        All states ``(T, B, H)``, the last one being the final state, and the final R, or None with lam 0.
    """
    if seed is None and options.draws:
        seed = torch.randint(2**31 - 1, (), device=xp.device)
    weight_hh = weight_hh.to(xp.dtype)  # under autocast the projected input comes in the lower precision
    inputs = ScanInputs(xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed)
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        from .scan_form import rum_scan_form

        return rum_scan_form(inputs, options)
    design = decide(inputs, options, lam is not None, backend)
    if design.module is None:
        return rum_scan_reference(inputs, options, lam=lam)
    if not torch.is_grad_enabled() and is_unwatched(xp, h0, weight_hh):
        out, R, _ = design.module.forward(inputs, options, save=False)
        return out, R
    if not torch.compiler.is_compiling():
        register_flops()
    # the operator finds the design of a backend itself: a program that is exported may meet another machine or batch
    return rum_scan_op(inputs, options, design.name if backend == design.name else design.backend)
