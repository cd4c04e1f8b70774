"""Backward of the lam = 0 scan: one row kernel and one matmul per step, after a parallel pass over all steps.

The forward saved the raw gates. The parallel pass redoes the forward's sums from them for all T at once, so the
sequential kernel rebuilds its step pointwise and waits only for the sums that hold the incoming gradient.
"""

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrum.ops.kernels.matmul import StepMatmul, load_parts
from torchrum.ops.kernels.rows import own_row, prefetch
from torchrum.ops.kernels.rum_step import kept_new, load_norms, rum_cell
from torchrum.ops.kernels.rum_step_backward import (
    STATS,
    NormTensors,
    load_step,
    norm_grads,
    redo_step,
    store_stats,
    sums_ahead,
    undo_step,
)
from torchrum.ops.kernels.step_graphs import Pass, aligned, fill_table, plain_mode, run_pass, scan_key, tensor_at
from torchrum.ops.kernels.triton_launch import Launch, launch, padded, prepare
from torchrum.ops.kernels.weights import recurrent_weight_gradient
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.stepwise.scan import Buffers, launch_flags
from torchrum.ops.rum_scan.types import Gradients, Results, ScanInputs


@triton.jit(do_not_specialize=["B"])
def stepwise_stats_kernel(
    xp, out, gates, h0, stats, ln_weight, ln_bias, B,
    H: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr, LN_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr, ETA: tl.constexpr,
):  # fmt: skip
    """The scalars of one row of one step; all T * B of them in parallel."""
    row = tl.program_id(0).to(tl.int64)
    t = row // B
    b = row - t * B
    j = tl.arange(0, BLOCK)
    mask = j < H
    tau_raw, u_raw, eps, h = load_step(xp, out, gates, h0, row, t, b, B, j, mask, H, GATE)
    norms = load_norms(ln_weight, ln_bias, j, mask, H, GATE, LN)
    cell = rum_cell(tau_raw, u_raw, eps, h, norms, j, mask, H, GATE, LN, LN_EPS, ACTIVATION)
    store_stats(stats + row * STATS, cell, GATE, LN, ETA)


