"""Device functions of one RUM step with lam = 0 on one batch row: the rotation's scalars, the cell and its operands."""

import triton
import triton.language as tl

from torchrum.ops.kernels.rows import (
    activate,
    load_ln,
    materialize,
    moments,
    moments2,
    sigmoid,
    sum2,
    sum3,
    sum4,
    sum5,
    sum6,
    sum7,
    zoneout_keep_new,
)

NORM_TINY = tl.constexpr(1e-12)  # no rotation for |eps| or |tau| up to this; eta makes a state up to this norm zero
BISECTOR_TINY = tl.constexpr(1e-4)  # half turn for |e + w| up to this
ACCURATE_COS = tl.constexpr(-0.9)  # below this cosine 1 + cos cancels, so the sums use e + w itself


@triton.jit
def rotation_scalars(eps, tau, h, j, mask, ee, eh, tt, et, th, H: tl.constexpr):
    """Compute the scalars of ``Rot(eps, tau) h = h + al e + be w + ga 1_i`` for ``e = eps/|eps|``, ``w = tau/|tau|``.

    Takes the sums ``eps.eps, eps.h, tau.tau, eps.tau, tau.h``. Returns ``inv_eps, inv_tau`` (both 0 if a vector is
    zero, which makes the rotation the identity and its gradients zero), ``cos = e.w``, ``k = 2 / |e + w|^2``,
    ``p = e.h``, ``q = w.h``, ``al, be, ga`` and, for the half turn, ``i`` (else -1), ``e_i`` and
    ``1 / |1_i - e_i e|``.
    """
    norm_eps = tl.sqrt(ee)
    norm_tau = tl.sqrt(tt)
    # in one dimension the only rotation is the identity; "<=" is false for NaN, so that NaN propagates
    fixed = (norm_eps <= NORM_TINY) | (norm_tau <= NORM_TINY) | (H == 1)
    inv_eps = tl.where(fixed, 0.0, 1.0 / norm_eps)
    inv_tau = tl.where(fixed, 0.0, 1.0 / norm_tau)
    p = eh * inv_eps
    q = th * inv_tau
    cos = et * inv_eps * inv_tau
    k = 1.0 / (1.0 + tl.maximum(cos, ACCURATE_COS))
    al = -k * (p + q)
    be = 2.0 * p + al
    ga = 0.0
    i = -1
    e_i = 0.0
    inv_f = 0.0
    if cos < ACCURATE_COS:
        e = eps * inv_eps
        s = e + tau * inv_tau
        ss, sg = sum2(s * s, s * (h - 2.0 * p * e))
        cos = 0.5 * ss - 1.0
        if ss > BISECTOR_TINY * BISECTOR_TINY:
            k = 2.0 / ss
            be = -k * sg
            al = be - 2.0 * p
        else:  # half turn in the plane of e and the axis where |e| is smallest
            i = tl.argmin(tl.where(mask, tl.abs(e), 2.0), 0)
            e_i, h_i = sum2(tl.where(j == i, e, 0.0), tl.where(j == i, h, 0.0))
            inv_f = 1.0 / tl.sqrt(1.0 - e_i * e_i)  # e_i^2 is at most 1/2
            fh = (h_i - e_i * p) * inv_f
            k = 0.0
            be = 0.0
            ga = -2.0 * fh * inv_f
            al = -2.0 * p - ga * e_i
    return inv_eps, inv_tau, cos, k, p, q, al, be, ga, i, e_i, inv_f


@triton.jit
def load_norms(ln_weight, ln_bias, j, mask, H: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr):
    """Load layer norm's gain and shift for tau, for the gate and for the candidate."""
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
def new_value_mask(lengths, seed, t, b, j, H: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr):
    """Return the mask of units that take the new state, from zoneout and the length; None if all units do."""
    keep = None
    if ZONEOUT == "train":
        keep = zoneout_keep_new(tl.load(seed), t, b * H + j, KEEP_BELOW)
        if lengths is not None:
            keep = keep & (t < tl.load(lengths + b))
        keep = materialize(keep)
    elif lengths is not None:
        keep = t < tl.load(lengths + b)
    return keep


