"""Row kernels of a chain's cells, one program per batch row: functions for LSTM and RUM, and the LSTM step.

A step reads its raw gates from a matmul and writes its new h for at most two readers: one without dropout, one with. A
reader is a buffer that the next matmul multiplies (``operand``) and a tensor over all steps (``plain``, ``dropped``).

The LSTM kernels serve a plain LSTM and each LSTM of a Fast-Slow RNN. The block called j in the equations is g here,
since j denotes the lanes of a row.
"""

import triton
import triton.language as tl

from torchrum.ops.kernels.matmul import load_parts
from torchrum.ops.kernels.rows import (
    cancels,
    ln_backward,
    load_ln,
    moments,
    own_row,
    prefetch,
    sigmoid,
    sum2,
    sum4,
    sum5,
    sum8,
    tanh,
    zoneout_keep_new,
)
from torchrum.ops.kernels.rum_step import rotation_scalars
from torchrum.ops.kernels.rum_step_backward import rotation_backward
from torchrum.ops.kernels.triton_launch import tensor_at


@triton.jit
def dependent_start(PDL: tl.constexpr):
    """Let the next kernel start and wait for the writes of the previous one, under dependent launch."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def apply_zoneout(new, old, seeds, STREAM: tl.constexpr, t, index, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr):
    """Apply zoneout: take the old value where the mask is false; in evaluation, take the expectation of the two."""
    if ZONEOUT == "train":
        return tl.where(zoneout_keep_new(tl.load(seeds + STREAM), t, index, KEEP_BELOW), new, old)
    elif ZONEOUT is not None:
        return (1.0 - ZONEOUT) * new + ZONEOUT * old
    else:
        return new


@triton.jit
def zoneout_backward(dnew, seeds, STREAM: tl.constexpr, t, index, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr):
    """Compute the gradients of the new and of the old value from the gradient of the mixed state."""
    if ZONEOUT == "train":
        keep = zoneout_keep_new(tl.load(seeds + STREAM), t, index, KEEP_BELOW)
        return tl.where(keep, dnew, 0.0), tl.where(keep, 0.0, dnew)
    elif ZONEOUT is not None:
        return (1.0 - ZONEOUT) * dnew, ZONEOUT * dnew
    else:
        return dnew, tl.zeros_like(dnew)


@triton.jit
def drop(x, seeds, STREAM: tl.constexpr, t, index, SCALE: tl.constexpr, KEEP_BELOW: tl.constexpr):
    """Apply dropout, which is also its own backward; SCALE is None without dropout."""
    if SCALE is not None:
        return tl.where(zoneout_keep_new(tl.load(seeds + STREAM), t, index, KEEP_BELOW), x * SCALE, 0.0)
    else:
        return x


@triton.jit
def store_state(
    new, plain_operand, dropped_operand, plain, dropped, plain_mask, seeds, t, b, row, index, j, mask,
    PLAIN_WIDTH: tl.constexpr, DROPPED_WIDTH: tl.constexpr, DROP: tl.constexpr, DROP_BELOW: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    """Store a new state for its readers; the plain one reads it multiplied with ``plain_mask``, if there is one."""
    dtype = plain.dtype.element_ty
    seen = new
    if plain_mask is not None:
        seen = new * tl.load(plain_mask + index, mask=mask, other=0.0)
    value = seen.to(dtype)
    tl.store(plain_operand + b * PLAIN_WIDTH + j, value, mask=mask)
    tl.store(plain + row * PLAIN_WIDTH + j, value, mask=mask)
    if DROPPED_WIDTH is not None:
        value = drop(new, seeds, STREAM, t, index, DROP, DROP_BELOW).to(dtype)
        if dropped_operand is not None:
            tl.store(dropped_operand + b * DROPPED_WIDTH + j, value, mask=mask)
        tl.store(dropped + row * DROPPED_WIDTH + j, value, mask=mask)


@triton.jit
def load_state_grad(
    dstate, parts_plain, parts_dropped, grad_out, plain_mask, seeds, t, b, B, row, index, j, mask, H: tl.constexpr,
    PLAIN_PARTS: tl.constexpr, DROPPED_PARTS: tl.constexpr, PLAIN_WIDTH: tl.constexpr, DROPPED_WIDTH: tl.constexpr,
    DROP: tl.constexpr, DROP_BELOW: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a new state from its carry and its readers; the transpose of ``store_state``."""
    dh = tl.load(dstate + b * H + j, mask=mask, other=0.0)
    seen = load_parts(parts_plain, b * PLAIN_WIDTH + j, mask, B * PLAIN_WIDTH, PLAIN_PARTS)
    if plain_mask is not None:
        seen *= tl.load(plain_mask + index, mask=mask, other=0.0)
    dh += seen
    if DROPPED_WIDTH is not None:
        if parts_dropped is not None:
            dropped_grad = load_parts(parts_dropped, b * DROPPED_WIDTH + j, mask, B * DROPPED_WIDTH, DROPPED_PARTS)
        else:
            dropped_grad = tl.load(grad_out + row * DROPPED_WIDTH + j, mask=mask, other=0.0).to(tl.float32)
        dh += drop(dropped_grad, seeds, STREAM, t, index, DROP, DROP_BELOW)
    return dh


