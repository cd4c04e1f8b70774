"""Device functions of one step of a gated RUM: its units in heads, the plane of each head, the step and its gradients.

Sums stay inside a head, so each program holds whole heads of a row, as a block of heads times units. A head is padded
to a power of two.
"""

from typing import Any

import triton
import triton.language as tl

from torchrum.ops.kernels.rows import tanh

UNITS = 128  # units per program; a longer head has a program of its own
NO_DIRECTION = tl.constexpr(1e-12)  # these two are tiny_of and opposite_of of rotation.py
OPPOSITE = tl.constexpr(1e-4)


@triton.jit
def own_units(H: tl.constexpr, HEAD: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr):
    """Return the units of this program ``(HEADS, SIZE)`` and the mask of the real ones."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, SIZE)[None, :]
    j = head * HEAD + i
    return j, (i < HEAD) & (j < H)


@triton.jit
def head_dot(x, y):
    return tl.sum(x * y, 1)[:, None]


@triton.jit
def inverse_above(length, tiny):
    return tl.where(length <= tiny, 0.0, 1.0 / length)  # propagates NaN


@triton.jit
def find_plane(eps, tau, j, mask, K: tl.constexpr, HEAD: tl.constexpr):
    """Compute each head's plane of rotation: e, w, m and the inverse lengths of eps, tau and e + w.

    The values are those of ``torch_backend.Plane``.
    """
    rotated = mask & (j < K)
    eps = tl.where(rotated, eps, 0.0)
    tau = tl.where(rotated, tau, 0.0)
    inv_eps = inverse_above(tl.sqrt(head_dot(eps, eps)), NO_DIRECTION)
    inv_tau = inverse_above(tl.sqrt(head_dot(tau, tau)), NO_DIRECTION)
    units = tl.sum(rotated.to(tl.int32), 1)[:, None]
    fixed = (inv_eps == 0.0) | (inv_tau == 0.0) | (units < 2)
    e, w = eps * inv_eps, tau * inv_tau
    s, apart = e + w, e - w
    square = head_dot(s, s)
    s -= head_dot(s, apart) / tl.maximum(4.0 - square, 2.0) * apart  # rotation.md: rounding tilts a short s
    length = tl.sqrt(square)
    opposite = length <= OPPOSITE
    inv_s = inverse_above(length, OPPOSITE)
    # half turn: m is the axis where |e| is smallest, made orthogonal to e
    size = tl.where(rotated, tl.abs(e), 2.0)
    smallest = tl.min(tl.where(size == tl.min(size, 1)[:, None], j, 2147483647), 1)[:, None]
    axis = tl.where(j == smallest, 1.0, 0.0)
    axis = tl.where(rotated, axis - head_dot(axis, e) * e, 0.0)
    m = tl.where(opposite, axis * inverse_above(tl.sqrt(head_dot(axis, axis)), 0.0), s * inv_s)
    inv_tau = tl.where(fixed | opposite, 0.0, inv_tau)
    return (
        tl.where(fixed, 0.0, e), w, tl.where(fixed, 0.0, m),
        tl.where(fixed, 0.0, inv_eps), inv_tau, tl.where(fixed, 0.0, inv_s),
    )  # fmt: skip


@triton.jit
def inner_of(tau, h, e, m, j, K: tl.constexpr):
    """Compute tau + P R h."""
    g = h - 2.0 * head_dot(e, h) * e
    return tau + tl.where(j < K, g - 2.0 * head_dot(m, g) * m, 0.0)


@triton.jit
def gated_step_backward(grad, r, u, tau, eps, h, j, mask, K: tl.constexpr, HEAD: tl.constexpr):
    """Compute the gradients of the raw r and u, of tau, eps and h from ``grad``, the gradient of the new state."""
    e, w, m, inv_eps, inv_tau, inv_s = find_plane(eps, tau, j, mask, K, HEAD)
    inner = inner_of(tau, h, e, m, j, K)
    candidate = tanh(eps + r * inner)
    deps = grad * (1.0 - u) * (1.0 - candidate * candidate)
    dr = deps * inner * r * (1.0 - r)
    du = grad * (h - candidate) * u * (1.0 - u)
    dtau = deps * r
    dh = grad * u

    dz = tl.where(j < K, dtau, 0.0)  # gradient of R h; the rest is torch_backend.Plane.backward
    p, m_dz = head_dot(e, h), head_dot(m, dz)
    g = h - 2.0 * p * e
    dg, m_g = dz - 2.0 * m_dz * m, head_dot(m, g)
    e_dg = head_dot(e, dg)
    ds = (4.0 * m_g * m_dz * m - 2.0 * (m_g * dz + m_dz * g)) * inv_s
    along = head_dot(e, ds)
    deps += (ds - 2.0 * (p * dg + e_dg * h) + (4.0 * p * e_dg - along) * e) * inv_eps
    dtau += (ds + along * w) * inv_tau
    return dr, du, dtau, deps, dh + dg - 2.0 * e_dg * e


def head_flags(H: int, head_size: int, rotated_units: int) -> dict[str, Any]:
    """Return the compile-time arguments for a row of H units: how programs divide it, and how many units rotate."""
    head = head_size if rotated_units > 0 else min(UNITS, triton.next_power_of_2(H))
    size = triton.next_power_of_2(head)
    heads = triton.next_power_of_2(min(max(1, UNITS // size), -(-H // head)))
    warps = max(1, min(4, heads * size // 128))
    return {"HEAD": head, "SIZE": size, "HEADS": heads, "K": rotated_units, "num_warps": warps}
