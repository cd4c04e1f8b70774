"""The rotation R(a, b) that takes the direction of one vector to that of another, as two reflections.

R = H_m H_e with H_x = I - 2 x x^T, e = a/|a|, w = b/|b| and the bisector m = (e + w)/|e + w|.
Reflecting in a zero vector changes nothing (H_0 = I), so "no rotation" is represented by e = m = 0.
rotation.md has the derivation and the policy for zero and opposite vectors.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchrum.ops._checks import check_broadcast, check_floating, check_same_device
from torchrum.ops.kernels.linear import working_dtype

__all__ = [
    "dot",
    "opposite_of",
    "orthogonal_to",
    "reflect",
    "reflectors",
    "rotate",
    "rotation_angle",
    "rotation_matrix",
    "saturate",
    "tiny_of",
    "unit",
]


def rotate(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Rotate ``h`` by the rotation that takes the direction of ``a`` to that of ``b``.

    R(a, b) rotates the plane of ``a`` and ``b`` by the angle between them and leaves every vector orthogonal to the
    plane unchanged. The cost is O(H), since no matrix is built.

    Args:
        a, b, h: ``(..., H)`` with the same H and leading dimensions that broadcast, floating, on one device. Mixed
            dtypes are promoted; float16 and bfloat16 are computed in float32.

    Returns:
        ``R(a, b) h``, ``(..., H)`` with the broadcast leading dimensions. Values and gradients are finite everywhere.
        If ``a`` or ``b`` is zero, ``h`` is not rotated and the gradients of both are zero. Opposite vectors give a half
        turn that does not depend on ``b``. With H = 1 the only rotation is the identity. NaN propagates.

    Example:
        >>> import torch
        >>> from torchrum import rotate
        >>> e1, e2 = torch.eye(3)[0], torch.eye(3)[1]
        >>> rotate(e1, e2, torch.tensor([1.0, 2.0, 3.0]))
        tensor([-2.,  1.,  3.])
    """
    check_floating("rotate", a=a, b=b, h=h)
    check_broadcast("rotate", a=a, b=b, h=h)
    check_same_device("rotate", a=a, b=b, h=h)
    return _rotate(a, b, h)


