"""Triton kernels of the gated scan, one launch per step, and their launches.

A kernel runs everything in a step except the matmul. Sums stay inside a head, so each program holds whole heads of a
row, as a block of heads times units. A head is padded to a power of two. README.md has the derivation.
"""

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrum.ops.gated_scan.torch_backend import weight_gradients
from torchrum.ops.gated_scan.types import GatedGradients, GatedInputs, GatedOptions
from torchrum.ops.kernels.gated_step import find_plane, gated_step_backward, head_flags, inner_of, own_units
from torchrum.ops.kernels.matmul import ScanSteps, StepMatmul, load_parts, scan_key
from torchrum.ops.kernels.rows import sigmoid, tanh, zoneout_keep_new
from torchrum.ops.kernels.triton_launch import (
    Launch,
    Pass,
    aligned,
    plain_mode,
    prepare,
    run_pass,
    tensor_at,
)


@triton.jit
def share_of_new(lengths, seed, t, b, j, H: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr):
    """Return the share of the new value in the state, from zoneout and the length."""
    share = tl.zeros(j.shape, tl.float32) + 1.0
    if ZONEOUT == "train":
        share = tl.where(zoneout_keep_new(tl.load(seed), t, b * H + j, KEEP_BELOW), 1.0, 0.0)
    elif ZONEOUT is not None:
        share = share * (1.0 - ZONEOUT)
    if lengths is not None:
        share = tl.where(t < tl.load(lengths + b), share, 0.0)
    return share


@triton.jit(do_not_specialize=["t", "B"])
def gated_forward_kernel(
    table, xp, out, gates, parts, state, operand, bias, lengths, seed, t, B,
    PARTS: tl.constexpr, SAVE: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, HEAD: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr,
):  # fmt: skip
    """Run one forward step for the heads of one program in row b.

    If there is a table, it holds the step that ``t`` counts from and the addresses of the tensors.
    """
    dtype = operand.dtype.element_ty
    if table is not None:
        t = tl.load(table) + t
        xp = tensor_at(table, 1, dtype)
        out = tensor_at(table, 2, dtype)
        gates = tensor_at(table, 3, tl.float32)
    b = tl.program_id(0)
    row = t.to(tl.int64) * B + b
    j, mask = own_units(H, HEAD, SIZE, HEADS)
    xp += row * (3 * H) + j
    gates += row * (3 * H) + j
    parts += b * (3 * HP)
    h = tl.load(state + b * H + j, mask=mask, other=0.0)
    eps = tl.load(xp + 2 * H, mask=mask, other=0.0).to(tl.float32)
    r = tl.load(xp, mask=mask, other=0.0).to(tl.float32) + tl.load(bias + j, mask=mask, other=0.0)
    u = tl.load(xp + H, mask=mask, other=0.0).to(tl.float32) + tl.load(bias + H + j, mask=mask, other=0.0)
    r = sigmoid(r + load_parts(parts, j, mask, B * (3 * HP), PARTS))
    u = sigmoid(u + load_parts(parts + HP, j, mask, B * (3 * HP), PARTS))
    tau = tl.load(bias + 2 * H + j, mask=mask, other=0.0)
    tau += load_parts(parts + 2 * HP, j, mask, B * (3 * HP), PARTS)
    e, _, m, _, _, _ = find_plane(eps, tau, j, mask, K, HEAD)
    candidate = tanh(eps + r * inner_of(tau, h, e, m, j, K))
    new = u * h + (1.0 - u) * candidate
    share = share_of_new(lengths, seed, t, b, j, H, ZONEOUT, KEEP_BELOW)
    new = tl.where(share == 1.0, new, tl.where(share == 0.0, h, share * new + (1.0 - share) * h))
    tl.store(state + b * H + j, new, mask=mask)
    tl.store(operand + b * HP + j, new.to(dtype), mask=mask)
    tl.store(out + row * H + j, new.to(dtype), mask=mask)
    if SAVE:
        tl.store(gates, r, mask=mask)
        tl.store(gates + H, u, mask=mask)
        tl.store(gates + 2 * H, tau, mask=mask)


