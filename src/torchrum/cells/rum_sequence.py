"""One RUM recurrence over a sequence: the projection, the scan, and what changes where no gradient is recorded."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops._dispatch import Backend
from ..ops._onednn import explained_linear
from ..ops.kernels.bf16x3 import bf16x3_linear
from ..ops.kernels.precision import autocast_dtype, exact_matmuls, rounds_matmuls, working_dtype
from ..ops.rum_scan import RumOptions, ScanInputs, StepWeights, native, operator_obstacle, rum_scan
from ..ops.rum_scan.native.linear import linear_applies, native_linear
from .base import State
from .rum_weights import Weights

EXACT_UNITS = 512
"""Hidden units up to which the fused scan of lam = 0 goes forward in exact matmuls while torch rounds to TF32; beyond,
its matmuls have sixteen bits."""

PART_STEPS = 1024
"""Steps, at least, of a part of a sequence that runs without gradients: many enough that its calls cost nothing."""
PART_NUMBERS = 2**18
"""Numbers, about, in the outputs of such a part; what it needs beside them is eight times that."""


def padded_bias(weights: Weights) -> Tensor | None:
    """The bias of the projection; zeros for eps where that has none."""
    weight, bias = weights["weight_ih"], weights["bias_ih"]
    if weight is None or bias is None or bias.shape[0] == weight.shape[0]:
        return bias
    return F.pad(bias, (0, weight.shape[0] - bias.shape[0]))


def project_rum(x: Tensor, weights: Weights, options: RumOptions, backend: Backend = "torch") -> Tensor:
    """``x W_ih^T + b`` for any leading dimensions; by the native scan's own matmul where ``backend`` allows it.

    TF32 would cost more than its ten bits: units of relu whose sign it turns over spoil the gradients far more than the
    rounding itself, and with lam other than 0 R adds up every step's rotation. So this matmul has at least the
    digits of the recurrent one.
    """
    weight, bias = weights["weight_ih"], padded_bias(weights)
    assert weight is not None
    if backend in ("auto", "native") and linear_applies(x, weight):
        return native_linear(x, weight, bias)
    if not rounds_matmuls(x):
        return F.linear(x, weight, bias) if torch.compiler.is_compiling() else explained_linear(x, weight, bias)
    if options.keeps_rotation or weight.shape[0] <= EXACT_UNITS * options.num_inputs:
        with exact_matmuls():
            return F.linear(x, weight, bias)
    return bf16x3_linear(x, weight, bias)


def run_rum(
    x: Tensor,
    state: State,
    weights: Weights,
    options: RumOptions,
    lengths: Tensor | None,
    training: bool,
    backend: Backend,
) -> tuple[Tensor, State]:
    """Project and scan ``x`` ``(T, B, I)`` -> outputs ``(T, B, H)`` and the last state.

    Where no gradient is recorded only the outputs grow with T: the native scan projects step by step, and else a long
    sequence goes through in parts.
    """
    if not torch.is_grad_enabled() and backend in ("auto", "native"):
        found = infer_rum(x, state, weights, options, lengths, training)
        if found is not None:
            return found
    steps = steps_at_once(x, state[0], options, training)
    if steps is None:
        return scan_rum(project_rum(x, weights, options, backend), state, weights, options, lengths, training, backend)
    whole: Tensor | None = None
    for start in range(0, x.shape[0], steps):
        xp = project_rum(x[start : start + steps], weights, options, backend)
        left = None if lengths is None else (lengths - start).clamp(min=0)
        output, state = scan_rum(xp, state, weights, options, left, training, backend)
        if whole is None:  # parts that wait to be joined would take the outputs' memory twice
            whole = output.new_empty(x.shape[0], *output.shape[1:])
        whole[start : start + steps] = output
    assert whole is not None
    return whole, state


def infer_rum(
    x: Tensor, state: State, weights: Weights, options: RumOptions, lengths: Tensor | None, training: bool
) -> tuple[Tensor, State] | None:
    """``run_rum`` by the native scan alone, None where it cannot; zoneout's masks would need a seed from torch."""
    weight_ih, weight_hh = weights["weight_ih"], weights["weight_hh"]
    assert weight_ih is not None and weight_hh is not None
    if not native.is_unwatched(x, weight_ih) or (options.zoneout > 0 and training):
        return None
    if operator_obstacle(options, weights["lam"] is not None) is not None:
        return None
    step_weights = StepWeights(weight_hh, weights["ln_weight"], weights["ln_bias"])
    output, R = native.infer_projecting(x, state, weight_ih, padded_bias(weights), step_weights, lengths, options)
    return output, (output[-1],) if R is None else (output[-1], R)


def steps_at_once(x: Tensor, h: Tensor, options: RumOptions, training: bool) -> int | None:
    """How many steps a part of a long sequence has; None where it is to run as a whole."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if x.dtype != working_dtype(x.dtype) or autocast_dtype(x.device.type) is not None:
        return None  # a scan carries its state in float32, which would be rounded between parts
    if options.zoneout > 0 and training:
        return None  # the masks are one draw for the sequence, which a checkpoint's second run must meet again
    steps = max(PART_STEPS, PART_NUMBERS // max(h.numel(), 1) // PART_STEPS * PART_STEPS)
    return steps if x.shape[0] > 2 * steps else None


def scan_rum(
    xp: Tensor,
    state: State,
    weights: Weights,
    options: RumOptions,
    lengths: Tensor | None,
    training: bool,
    backend: Backend,
) -> tuple[Tensor, State]:
    """Run one recurrence over projected inputs ``(T, B, ...)`` -> outputs and the last state."""
    options = options.with_training(training)
    weight_hh = weights["weight_hh"]
    assert weight_hh is not None
    R = state[1] if len(state) == 2 else None
    inputs = ScanInputs(xp, state[0], R, weight_hh, weights["ln_weight"], weights["ln_bias"], lengths)
    output, R = rum_scan(inputs, options, lam=weights["lam"], backend=backend)
    return output, (output[-1],) if R is None else (output[-1], R)
