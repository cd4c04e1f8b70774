"""Backward of the lam = 0 scan: one row kernel and one matrix product a step, after a parallel pass over all steps.

The forward saved the raw gates. The parallel pass redoes the forward's sums from them for all T at once, so the
sequential kernel rebuilds its step pointwise and waits only for the sums that hold the incoming gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ..options import RumOptions
from .common import ACCURATE_COS, activate, activation_slope, prefetch, sigmoid, sum2, sum3, sum4, zoneout_keep_new
from .compiling import launch
from .graphs import aligned, can_graph, fill_table, plain_mode, run_graphed
from .lam0_forward import Buffers, launch_options, load_ln, padded, rum_cell, scan_key
from .product import Product, load_parts

STATS = tl.constexpr(20)  # float32 numbers kept for each row of each step


@triton.jit
def load_step(xp, out, gates, h0, row, t, b, B, j, mask, H: tl.constexpr, GATE: tl.constexpr):
    """What one row's step started from: raw gates, eps and the state before it."""
    G: tl.constexpr = 2 if GATE else 1
    e = tl.load(xp + row * ((G + 1) * H) + G * H + j, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(out + (row - B) * H + j, mask=mask & (t > 0), other=0.0).to(tl.float32)
    h += tl.load(h0 + b * H + j, mask=mask & (t == 0), other=0.0)
    tau_raw = tl.load(gates + row * (G * H) + j, mask=mask, other=0.0).to(tl.float32)
    u_raw = tau_raw
    if GATE:
        u_raw = tl.load(gates + row * (G * H) + H + j, mask=mask, other=0.0).to(tl.float32)
    return tau_raw, u_raw, e, h


@triton.jit
def store_stats(
    stats, new, inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f, mean_t, rstd_t, mean_u, rstd_u, mean_c, rstd_c,
    GATE: tl.constexpr, LN: tl.constexpr, ETA: tl.constexpr,
):  # fmt: skip
    """Keep what ``rum_cell`` returns; ``rum_cell_backward`` reads it."""
    tl.store(stats + 0, inv_e)
    tl.store(stats + 1, inv_t)
    tl.store(stats + 2, c)
    tl.store(stats + 3, k)
    tl.store(stats + 4, p)
    tl.store(stats + 5, q)
    tl.store(stats + 6, al)
    tl.store(stats + 7, be)
    tl.store(stats + 8, ga)
    tl.store(stats + 9, i.to(tl.float32))
    tl.store(stats + 10, u_i)
    tl.store(stats + 11, inv_f)
    if ETA is not None:
        norm = tl.sqrt(tl.sum(new * new, 0))
        tl.store(stats + 12, tl.where(norm <= 1e-12, 0.0, 1.0 / norm))
    if LN != "none":
        tl.store(stats + 13, mean_t)
        tl.store(stats + 14, rstd_t)
        tl.store(stats + 15, mean_c)
        tl.store(stats + 16, rstd_c)
        if GATE:
            tl.store(stats + 17, mean_u)
            tl.store(stats + 18, rstd_u)


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
    new, inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f, mean_t, rstd_t, mean_u, rstd_u, mean_c, rstd_c = rum_cell(
        tau_raw, u_raw, e, h, ln_weight, ln_bias, j, mask, H, GATE, LN, LN_EPS, ACTIVATION
    )
    store_stats(
        stats + row * STATS, new, inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f,
        mean_t, rstd_t, mean_u, rstd_u, mean_c, rstd_c, GATE, LN, ETA,
    )  # fmt: skip


@triton.jit
def add_ln_grad(grads, block: tl.constexpr, grad, normed, j, mask, H: tl.constexpr, G: tl.constexpr):
    """Add to this row's own line of the weight and bias gradients; the lines are summed after the last step."""
    weight = grads + block * H + j
    bias = weight + (G + 1) * H
    tl.store(weight, tl.load(weight, mask=mask, other=0.0) + grad * normed, mask=mask)
    tl.store(bias, tl.load(bias, mask=mask, other=0.0) + grad, mask=mask)


@triton.jit
def ln_backward(grad, normed, weight, rstd, total, projection, H: tl.constexpr):
    """Gradient of a layer norm's input from the sums of ``weight * grad`` and ``weight * grad * normed``."""
    return rstd * (weight * grad - total / H - normed * (projection / H))


@triton.jit
def rotation_backward(dz, dz_u, dz_w, u, w, h, inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f, j):
    """Gradients of ``Rot(e, tau) h`` to h, e and tau from ``dz`` and its products with the unit vectors u and w."""
    dz_v = dz_u + dz_w
    if c < ACCURATE_COS:  # u and w nearly cancel, and so would the two products
        dz_v = tl.sum(dz * (u + w), 0)
    dq = -k * dz_v
    dp = 2.0 * dz_w + dq
    dc = -k * al * dz_v
    dh = dz + dp * u + dq * w
    de = inv_e * (al * dz + dp * h + dc * w - (al * dz_u + dp * p + dc * c) * u)
    dtau = inv_t * (be * dz + dq * h + dc * u - (be * dz_w + dq * q + dc * c) * w)
    if i >= 0.0:  # half turn, whose second axis f counts as a constant: H_f H_u h
        axis = tl.where(j == i.to(tl.int32), 1.0, 0.0)
        dz_f = (tl.sum(dz * axis, 0) - u_i * dz_u) * inv_f
        f = (axis - u_i * u) * inv_f
        dg = dz - 2.0 * dz_f * f
        dh = dg - 2.0 * dz_u * u
        de = (-2.0 * inv_e) * (dz_u * h + p * dg - (2.0 * p * dz_u) * u)
        dtau = 0.0 * dz
    return dh, de, dtau


@triton.jit
def redo_step(
    tau_raw, u_raw, e, h, stats, ln_weight, ln_bias, j, mask,
    H: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr, ACTIVATION: tl.constexpr,
    ETA: tl.constexpr,
):  # fmt: skip
    """The step again, pointwise: all that ``undo_step`` needs and that does not wait for the gradient."""
    G: tl.constexpr = 2 if GATE else 1
    inv_e = tl.load(stats + 0)
    inv_t = tl.load(stats + 1)
    c = tl.load(stats + 2)
    k = tl.load(stats + 3)
    p = tl.load(stats + 4)
    q = tl.load(stats + 5)
    al = tl.load(stats + 6)
    be = tl.load(stats + 7)
    ga = tl.load(stats + 8)
    i = tl.load(stats + 9)
    u_i = tl.load(stats + 10)
    inv_f = tl.load(stats + 11)
    normed_t, weight_t, rstd_t = tau_raw, tau_raw, inv_e
    normed_u, weight_u, rstd_u, slope_u = u_raw, u_raw, inv_e, u_raw
    normed_c, weight_c, rstd_c = tau_raw, tau_raw, inv_e
    tau = tau_raw
    gate = u_raw
    if LN != "none":
        rstd_t = tl.load(stats + 14)
        weight_t, bias = load_ln(ln_weight, ln_bias, 0, j, mask, H)
        normed_t = (tau_raw - tl.load(stats + 13)) * rstd_t
        tau = normed_t * weight_t + bias
    if GATE:
        if LN == "none":
            gate = sigmoid(u_raw)
        else:
            if LN == "authors":
                gate = sigmoid(u_raw)
                slope_u = gate * (1.0 - gate)
            rstd_u = tl.load(stats + 18)
            weight_u, bias = load_ln(ln_weight, ln_bias, 1, j, mask, H)
            normed_u = (gate - tl.load(stats + 17)) * rstd_u
            gate = normed_u * weight_u + bias
            if LN == "before":
                gate = sigmoid(gate)
    u = e * inv_e
    w = tau * inv_t
    new = e + h + al * u + be * w + tl.where(j == i.to(tl.int32), ga, 0.0)
    if LN != "none":
        rstd_c = tl.load(stats + 16)
        weight_c, bias = load_ln(ln_weight, ln_bias, G, j, mask, H)
        normed_c = (new - tl.load(stats + 15)) * rstd_c
        new = normed_c * weight_c + bias
    new = activate(new, ACTIVATION)
    share = tl.full([BLOCK], 1.0, tl.float32)  # how much of the state's gradient reaches the candidate
    if GATE:
        share = 1.0 - gate
    slope = share * activation_slope(new, ACTIVATION)
    mixed, inv_norm, mixed_u, mixed_w = new, inv_e, inv_e, inv_e
    if ETA is not None:
        inv_norm = tl.load(stats + 12)
        if GATE:
            mixed = gate * h + share * new
        mixed = tl.where(mask, mixed * inv_norm, 0.0)
        if LN == "none":
            mixed_u, mixed_w = sum2(mixed * slope * u, mixed * slope * w)
    return (
        inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f, u, w, gate, new, share, slope, mixed, inv_norm,
        mixed_u, mixed_w, normed_t, weight_t, rstd_t, normed_u, weight_u, rstd_u, slope_u, normed_c, weight_c, rstd_c
    )  # fmt: skip


@triton.jit
def undo_step(
    dh, again, h, ln_grads, lengths, seed, t, b, j, mask,
    H: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr, ETA: tl.constexpr,
    ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr,
):  # fmt: skip
    """Gradients of the raw tau, the raw gate, eps and the state before the step from ``dh``, that of its new state."""
    G: tl.constexpr = 2 if GATE else 1
    (
        inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f, u, w, gate, new, share, slope, mixed, inv_norm,
        mixed_u, mixed_w, normed_t, weight_t, rstd_t, normed_u, weight_u, rstd_u, slope_u, normed_c, weight_c, rstd_c
    ) = again  # fmt: skip
    # back through lengths, zoneout and eta
    dprev = tl.zeros_like(dh)
    if ZONEOUT == "train":
        keep = zoneout_keep_new(tl.load(seed), t, b * H + j, KEEP_BELOW)
        dprev = tl.where(keep, 0.0, dh)
        dnew = tl.where(keep, dh, 0.0)
    elif ZONEOUT is not None:
        dprev = ZONEOUT * dh
        dnew = (1.0 - ZONEOUT) * dh
    else:
        dnew = dh
    if lengths is not None:
        live = t < tl.load(lengths + b)
        dprev = tl.where(live, dprev, dh)
        dnew = tl.where(live, dnew, 0.0)
    if ETA is not None:
        scale = ETA * inv_norm
        if LN == "none":  # the rotation's sums are linear in dnew and in mixed
            along, dnew_u, dnew_w = sum3(dnew * mixed, dnew * slope * u, dnew * slope * w)
            dz_u = scale * (dnew_u - along * mixed_u)
            dz_w = scale * (dnew_w - along * mixed_w)
        else:
            along = tl.sum(dnew * mixed, 0)
        dnew = scale * (dnew - along * mixed)

    # back through the gate, the candidate's layer norm and the rotation
    dz = dnew * slope
    dgate = dnew
    if GATE:
        dprev += dnew * gate
        dgate = dnew * (h - new)
        if LN != "authors":
            dgate *= gate * share
    if LN != "none":
        add_ln_grad(ln_grads, G, dz, normed_c, j, mask, H, G)
        dz_c = dz * weight_c
        if GATE:
            add_ln_grad(ln_grads, 1, dgate, normed_u, j, mask, H, G)
            dgate_c = dgate * weight_u
            total, projection, total_u, projection_u = sum4(dz_c, dz_c * normed_c, dgate_c, dgate_c * normed_u)
            dgate = ln_backward(dgate, normed_u, weight_u, rstd_u, total_u, projection_u, H)
            if LN == "authors":
                dgate *= slope_u
        else:
            total, projection = sum2(dz_c, dz_c * normed_c)
        dz = ln_backward(dz, normed_c, weight_c, rstd_c, total, projection, H)
        dz_u, dz_w = sum2(dz * u, dz * w)
    elif ETA is None:
        dz_u, dz_w = sum2(dz * u, dz * w)
    dh_turn, de, dtau = rotation_backward(
        dz, dz_u, dz_w, u, w, h, inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f, j
    )
    if LN != "none":
        add_ln_grad(ln_grads, 0, dtau, normed_t, j, mask, H, G)
        dtau_c = dtau * weight_t
        total, projection = sum2(dtau_c, dtau_c * normed_t)
        dtau = ln_backward(dtau, normed_t, weight_t, rstd_t, total, projection, H)
    return dtau, dgate, dz + de, dprev + dh_turn


@triton.jit
def rum_cell_backward(
    dh, tau_raw, u_raw, e, h, stats, ln_grads, ln_weight, ln_bias, lengths, seed, t, b, j, mask,
    H: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr, ACTIVATION: tl.constexpr,
    ETA: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr,
):  # fmt: skip
    """``undo_step`` from the step's own inputs."""
    again = redo_step(
        tau_raw, u_raw, e, h, stats, ln_weight, ln_bias, j, mask, H, BLOCK, GATE, LN, ACTIVATION, ETA
    )  # fmt: skip
    return undo_step(dh, again, h, ln_grads, lengths, seed, t, b, j, mask, H, GATE, LN, ETA, ZONEOUT, KEEP_BELOW)


@triton.jit(do_not_specialize=["t", "T", "B"])
def lam0_backward_kernel(
    table, xp, out, gates, stats, grad_out, dxp, product, dstate, low, ln_grads, h0, ln_weight, ln_bias, lengths, seed,
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
    b = tl.program_id(0)
    row = t.to(tl.int64) * B + b
    G: tl.constexpr = 2 if GATE else 1
    j = tl.arange(0, BLOCK)
    mask = j < H
    dxp += row * ((G + 1) * H)
    low += b * (G * HP)
    if LN != "none":
        ln_grads += b * (2 * (G + 1) * H)
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
    again = redo_step(
        tau_raw, u_raw, e, h, stats + row * STATS, ln_weight, ln_bias, j, mask, H, BLOCK, GATE, LN, ACTIVATION, ETA
    )
    if PDL:  # all above was written before the product began, see BackwardSteps.begin
        tl.extra.cuda.gdc_wait()
    told = mask & (t + 1 < T)  # the last step hears from none after it
    dh += tl.load(dstate + b * H + j, mask=told, other=0.0)
    dh += load_parts(product, b * HP + j, told, B * HP, PARTS)
    dtau, dgate, deps, dprev = undo_step(
        dh, again, h, ln_grads, lengths, seed, t, b, j, mask, H, GATE, LN, ETA, ZONEOUT, KEEP_BELOW
    )
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
        ln_shape = (B, 2, (self.G + 1) * H)
        self.ln_grads = torch.empty(ln_shape, device=like.device) if options.layer_norm else None
        self.flags = launch_options(like, H, options, "backward")
        self.product = Product(self.low, self.weight, self.flags["PDL"], self.direction)

    def begin(
        self, xp: Tensor, out: Tensor, gates: Tensor, stats: Tensor, grad_out: Tensor, dxp: Tensor, *loaded: Any
    ) -> None:
        self.load(*loaded)
        self.sums(xp, out, gates, stats)
        # Under dependent launch the first row kernel reads ahead of the kernel before it, so that must write nothing
        # which is read ahead: neither the weight nor the scalars above.
        (self.dstate if self.ln_grads is None else self.ln_grads).zero_()
        self.given = (xp, out, gates, stats, grad_out, dxp)
        if self.table is not None:
            fill_table(self.table, len(out) - 1, len(out), *self.given)

    def sums(self, xp: Tensor, out: Tensor, gates: Tensor, stats: Tensor) -> None:
        """Enqueue the parallel pass over all steps."""
        names = ("H", "BLOCK", "GATE", "LN", "LN_EPS", "ACTIVATION", "ETA")
        launch(
            lam0_stats_kernel, (out.shape[0] * self.B,),
            xp, out, gates, self.h0, stats, self.ln_weight, self.ln_bias, self.B,
            **{name: self.flags[name] for name in names}, num_warps=min(self.flags["num_warps"], 8),
        )  # fmt: skip

    def row(self, table: Tensor | None, t: int) -> None:
        given = self.given if table is None else [None] * len(self.given)
        kernel = launch(
            lam0_backward_kernel, (self.B,),
            table, *given, self.product.out, self.dstate, self.low, self.ln_grads, self.h0,
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
        return dh0, None if self.ln_grads is None else self.ln_grads.sum(0)


def recurrent_weight_grad(dxp: Tensor, h0: Tensor, out: Tensor, H: int, G: int) -> Tensor:
    """Sum over steps of (gradient of the raw gates)^T (state before the step), as products over all T * B rows."""
    dgates = dxp[..., : G * H]
    grad = dgates[0].t() @ h0.to(dxp.dtype)
    if out.shape[0] > 1:
        left, right = aligned_rows(dgates[1:].flatten(0, 1)), aligned_rows(out[:-1].flatten(0, 1))
        if left.shape[1] == G * H and right.shape[1] == H:
            grad.addmm_(left.t(), right)
        else:
            grad += (left.t() @ right)[: G * H, :H]
    return grad


def aligned_rows(x: Tensor) -> Tensor:
    """``x`` with rows on 16-byte boundaries, zero-padded where they are not: cuBLAS is far slower otherwise."""
    unit = 16 // x.element_size()
    return F.pad(x, (0, -x.shape[1] % unit)) if x.is_cuda and x.stride(0) % unit else x


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
        dweight = recurrent_weight_grad(dxp, h0, out, H, options.num_gates).to(weight_hh.dtype)
        if ln_grads is None or ln_weight is None or ln_bias is None:
            return dxp, dh0.to(h0.dtype), dweight, None, None
        return dxp, dh0.to(h0.dtype), dweight, ln_grads[0].to(ln_weight.dtype), ln_grads[1].to(ln_bias.dtype)
