"""A whole LSTM sequence, with layer norm and zoneout: from projected inputs and an initial state to all states."""

from torch import Tensor

from torchrum.ops._dispatch import Backend, Choice, choose_fused
from torchrum.ops.kernels.machine import row_kernel_obstacle, tracing_obstacle
from torchrum.ops.kernels.masks import draw_seed
from torchrum.ops.kernels.weights import CellWeights
from torchrum.ops.lstm_scan.reference import (
    LstmInputs,
    LstmOptions,
    LstmStepWeights,
    lstm_scan_reference,
    lstm_step,
    norm_gates,
    step_weights,
    zoneout_masks,
)

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
    """Return the backend that ``lstm_scan`` takes for ``xp``, and the reason; "torch" and "reference" are the same."""
    return choose_fused(backend, lambda: fused_obstacle(xp))


def fused_obstacle(xp: Tensor) -> str | None:
    """Why the fused backend cannot run on ``xp``, or None."""
    return f"the input is on {xp.device.type}" if xp.device.type != "cuda" else kernel_obstacle(xp)


def kernel_obstacle(xp: Tensor) -> str | None:
    """Why the kernels cannot run on ``xp``, or None; Triton's interpreter also runs them on the CPU."""
    return tracing_obstacle(xp) or row_kernel_obstacle(xp, xp.shape[-1] // 4)


def lstm_scan(inputs: LstmInputs, options: LstmOptions, *, backend: Backend = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Run an LSTM over a sequence of projected inputs.

    Args:
        inputs: the tensors. Without a seed, zoneout's masks come from torch's generator.
        options: the hyper-parameters.
        backend: ``"auto"`` takes the fastest that can run; ``"fused"``, ``"torch"`` or ``"reference"`` insists.

    Returns:
        h of all steps ``(T, B, H)``, the last h and the last c, both ``(B, H)``.
    """
    xp = inputs.xp
    # under autocast the projected input has the lower precision
    inputs = inputs._replace(weight_hh=inputs.weight_hh.to(xp.dtype))
    if lstm_scan_choice(xp, backend=backend).backend != "fused":
        return lstm_scan_reference(inputs, options)
    from torchrum.ops.lstm_scan.fused import lstm_scan_fused  # triton is absent on machines without CUDA

    seed = inputs.seed if options.draws else None
    if options.draws and seed is None:
        seed = draw_seed(xp.device)
    return lstm_scan_fused(inputs._replace(seed=seed), options)
