"""Device functions that the row kernels of a chain's cells share: what a step reads, and whom it hands its state to.

A step reads the matmul of its raw gates, and hands its new h to at most two readers: one gets it plain, the other
through dropout. A reader is a buffer that the next matmul multiplies (``low``) and a tensor over all steps (``plain``,
``dropped``).
"""

import triton
import triton.language as tl

from torchrum.ops.kernels.matmul import load_parts
from torchrum.ops.kernels.rows import zoneout_keep_new


@triton.jit
def dependent_start(PDL: tl.constexpr):
    """Under dependent launch: let the next kernel start, and wait for all that the one before has written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def zone(new, old, seeds, STREAM: tl.constexpr, t, index, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr):
    """Zoneout: the old value where the mask says so; in evaluation the two mixed in that proportion."""
    if ZONEOUT == "train":
        return tl.where(zoneout_keep_new(tl.load(seeds + STREAM), t, index, KEEP_BELOW), new, old)
    elif ZONEOUT is not None:
        return (1.0 - ZONEOUT) * new + ZONEOUT * old
    else:
        return new


@triton.jit
def zone_backward(dnew, seeds, STREAM: tl.constexpr, t, index, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr):
    """How a mixed state's gradient parts: to the new value, to the old one."""
    if ZONEOUT == "train":
        keep = zoneout_keep_new(tl.load(seeds + STREAM), t, index, KEEP_BELOW)
        return tl.where(keep, dnew, 0.0), tl.where(keep, 0.0, dnew)
    elif ZONEOUT is not None:
        return (1.0 - ZONEOUT) * dnew, ZONEOUT * dnew
    else:
        return dnew, tl.zeros_like(dnew)


@triton.jit
def drop(x, seeds, STREAM: tl.constexpr, t, index, SCALE: tl.constexpr, KEEP_BELOW: tl.constexpr):
    """Dropout, and as well its own backward; SCALE is None where there is none."""
    if SCALE is not None:
        return tl.where(zoneout_keep_new(tl.load(seeds + STREAM), t, index, KEEP_BELOW), x * SCALE, 0.0)
    else:
        return x


@triton.jit
def hand_on(
    new, low_plain, low_dropped, plain, dropped, seeds, t, b, row, index, j, mask,
    PLAIN_WIDTH: tl.constexpr, DROPPED_WIDTH: tl.constexpr, DROP: tl.constexpr, DROP_BELOW: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    """Store a new state where its readers find it."""
    dtype = plain.dtype.element_ty
    value = new.to(dtype)
    tl.store(low_plain + b * PLAIN_WIDTH + j, value, mask=mask)
    tl.store(plain + row * PLAIN_WIDTH + j, value, mask=mask)
    if DROPPED_WIDTH is not None:
        value = drop(new, seeds, STREAM, t, index, DROP, DROP_BELOW).to(dtype)
        if low_dropped is not None:
            tl.store(low_dropped + b * DROPPED_WIDTH + j, value, mask=mask)
        tl.store(dropped + row * DROPPED_WIDTH + j, value, mask=mask)


@triton.jit
def gather_grad(
    dstate, parts_plain, parts_dropped, grad_out, seeds, t, b, B, row, index, j, mask, H: tl.constexpr,
    PLAIN_PARTS: tl.constexpr, DROPPED_PARTS: tl.constexpr, PLAIN_WIDTH: tl.constexpr, DROPPED_WIDTH: tl.constexpr,
    DROP: tl.constexpr, DROP_BELOW: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """The gradient of a new state, from its carry and its readers; the transpose of ``hand_on``."""
    dh = tl.load(dstate + b * H + j, mask=mask, other=0.0)
    dh += load_parts(parts_plain, b * PLAIN_WIDTH + j, mask, B * PLAIN_WIDTH, PLAIN_PARTS)
    if DROPPED_WIDTH is not None:
        if parts_dropped is not None:
            arriving = load_parts(parts_dropped, b * DROPPED_WIDTH + j, mask, B * DROPPED_WIDTH, DROPPED_PARTS)
        else:
            arriving = tl.load(grad_out + row * DROPPED_WIDTH + j, mask=mask, other=0.0).to(tl.float32)
        dh += drop(arriving, seeds, STREAM, t, index, DROP, DROP_BELOW)
    return dh


@triton.jit
def load_gate(
    parts, xp, bias, gates, block: tl.constexpr, b, B, j, mask,
    H: tl.constexpr, HP: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One block of pre-activations, also stored for the backward; ``xp`` and ``gates`` point at this row."""
    raw = load_parts(parts, b * (BLOCKS * HP) + block * HP + j, mask, B * (BLOCKS * HP), PARTS)
    if xp is not None:
        raw += tl.load(xp + block * H + j, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        raw += tl.load(bias + block * H + j, mask=mask, other=0.0)
    tl.store(gates + block * H + j, raw.to(gates.dtype.element_ty), mask=mask)
    return raw
