"""Device functions that the fused kernels share: row sums, activations, the rotation's scalars, zoneout's hash.

All of them work on one batch row held as a block of ``BLOCK`` float32 lanes, of which ``H`` are real. Lanes past ``H``
must be zero in every vector that enters a sum.
"""

import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))

NORM_TINY = tl.constexpr(1e-12)  # |eps| or |tau| at or under this: no rotation
BISECTOR_TINY = tl.constexpr(1e-4)  # |u + w| at or under this: half turn
ACCURATE_COS = tl.constexpr(-0.9)  # below this cosine 1 + cos cancels and the sums are taken over u + w itself


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def _add7(a0, a1, a2, a3, a4, a5, a6, b0, b1, b2, b3, b4, b5, b6):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6


# Several sums in one reduction share its shuffles' latency and its barrier. The interpreter walks a joint reduction
# element by element in Python, so there the sums are taken one by one.


@triton.jit
def sum2(a, b):
    if INTERPRET:
        return tl.sum(a, 0), tl.sum(b, 0)
    else:
        return tl.reduce((a, b), 0, _add2)


@triton.jit
def sum3(a, b, c):
    if INTERPRET:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)
    else:
        return tl.reduce((a, b, c), 0, _add3)


@triton.jit
def sum4(a, b, c, d):
    if INTERPRET:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0), tl.sum(d, 0)
    else:
        return tl.reduce((a, b, c, d), 0, _add4)


@triton.jit
def sum5(a, b, c, d, e):
    if INTERPRET:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0), tl.sum(d, 0), tl.sum(e, 0)
    else:
        return tl.reduce((a, b, c, d, e), 0, _add5)


@triton.jit
def sum6(a, b, c, d, e, f):
    if INTERPRET:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0), tl.sum(d, 0), tl.sum(e, 0), tl.sum(f, 0)
    else:
        return tl.reduce((a, b, c, d, e, f), 0, _add6)


@triton.jit
def sum7(a, b, c, d, e, f, g):
    if INTERPRET:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0), tl.sum(d, 0), tl.sum(e, 0), tl.sum(f, 0), tl.sum(g, 0)
    else:
        return tl.reduce((a, b, c, d, e, f, g), 0, _add7)


@triton.jit
def prefetch(row, BYTES: tl.constexpr):
    """Ask L2 for ``BYTES`` from the pointer ``row`` on, without waiting: the next step's data come from far memory."""
    if not INTERPRET:
        LINES: tl.constexpr = triton.next_power_of_2((BYTES + 127) // 128)
        lines = row.to(tl.int64) + tl.minimum(tl.arange(0, LINES) * 128, BYTES - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def hash32(x):
    """One round of a 32-bit integer hash; ``x`` is uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def zoneout_keep_new(seed, t, index, threshold: tl.constexpr):
    """Which elements take their new value at step ``t``; ``index`` is ``b * H + j``, ``threshold`` (1 - p) 2^32."""
    key = hash32(seed.to(tl.uint32) ^ (t.to(tl.uint32) * 0x9E3779B9))
    return hash32(key ^ index.to(tl.uint32)) < threshold


@triton.jit
def settled(mask):
    """``mask``, computed here: the compiler would put it off to its first use, behind a wait."""
    if INTERPRET:
        return mask
    else:
        return (
            tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
            )
            != 0
        )


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    decay = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - decay) / (1.0 + decay)
    xx = x * x
    small = x * (1.0 + xx * (-1.0 / 3.0 + xx * (2.0 / 15.0)))  # 1 - decay cancels near zero
    return tl.where(tl.abs(x) < 0.1, small, tl.where(x < 0.0, -large, large))


@triton.jit
def activate(x, activation: tl.constexpr):
    if activation == "relu":
        return tl.maximum(x, 0.0)
    elif activation == "tanh":
        return tanh(x)
    elif activation == "sigmoid":
        return sigmoid(x)
    else:
        tl.static_assert(activation == "softsign")
        return x / (1.0 + tl.abs(x))


@triton.jit
def activation_slope(y, activation: tl.constexpr):
    """The activation's derivative, from its value ``y``."""
    if activation == "relu":
        return tl.where(y > 0.0, 1.0, 0.0)
    elif activation == "tanh":
        return 1.0 - y * y
    elif activation == "sigmoid":
        return y * (1.0 - y)
    else:
        tl.static_assert(activation == "softsign")
        return (1.0 - tl.abs(y)) * (1.0 - tl.abs(y))


@triton.jit
def moments(x, mask, total, squares, ln_eps: tl.constexpr, H: tl.constexpr):
    """Mean and 1 / sqrt(var + ln_eps) of a row from its sum and its sum of squares."""
    mean = total / H
    var = tl.maximum(squares / H - mean * mean, 0.0)
    if mean * mean > 8.0 * (var + ln_eps):  # the difference cancels: take the variance about the mean
        centred = tl.where(mask, x - mean, 0.0)
        var = tl.sum(centred * centred, 0) / H
    return mean, 1.0 / tl.sqrt(var + ln_eps)


@triton.jit
def moments2(x, y, mask, total_x, squares_x, total_y, squares_y, ln_eps: tl.constexpr, H: tl.constexpr):
    """``moments`` of two rows, with one branch for both."""
    mean_x, mean_y = total_x / H, total_y / H
    var_x = tl.maximum(squares_x / H - mean_x * mean_x, 0.0)
    var_y = tl.maximum(squares_y / H - mean_y * mean_y, 0.0)
    if (mean_x * mean_x > 8.0 * (var_x + ln_eps)) | (mean_y * mean_y > 8.0 * (var_y + ln_eps)):
        centred_x = tl.where(mask, x - mean_x, 0.0)
        centred_y = tl.where(mask, y - mean_y, 0.0)
        squares_x, squares_y = sum2(centred_x * centred_x, centred_y * centred_y)
        var_x, var_y = squares_x / H, squares_y / H
    return mean_x, 1.0 / tl.sqrt(var_x + ln_eps), mean_y, 1.0 / tl.sqrt(var_y + ln_eps)


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