@triton.jit
def with_norm(new, ETA: tl.constexpr):
    """Scale a new state to the norm ETA, if ETA is given."""
    if ETA is not None:
        norm = tl.sqrt(tl.sum(new * new, 0))
        new = new * tl.where(norm <= NORM_TINY, 0.0, ETA / norm)
    return new


@triton.jit
def sums_of_inputs(eps, h, LN: tl.constexpr):
    """Compute the sums of ``rum_cell`` without tau and the gate: eps.eps, eps.h and, for layer norm, h.h, eps, h."""
    if LN == "none":
        ee, eh = sum2(eps * eps, eps * h)
        return ee, eh, ee, ee, ee
    else:
        return sum5(eps * eps, eps * h, h * h, eps, h)


@triton.jit
def rum_cell(
    tau_raw, u_raw, eps, h, norms, j, mask,
    H: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr, LN_EPS: tl.constexpr, ACTIVATION: tl.constexpr,
    inputs=None,
):  # fmt: skip
    """Compute the new state before eta and zoneout, and every scalar that the backward needs to repeat the step without
    a sum: the values of ``rotation_scalars``, and layer norm's mean and 1/std of tau, the gate and the candidate.

    ``inputs`` holds the values of ``sums_of_inputs`` if they are already computed.
    """
    mean_t, rstd_t, mean_u, rstd_u, mean_c, rstd_c = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    tau = tau_raw
    u = u_raw
    if LN == "none":
        if inputs is None:
            ee, eh, tt, et, th = sum5(eps * eps, eps * h, tau * tau, eps * tau, tau * h)
        else:
            ee, eh, _, _, _ = inputs
            tt, et, th = sum3(tau * tau, eps * tau, tau * h)
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
                total, squares, total_u, squares_u, ee, eh = sum6(tau, tau * tau, u, u * u, eps * eps, eps * h)
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
                total, squares, ee, eh = sum4(tau, tau * tau, eps * eps, eps * h)
            else:
                total, squares = sum2(tau, tau * tau)
            mean_t, rstd_t = moments(tau, mask, total, squares, LN_EPS, H)
        tau = (tau - mean_t) * rstd_t * weight_t + bias_t
        if inputs is None:
            tt, et, th, total_t, hh, total_e, total_h = sum7(tau * tau, eps * tau, tau * h, tau, h * h, eps, h)
        else:
            tt, et, th, total_t = sum4(tau * tau, eps * tau, tau * h, tau)

    rotation = rotation_scalars(eps, tau, h, j, mask, ee, eh, tt, et, th, H)
    inv_eps, inv_tau, cos, _, p, q, al, be, ga, i, _, _ = rotation
    new = eps + h + (al * inv_eps) * eps + (be * inv_tau) * tau + tl.where(j == i, ga, 0.0)
    if LN != "none":
        # moments of eps + z without another sum: |z| = |h|, and eps.z = |eps| (2 p cos - q)
        ez = tl.where(inv_eps == 0.0, eh, ee * inv_eps * (2.0 * p * cos - q))
        mean_c = (total_e + total_h + (al * inv_eps) * total_e + (be * inv_tau) * total_t) / H
        var_c = tl.maximum((ee + hh + 2.0 * ez) / H - mean_c * mean_c, 0.0)
        if (cos < ACCURATE_COS) | (ee + hh > (8.0 * H) * (var_c + LN_EPS)):  # these terms cancel: compute the sums
            mean_c = tl.sum(new, 0) / H
            centred = tl.where(mask, new - mean_c, 0.0)
            var_c = tl.sum(centred * centred, 0) / H
        rstd_c = 1.0 / tl.sqrt(var_c + LN_EPS)
        new = (new - mean_c) * rstd_c * weight_c + bias_c
    new = activate(new, ACTIVATION)
    if GATE:
        new = u * h + (1.0 - u) * new
    new = tl.where(mask, new, 0.0)
    return new, rotation, (mean_t, rstd_t, mean_u, rstd_u, mean_c, rstd_c)
