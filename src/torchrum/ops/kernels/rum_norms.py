"""Gradients of layer norm's gains and shifts, after the loop: a sum over all steps and rows that no step waits for.

Each step kept the gradient of its state as it left zoneout (``dseen``, in the scan's dtype) and five scalars per row;
the rest is the step again, pointwise.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrum.ops.kernels.compiling import launch
from torchrum.ops.kernels.rum_step import load_norms
from torchrum.ops.kernels.rum_step_backward import STATS, redo_step, step_norm_grads

PROGRAMS = 2048  # each has its rows and columns; what they find is summed over the rows afterwards
BLOCK = 256  # columns of a program


@triton.jit(do_not_specialize=["rows", "B"])
def rum_norm_grad_kernel(
    gates, eps, states, h0, stats, dseen, sums, ln_weight, ln_bias, rows, B,
    H: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr,
    ACTIVATION: tl.constexpr, ETA: tl.constexpr,
    GATES_WIDTH: tl.constexpr, EPS_WIDTH: tl.constexpr, STATES_WIDTH: tl.constexpr,
):  # fmt: skip
    """``sums[program] = (gains, shifts)``. With ``h0``, states begin after the first step, else before it."""
    G: tl.constexpr = 2 if GATE else 1
    program = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = j < H
    norms = load_norms(ln_weight, ln_bias, j, mask, H, GATE, LN)
    zero = tl.zeros([BLOCK], tl.float32)
    gain_t, gain_u, gain_c, shift_t, shift_u, shift_c = zero, zero, zero, zero, zero, zero
    row = program.to(tl.int64)
    while row < rows:
        tau_raw = tl.load(gates + row * GATES_WIDTH + j, mask=mask, other=0.0).to(tl.float32)
        u_raw = tau_raw
        if GATE:
            u_raw = tl.load(gates + row * GATES_WIDTH + H + j, mask=mask, other=0.0).to(tl.float32)
        eps_row = tl.load(eps + row * EPS_WIDTH + j, mask=mask, other=0.0).to(tl.float32)
        if h0 is None:
            h = tl.load(states + row * STATES_WIDTH + j, mask=mask, other=0.0).to(tl.float32)
        else:
            h = tl.load(states + (row - B) * STATES_WIDTH + j, mask=mask & (row >= B), other=0.0).to(tl.float32)
            h += tl.load(h0 + row * H + j, mask=mask & (row < B), other=0.0)
        dnew = tl.load(dseen + row * H + j, mask=mask, other=0.0).to(tl.float32)
        stat = stats + row * STATS
        again = redo_step(tau_raw, u_raw, eps_row, h, stat, norms, j, mask, GATE, LN, ACTIVATION, ETA)
        dtau, normed_t, dgate, normed_u, dc, normed_c = step_norm_grads(dnew, again, h, stat, H, GATE, LN, ETA)
        gain_t += dtau * normed_t
        shift_t += dtau
        gain_c += dc * normed_c
        shift_c += dc
        if GATE:
            gain_u += dgate * normed_u
            shift_u += dgate
        row += tl.num_programs(0)
    sums += program.to(tl.int64) * (2 * (G + 1) * H) + j
    shifts = sums + (G + 1) * H
    tl.store(sums, gain_t, mask=mask)
    tl.store(shifts, shift_t, mask=mask)
    tl.store(sums + G * H, gain_c, mask=mask)
    tl.store(shifts + G * H, shift_c, mask=mask)
    if GATE:
        tl.store(sums + H, gain_u, mask=mask)
        tl.store(shifts + H, shift_u, mask=mask)


class NormTensors(NamedTuple):
    """What the gradients of layer norm's parameters are made of; all but ``h0`` are ``(T, B, ...)``."""

    gates: Tensor
    """The raw gates of all steps, tau first."""
    eps: Tensor
    states: Tensor
    """Before each step; or after it, and ``h0`` the one before the first."""
    h0: Tensor | None
    stats: Tensor
    """What the steps kept."""
    dseen: Tensor
    """The states' gradients behind zoneout."""


def norm_grads(tensors: NormTensors, ln_weight: Tensor, ln_bias: Tensor, flags: dict[str, Any]) -> Tensor:
    """``(2, blocks*H)`` in float32: gradients of the gains and of the shifts.

    Args:
        ln_weight, ln_bias: float32.
        flags: compile-time arguments of the row kernel.
    """
    gates, eps, states, _, _, dseen = tensors
    H = flags["H"]
    (T, B), size = dseen.shape[:2], ln_weight.numel()
    rows = T * B
    block = min(BLOCK, flags["BLOCK"])
    tiles = triton.cdiv(H, block)
    programs = min(rows, triton.cdiv(PROGRAMS, tiles))
    sums = torch.empty((programs, 2, size), device=dseen.device)
    launch(
        rum_norm_grad_kernel, (programs, tiles),
        *tensors, sums, ln_weight, ln_bias, rows, B,
        H=H, BLOCK=block, **{name: flags[name] for name in ("GATE", "LN", "ACTIVATION", "ETA")},
        GATES_WIDTH=gates.stride(1), EPS_WIDTH=eps.stride(1), STATES_WIDTH=states.stride(1),
        num_warps=max(1, block // 128),
    )  # fmt: skip
    return sums.sum(0)
