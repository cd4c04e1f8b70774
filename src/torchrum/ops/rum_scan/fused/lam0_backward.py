"""Backward of the lam = 0 scan: one row kernel and one matrix product a step, after a parallel pass over all steps.

The forward saved the raw gates. The parallel pass redoes the forward's sums from them for all T at once, so the
sequential kernel rebuilds its step pointwise and waits only for the sums that hold the incoming gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..options import RumOptions
from .common import prefetch
from .compiling import launch
from .graphs import aligned, can_graph, fill_table, plain_mode, run_graphed
from .lam0_forward import Buffers, kept_new, launch_options, load_norms, padded, rum_cell, scan_key
from .lam0_norms import norm_grads
from .lam0_step import STATS, load_step, redo_step, store_stats, sums_ahead, undo_step
from .product import Product, load_parts
from .weight_gradient import weight_gradient


@triton.jit(do_not_specialize=["B"])
def lam0_stats_kernel(
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
    tau_raw, u_raw, e, h = load_step(xp, out, gates, h0, row, t, b, B, j, mask, H, GATE)
    norms = load_norms(ln_weight, ln_bias, j, mask, H, GATE, LN)
    new, inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f, mean_t, rstd_t, mean_u, rstd_u, mean_c, rstd_c = rum_cell(
        tau_raw, u_raw, e, h, norms, j, mask, H, GATE, LN, LN_EPS, ACTIVATION
    )
    store_stats(
        stats + row * STATS, new, inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f,
        mean_t, rstd_t, mean_u, rstd_u, mean_c, rstd_c, GATE, LN, ETA,
    )  # fmt: skip


@triton.jit(do_not_specialize=["t", "T", "B"])
def lam0_backward_kernel(
    table, xp, out, gates, stats, grad_out, dxp, dseen, product, dstate, low, h0, ln_weight, ln_bias, lengths, seed,
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
        xp = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(dtype)), 16)
        out = tl.multiple_of(tl.load(table + 2).to(tl.pointer_type(dtype)), 16)
        gates = tl.multiple_of(tl.load(table + 3).to(tl.pointer_type(dtype)), 16)
        stats = tl.multiple_of(tl.load(table + 4).to(tl.pointer_type(tl.float32)), 16)
        grad_out = tl.multiple_of(tl.load(table + 5).to(tl.pointer_type(dtype)), 16)
        dxp = tl.multiple_of(tl.load(table + 6).to(tl.pointer_type(dtype)), 16)
        if LN != "none":
            dseen = tl.multiple_of(tl.load(table + 8).to(tl.pointer_type(dtype)), 16)
    b = tl.program_id(0)
    row = t.to(tl.int64) * B + b
    G: tl.constexpr = 2 if GATE else 1
    j = tl.arange(0, BLOCK)
    mask = j < H
    dxp += row * ((G + 1) * H)
    low += b * (G * HP)
    if LN != "none":
        dseen += row * H
    tau_raw, u_raw, e, h = load_step(xp, out, gates, h0, row, t, b, B, j, mask, H, GATE)
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
    again = redo_step(tau_raw, u_raw, e, h, stats, norms, j, mask, GATE, LN, ACTIVATION, ETA)
    ahead = sums_ahead(again, GATE, LN, ETA)
    if PDL:  # all above was written before the product began, see BackwardSteps.begin
        tl.extra.cuda.gdc_wait()
    told = mask & (t + 1 < T)  # the last step hears from none after it
    dh += tl.load(dstate + b * H + j, mask=told, other=0.0)
    dh += load_parts(product, b * HP + j, told, B * HP, PARTS)
    dtau, dgate, deps, dprev = undo_step(dh, again, ahead, keep, h, stats, dseen, j, mask, H, GATE, LN, ETA, ZONEOUT)
    tl.store(low + j, dtau.to(dtype), mask=mask)
    if GATE:
        tl.store(low + HP + j, dgate.to(dtype), mask=mask)
        tl.store(dxp + H + j, dgate.to(dtype), mask=mask)
    tl.store(dstate + b * H + j, dprev, mask=mask)
    tl.store(dxp + j, dtau.to(dtype), mask=mask)
    tl.store(dxp + G * H + j, deps.to(dtype), mask=mask)


class BackwardSteps(Buffers):
    """One row kernel and one product a step. What h's gradient gets from later steps is ``dstate + product``."""

    direction = "backward"
    stride = -1

    def __init__(self, like: Tensor, B: int, H: int, options: RumOptions, has_lengths: bool, graphed: bool) -> None:
        super().__init__(like, B, H, options, has_lengths, graphed)
        HP = padded(H)
        self.low = torch.zeros((B, self.G * HP), dtype=like.dtype, device=like.device)  # padding stays zero
        self.dstate = torch.empty((B, H), dtype=torch.float32, device=like.device)
        self.dseen = like.new_empty(0) if options.layer_norm else None  # made anew for each call
        self.flags = launch_options(like, H, options, "backward")
        self.product = Product(self.low, self.weight, self.flags["PDL"], self.direction)

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
            lam0_stats_kernel, (out.shape[0] * self.B,),
            xp, out, gates, self.h0, stats, self.ln_weight, self.ln_bias, self.B,
            **{name: self.flags[name] for name in names}, num_warps=min(self.flags["num_warps"], 8),
        )  # fmt: skip

    def row(self, table: Tensor | None, t: int) -> None:
        given = (*self.given, self.dseen) if table is None else [None] * (len(self.given) + 1)
        kernel = launch(
            lam0_backward_kernel, (self.B,),
            table, *given, self.product.out, self.dstate, self.low, self.h0,
            self.ln_weight, self.ln_bias, self.lengths, self.seed, t, len(self.given[0]), self.B,
            PARTS=self.product.parts, **self.flags,
        )  # fmt: skip
        self.launched(kernel)

    def step(self, t: int) -> None:
        self.row(self.table, t)
        self.product()

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Gradient of the first state and of layer norm's (weight, bias), both in float32."""
        dh0 = self.dstate + self.product.out[:, :, : self.H].float().sum(0)
        if self.dseen is None or self.ln_weight is None or self.ln_bias is None:
            return dh0, None
        xp, out, gates, stats, _, _ = self.given
        eps = xp[..., self.G * self.H :]
        return dh0, norm_grads(
            gates, eps, out, self.h0, stats, self.dseen, self.ln_weight, self.ln_bias, self.H, self.flags
        )

    def forget(self) -> None:
        super().forget()
        self.dseen = None if self.dseen is None else self.dseen.new_empty(0)