@triton.jit(do_not_specialize=["t", "T", "B"])
def gated_backward_kernel(
    table, xp, out, gates, grad_out, dxp, dgates, parts, dstate, operand, h0, lengths, seed, t, T, B,
    PARTS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, HEAD: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr,
):  # fmt: skip
    """Run one backward step. ``t`` is the step or, if there is a table, counts back from the table's step."""
    dtype = operand.dtype.element_ty
    if table is not None:
        t = tl.load(table) - t
        T = tl.load(table + 7)
        xp = tensor_at(table, 1, dtype)
        out = tensor_at(table, 2, dtype)
        gates = tensor_at(table, 3, tl.float32)
        grad_out = tensor_at(table, 4, dtype)
        dxp = tensor_at(table, 5, dtype)
        dgates = tensor_at(table, 6, dtype)
    b = tl.program_id(0)
    row = t.to(tl.int64) * B + b
    j, mask = own_units(H, HEAD, SIZE, HEADS)
    gates += row * (3 * H) + j
    eps = tl.load(xp + row * (3 * H) + 2 * H + j, mask=mask, other=0.0).to(tl.float32)
    r = tl.load(gates, mask=mask, other=0.0)
    u = tl.load(gates + H, mask=mask, other=0.0)
    tau = tl.load(gates + 2 * H, mask=mask, other=0.0)
    before = tl.load(out + (row - B) * H + j, mask=mask & (t > 0), other=0.0).to(tl.float32)
    h = tl.where(t > 0, before, tl.load(h0 + b * H + j, mask=mask & (t == 0), other=0.0))
    share = share_of_new(lengths, seed, t, b, j, H, ZONEOUT, KEEP_BELOW)

    later = mask & (t + 1 < T)  # no step follows the last one
    total = tl.load(grad_out + row * H + j, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(dstate + b * H + j, mask=later, other=0.0)
    total += load_parts(parts + b * HP, j, later, B * HP, PARTS)
    grad = total * share
    dr, du, dtau, deps, dh = gated_step_backward(grad, r, u, tau, eps, h, j, mask, K, HEAD)
    dh += total - grad
    dxp += row * (3 * H) + j
    dgates += row * (3 * H) + j
    operand += b * (3 * HP) + j
    tl.store(dstate + b * H + j, dh, mask=mask)
    tl.store(dxp, dr.to(dtype), mask=mask)
    tl.store(dxp + H, du.to(dtype), mask=mask)
    tl.store(dxp + 2 * H, deps.to(dtype), mask=mask)
    tl.store(dgates, dr.to(dtype), mask=mask)
    tl.store(dgates + H, du.to(dtype), mask=mask)
    tl.store(dgates + 2 * H, dtau.to(dtype), mask=mask)
    tl.store(operand, dr.to(dtype), mask=mask)
    tl.store(operand + HP, du.to(dtype), mask=mask)
    tl.store(operand + 2 * HP, dtau.to(dtype), mask=mask)


class Steps(ScanSteps):
    """The parts common to both directions: the bias, and the division of rows into programs."""

    def __init__(self, inputs: GatedInputs, options: GatedOptions, graphed: bool) -> None:
        super().__init__(inputs, 3, options.draws, graphed)
        self.bias = torch.empty(3 * self.H, device=self.h0.device)
        division = head_flags(self.H, options.head_size, options.rotated_units)
        self.flags = {"H": self.H, "HP": self.HP, **division, **options.kernel_flags()}
        self.grid = self.B, triton.cdiv(self.H, self.flags["HEAD"] * self.flags["HEADS"])


class ForwardSteps(Steps):
    """One matmul and one row kernel per step; ``h0`` is the running state in float32, ``operand`` the matmul's."""

    direction = "forward"
    stride = 1

    def __init__(self, inputs: GatedInputs, options: GatedOptions, graphed: bool, save: bool) -> None:
        super().__init__(inputs, options, graphed)
        self.flags["SAVE"] = save
        self.operand = self.weight.new_zeros(self.B, self.HP)  # padding stays zero
        self.matmul = StepMatmul(self.operand, self.weight.t(), False, self.direction)

    def begin(self, inputs: GatedInputs, out: Tensor, gates: Tensor) -> None:
        self.load(inputs, inputs.xp, out, gates)
        self.bias.zero_() if inputs.bias_hh is None else self.bias.copy_(inputs.bias_hh)
        self.operand[:, : self.H].copy_(inputs.h0)

    def row(self, table: Tensor | None, t: int) -> Launch:
        return prepare(
            gated_forward_kernel, self.grid, *self.tensors(table), self.matmul.out, self.h0, self.operand, self.bias,
            self.lengths, self.seed, t, self.B, PARTS=self.matmul.parts, **self.flags,
        )  # fmt: skip


class BackwardSteps(Steps):
    """One row kernel and one matmul per step; h's gradient is the sum of ``dstate`` and the matmul's output."""

    direction = "backward"
    stride = -1

    def __init__(self, inputs: GatedInputs, options: GatedOptions, graphed: bool) -> None:
        super().__init__(inputs, options, graphed)
        self.operand = self.weight.new_zeros(self.B, 3 * self.HP)  # padding stays zero
        self.dstate = torch.empty_like(self.h0)
        self.matmul = StepMatmul(self.operand, self.weight, False, self.direction)

    def begin(self, inputs: GatedInputs, *given: Tensor) -> None:
        self.load(inputs, inputs.xp, *given)

    def row(self, table: Tensor | None, t: int) -> Launch:
        return prepare(
            gated_backward_kernel, self.grid, *self.tensors(table), self.matmul.out, self.dstate, self.operand, self.h0,
            self.lengths, self.seed, t, self.T, self.B, PARTS=self.matmul.parts, **self.flags,
        )  # fmt: skip

    def finish(self) -> Tensor:
        """Return the gradient of the first state, in float32."""
        return self.dstate + self.matmul.out[:, :, : self.H].float().sum(0)


def _key(direction: str, inputs: GatedInputs, options: GatedOptions, *more: Any) -> Hashable:
    return scan_key("gated", direction, inputs.xp, options, inputs.lengths is not None, *more)


def forward(inputs: GatedInputs, options: GatedOptions, save: bool) -> tuple[Tensor, Tensor]:
    """Run the forward pass, see ``stepwise.forward``."""
    with plain_mode(inputs.xp):
        out, gates = inputs.empty_results(save)
        inputs = inputs._replace(xp=aligned(inputs.xp), weight_hh=inputs.weight_hh.contiguous())

        def next_pass() -> None:
            backward(out, inputs, out, gates, options)

        scan_pass: Pass[ForwardSteps, None] = Pass(
            key=lambda: _key("forward", inputs, options, save),
            build=lambda graphed: ForwardSteps(inputs, options, graphed, save),
            begin=lambda steps: steps.begin(inputs, out, gates),
            finish=lambda steps: None,
            next_pass=next_pass if save and options.training else None,
        )
        run_pass(scan_pass, inputs.xp, len(out))
    return out, gates


def backward(
    grad_out: Tensor, inputs: GatedInputs, out: Tensor, gates: Tensor, options: GatedOptions
) -> GatedGradients:
    """Run the backward pass, see ``stepwise.backward``."""
    with plain_mode(inputs.xp):
        xp = aligned(inputs.xp)
        inputs = inputs._replace(xp=xp, weight_hh=inputs.weight_hh.contiguous())
        dxp, dgates = torch.empty_like(xp), torch.empty_like(xp)
        given = (aligned(out), aligned(gates), aligned(grad_out.to(xp.dtype)), dxp, dgates)
        scan_pass: Pass[BackwardSteps, Tensor] = Pass(
            key=lambda: _key("backward", inputs, options),
            build=lambda graphed: BackwardSteps(inputs, options, graphed),
            begin=lambda steps: steps.begin(inputs, *given),
            finish=BackwardSteps.finish,
        )
        dh0 = run_pass(scan_pass, xp, len(out))
        return GatedGradients(dxp, dh0.to(inputs.h0.dtype), *weight_gradients(dgates, inputs, out))
