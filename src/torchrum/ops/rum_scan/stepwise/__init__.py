"""lam = 0 on any recent GPU: one matmul and one Triton kernel per step, replayed as CUDA graphs.

``forward`` and ``backward`` are imported on first use: they need Triton, which is absent on machines without a GPU.
"""

from typing import Any

from torchrum.ops.kernels.machine import KERNEL_ACTIVATIONS, row_kernel_obstacle
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.types import Residuals, Results, ScanInputs

__all__ = ["backward", "empty_results", "forward", "obstacle"]


def obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """Why this design cannot run, in words, or None."""
    if inputs.xp.device.type != "cuda":
        return f"the input is on {inputs.xp.device.type}"
    if options.lam != 0:
        return f"lam is {options.lam}, and the kernels are written for lam 0"
    if options.activation not in KERNEL_ACTIVATIONS:
        return f"activation is {options.activation!r}, and the kernels know only " + ", ".join(KERNEL_ACTIVATIONS)
    return row_kernel_obstacle(inputs.xp, inputs.h0.shape[-1])


def empty_results(inputs: ScanInputs, options: RumOptions) -> Results:
    """Buffers for what ``forward`` returns: the raw gates are all that it keeps."""
    xp, (T, B), H = inputs.xp, inputs.xp.shape[:2], inputs.h0.shape[-1]
    return Results(xp.new_empty(T, B, H), None, Residuals(xp.new_empty(T, B, options.num_gates * H)))


def __getattr__(name: str) -> Any:
    """``forward`` and ``backward``, names of this module from the first time that either is asked for."""
    if name not in ("forward", "backward"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchrum.ops.rum_scan.stepwise.scan import forward
    from torchrum.ops.rum_scan.stepwise.scan_backward import backward

    globals().update(forward=forward, backward=backward)
    return globals()[name]
