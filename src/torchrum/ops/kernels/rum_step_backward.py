"""Device functions of the lam = 0 backward: one step recomputed from its saved values, and its gradients.

The step is recomputed pointwise from the scalars in ``stats``, so this works on any piece of a row and on many rows at
once. All sums with the incoming gradient are computed in one round, or in two with layer norm: the backward is linear,
so a term that a sum would have to wait for is subtracted from it afterwards.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrum.ops.kernels.rows import (
    activate,
    activation_slope,
    ln_backward,
    sigmoid,
    sum2,
    sum3,
    sum4,
    sum5,
    sum6,
    sum7,
)
from torchrum.ops.kernels.rum_step import ACCURATE_COS, NORM_TINY, load_norms
from torchrum.ops.kernels.triton_launch import launch

STATS = tl.constexpr(24)  # float32 numbers saved per row and step
FROM_BACKWARD = tl.constexpr(19)  # the backward writes the numbers from this one on, for layer norm's gradients


@triton.jit
def load_step(xp, out, gates, h0, row, t, b, B, j, mask, H: tl.constexpr, GATE: tl.constexpr):
    """Load the operands of one row's step: raw gates, eps and the state before the step."""
    G: tl.constexpr = 2 if GATE else 1
    eps = tl.load(xp + row * ((G + 1) * H) + G * H + j, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(out + (row - B) * H + j, mask=mask & (t > 0), other=0.0).to(tl.float32)
    h += tl.load(h0 + b * H + j, mask=mask & (t == 0), other=0.0)
    tau_raw = tl.load(gates + row * (G * H) + j, mask=mask, other=0.0).to(tl.float32)
    u_raw = tau_raw
    if GATE:
        u_raw = tl.load(gates + row * (G * H) + H + j, mask=mask, other=0.0).to(tl.float32)
    return tau_raw, u_raw, eps, h


@triton.jit
def store_stats(stats, cell, GATE: tl.constexpr, LN: tl.constexpr, ETA: tl.constexpr):
    """Store the scalars of ``cell``, a result of ``rum_cell``, for ``recompute_step``."""
    new, rotation, norm_moments = cell
    inv_eps, inv_tau, cos, k, p, q, al, be, ga, i, e_i, inv_f = rotation
    mean_t, rstd_t, mean_u, rstd_u, mean_c, rstd_c = norm_moments
    tl.store(stats + 0, inv_eps)
    tl.store(stats + 1, inv_tau)
    tl.store(stats + 2, cos)
    tl.store(stats + 3, k)
    tl.store(stats + 4, p)
    tl.store(stats + 5, q)
    tl.store(stats + 6, al)
    tl.store(stats + 7, be)
    tl.store(stats + 8, ga)
    tl.store(stats + 9, i.to(tl.float32))
    tl.store(stats + 10, e_i)
    tl.store(stats + 11, inv_f)
    if ETA is not None:
        norm = tl.sqrt(tl.sum(new * new, 0))
        tl.store(stats + 12, tl.where(norm <= NORM_TINY, 0.0, 1.0 / norm))
    if LN != "none":
        tl.store(stats + 13, mean_t)
        tl.store(stats + 14, rstd_t)
        tl.store(stats + 15, mean_c)
        tl.store(stats + 16, rstd_c)
        if GATE:
            tl.store(stats + 17, mean_u)
            tl.store(stats + 18, rstd_u)


@triton.jit
def tau_grad(dz, dz_s, dz_w, e, w, h, rotation):
    """Compute the gradient of tau from ``dz``, that of ``Rot(eps, tau) h``, and its inner products with e + w and w.

    It is zero for a half turn.
    """
    _, inv_tau, cos, k, _, q, al, be, _, _, _, _ = rotation
    dq = -k * dz_s
    dcos = -k * al * dz_s
    return inv_tau * (be * dz + dq * h + dcos * e - (be * dz_w + dq * q + dcos * cos) * w)


@triton.jit
def rotation_backward(dz, dz_e, dz_w, e, w, h, rotation, j):
    """Compute the gradients of h, eps and tau from ``dz``, the gradient of ``Rot(eps, tau) h``, and its inner products
    with e and w; also return the inner product of ``dz`` with e + w. ``rotation`` holds the values of
    ``rotation_scalars``.
    """
    inv_eps, _, cos, k, p, _, al, _, _, i, e_i, inv_f = rotation
    dz_s = dz_e + dz_w
    if cos < ACCURATE_COS:  # e and w nearly cancel, so the two inner products would too
        dz_s = tl.sum(dz * (e + w), 0)
    dq = -k * dz_s
    dp = 2.0 * dz_w + dq
    dcos = -k * al * dz_s
    dh = dz + dp * e + dq * w
    deps = inv_eps * (al * dz + dp * h + dcos * w - (al * dz_e + dp * p + dcos * cos) * e)
    dtau = tau_grad(dz, dz_s, dz_w, e, w, h, rotation)
    if i >= 0.0:  # half turn H_f H_e h, with the second axis f treated as a constant
        axis = tl.where(j == i.to(tl.int32), 1.0, 0.0)
        dz_f = (tl.sum(dz * axis, 0) - e_i * dz_e) * inv_f
        f = (axis - e_i * e) * inv_f
        dg = dz - 2.0 * dz_f * f
        dh = dg - 2.0 * dz_e * e
        deps = (-2.0 * inv_eps) * (dz_e * h + p * dg - (2.0 * p * dz_e) * e)
        dtau = 0.0 * dz
    return dh, deps, dtau, dz_s


@triton.jit
def recompute_step(
    tau_raw, u_raw, eps, h, stats, norms, j, mask,
    GATE: tl.constexpr, LN: tl.constexpr, ACTIVATION: tl.constexpr, ETA: tl.constexpr,
):  # fmt: skip
    """Recompute the step, pointwise: the vectors for ``step_backward`` that do not depend on the gradient."""
    inv_eps = tl.load(stats + 0)
    inv_tau = tl.load(stats + 1)
    cos = tl.load(stats + 2)
    k = tl.load(stats + 3)
    p = tl.load(stats + 4)
    q = tl.load(stats + 5)
    al = tl.load(stats + 6)
    be = tl.load(stats + 7)
    ga = tl.load(stats + 8)
    i = tl.load(stats + 9)
    e_i = tl.load(stats + 10)
    inv_f = tl.load(stats + 11)
    normed_t, weight_t, rstd_t = tau_raw, tau_raw, inv_eps
    normed_u, weight_u, rstd_u, slope_u = u_raw, u_raw, inv_eps, u_raw
    normed_c, weight_c, rstd_c = tau_raw, tau_raw, inv_eps
    if LN != "none":
        weight_t, bias_t, weight_u, bias_u, weight_c, bias_c = norms
    tau = tau_raw
    gate = u_raw
    if LN != "none":
        rstd_t = tl.load(stats + 14)
        normed_t = (tau_raw - tl.load(stats + 13)) * rstd_t
        tau = normed_t * weight_t + bias_t
    if GATE:
        if LN == "none":
            gate = sigmoid(u_raw)
        else:
            if LN == "authors":
                gate = sigmoid(u_raw)
                slope_u = gate * (1.0 - gate)
            rstd_u = tl.load(stats + 18)
            normed_u = (gate - tl.load(stats + 17)) * rstd_u
            gate = normed_u * weight_u + bias_u
            if LN == "before":
                gate = sigmoid(gate)
    e = eps * inv_eps
    w = tau * inv_tau
    new = eps + h + al * e + be * w + tl.where(j == i.to(tl.int32), ga, 0.0)
    if LN != "none":
        rstd_c = tl.load(stats + 16)
        normed_c = (new - tl.load(stats + 15)) * rstd_c
        new = normed_c * weight_c + bias_c
    new = activate(new, ACTIVATION)
    slope = activation_slope(new, ACTIVATION)  # share of the state's gradient that reaches the candidate's argument
    share, slope_gate = slope, slope
    if GATE:
        share = 1.0 - gate
        slope *= share
        slope_gate = h - new  # share that reaches the gate's argument
        if LN != "authors":
            slope_gate *= gate * share
    mixed, inv_norm = new, inv_eps
    if ETA is not None:
        inv_norm = tl.load(stats + 12)
        if GATE:
            mixed = gate * h + share * new
        mixed = tl.where(mask, mixed * inv_norm, 0.0)
    return (
        (inv_eps, inv_tau, cos, k, p, q, al, be, ga, i, e_i, inv_f),
        (e, w, gate, slope, slope_gate, mixed, inv_norm),
        (normed_t, weight_t, rstd_t, normed_u, weight_u, rstd_u, slope_u, normed_c, weight_c, rstd_c),
    )


@triton.jit
def precompute_sums(recomputed, GATE: tl.constexpr, LN: tl.constexpr, ETA: tl.constexpr):
    """Compute the sums of ``step_backward`` that do not depend on the gradient: the sums with ``mixed`` in place of the
    gradient, and the terms that layer norm subtracts from the inner products with e and w."""
    _, vectors, layers = recomputed
    e, w, _, slope, slope_gate, mixed, _ = vectors
    _, _, _, normed_u, weight_u, _, _, normed_c, weight_c, _ = layers
    mixed_e, mixed_w, mixed_1, mixed_n, mixed_gate, mixed_gate_n = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    sum_e, sum_w, n_e, n_w = 0.0, 0.0, 0.0, 0.0
    if LN == "none":
        if ETA is not None:
            mixed_e, mixed_w = sum2(mixed * slope * e, mixed * slope * w)
    else:
        sum_e, sum_w, n_e, n_w = sum4(e, w, normed_c * e, normed_c * w)
        if ETA is not None:
            to_c = mixed * (slope * weight_c)
            if GATE:
                to_gate = mixed * (slope_gate * weight_u)
                mixed_e, mixed_w, mixed_1, mixed_n, mixed_gate, mixed_gate_n = sum6(
                    to_c * e, to_c * w, to_c, to_c * normed_c, to_gate, to_gate * normed_u
                )
            else:
                mixed_e, mixed_w, mixed_1, mixed_n = sum4(to_c * e, to_c * w, to_c, to_c * normed_c)
    return mixed_e, mixed_w, mixed_1, mixed_n, mixed_gate, mixed_gate_n, sum_e, sum_w, n_e, n_w


@triton.jit
def step_backward(
    dh, recomputed, precomputed, keep, h, stats, saved_dnew, j, mask,
    H: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr, ETA: tl.constexpr, ZONEOUT: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the raw tau, the raw gate, eps and the state before the step from ``dh``, the gradient
    of the new state.

    With layer norm, store the values for ``step_norm_grads`` in ``saved_dnew`` and in the scalars from FROM_BACKWARD
    on.
    """
    rotation, vectors, layers = recomputed
    e, w, gate, slope, slope_gate, mixed, inv_norm = vectors
    normed_t, weight_t, rstd_t, normed_u, weight_u, rstd_u, slope_u, normed_c, weight_c, rstd_c = layers
    mixed_e, mixed_w, mixed_1, mixed_n, mixed_gate, mixed_gate_n, sum_e, sum_w, n_e, n_w = precomputed
    # backward of lengths and zoneout
    dprev = tl.zeros_like(dh)
    dnew = dh
    if ZONEOUT is not None and ZONEOUT != "train":
        dprev = ZONEOUT * dh
        dnew = (1.0 - ZONEOUT) * dh
    if keep is not None:
        dprev = tl.where(keep, dprev, dh)
        dnew = tl.where(keep, dnew, 0.0)

    # the sums, all linear in dnew; eta subtracts mixed's share from dnew, so also from each sum
    along = 0.0
    if LN == "none":
        if ETA is None:
            dz_e, dz_w = sum2(dnew * slope * e, dnew * slope * w)
        else:
            along, dz_e, dz_w = sum3(dnew * mixed, dnew * slope * e, dnew * slope * w)
    else:
        tl.store(saved_dnew + j, dnew.to(saved_dnew.dtype.element_ty), mask=mask)
        slope *= weight_c  # as in precompute_sums, but only now: one vector less to hold while the gradient arrives
        to_c = dnew * slope
        if GATE:
            slope_gate *= weight_u
            to_gate = dnew * slope_gate
            if ETA is None:
                dz_e, dz_w, total, projection, total_u, projection_u = sum6(
                    to_c * e, to_c * w, to_c, to_c * normed_c, to_gate, to_gate * normed_u
                )
            else:
                dz_e, dz_w, total, projection, total_u, projection_u, along = sum7(
                    to_c * e, to_c * w, to_c, to_c * normed_c, to_gate, to_gate * normed_u, dnew * mixed
                )
        elif ETA is None:
            dz_e, dz_w, total, projection = sum4(to_c * e, to_c * w, to_c, to_c * normed_c)
        else:
            dz_e, dz_w, total, projection, along = sum5(to_c * e, to_c * w, to_c, to_c * normed_c, dnew * mixed)
    if ETA is not None:
        scale = ETA * inv_norm
        dnew = scale * (dnew - along * mixed)
        dz_e = scale * (dz_e - along * mixed_e)
        dz_w = scale * (dz_w - along * mixed_w)
        if LN != "none":
            total = scale * (total - along * mixed_1)
            projection = scale * (projection - along * mixed_n)
            if GATE:
                total_u = scale * (total_u - along * mixed_gate)
                projection_u = scale * (projection_u - along * mixed_gate_n)

    # backward of the gate, the candidate's layer norm and the rotation
    dz = dnew * slope
    dgate = dnew
    if GATE:
        dprev += dnew * gate
        dgate = dnew * slope_gate
    if LN != "none":
        if GATE:
            dgate = ln_backward(dgate, normed_u, 1.0, rstd_u, total_u, projection_u, H)
            if LN == "authors":
                dgate *= slope_u
        dz = ln_backward(dz, normed_c, 1.0, rstd_c, total, projection, H)
        dz_e = ln_backward(dz_e, n_e, 1.0, rstd_c, total * sum_e, projection, H)
        dz_w = ln_backward(dz_w, n_w, 1.0, rstd_c, total * sum_w, projection, H)
    dh_rotation, deps, dtau, dz_s = rotation_backward(dz, dz_e, dz_w, e, w, h, rotation, j)
    if LN != "none":
        stats += FROM_BACKWARD
        tl.store(stats + 0, along)
        tl.store(stats + 1, total)
        tl.store(stats + 2, projection)
        tl.store(stats + 3, dz_s)
        tl.store(stats + 4, dz_w)
        dtau_c = dtau * weight_t
        total, projection = sum2(dtau_c, dtau_c * normed_t)
        dtau = ln_backward(dtau, normed_t, weight_t, rstd_t, total, projection, H)
    return dtau, dgate, dz + deps, dprev + dh_rotation


@triton.jit
def step_norm_grads(
    dnew, recomputed, h, stats,
    H: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr, ETA: tl.constexpr,
):  # fmt: skip
    """Recompute the gradients of the layer norms' outputs for tau, the gate and the candidate, each with its normalised
    value, pointwise from the values that ``step_backward`` stored."""
    rotation, vectors, layers = recomputed
    e, w, _, slope, slope_gate, mixed, inv_norm = vectors
    normed_t, _, _, normed_u, _, _, _, normed_c, weight_c, rstd_c = layers
    stats += FROM_BACKWARD
    if ETA is not None:
        dnew = (ETA * inv_norm) * (dnew - tl.load(stats + 0) * mixed)
    dc = dnew * slope
    dz = ln_backward(dc, normed_c, weight_c, rstd_c, tl.load(stats + 1), tl.load(stats + 2), H)
    dtau = tau_grad(dz, tl.load(stats + 3), tl.load(stats + 4), e, w, h, rotation)
    return dtau, normed_t, dnew * slope_gate, normed_u, dc, normed_c


# Gradients of layer norm's gains and shifts, after the loop: a sum over all steps and rows, which no step depends on.
# Each step saved the gradient of its state before zoneout (``saved_dnew``) and five scalars per row; the rest is
# recomputed.
NORM_PROGRAMS = 2048  # each has its own rows and columns; the results are summed over the rows afterwards
NORM_BLOCK = 256  # columns per program


@triton.jit(do_not_specialize=["rows", "B"])
def rum_norm_grad_kernel(
    gates, eps, states, h0, stats, saved_dnew, sums, ln_weight, ln_bias, rows, B,
    H: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr,
    ACTIVATION: tl.constexpr, ETA: tl.constexpr,
    GATES_WIDTH: tl.constexpr, EPS_WIDTH: tl.constexpr, STATES_WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients summed over a program's rows, ``sums[program] = (gains, shifts)``.

    With ``h0``, ``states`` holds the state after each step, else the state before each step.
    """
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
        dnew = tl.load(saved_dnew + row * H + j, mask=mask, other=0.0).to(tl.float32)
        stat = stats + row * STATS
        recomputed = recompute_step(tau_raw, u_raw, eps_row, h, stat, norms, j, mask, GATE, LN, ACTIVATION, ETA)
        dtau, normed_t, dgate, normed_u, dc, normed_c = step_norm_grads(dnew, recomputed, h, stat, H, GATE, LN, ETA)
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


def norm_grads(
    gates: Tensor,
    eps: Tensor,
    states: Tensor,
    h0: Tensor | None,
    stats: Tensor,
    saved_dnew: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    flags: dict[str, Any],
) -> Tensor:
    """Compute the gradients of layer norm's gains and shifts, ``(2, blocks*H)`` in float32.

    Args:
        gates, eps: ``(T, B, ...)``, the raw gates of all steps, tau first, and eps.
        states: ``(T, B, H)``, the state before each step or, with ``h0``, after each step.
        h0: ``(B, H)``, the state before the first step, or None.
        stats, dseen: the scalars that the steps saved, and the gradients of the states before zoneout.
        ln_weight, ln_bias: float32.
        flags: compile-time arguments of the row kernel.
    """
    H = flags["H"]
    (T, B), size = saved_dnew.shape[:2], ln_weight.numel()
    rows = T * B
    block = min(NORM_BLOCK, flags["BLOCK"])
    tiles = triton.cdiv(H, block)
    programs = min(rows, triton.cdiv(NORM_PROGRAMS, tiles))
    sums = torch.empty((programs, 2, size), device=saved_dnew.device)
    launch(
        rum_norm_grad_kernel, (programs, tiles),
        gates, eps, states, h0, stats, saved_dnew, sums, ln_weight, ln_bias, rows, B,
        H=H, BLOCK=block, **{name: flags[name] for name in ("GATE", "LN", "ACTIVATION", "ETA")},
        GATES_WIDTH=gates.stride(1), EPS_WIDTH=eps.stride(1), STATES_WIDTH=states.stride(1),
        num_warps=max(1, block // 128),
    )  # fmt: skip
    return sums.sum(0)
