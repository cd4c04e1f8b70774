"""A whole LSTM sequence, with layer norm and zoneout: from projected inputs and an initial state to all states."""

from torch import Tensor

from torchrum.ops._dispatch import Backend, Choice, choose_fused
from torchrum.ops.kernels.masks import draw_seed
from torchrum.ops.kernels.weights import CellWeights
from torchrum.ops.lstm_scan.options import LstmOptions
from torchrum.ops.lstm_scan.reference import lstm_scan_reference, lstm_step, norm_gates, zoneout_masks
from torchrum.ops.lstm_scan.types import LstmInputs, LstmStepWeights, step_weights

__all__ = [
    "CellWeights",
    "LstmInputs",
    "LstmOptions",
    "LstmStepWeights",
    "lstm_scan",
    "lstm_scan_choice",
    "lstm_scan_reference",
    "lstm_step",
    "norm_gates",
    "step_weights",
    "zoneout_masks",
]


def lstm_scan_choice(xp: Tensor, *, backend: Backend = "auto") -> Choice:
    """The backend that ``lstm_scan`` takes for such an input, and why; "torch" and "reference" are the same here."""
    return choose_fused(backend, lambda: fused_obstacle(xp))


def fused_obstacle(xp: Tensor) -> str | None:
    """Why the fused backend cannot run, or None."""
    if xp.device.type != "cuda":
        return f"the input is on {xp.device.type}"
    from torchrum.ops.lstm_scan import fused

    return fused.obstacle(xp)


def lstm_scan(inputs: LstmInputs, options: LstmOptions, *, backend: Backend = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Run an LSTM over a sequence whose inputs are projected already.

    Args:
        inputs: the tensors; without a seed, zoneout's masks come from torch's generator.
        options: everything a step can vary.
        backend: ``"auto"`` takes the fastest that can run; ``"fused"``, ``"torch"`` or ``"reference"`` insists.

    Returns:
        h of all steps ``(T, B, H)``, the last h and the last c, both ``(B, H)``.
    """
    xp = inputs.xp
    # under autocast the projected input comes in the lower precision
    inputs = inputs._replace(weight_hh=inputs.weight_hh.to(xp.dtype))
    if lstm_scan_choice(xp, backend=backend).backend != "fused":
        return lstm_scan_reference(inputs, options)
    from torchrum.ops.lstm_scan.fused import lstm_scan_fused  # triton is absent on machines without CUDA

    seed = inputs.seed if options.draws else None
    if options.draws and seed is None:
        seed = draw_seed(xp.device)
    return lstm_scan_fused(inputs._replace(seed=seed), options)
