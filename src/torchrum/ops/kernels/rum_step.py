"""Device functions of one RUM step with lam = 0 on one batch row: the rotation's scalars, the cell, what it reads."""

import triton
import triton.language as tl

from .rows import (
    activate,
    load_ln,
    moments,
    moments2,
    settled,
    sigmoid,
    sum2,
    sum3,
    sum4,
    sum5,
    sum6,
    sum7,
    zoneout_keep_new,
)

NORM_TINY = tl.constexpr(1e-12)  # |eps| or |tau| at or under this: no rotation
BISECTOR_TINY = tl.constexpr(1e-4)  # |u + w| at or under this: half turn
ACCURATE_COS = tl.constexpr(-0.9)  # below this cosine 1 + cos cancels and the sums are taken over u + w itself


@triton.jit
def rotation_scalars(e, tau, h, j, mask, ee, eh, tt, et, th, H: tl.constexpr):
    """The scalars of ``Rot(e, tau) h = h + al u + be w + ga 1_i``, with ``u = e / |e|`` and ``w = tau / |tau|``.

    Takes the sums ``e.e, e.h, tau.tau, e.tau, tau.h``. Returns ``inv_e, inv_t`` (both 0 if a vector is zero, which
    makes the rotation the identity and its gradients zero), ``c = u.w``, ``k = 2 / |u + w|^2``, ``p = u.h``,
    ``q = w.h``, ``al, be, ga`` and, for the half turn, ``i`` (else -1), ``u_i`` and ``1 / |1_i - u_i u|``.
    """
    norm_e = tl.sqrt(ee)
    norm_t = tl.sqrt(tt)
    # a line has no rotation but 1; "not <=" rather than ">" so that NaN is passed on
    fixed = (norm_e <= NORM_TINY) | (norm_t <= NORM_TINY) | (H == 1)
    inv_e = tl.where(fixed, 0.0, 1.0 / norm_e)
    inv_t = tl.where(fixed, 0.0, 1.0 / norm_t)
    p = eh * inv_e
    q = th * inv_t
    c = et * inv_e * inv_t
    k = 1.0 / (1.0 + tl.maximum(c, ACCURATE_COS))
    al = -k * (p + q)
    be = 2.0 * p + al
    ga = 0.0
    i = -1
    u_i = 0.0
    inv_f = 0.0
    if c < ACCURATE_COS:
        u = e * inv_e
        v = u + tau * inv_t
        vv, vg = sum2(v * v, v * (h - 2.0 * p * u))
        c = 0.5 * vv - 1.0
        if vv > BISECTOR_TINY * BISECTOR_TINY:
            k = 2.0 / vv
            be = -k * vg
            al = be - 2.0 * p
        else:  # half turn in the plane of u and the axis it leans on least
            i = tl.argmin(tl.where(mask, tl.abs(u), 2.0), 0)
            u_i, h_i = sum2(tl.where(j == i, u, 0.0), tl.where(j == i, h, 0.0))
            inv_f = 1.0 / tl.sqrt(1.0 - u_i * u_i)  # u_i^2 is at most 1/2
            fh = (h_i - u_i * p) * inv_f
            k = 0.0
            be = 0.0
            ga = -2.0 * fh * inv_f
            al = -2.0 * p - ga * u_i
    return inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f


@triton.jit
def load_norms(ln_weight, ln_bias, j, mask, H: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr):
    """Layer norm's gain and shift for tau, for the gate and for the candidate."""
    norms = None
    if LN != "none":
        weight_t, bias_t = load_ln(ln_weight, ln_bias, 0, j, mask, H)
        weight_u, bias_u = weight_t, bias_t
        if GATE:
            weight_u, bias_u = load_ln(ln_weight, ln_bias, 1, j, mask, H)
        weight_c, bias_c = load_ln(ln_weight, ln_bias, 2 if GATE else 1, j, mask, H)
        norms = (weight_t, bias_t, weight_u, bias_u, weight_c, bias_c)
    return norms


@triton.jit
def kept_new(lengths, seed, t, b, j, H: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr):
    """Where zoneout's masks and the length let the new state in; None if everywhere."""
    keep = None
    if ZONEOUT == "train":
        keep = zoneout_keep_new(tl.load(seed), t, b * H + j, KEEP_BELOW)
        if lengths is not None:
            keep = keep & (t < tl.load(lengths + b))
        keep = settled(keep)
    elif lengths is not None:
        keep = t < tl.load(lengths + b)
    return keep