def rotation_matrix(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix of the rotation that takes the direction of ``a`` to that of ``b``.

    Args:
        a, b: ``(..., H)`` as in :func:`rotate`.

    Returns:
        ``R(a, b)``, ``(..., H, H)``, orthogonal with determinant +1; ``R @ h`` is ``rotate(a, b, h)`` for a column h.
    """
    check_floating("rotation_matrix", a=a, b=b)
    check_broadcast("rotation_matrix", a=a, b=b)
    check_same_device("rotation_matrix", a=a, b=b)
    axes = torch.eye(a.shape[-1], dtype=torch.promote_types(a.dtype, b.dtype), device=a.device)
    return _rotate(a.unsqueeze(-2), b.unsqueeze(-2), axes).mT  # row j was R e_j, column j of R


def rotation_angle(a: Tensor, b: Tensor) -> Tensor:
    """Return the angle between ``a`` and ``b``, by which :func:`rotate` turns their plane.

    Args:
        a, b: ``(..., H)`` as in :func:`rotate`.

    Returns:
        The angle in radians, from 0 to pi, shape ``(...)``, accurate to rounding even near 0 and pi. It is 0 where
        ``a`` or ``b`` is zero. The gradient is zero for zero, parallel and opposite vectors, where it has no direction.
    """
    check_floating("rotation_angle", a=a, b=b)
    check_broadcast("rotation_angle", a=a, b=b)
    check_same_device("rotation_angle", a=a, b=b)
    (e, a_length), (w, b_length) = polar(a), polar(b)
    # unlike the two chords, arccos(e.w) loses half of the digits near 0 and pi and has an infinite gradient there
    _, difference = polar(e - w, tiny=0.0)
    _, total = polar(e + w, tiny=0.0)
    rotates = (a_length != 0) & (b_length != 0) | (a_length + b_length).isnan()
    angle = 2 * torch.atan2(torch.where(rotates, difference, 0.0), torch.where(rotates, total, 1.0))
    return angle.squeeze(-1).to(torch.promote_types(a.dtype, b.dtype))


def _rotate(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Compute :func:`rotate` without the checks."""
    e, m = reflectors(a, b)
    # two reflections are orthogonal to rounding at every angle and need no sqrt(1 - cos^2), whose gradient is
    # infinite where a and b are parallel
    y = reflect(m, reflect(e, h.to(torch.promote_types(e.dtype, h.dtype))))
    return y.to(torch.promote_types(torch.promote_types(a.dtype, b.dtype), h.dtype))


def tiny_of(dtype: torch.dtype) -> float:
    """Return the length up to which a vector has no direction: it rotates nothing and its gradient is zero."""
    return 1e-30 if dtype == torch.float64 else 1e-12


def opposite_of(dtype: torch.dtype) -> float:
    """Return the length of e + w up to which unit vectors count as opposite: a shorter sum is mostly rounding noise."""
    return 1e-8 if dtype == torch.float64 else 1e-4


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner product over the last dimension, which is kept with size 1."""
    return (x * y).sum(-1, keepdim=True)


def reflect(x: Tensor, h: Tensor) -> Tensor:
    """Return H_x h = h - 2 (x.h) x for a unit vector ``x``; a zero ``x`` gives ``h``."""
    return h - 2 * dot(x, h) * x


def saturate(grad: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0) -> Tensor:
    """Return grad/scale in ``dtype``, clamped to its largest number.

    NaN and Inf in ``grad`` propagate, so that a loss scaler can detect them.
    """
    limit = torch.finfo(dtype).max
    return torch.where(grad.isfinite(), (grad / scale).clamp(-limit, limit), grad).to(dtype)


class _Scale(torch.autograd.Function):
    """Division x / scale in scale's dtype, with a gradient that saturates at the largest number of x's dtype.

    The gradient of a direction grows as 1/|x|, which overflows float16 for |x| below about 1e-5.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x.to(scale.dtype) / scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, scale = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return saturate(grad, ctx.dtype, scale), None


def polar(x: Tensor, tiny: float | None = None) -> tuple[Tensor, Tensor]:
    """Return direction and length over the last dimension, both zero with zero gradient for lengths up to ``tiny``.

    Returns:
        Direction like ``x`` and length ``(..., 1)``, both in the working dtype. NaN propagates.
    """
    dtype = working_dtype(x.dtype)
    tiny = tiny_of(x.dtype) if tiny is None else tiny
    # squares of numbers scaled to 1 can neither overflow nor vanish; the results do not depend on the scale, so it is
    # treated as a constant
    scale = x.detach().abs().amax(-1, keepdim=True).to(dtype)
    scale = torch.where(scale == 0, 1.0, scale)
    # torch.compile rejects a Function with a forward-mode rule, so forward mode uses the plain division
    scaled = _Scale.apply(x, scale) if forward_ad._current_level < 0 else x.to(dtype) / scale
    is_zero = scale * dot(scaled, scaled).detach().sqrt() <= tiny  # False for NaN, which must propagate
    # replace zeros before the square root too: a NaN gradient would pass through the second where
    safe = torch.where(is_zero, 1.0, scaled)
    length = dot(safe, safe).sqrt()
    return torch.where(is_zero, 0.0, safe / length), torch.where(is_zero, 0.0, scale * length)


def unit(x: Tensor) -> Tensor:
    """Return x/|x| over the last dimension; zero, with zero gradient, where ``x`` is too short to have a direction."""
    return polar(x)[0]


def orthogonal_to(e: Tensor) -> Tensor:
    """Return a fixed unit vector orthogonal to the unit vector ``e``, without gradient.

    It is the axis where ``e`` is smallest, made orthogonal to ``e``.
    """
    e = e.detach()
    smallest = e.abs().argmin(-1, keepdim=True)  # the first of equal ones
    axis = (torch.arange(e.shape[-1], device=e.device) == smallest).to(e.dtype)
    return unit(axis - dot(axis, e) * e)


def bisector(e: Tensor, w: Tensor) -> Tensor:
    """Return the unit vector half-way between unit vectors ``e`` and ``w``; if opposite, one orthogonal to ``e``."""
    # |e + w| is computed from the sum, never as 2 (1 + e.w), which cancels. Near a half turn the sum is short and the
    # rounding error of |e| - |w| tilts it; the tilt is subtracted, without gradient since it is zero in theory.
    difference = (e - w).detach()
    square = dot(difference, difference)
    tilt = torch.where(square > 2, dot((e + w).detach(), difference) / square, 0.0) * difference
    m, length = polar(e + w - tilt, tiny=max(opposite_of(e.dtype), opposite_of(w.dtype)))
    return torch.where(length == 0, orthogonal_to(e), m)


def reflectors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the unit vectors e and m of R(a, b) = H_m H_e in the working dtype; both zero where R = I by policy."""
    (e, a_length), (w, b_length) = polar(a), polar(b)
    fixed = (a_length == 0) | (b_length == 0) | (e.shape[-1] == 1)  # in one dimension only the identity
    fixed = fixed & ~(a_length + b_length).isnan()
    return torch.where(fixed, 0.0, e), torch.where(fixed, 0.0, bisector(e, w))
