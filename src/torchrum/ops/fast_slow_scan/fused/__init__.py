"""The fused GPU backend of the Fast-Slow scan. Triton is imported on first use."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrum.ops.fast_slow_scan.options import STREAMS_PER_CELL, FastSlowOptions
from torchrum.ops.fast_slow_scan.reference import fast_slow_scan_reference
from torchrum.ops.fast_slow_scan.types import FastSlowInputs, State
from torchrum.ops.kernels.machine import KERNEL_ACTIVATIONS, row_kernel_obstacle, tracing_obstacle
from torchrum.ops.kernels.masks import stream_seeds
from torchrum.ops.kernels.weights import CellWeights, reference_gradients
from torchrum.ops.lstm_scan import LstmOptions
from torchrum.ops.rum_scan import RumOptions

NUM_WEIGHTS = len(CellWeights._fields)


def obstacle(xp: Tensor, slow_size: int, options: FastSlowOptions) -> str | None:
    """Why the fused scan cannot run on such an input, in words, or None."""
    return (
        tracing_obstacle(xp)
        or row_kernel_obstacle(xp, max(xp.shape[-1] // 4, slow_size))
        or (rum_obstacle(options.slow) if isinstance(options.slow, RumOptions) else None)
    )


def rum_obstacle(options: RumOptions) -> str | None:
    if options.lam != 0:
        return f"the slow cell's lam is {options.lam}, and a slow RUM's kernels are written for lam 0"
    if options.activation not in KERNEL_ACTIVATIONS:
        return f"the slow cell's activation is {options.activation!r}, and the kernels know only " + ", ".join(
            KERNEL_ACTIVATIONS
        )
    if options.target_activation is not None:
        return "the slow cell has a target_activation, and the kernels have none"
    return None


def unflatten(tensors: Sequence[Any], seed: Tensor | None, options: FastSlowOptions) -> FastSlowInputs:
    """The inputs from one flat list: xp, the states' parts, the weights' parts."""
    slow_parts = 2 if isinstance(options.slow, LstmOptions) else 1
    xp, fast, slow, flat = tensors[0], tensors[1:3], tensors[3 : 3 + slow_parts], tensors[3 + slow_parts :]
    weights = [CellWeights(*flat[i : i + NUM_WEIGHTS]) for i in range(0, len(flat), NUM_WEIGHTS)]
    return FastSlowInputs(xp, tuple(fast), tuple(slow), weights, seed)


class _FastSlowScan(torch.autograd.Function):
    """Tensors as ``unflatten`` takes them -> out, the last states' parts."""

    @staticmethod
    def forward(ctx: Any, options: FastSlowOptions, seed: Tensor | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        from torchrum.ops.fast_slow_scan.fused.scan import fast_slow_forward

        inputs = unflatten(tensors, seed, options)
        seeds = None if seed is None else stream_seeds(seed, STREAMS_PER_CELL * len(inputs.weights))
        out, fast, slow, saved = fast_slow_forward(inputs, seeds, options)
        ctx.options, ctx.count = options, len(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, seed, seeds, *(part for parts in saved for part in parts))
        return out, *fast, *slow

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from torchrum.ops.fast_slow_scan.fused.scan import Saved, fast_slow_backward

        options, everything = ctx.options, ctx.saved_tensors  # once: checkpointing unpacks them only once
        tensors, (seed, seeds, *kept) = everything[: ctx.count], everything[ctx.count :]
        if torch.is_grad_enabled():  # create_graph=True: the reference is differentiable twice

            def scan(*given: Tensor | None) -> tuple[Tensor, ...]:
                out, fast, slow = fast_slow_scan_reference(unflatten(given, seed, options), options)
                return out, *fast, *slow

            return None, None, *reference_gradients(scan, tensors, grads, ctx.needs_input_grad[2:])
        inputs = unflatten(tensors, seed, options)
        n = len(inputs.weights)
        saved = Saved(*(tuple(kept[i : i + n]) for i in range(0, 4 * n, n)))
        dxp, dstates, dweights = fast_slow_backward(grads, inputs, seeds, saved, options)
        return None, None, dxp, *dstates, *(part for cell in dweights for part in cell)


@torch.compiler.disable  # graphs and kernels of its own: a compiler has nothing to add
def fast_slow_scan_fused(inputs: FastSlowInputs, options: FastSlowOptions) -> tuple[Tensor, State, State]:
    """The arguments and results of ``fast_slow_scan_reference``."""
    xp, fast, slow, weights, seed = inputs
    flat = (part for cell in weights for part in cell)
    out, *states = _FastSlowScan.apply(options, seed, xp, *fast, *slow, *flat)
    return out, tuple(states[:2]), tuple(states[2:])