@triton.jit(do_not_specialize=["t", "T", "B"])
def stepwise_backward_kernel(
    table, xp, out, gates, stats, grad_out, dxp, dseen, parts, dstate, low, h0, ln_weight, ln_bias, lengths, seed,
    t, T, B,
    PARTS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr,
    LN: tl.constexpr, LN_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr, ETA: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One step back for row b. ``t`` is the step, or counts back from the table's step where there is a table."""
    dtype = low.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if table is not None:
        t = tl.load(table) - t
        T = tl.load(table + 7)
        xp = tensor_at(table, 1, dtype)
        out = tensor_at(table, 2, dtype)
        gates = tensor_at(table, 3, dtype)
        stats = tensor_at(table, 4, tl.float32)
        grad_out = tensor_at(table, 5, dtype)
        dxp = tensor_at(table, 6, dtype)
        if LN != "none":
            dseen = tensor_at(table, 8, dtype)
    b, row, j, mask = own_row(t, B, H, BLOCK)
    G: tl.constexpr = 2 if GATE else 1
    dxp += row * ((G + 1) * H)
    low += b * (G * HP)
    if LN != "none":
        dseen += row * H
    tau_raw, u_raw, eps, h = load_step(xp, out, gates, h0, row, t, b, B, j, mask, H, GATE)
    dh = tl.load(grad_out + row * H + j, mask=mask, other=0.0).to(tl.float32)
    if t > 0:  # what the next step back begins with
        BYTES: tl.constexpr = H * dtype.primitive_bitwidth // 8
        before = row - B
        prefetch(grad_out + before * H, BYTES)
        prefetch(gates + before * (G * H), G * BYTES)
        prefetch(xp + before * ((G + 1) * H) + G * H, BYTES)
        prefetch(stats + before * STATS, 4 * STATS)
        if t > 1:
            prefetch(out + (before - B) * H, BYTES)
    stats += row * STATS
    norms = load_norms(ln_weight, ln_bias, j, mask, H, GATE, LN)
    keep = kept_new(lengths, seed, t, b, j, H, ZONEOUT, KEEP_BELOW)
    again = redo_step(tau_raw, u_raw, eps, h, stats, norms, j, mask, GATE, LN, ACTIVATION, ETA)
    ahead = sums_ahead(again, GATE, LN, ETA)
    if PDL:  # all above was written before the matmul began, see BackwardSteps.begin
        tl.extra.cuda.gdc_wait()
    later = mask & (t + 1 < T)  # no step follows the last one
    dh += tl.load(dstate + b * H + j, mask=later, other=0.0)
    dh += load_parts(parts, b * HP + j, later, B * HP, PARTS)
    dtau, dgate, deps, dprev = undo_step(dh, again, ahead, keep, h, stats, dseen, j, mask, H, GATE, LN, ETA, ZONEOUT)
    tl.store(low + j, dtau.to(dtype), mask=mask)
    if GATE:
        tl.store(low + HP + j, dgate.to(dtype), mask=mask)
        tl.store(dxp + H + j, dgate.to(dtype), mask=mask)
    tl.store(dstate + b * H + j, dprev, mask=mask)
    tl.store(dxp + j, dtau.to(dtype), mask=mask)
    tl.store(dxp + G * H + j, deps.to(dtype), mask=mask)


class BackwardSteps(Buffers):
    """One row kernel and one matmul per step; h's gradient gets ``dstate`` and the matmul's output from later steps."""

    direction = "backward"
    stride = -1

    def __init__(self, like: Tensor, B: int, H: int, options: RumOptions, has_lengths: bool, graphed: bool) -> None:
        super().__init__(like, B, H, options, has_lengths, graphed)
        HP = padded(H)
        self.low = torch.zeros((B, self.G * HP), dtype=like.dtype, device=like.device)  # padding stays zero
        self.dstate = torch.empty((B, H), dtype=torch.float32, device=like.device)
        self.dseen = like.new_empty(0) if options.layer_norm else None  # made anew for each call
        self.flags = launch_flags(like, H, options, "backward")
        self.matmul = StepMatmul(self.low, self.weight, self.flags["PDL"], self.direction)

    def begin(
        self, xp: Tensor, out: Tensor, gates: Tensor, stats: Tensor, grad_out: Tensor, dxp: Tensor, *loaded: Any
    ) -> None:
        self.load(*loaded)
        self.sums(xp, out, gates, stats)
        # Under dependent launch the first row kernel reads ahead of the kernel before it, so that must write nothing
        # which is read ahead: neither the weight nor the scalars above.
        self.dstate.zero_()
        self.given = (xp, out, gates, stats, grad_out, dxp)
        if self.dseen is not None:
            self.dseen = out.new_empty(out.shape)
        if self.table is not None:
            fill_table(self.table, len(out) - 1, len(out), *self.given, self.dseen)

    def sums(self, xp: Tensor, out: Tensor, gates: Tensor, stats: Tensor) -> None:
        """Enqueue the parallel pass over all steps."""
        names = ("H", "BLOCK", "GATE", "LN", "LN_EPS", "ACTIVATION", "ETA")
        launch(
            stepwise_stats_kernel, (out.shape[0] * self.B,),
            xp, out, gates, self.h0, stats, self.ln_weight, self.ln_bias, self.B,
            **{name: self.flags[name] for name in names}, num_warps=min(self.flags["num_warps"], 8),
        )  # fmt: skip

    def row(self, table: Tensor | None, t: int) -> Launch:
        given = (*self.given, self.dseen) if table is None else [None] * (len(self.given) + 1)
        return prepare(
            stepwise_backward_kernel, (self.B,),
            table, *given, self.matmul.out, self.dstate, self.low, self.h0,
            self.ln_weight, self.ln_bias, self.lengths, self.seed, t, len(self.given[0]), self.B,
            PARTS=self.matmul.parts, **self.flags,
        )  # fmt: skip

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Gradient of the first state and of layer norm's (weight, bias), both in float32."""
        dh0 = self.dstate + self.matmul.out[:, :, : self.H].float().sum(0)
        if self.dseen is None or self.ln_weight is None or self.ln_bias is None:
            return dh0, None
        xp, out, gates, stats, _, _ = self.given
        eps = xp[..., self.G * self.H :]
        tensors = NormTensors(gates, eps, out, self.h0, stats, self.dseen)
        return dh0, norm_grads(tensors, self.ln_weight, self.ln_bias, self.flags)

    def forget(self) -> None:
        super().forget()
        self.dseen = None if self.dseen is None else self.dseen.new_empty(0)


def backward(
    grad_out: Tensor, grad_R: None, inputs: ScanInputs, results: Results, options: RumOptions, need_R0: bool
) -> Gradients:
    """Gradients of the inputs, each in the dtype of its tensor; there is no R with lam 0."""
    xp, h0, _, weight_hh, ln_weight, ln_bias, lengths, seed = inputs
    out, _, (gates, _) = results
    assert gates is not None
    (T, B, _), H = xp.shape, weight_hh.shape[1]
    with plain_mode(xp):
        dxp = xp.new_empty(xp.shape)
        if xp.numel() == 0:
            dh0, dweight, *dln = (None if x is None else torch.zeros_like(x) for x in (h0, *inputs.weights))
            return Gradients(dxp, dh0, None, dweight, *dln)  # type: ignore[arg-type]
        xp, out, gates, grad_out = aligned(xp), aligned(out), aligned(gates), aligned(grad_out.to(xp.dtype))
        weight_hh, stats = weight_hh.contiguous(), xp.new_empty((T, B, STATS.value), dtype=torch.float32)

        def key() -> Hashable:
            return scan_key("rum", "backward", xp, H, lengths is not None, *options.kernel_flags().values())

        def build(graphed: bool) -> BackwardSteps:
            return BackwardSteps(xp, B, H, options, lengths is not None, graphed)

        def begin(steps: BackwardSteps) -> None:
            loaded = (h0, weight_hh, ln_weight, ln_bias, lengths, seed)
            steps.begin(xp, out, gates, stats, grad_out, dxp, *loaded)

        dh0, ln_grads = run_pass(Pass(key, build, begin, BackwardSteps.finish), xp, T)
        dweight = recurrent_weight_gradient(dxp, weight_hh.shape[0], None if inputs.from_zero else h0, out).to(
            weight_hh.dtype
        )
        grads = Gradients(dxp, dh0.to(h0.dtype), None, dweight)
        if ln_grads is None or ln_weight is None or ln_bias is None:
            return grads
        return grads._replace(ln_weight=ln_grads[0].to(ln_weight.dtype), ln_bias=ln_grads[1].to(ln_bias.dtype))