def lam0_backward(
    grad_out: Tensor,
    xp: Tensor,
    h0: Tensor,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    gates: Tensor,
    options: RumOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``xp``, ``h0``, ``weight_hh``, ``ln_weight`` and ``ln_bias``, each in the dtype of its tensor."""
    T, B, H = xp.shape[0], xp.shape[1], weight_hh.shape[1]
    with plain_mode(xp):
        dxp = xp.new_empty(xp.shape)
        if xp.numel() == 0:
            zeros = [None if x is None else torch.zeros_like(x) for x in (h0, weight_hh, ln_weight, ln_bias)]
            return dxp, *zeros  # type: ignore[return-value]
        xp, out, gates, grad_out = aligned(xp), aligned(out), aligned(gates), aligned(grad_out.to(xp.dtype))
        stats = xp.new_empty((T, B, STATS.value), dtype=torch.float32)
        given = (xp, out, gates, stats, grad_out, dxp, h0, weight_hh.contiguous(), ln_weight, ln_bias, lengths, seed)

        def build(graphed: bool = True) -> BackwardSteps:
            return BackwardSteps(xp, B, H, options, lengths is not None, graphed)

        if can_graph(xp, T):
            key = scan_key("backward", xp, B, H, options, lengths is not None)
            dh0, ln_grads = run_graphed(key, build, lambda s: s.begin(*given), T, lambda s: s.finish())
        else:
            steps = build(graphed=False)
            steps.begin(*given)
            for t in range(T - 1, -1, -1):
                steps.step(t)
            dh0, ln_grads = steps.finish()
        dweight = weight_gradient(dxp, h0, out, options.num_gates).to(weight_hh.dtype)
        if ln_grads is None or ln_weight is None or ln_bias is None:
            return dxp, dh0.to(h0.dtype), dweight, None, None
        return dxp, dh0.to(h0.dtype), dweight, ln_grads[0].to(ln_weight.dtype), ln_grads[1].to(ln_bias.dtype)
