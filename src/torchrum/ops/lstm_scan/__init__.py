"""A whole LSTM sequence, with layer norm and zoneout: from projected inputs and an initial state to all states."""

import torch
from torch import Tensor

from .._dispatch import Backend, Choice, choose_fused
from ..kernels.weights import CellWeights
from .options import LstmOptions
from .reference import lstm_scan_reference, lstm_step_reference, zoneout_masks
from .types import LstmInputs

__all__ = [
    "CellWeights",
    "LstmInputs",
    "LstmOptions",
    "lstm_scan",
    "lstm_scan_choice",
    "lstm_scan_reference",
    "lstm_step_reference",
    "zoneout_masks",
]


def lstm_scan_choice(xp: Tensor, *, backend: Backend = "auto") -> Choice:
    """The backend that ``lstm_scan`` takes for such an input, and why; "torch" and "reference" are the same here."""
    return choose_fused(backend, lambda: fused_obstacle(xp))


def fused_obstacle(xp: Tensor) -> str | None:
    """Why the fused backend cannot run, or None."""
    if xp.device.type != "cuda":
        return f"the input is on {xp.device.type}"
    from . import fused

    return fused.obstacle(xp)


def lstm_scan(
    xp: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight_hh: Tensor,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    *,
    options: LstmOptions,
    lengths: Tensor | None = None,
    seed: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Run an LSTM over a sequence whose inputs are projected already.

    Args:
        xp: ``(T, B, 4H)``, ``x W_ih^T + b`` in blocks i, j, f, o.
        h0, c0: ``(B, H)``.
        weight_hh: ``(4H, H)``, rows i, j, f, o.
        ln_weight, ln_bias: ``(5H,)``, blocks i, j, f, o, c, with layer norm.
        options: everything a step can vary.
        lengths: ``(B,)`` int64; a row past its length keeps its state.
        seed: int64 scalar that zoneout's masks come from; drawn if None.
        backend: ``"auto"`` takes the fastest that can run; ``"fused"``, ``"torch"`` or ``"reference"`` insists.

    Returns:
        h of all steps ``(T, B, H)``, the last h and the last c, both ``(B, H)``.
    """
    if seed is None and options.draws:
        seed = torch.randint(2**31 - 1, (), device=xp.device)
    weight_hh = weight_hh.to(xp.dtype)  # under autocast the projected input comes in the lower precision
    inputs = LstmInputs(xp, h0, c0, weight_hh, ln_weight, ln_bias, lengths, seed if options.draws else None)
    if lstm_scan_choice(xp, backend=backend).backend == "fused":
        from .fused import lstm_scan_fused  # triton is absent on machines without CUDA

        return lstm_scan_fused(inputs, options)
    return lstm_scan_reference(inputs, options)
