"""The gated scan as torch's ``scan`` operator around its step: what ONNX and programs without torchrum can hold."""

from dataclasses import replace

import torch
from torch import Tensor

from torchrum.ops.gated_scan.reference import gated_step_reference
from torchrum.ops.gated_scan.types import GatedOptions
from torchrum.ops.kernels.linear import working_dtype


def gated_scan_form(
    xp: Tensor,
    h0: Tensor,
    weight_hh: Tensor,
    bias_hh: Tensor | None,
    lengths: Tensor | None,
    options: GatedOptions,
) -> Tensor:
    """All states ``(T, B, H)``, in evaluation, with dynamic T and B.

    Everything is detached, as in ``rum_scan_form``: the exporter to ONNX fails on operands that ask for gradients.
    """
    from torch._higher_order_ops.scan import scan_op  # a prototype of torch: there is no public path to it yet

    options = replace(options, training=False)
    bias = xp.new_zeros(len(weight_hh)) if bias_hh is None else bias_hh.detach().to(xp.dtype)
    fixed = [weight_hh.detach().to(xp.dtype), bias, *([] if lengths is None else [lengths])]

    def step(h: Tensor, now: Tensor, t: Tensor, weight_hh: Tensor, bias_hh: Tensor, *others: Tensor) -> list[Tensor]:
        new = gated_step_reference(now, h, weight_hh, bias_hh, None, options)
        if lengths is not None:
            new = torch.where((t < others[0]).unsqueeze(-1), new, h)
        return [new, new.clone()]  # carry, then output: they may not alias

    # a symbolic batch size must be among the operands, or Inductor cannot allocate the stacked states
    sizes = [size for size in xp.shape[1:2] if isinstance(size, torch.SymInt)]
    start, steps = h0.detach().to(working_dtype(xp.dtype)).contiguous(), torch.arange(xp.shape[0], device=xp.device)
    _, states = scan_op(step, [start], [xp.detach(), steps], (*fixed, *sizes))
    return states.to(xp.dtype)