@triton.jit
def load_gate(
    parts, xp, bias, gates, block: tl.constexpr, b, B, j, mask,
    H: tl.constexpr, HP: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Load one block of pre-activations and store it for the backward; ``xp`` and ``gates`` point at this row."""
    raw = load_parts(parts, b * (BLOCKS * HP) + block * HP + j, mask, B * (BLOCKS * HP), PARTS)
    if xp is not None:
        raw += tl.load(xp + block * H + j, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        raw += tl.load(bias + block * H + j, mask=mask, other=0.0)
    tl.store(gates + block * H + j, raw.to(gates.dtype.element_ty), mask=mask)
    return raw


# Float32 numbers saved per row and step: mean and 1/std of i, g, f, o, c and, in a rotational LSTM, of the candidate;
# then the values of ``rotation_scalars``.
STATS = tl.constexpr(16)
ROTATED_STATS = tl.constexpr(24)
ROTATION = tl.constexpr(12)  # index of the rotation's first number


@triton.jit
def load_gates(gates, j, mask, H: tl.constexpr):
    """Load the blocks i, g, f, o of one row in float32."""
    i = tl.load(gates + j, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gates + H + j, mask=mask, other=0.0).to(tl.float32)
    f = tl.load(gates + 2 * H + j, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(gates + 3 * H + j, mask=mask, other=0.0).to(tl.float32)
    return i, g, f, o


@triton.jit
def store_gates(gates, i, g, f, o, j, mask, WIDTH: tl.constexpr):
    """Store the four blocks WIDTH apart, in the dtype of ``gates``."""
    dtype = gates.dtype.element_ty
    tl.store(gates + j, i.to(dtype), mask=mask)
    tl.store(gates + WIDTH + j, g.to(dtype), mask=mask)
    tl.store(gates + 2 * WIDTH + j, f.to(dtype), mask=mask)
    tl.store(gates + 3 * WIDTH + j, o.to(dtype), mask=mask)


@triton.jit
def gate_moments(i, g, f, o, mask, LN_EPS: tl.constexpr, H: tl.constexpr):
    """Compute means and 1 / sqrt(var + LN_EPS) of the four gates: one reduction, or two if digits would be lost."""
    si, qi, sg, qg, sf, qf, so, qo = sum8(i, i * i, g, g * g, f, f * f, o, o * o)
    mi, mg, mf, mo = si / H, sg / H, sf / H, so / H
    vi = tl.maximum(qi / H - mi * mi, 0.0)
    vg = tl.maximum(qg / H - mg * mg, 0.0)
    vf = tl.maximum(qf / H - mf * mf, 0.0)
    vo = tl.maximum(qo / H - mo * mo, 0.0)
    if cancels(mi, vi, LN_EPS) | cancels(mg, vg, LN_EPS) | cancels(mf, vf, LN_EPS) | cancels(mo, vo, LN_EPS):
        di = tl.where(mask, i - mi, 0.0)
        dg = tl.where(mask, g - mg, 0.0)
        df = tl.where(mask, f - mf, 0.0)
        do = tl.where(mask, o - mo, 0.0)
        qi, qg, qf, qo = sum4(di * di, dg * dg, df * df, do * do)
        vi, vg, vf, vo = qi / H, qg / H, qf / H, qo / H
    return (
        mi, mg, mf, mo,
        1.0 / tl.sqrt(vi + LN_EPS), 1.0 / tl.sqrt(vg + LN_EPS), 1.0 / tl.sqrt(vf + LN_EPS), 1.0 / tl.sqrt(vo + LN_EPS),
    )  # fmt: skip


@triton.jit
def normed_gate(raw, mean, rstd, ln_weight, ln_bias, block: tl.constexpr, j, mask, H: tl.constexpr):
    """Return a gate's normalised value, without and with layer norm's gain and shift, and the gain."""
    weight, bias = load_ln(ln_weight, ln_bias, block, j, mask, H)
    normed = (raw - mean) * rstd
    return normed, normed * weight + bias, weight


@triton.jit
def store_rotation(stats, rotation):
    """Store the values of ``rotation_scalars``."""
    inv_eps, inv_tau, cos, k, p, q, al, be, ga, i, e_i, inv_f = rotation
    stats += ROTATION
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


@triton.jit
def load_rotation(stats):
    """Load the values that ``store_rotation`` stored."""
    stats += ROTATION
    return (
        tl.load(stats + 0), tl.load(stats + 1), tl.load(stats + 2), tl.load(stats + 3), tl.load(stats + 4),
        tl.load(stats + 5), tl.load(stats + 6), tl.load(stats + 7), tl.load(stats + 8), tl.load(stats + 9),
        tl.load(stats + 10), tl.load(stats + 11),
    )  # fmt: skip


@triton.jit
def add_rotated(eps, tau, h, rotation, j):
    """Compute eps + Rot(eps, tau) h, pointwise, and the directions e and w."""
    inv_eps, inv_tau, _, _, _, _, al, be, ga, i, _, _ = rotation
    e = eps * inv_eps
    w = tau * inv_tau
    return eps + h + al * e + be * w + tl.where(j == i.to(tl.int32), ga, 0.0), e, w


@triton.jit(do_not_specialize=["t", "T", "B"])
def lstm_forward_kernel(
    table, slots, xp, gates, cells, stats, plain, dropped, states,
    parts, bias, h_state, c_state, plain_operand, dropped_operand, plain_mask, ln_weight, ln_bias, lengths, seeds,
    t, T, B,
    PARTS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, LN: tl.constexpr,
    LN_EPS: tl.constexpr, FORGET: tl.constexpr, ROTATED: tl.constexpr, KEEPS_H: tl.constexpr, READS_XP: tl.constexpr,
    ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr, ZONEOUT_C: tl.constexpr, KEEP_BELOW_C: tl.constexpr,
    DROP: tl.constexpr, DROP_BELOW: tl.constexpr, PLAIN_WIDTH: tl.constexpr, DROPPED_WIDTH: tl.constexpr,
    STREAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run one forward step for row b.

    The table holds the step that ``t`` counts from; the slots hold T and the addresses of the tensors over all steps.
    Streams of masks: STREAM for h, STREAM + 1 for c, STREAM + 2 for dropout. A rotational LSTM (ROTATED) has tau in
    place of g, and eps in a fifth block; with KEEPS_H it stores h before the step in ``states``.
    """
    BLOCKS: tl.constexpr = 5 if ROTATED else 4
    dtype = plain_operand.dtype.element_ty
    dependent_start(PDL)
    if table is not None:
        t = tl.load(table) + t
        T = tl.load(slots + 7)
        if READS_XP:
            xp = tensor_at(slots, 1, dtype)
        gates = tensor_at(slots, 2, dtype)
        cells = tensor_at(slots, 3, tl.float32)
        stats = tensor_at(slots, 4, tl.float32)
        plain = tensor_at(slots, 5, dtype)
        if DROPPED_WIDTH is not None:
            dropped = tensor_at(slots, 6, dtype)
        if KEEPS_H:
            states = tensor_at(slots, 8, dtype)
    b, row, j, mask = own_row(t, B, H, BLOCK)
    index = b * H + j
    gates += row * (BLOCKS * H)
    if READS_XP:
        xp += row * (BLOCKS * H)
    h = tl.load(h_state + index, mask=mask, other=0.0)
    c = tl.load(c_state + index, mask=mask, other=0.0)
    tl.store(cells + row * H + j, c, mask=mask)
    if KEEPS_H:
        tl.store(states + row * H + j, h.to(dtype), mask=mask)
    i = load_gate(parts, xp, bias, gates, 0, b, B, j, mask, H, HP, BLOCKS, PARTS)
    g = load_gate(parts, xp, bias, gates, 1, b, B, j, mask, H, HP, BLOCKS, PARTS)
    f = load_gate(parts, xp, bias, gates, 2, b, B, j, mask, H, HP, BLOCKS, PARTS)
    o = load_gate(parts, xp, bias, gates, 3, b, B, j, mask, H, HP, BLOCKS, PARTS)
    if READS_XP:  # noqa: SIM102 -- a compile-time condition, the inner one is evaluated at run time
        if t + 1 < T:
            prefetch(xp + B.to(tl.int64) * (BLOCKS * H), BLOCKS * H * dtype.primitive_bitwidth // 8)

    if LN or ROTATED:
        stats += row * (ROTATED_STATS if ROTATED else STATS)
    if LN:
        mean_i, mean_g, mean_f, mean_o, rstd_i, rstd_g, rstd_f, rstd_o = gate_moments(i, g, f, o, mask, LN_EPS, H)
        _, i, _ = normed_gate(i, mean_i, rstd_i, ln_weight, ln_bias, 0, j, mask, H)
        _, g, _ = normed_gate(g, mean_g, rstd_g, ln_weight, ln_bias, 1, j, mask, H)
        _, f, _ = normed_gate(f, mean_f, rstd_f, ln_weight, ln_bias, 2, j, mask, H)
        _, o, _ = normed_gate(o, mean_o, rstd_o, ln_weight, ln_bias, 3, j, mask, H)
    if ROTATED:
        eps = load_gate(parts, xp, bias, gates, 4, b, B, j, mask, H, HP, BLOCKS, PARTS)
        ee, eh, tt, et, th = sum5(eps * eps, eps * h, g * g, eps * g, g * h)
        rotation = rotation_scalars(eps, g, h, j, mask, ee, eh, tt, et, th, H)
        store_rotation(stats, rotation)
        g, _, _ = add_rotated(eps, g, h, rotation, j)
        if LN:
            total, squares = sum2(g, g * g)
            mean, rstd = moments(g, mask, total, squares, LN_EPS, H)
            _, g, _ = normed_gate(g, mean, rstd, ln_weight, ln_bias, 5, j, mask, H)
            tl.store(stats + 10, mean)
            tl.store(stats + 11, rstd)
    new_c = c * sigmoid(f + FORGET) + sigmoid(i) * tanh(g)
    new_c = tl.where(mask, new_c, 0.0)
    seen = new_c
    if LN:
        total, squares = sum2(new_c, new_c * new_c)
        mean_c, rstd_c = moments(new_c, mask, total, squares, LN_EPS, H)
        _, seen, _ = normed_gate(new_c, mean_c, rstd_c, ln_weight, ln_bias, 4, j, mask, H)
        tl.store(stats + 0, mean_i)
        tl.store(stats + 1, rstd_i)
        tl.store(stats + 2, mean_g)
        tl.store(stats + 3, rstd_g)
        tl.store(stats + 4, mean_f)
        tl.store(stats + 5, rstd_f)
        tl.store(stats + 6, mean_o)
        tl.store(stats + 7, rstd_o)
        tl.store(stats + 8, mean_c)
        tl.store(stats + 9, rstd_c)
    new_h = apply_zoneout(tanh(seen) * sigmoid(o), h, seeds, STREAM, t, index, ZONEOUT, KEEP_BELOW)
    new_c = apply_zoneout(new_c, c, seeds, STREAM + 1, t, index, ZONEOUT_C, KEEP_BELOW_C)
    if lengths is not None:
        active = t < tl.load(lengths + b)
        new_h = tl.where(active, new_h, h)
        new_c = tl.where(active, new_c, c)
    tl.store(h_state + index, new_h, mask=mask)
    tl.store(c_state + index, new_c, mask=mask)
    store_state(
        new_h, plain_operand, dropped_operand, plain, dropped, plain_mask, seeds, t, b, row, index, j, mask,
        PLAIN_WIDTH, DROPPED_WIDTH, DROP, DROP_BELOW, STREAM + 2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["t", "B"])
def lstm_backward_kernel(
    table, slots, gates, cells, stats, grad_out, dgates, dnormed, before,
    parts_plain, parts_dropped, plain_mask, dh_state, dc_state, operand, ln_weight, ln_bias, lengths, seeds, t, B,
    PLAIN_PARTS: tl.constexpr, DROPPED_PARTS: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, LN: tl.constexpr, FORGET: tl.constexpr,
    ROTATED: tl.constexpr, BEFORE_WIDTH: tl.constexpr, FROM_OUT: tl.constexpr,
    ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr, ZONEOUT_C: tl.constexpr, KEEP_BELOW_C: tl.constexpr,
    DROP: tl.constexpr, DROP_BELOW: tl.constexpr, PLAIN_WIDTH: tl.constexpr, DROPPED_WIDTH: tl.constexpr,
    STREAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run one backward step for row b.

    ``dnormed`` receives the gradients of layer norm's outputs, for the gradients of its gains and shifts. For a
    rotational LSTM, ``before`` holds h before each step, in rows BEFORE_WIDTH apart.
    """
    BLOCKS: tl.constexpr = 5 if ROTATED else 4
    WIDTH: tl.constexpr = ROTATED_STATS if ROTATED else STATS
    dtype = operand.dtype.element_ty
    dependent_start(PDL)
    if table is not None:
        t = tl.load(table) - t
        gates = tensor_at(slots, 1, dtype)
        cells = tensor_at(slots, 2, tl.float32)
        stats = tensor_at(slots, 3, tl.float32)
        if FROM_OUT:
            grad_out = tensor_at(slots, 4, dtype)
        dgates = tensor_at(slots, 5, dtype)
        dnormed = tensor_at(slots, 6, dtype)
        if ROTATED:
            before = tensor_at(slots, 8, dtype)
    b, row, j, mask = own_row(t, B, H, BLOCK)
    index = b * H + j
    gates += row * (BLOCKS * H)
    dgates += row * (BLOCKS * H)
    operand += b * (BLOCKS * HP)
    i, g, f, o = load_gates(gates, j, mask, H)
    c = tl.load(cells + row * H + j, mask=mask, other=0.0)
    dc_after = tl.load(dc_state + index, mask=mask, other=0.0)
    dh_after = load_state_grad(
        dh_state, parts_plain, parts_dropped, grad_out, plain_mask, seeds, t, b, B, row, index, j, mask, H,
        PLAIN_PARTS, DROPPED_PARTS, PLAIN_WIDTH, DROPPED_WIDTH, DROP, DROP_BELOW, STREAM + 2,
    )  # fmt: skip
    if t > 0:  # the data that the next backward step begins with
        BYTES: tl.constexpr = H * dtype.primitive_bitwidth // 8
        prefetch(gates - B.to(tl.int64) * (BLOCKS * H), BLOCKS * BYTES)
        if ROTATED:
            prefetch(before + (row - B) * BEFORE_WIDTH, BYTES)
        prefetch(cells + (row - B) * H, 4 * H)
        if LN or ROTATED:
            prefetch(stats + (row - B) * WIDTH, 4 * WIDTH)
        if FROM_OUT:
            prefetch(grad_out + (row - B) * H, BYTES)

    # repeat the forward step, pointwise
    if LN or ROTATED:
        stats += row * WIDTH
    if LN:
        rstd_i = tl.load(stats + 1)
        rstd_g = tl.load(stats + 3)
        rstd_f = tl.load(stats + 5)
        rstd_o = tl.load(stats + 7)
        rstd_c = tl.load(stats + 9)
        ni, i, wi = normed_gate(i, tl.load(stats + 0), rstd_i, ln_weight, ln_bias, 0, j, mask, H)
        ng, g, wg = normed_gate(g, tl.load(stats + 2), rstd_g, ln_weight, ln_bias, 1, j, mask, H)
        nf, f, wf = normed_gate(f, tl.load(stats + 4), rstd_f, ln_weight, ln_bias, 2, j, mask, H)
        no, o, wo = normed_gate(o, tl.load(stats + 6), rstd_o, ln_weight, ln_bias, 3, j, mask, H)
    if ROTATED:
        h = tl.load(before + row * BEFORE_WIDTH + j, mask=mask, other=0.0).to(tl.float32)
        eps = tl.load(gates + 4 * H + j, mask=mask, other=0.0).to(tl.float32)
        rotation = load_rotation(stats)
        g, e, w = add_rotated(eps, g, h, rotation, j)
        if LN:
            rstd_j = tl.load(stats + 11)
            nj, g, wj = normed_gate(g, tl.load(stats + 10), rstd_j, ln_weight, ln_bias, 5, j, mask, H)
    i = sigmoid(i)
    g = tanh(g)
    f = sigmoid(f + FORGET)
    o = sigmoid(o)
    seen = c * f + i * g
    if LN:
        nc, seen, wc = normed_gate(seen, tl.load(stats + 8), rstd_c, ln_weight, ln_bias, 4, j, mask, H)
    y = tanh(seen)

    dh, dh_before = zoneout_backward(dh_after, seeds, STREAM, t, index, ZONEOUT, KEEP_BELOW)
    dc, dc_before = zoneout_backward(dc_after, seeds, STREAM + 1, t, index, ZONEOUT_C, KEEP_BELOW_C)
    if lengths is not None:
        active = t < tl.load(lengths + b)
        dh, dh_before = tl.where(active, dh, 0.0), tl.where(active, dh_before, dh_after)
        dc, dc_before = tl.where(active, dc, 0.0), tl.where(active, dc_before, dc_after)

    do = dh * y * o * (1.0 - o)
    dseen = dh * o * (1.0 - y * y)
    if LN:
        dnormed += row * ((BLOCKS + 1) * H)
        tl.store(dnormed + 4 * H + j, dseen.to(dtype), mask=mask)
        total, projection = sum2(dseen * wc, dseen * wc * nc)
        dc += tl.where(mask, ln_backward(dseen, nc, wc, rstd_c, total, projection, H), 0.0)
    else:
        dc += dseen
    di = dc * g * i * (1.0 - i)
    dg = dc * i * (1.0 - g * g)
    df = dc * c * f * (1.0 - f)
    if ROTATED:
        if LN:
            tl.store(dnormed + 5 * H + j, dg.to(dtype), mask=mask)
            total, projection = sum2(dg * wj, dg * wj * nj)
            dg = tl.where(mask, ln_backward(dg, nj, wj, rstd_j, total, projection, H), 0.0)
        dg_e, dg_w = sum2(dg * e, dg * w)
        dh_rotation, deps, dtau, _ = rotation_backward(dg, dg_e, dg_w, e, w, h, rotation, j)
        deps += dg
        dg = dtau
        dh_before += dh_rotation
        tl.store(operand + 4 * HP + j, deps.to(dtype), mask=mask)
        tl.store(dgates + 4 * H + j, deps.to(dtype), mask=mask)
    if LN:
        store_gates(dnormed, di, dg, df, do, j, mask, H)
        ti, pi, tg, pg, tf, pf, to, po = sum8(
            di * wi, di * wi * ni, dg * wg, dg * wg * ng, df * wf, df * wf * nf, do * wo, do * wo * no
        )
        di = ln_backward(di, ni, wi, rstd_i, ti, pi, H)
        dg = ln_backward(dg, ng, wg, rstd_g, tg, pg, H)
        df = ln_backward(df, nf, wf, rstd_f, tf, pf, H)
        do = ln_backward(do, no, wo, rstd_o, to, po, H)

    store_gates(operand, di, dg, df, do, j, mask, HP)
    tl.store(dh_state + index, dh_before, mask=mask)
    tl.store(dc_state + index, dc_before + dc * f, mask=mask)
    store_gates(dgates, di, dg, df, do, j, mask, H)


@triton.jit(do_not_specialize=["rows"])
def lstm_norm_grad_kernel(
    gates, cells, stats, dnormed, before, sums, ln_weight, ln_bias, rows,
    H: tl.constexpr, BLOCK: tl.constexpr, FORGET: tl.constexpr, ROTATED: tl.constexpr, BEFORE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of layer norm's gains and shifts, all steps in parallel; each program sums its own rows."""
    BLOCKS: tl.constexpr = 5 if ROTATED else 4
    program = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = j < H
    zero = tl.zeros([BLOCK], tl.float32)
    wi, wg, wf, wo, wc, wj = zero, zero, zero, zero, zero, zero
    bi, bg, bf, bo, bc, bj = zero, zero, zero, zero, zero, zero
    gain_i, shift_i = load_ln(ln_weight, ln_bias, 0, j, mask, H)
    gain_g, shift_g = load_ln(ln_weight, ln_bias, 1, j, mask, H)
    gain_f, shift_f = load_ln(ln_weight, ln_bias, 2, j, mask, H)
    if ROTATED:
        gain_j, shift_j = load_ln(ln_weight, ln_bias, 5, j, mask, H)
    row = program.to(tl.int64)
    while row < rows:
        raw = gates + row * (BLOCKS * H) + j
        grad = dnormed + row * ((BLOCKS + 1) * H) + j
        stat = stats + row * (ROTATED_STATS if ROTATED else STATS)
        i = (tl.load(raw, mask=mask, other=0.0).to(tl.float32) - tl.load(stat)) * tl.load(stat + 1)
        g = (tl.load(raw + H, mask=mask, other=0.0).to(tl.float32) - tl.load(stat + 2)) * tl.load(stat + 3)
        f = (tl.load(raw + 2 * H, mask=mask, other=0.0).to(tl.float32) - tl.load(stat + 4)) * tl.load(stat + 5)
        o = (tl.load(raw + 3 * H, mask=mask, other=0.0).to(tl.float32) - tl.load(stat + 6)) * tl.load(stat + 7)
        c = tl.load(cells + row * H + j, mask=mask, other=0.0) * sigmoid(f * gain_f + shift_f + FORGET)
        candidate = g * gain_g + shift_g
        if ROTATED:
            h = tl.load(before + row * BEFORE_WIDTH + j, mask=mask, other=0.0).to(tl.float32)
            eps = tl.load(raw + 4 * H, mask=mask, other=0.0).to(tl.float32)
            n, _, _ = add_rotated(eps, candidate, h, load_rotation(stat), j)
            n = (n - tl.load(stat + 10)) * tl.load(stat + 11)
            candidate = n * gain_j + shift_j
            dj = tl.load(grad + 5 * H, mask=mask, other=0.0).to(tl.float32)
            wj += dj * n
            bj += dj
        c += sigmoid(i * gain_i + shift_i) * tanh(candidate)
        c = (c - tl.load(stat + 8)) * tl.load(stat + 9)
        di = tl.load(grad, mask=mask, other=0.0).to(tl.float32)
        dg = tl.load(grad + H, mask=mask, other=0.0).to(tl.float32)
        df = tl.load(grad + 2 * H, mask=mask, other=0.0).to(tl.float32)
        do = tl.load(grad + 3 * H, mask=mask, other=0.0).to(tl.float32)
        dc = tl.load(grad + 4 * H, mask=mask, other=0.0).to(tl.float32)
        wi += di * i
        wg += dg * g
        wf += df * f
        wo += do * o
        wc += dc * c
        bi += di
        bg += dg
        bf += df
        bo += do
        bc += dc
        row += tl.num_programs(0)
    sums += program * (2 * (BLOCKS + 1) * H)
    shifts = sums + (BLOCKS + 1) * H
    store_gates(sums, wi, wg, wf, wo, j, mask, H)
    store_gates(shifts, bi, bg, bf, bo, j, mask, H)
    tl.store(sums + 4 * H + j, wc, mask=mask)
    tl.store(shifts + 4 * H + j, bc, mask=mask)
    if ROTATED:
        tl.store(sums + 5 * H + j, wj, mask=mask)
        tl.store(shifts + 5 * H + j, bj, mask=mask)
