"""A whole LSTM sequence: from projected inputs and an initial state to all states."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrum.ops._dispatch import Backend, Choice, choose_fused
from torchrum.ops.kernels.linear import CellWeights
from torchrum.ops.kernels.machine import row_kernel_obstacle, tracing_obstacle
from torchrum.ops.kernels.masks import draw_seed
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

if TYPE_CHECKING:
    from torchrum.ops.kernels.chain import Plan

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
    seed = inputs.seed if options.draws else None
    if options.draws and seed is None:
        seed = draw_seed(xp.device)
    return lstm_scan_fused(inputs._replace(seed=seed), options)


@functools.lru_cache(256)
def lstm_plans(hidden: int, options: LstmOptions) -> tuple["Plan", ...]:
    """The chain of an LSTM, which reads its own state."""
    from torchrum.ops.kernels.chain import LstmBackward, LstmForward, Plan  # triton is absent on machines without CUDA

    plan = Plan(
        stages=(LstmForward, LstmBackward),
        number=0,
        hidden=hidden,
        inputs=(hidden,),
        blocks=4,
        norms=5 if options.layer_norm else 0,
        state=(0, 1),
        plain=(0, 0),
        dropped=None,
        dropout=0.0,
        flags=tuple(options.kernel_flags().items()),
    )
    return (plan,)


@torch.compiler.disable  # graphs and kernels of its own: a compiler has nothing to add
def lstm_scan_fused(inputs: LstmInputs, options: LstmOptions) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments and results of ``lstm_scan_reference``."""
    from torchrum.ops.kernels.chain import chain_scan

    xp, h0, c0, weight_hh, ln_weight, ln_bias, lengths, seed = inputs

    def reference(xp: Tensor, states: Sequence[Tensor], weights: Sequence[CellWeights]) -> tuple[Tensor, ...]:
        (h0, c0), (_, weight_hh, _, ln_weight, ln_bias) = states, weights[0]
        return lstm_scan_reference(LstmInputs(xp, h0, c0, weight_hh, ln_weight, ln_bias, lengths, seed), options)

    weights = [CellWeights(None, weight_hh, None, ln_weight, ln_bias)]
    plans = lstm_plans(weight_hh.shape[1], options)
    out, (h, c) = chain_scan(plans, xp, (h0, c0), weights, seed, lengths, options.training, reference)
    return out, h, c