@triton.jit
def sums_of_inputs(e, h, LN: tl.constexpr):
    """The sums of ``rum_cell`` that need neither tau nor the gate: e.e, e.h and, for layer norm, h.h, those of e, h."""
    if LN == "none":
        ee, eh = sum2(e * e, e * h)
        return ee, eh, ee, ee, ee
    else:
        return sum5(e * e, e * h, h * h, e, h)


@triton.jit
def rum_cell(
    tau_raw, u_raw, e, h, norms, j, mask,
    H: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr, LN_EPS: tl.constexpr, ACTIVATION: tl.constexpr,
    inputs=None,
):  # fmt: skip
    """The state before eta and zoneout, and every scalar that the backward needs to redo it without a sum.

    ``inputs`` is what ``sums_of_inputs`` returns, where that is known already.
    """
    mean_t, rstd_t, mean_u, rstd_u, mean_c, rstd_c = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    tau = tau_raw
    u = u_raw
    if LN == "none":
        if inputs is None:
            ee, eh, tt, et, th = sum5(e * e, e * h, tau * tau, e * tau, tau * h)
        else:
            ee, eh, _, _, _ = inputs
            tt, et, th = sum3(tau * tau, e * tau, tau * h)
        if GATE:
            u = sigmoid(u)
    else:
        weight_t, bias_t, weight_u, bias_u, weight_c, bias_c = norms
        if inputs is not None:
            ee, eh, hh, total_e, total_h = inputs
        if GATE:
            if LN == "authors":
                u = tl.where(mask, sigmoid(u), 0.0)
            if inputs is None:
                total, squares, total_u, squares_u, ee, eh = sum6(tau, tau * tau, u, u * u, e * e, e * h)
            else:
                total, squares, total_u, squares_u = sum4(tau, tau * tau, u, u * u)
            mean_t, rstd_t, mean_u, rstd_u = moments2(
                tau, u, mask, total, squares, total_u, squares_u, LN_EPS, H
            )  # fmt: skip
            u = (u - mean_u) * rstd_u * weight_u + bias_u
            if LN == "before":
                u = sigmoid(u)
        else:
            if inputs is None:
                total, squares, ee, eh = sum4(tau, tau * tau, e * e, e * h)
            else:
                total, squares = sum2(tau, tau * tau)
            mean_t, rstd_t = moments(tau, mask, total, squares, LN_EPS, H)
        tau = (tau - mean_t) * rstd_t * weight_t + bias_t
        if inputs is None:
            tt, et, th, total_t, hh, total_e, total_h = sum7(tau * tau, e * tau, tau * h, tau, h * h, e, h)
        else:
            tt, et, th, total_t = sum4(tau * tau, e * tau, tau * h, tau)

    inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f = rotation_scalars(e, tau, h, j, mask, ee, eh, tt, et, th, H)
    new = e + h + (al * inv_e) * e + (be * inv_t) * tau + tl.where(j == i, ga, 0.0)
    if LN != "none":
        # Moments of e + z without another sum: z is as long as h, and e.z = |e| (2 p c - q).
        ez = tl.where(inv_e == 0.0, eh, ee * inv_e * (2.0 * p * c - q))
        mean_c = (total_e + total_h + (al * inv_e) * total_e + (be * inv_t) * total_t) / H
        var_c = tl.maximum((ee + hh + 2.0 * ez) / H - mean_c * mean_c, 0.0)
        if (c < ACCURATE_COS) | (ee + hh > (8.0 * H) * (var_c + LN_EPS)):  # these terms cancel: sum after all
            mean_c = tl.sum(new, 0) / H
            centred = tl.where(mask, new - mean_c, 0.0)
            var_c = tl.sum(centred * centred, 0) / H
        rstd_c = 1.0 / tl.sqrt(var_c + LN_EPS)
        new = (new - mean_c) * rstd_c * weight_c + bias_c
    new = activate(new, ACTIVATION)
    if GATE:
        new = u * h + (1.0 - u) * new
    new = tl.where(mask, new, 0.0)
    return (
        new, inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f, mean_t, rstd_t, mean_u, rstd_u, mean_c, rstd_c
    )  # fmt: skip
