"""The scan as torch's ``scan`` operator around the reference step: what ONNX and programs without torchrum can hold.

Neither the number of steps nor the batch size is baked in; ONNX has the same operator, ``Scan``.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op  # a prototype of torch: there is no public path to it yet

from torchrum.ops.kernels.precision import working_dtype
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.reference import rum_step_reference
from torchrum.ops.rum_scan.types import ScanInputs, StepWeights


def rum_scan_form(inputs: ScanInputs, options: RumOptions) -> tuple[Tensor, Tensor | None]:
    """All states ``(T, B, H)`` and the last R, in evaluation, for lam 0 and 1.

    Everything is detached: the exporter to ONNX fails on an operator whose operands ask for gradients.
    """
    if options.lam not in (0, 1):
        raise ValueError(
            f"RUM: lam is {options.lam}; ONNX holds 0 and 1 only, other powers of R have no operator there."
        )
    options = options.with_training(False)
    xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, _ = inputs
    dtype, (B, H) = working_dtype(xp.dtype), h0.shape
    start = [h0.detach().to(dtype).contiguous()]
    if options.keeps_rotation:
        R = torch.eye(H, dtype=dtype, device=xp.device).expand(B, H, H) if R0 is None else R0.detach()
        start.append(R.to(dtype).contiguous())
    norm = [part.detach() for part in (ln_weight, ln_bias) if part is not None]
    fixed = [weight_hh.detach().to(xp.dtype), *norm, *([] if lengths is None else [lengths])]
    # a symbolic batch size must be among the operands, or Inductor cannot allocate the stacked states
    sizes = [size for size in xp.shape[1:2] if isinstance(size, torch.SymInt)]
    step = _make_step(len(start), bool(norm), lengths is not None, options)
    steps = torch.arange(xp.shape[0], device=xp.device)
    _, *memory, states = scan_op(step, start, [xp.detach(), steps], (*fixed, *sizes))
    return states.to(xp.dtype), memory[0] if memory else None


def _make_step(carried: int, norm: bool, masked: bool, options: RumOptions) -> Callable[..., list[Tensor]]:
    def step(*parts: Tensor) -> list[Tensor]:
        """Carry, slices of this step, then what stays: the order in which the operator passes them."""
        h, *memory = parts[:carried]
        now, t, weight_hh, *others = parts[carried:]
        R = memory[0] if memory else None
        weights = StepWeights(weight_hh, *(others[:2] if norm else ()))
        new, new_R = rum_step_reference(now, h, R, weights, None, options)
        if masked:
            going = (t < others[2 if norm else 0]).unsqueeze(-1)  # (B, 1)
            new = torch.where(going, new, h)
            new_R = None if R is None or new_R is None else torch.where(going.unsqueeze(-1), new_R, R)
        return [new, *([] if new_R is None else [new_R]), new.clone()]  # carry, then output: they may not alias

    return step
