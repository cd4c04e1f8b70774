"""The gated scan on any recent GPU: one matmul and one Triton kernel per step, replayed as CUDA graphs.

``stepwise_triton`` is imported on first use: it needs Triton, which is absent on machines without a GPU.
"""

from torch import Tensor

from torchrum.ops.gated_scan.types import GatedGradients, GatedInputs, GatedOptions
from torchrum.ops.kernels.machine import row_kernel_obstacle

LARGEST_HEAD = 256
"""Most units per head: a program holds at least one head in its registers."""


def obstacle(inputs: GatedInputs, options: GatedOptions) -> str | None:
    """Return the reason why this design cannot run, or None."""
    if inputs.xp.device.type != "cuda":
        return f"the input is on {inputs.xp.device.type}"
    if options.rotated_units > 0 and options.head_size > LARGEST_HEAD:
        return f"a head has {options.head_size} units, and the kernels hold at most {LARGEST_HEAD}"
    return row_kernel_obstacle(inputs.xp, inputs.h0.shape[-1])


def forward(inputs: GatedInputs, options: GatedOptions, save: bool = True) -> tuple[Tensor, Tensor]:
    """Compute the states and, with ``save``, the gates."""
    from torchrum.ops.gated_scan.stepwise_triton import forward

    return forward(inputs, options, save)


def backward(
    grad_out: Tensor, inputs: GatedInputs, out: Tensor, gates: Tensor, options: GatedOptions
) -> GatedGradients:
    """Compute the gradients of the inputs from the gradient of the states."""
    from torchrum.ops.gated_scan.stepwise_triton import backward

    return backward(grad_out, inputs, out, gates, options)
