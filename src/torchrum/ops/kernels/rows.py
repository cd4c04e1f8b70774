"""Device functions that the fused kernels share: row sums, activations, layer norm, zoneout's hash.

Each works on one batch row, a block of ``BLOCK`` float32 lanes of which the first ``H`` are real. Lanes past ``H`` must
be zero in every vector that enters a sum.
"""

import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))


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


@triton.jit
def _add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def own_row(t, B, H: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's batch row, its index among the rows of all steps, its lanes and the mask of real lanes."""
    b = tl.program_id(0)
    row = t.to(tl.int64) * B + b
    j = tl.arange(0, BLOCK)
    return b, row, j, j < H


# Several sums in one reduction share the latency of its shuffles and its barrier.


@triton.jit
def sum2(a, b):
    return tl.reduce((a, b), 0, _add2)


@triton.jit
def sum3(a, b, c):
    return tl.reduce((a, b, c), 0, _add3)


@triton.jit
def sum4(a, b, c, d):
    return tl.reduce((a, b, c, d), 0, _add4)


@triton.jit
def sum5(a, b, c, d, e):
    return tl.reduce((a, b, c, d, e), 0, _add5)


@triton.jit
def sum6(a, b, c, d, e, f):
    return tl.reduce((a, b, c, d, e, f), 0, _add6)


@triton.jit
def sum7(a, b, c, d, e, f, g):
    return tl.reduce((a, b, c, d, e, f, g), 0, _add7)


@triton.jit
def sum8(a, b, c, d, e, f, g, h):
    return tl.reduce((a, b, c, d, e, f, g, h), 0, _add8)


@triton.jit
def prefetch(row, BYTES: tl.constexpr):
    """Prefetch ``BYTES`` from the pointer ``row`` on into L2: the next step's data are in device memory."""
    if not INTERPRET:
        LINES: tl.constexpr = triton.next_power_of_2((BYTES + 127) // 128)
        lines = row.to(tl.int64) + tl.minimum(tl.arange(0, LINES) * 128, BYTES - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def hash32(x):
    """Hash a uint32 ``x``."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def zoneout_keep_new(seed, t, index, threshold: tl.constexpr):
    """Return the mask of elements that take their new value at step ``t``.

    ``index`` is ``b * H + j``, and ``threshold`` is ``(1 - p) 2^32``.
    """
    key = hash32(seed.to(tl.uint32) ^ (t.to(tl.uint32) * 0x9E3779B9))
    return hash32(key ^ index.to(tl.uint32)) < threshold


@triton.jit
def materialize(mask):
    """Return ``mask``, computed here: the compiler would delay it to its first use, behind a wait."""
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
    """Return the activation's derivative, from its value ``y``."""
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
def cancels(mean, var, ln_eps: tl.constexpr):
    """Return whether a variance computed as a difference of squares has lost too many digits."""
    return mean * mean > 8.0 * (var + ln_eps)


@triton.jit
def moments(x, mask, total, squares, ln_eps: tl.constexpr, H: tl.constexpr):
    """Compute the mean and 1 / sqrt(var + ln_eps) of a row from its sum and its sum of squares."""
    mean = total / H
    var = tl.maximum(squares / H - mean * mean, 0.0)
    if cancels(mean, var, ln_eps):  # take the variance about the mean
        centred = tl.where(mask, x - mean, 0.0)
        var = tl.sum(centred * centred, 0) / H
    return mean, 1.0 / tl.sqrt(var + ln_eps)


@triton.jit
def moments2(x, y, mask, total_x, squares_x, total_y, squares_y, ln_eps: tl.constexpr, H: tl.constexpr):
    """Compute the ``moments`` of two rows, with one branch for both."""
    mean_x, mean_y = total_x / H, total_y / H
    var_x = tl.maximum(squares_x / H - mean_x * mean_x, 0.0)
    var_y = tl.maximum(squares_y / H - mean_y * mean_y, 0.0)
    if cancels(mean_x, var_x, ln_eps) | cancels(mean_y, var_y, ln_eps):
        centred_x = tl.where(mask, x - mean_x, 0.0)
        centred_y = tl.where(mask, y - mean_y, 0.0)
        squares_x, squares_y = sum2(centred_x * centred_x, centred_y * centred_y)
        var_x, var_y = squares_x / H, squares_y / H
    return mean_x, 1.0 / tl.sqrt(var_x + ln_eps), mean_y, 1.0 / tl.sqrt(var_y + ln_eps)


@triton.jit
def load_ln(ln_weight, ln_bias, block: tl.constexpr, j, mask, H: tl.constexpr):
    weight = tl.load(ln_weight + block * H + j, mask=mask, other=0.0)
    return weight, tl.load(ln_bias + block * H + j, mask=mask, other=0.0)


@triton.jit
def ln_backward(grad, normed, weight, rstd, total, projection, H: tl.constexpr):
    """Compute the gradient of a layer norm's input.

    ``total`` and ``projection`` are the sums of ``weight * grad`` and of ``weight * grad * normed``.
    """
    if H == 1:  # the value is its own mean, so the gradient is zero up to rounding
        return 0.0 * grad
    else:
        return rstd * (weight * grad - total / H - normed * (projection / H))
