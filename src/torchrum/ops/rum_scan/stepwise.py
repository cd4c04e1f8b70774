"""lam = 0 on any recent GPU: one matmul and one Triton kernel per step, replayed as CUDA graphs.

``stepwise_triton`` is imported on first use: it needs Triton, which is absent on machines without a GPU.
"""

from torch import Tensor

from torchrum.ops.kernels.machine import KERNEL_ACTIVATIONS, row_kernel_obstacle
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.types import NO_COPIES, Copies, Gradients, Residuals, Results, ScanInputs


def obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """Return the reason why this design cannot run, or None."""
    if inputs.xp.device.type != "cuda":
        return f"the input is on {inputs.xp.device.type}"
    if options.lam != 0:
        return f"lam is {options.lam}, and the kernels are written for lam 0"
    if options.activation not in KERNEL_ACTIVATIONS:
        return f"activation is {options.activation!r}, and the kernels know only " + ", ".join(KERNEL_ACTIVATIONS)
    return row_kernel_obstacle(inputs.xp, inputs.h0.shape[-1])


def empty_results(inputs: ScanInputs, options: RumOptions) -> Results:
    """Allocate the results of ``forward``, which saves only the raw gates for the backward."""
    xp, (T, B), H = inputs.xp, inputs.xp.shape[:2], inputs.h0.shape[-1]
    return Results(xp.new_empty(T, B, H), None, Residuals(xp.new_empty(T, B, options.num_gates * H)))


def forward(inputs: ScanInputs, options: RumOptions, save: bool = True, copies: Copies = NO_COPIES) -> Results:
    """Compute the states ``(T, B, H)`` and, even without ``save``, the raw gates ``(T, B, num_gates * H)``."""
    from torchrum.ops.rum_scan.stepwise_triton import forward

    results = forward(inputs, options)
    copies.fill(results)
    return results


def backward(
    grad_out: Tensor, grad_R: None, inputs: ScanInputs, results: Results, options: RumOptions, need_R0: bool
) -> Gradients:
    """Compute the gradients of the inputs, each in the dtype of its tensor; there is no R with lam 0."""
    from torchrum.ops.rum_scan.stepwise_triton import backward

    return backward(grad_out, inputs, results, options)
