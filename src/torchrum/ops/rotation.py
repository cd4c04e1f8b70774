"""The rotation R(a, b) that takes the direction of one vector to that of another, as two reflections.

R = H_m H_e with H_x = I - 2 x x^T, e = a/|a|, w = b/|b| and m = (e + w)/|e + w|, the bisector.
A zero vector reflects nothing (H_0 = I), so "no rotation" is written as e = m = 0.
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

    R(a, b) turns the plane of ``a`` and ``b`` by the angle between them and leaves everything orthogonal to the
    plane in place. It costs O(H): no matrix is built.

    Args:
        a, b, h: ``(..., H)`` with one H and leading dimensions that broadcast, floating, on one device. Mixed dtypes
            are promoted; float16 and bfloat16 compute in float32.

    Returns:
        ``R(a, b) h``, ``(..., H)`` with the broadcast leading dimensions. Values and gradients are finite everywhere.
        A zero ``a`` or ``b`` rotates nothing and gets a zero gradient, opposite vectors give a half turn that does
        not depend on ``b``, and with H = 1 the only rotation is 1. NaN stays NaN.

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
        The angle in radians, from 0 to pi, shape ``(...)``, exact to rounding also near 0 and pi. It is 0 where ``a``
        or ``b`` is zero. The gradient is zero where it has no direction: zero, parallel and opposite vectors.
    """
    check_floating("rotation_angle", a=a, b=b)
    check_broadcast("rotation_angle", a=a, b=b)
    check_same_device("rotation_angle", a=a, b=b)
    (e, a_length), (w, b_length) = polar(a), polar(b)
    # arccos(e.w) loses half the digits near 0 and pi and has an infinite gradient there; the two chords do not.
    _, apart = polar(e - w, tiny=0.0)
    _, together = polar(e + w, tiny=0.0)
    turned = (a_length != 0) & (b_length != 0) | (a_length + b_length).isnan()
    angle = 2 * torch.atan2(torch.where(turned, apart, 0.0), torch.where(turned, together, 1.0))
    return angle.squeeze(-1).to(torch.promote_types(a.dtype, b.dtype))


def _rotate(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """:func:`rotate` without the checks."""
    e, m = reflectors(a, b)
    # Two reflections are orthogonal to rounding at every angle and need no sqrt(1 - cos^2), whose gradient is
    # infinite where a and b are parallel.
    y = reflect(m, reflect(e, h.to(torch.promote_types(e.dtype, h.dtype))))
    return y.to(torch.promote_types(torch.promote_types(a.dtype, b.dtype), h.dtype))


def tiny_of(dtype: torch.dtype) -> float:
    """A vector of at most this length has no direction: it rotates nothing and gets a zero gradient."""
    return 1e-30 if dtype == torch.float64 else 1e-12


def opposite_of(dtype: torch.dtype) -> float:
    """Unit vectors with |e + w| of at most this are opposite: below it the sum is mostly rounding noise."""
    return 1e-8 if dtype == torch.float64 else 1e-4


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product over the last dimension, which stays with size 1."""
    return (x * y).sum(-1, keepdim=True)


def reflect(x: Tensor, h: Tensor) -> Tensor:
    """H_x h = h - 2 (x.h) x for a unit vector ``x``; a zero ``x`` gives ``h``."""
    return h - 2 * dot(x, h) * x


def saturate(grad: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0) -> Tensor:
    """grad/scale in ``dtype``, clamped to its largest number.

    NaN and Inf in ``grad`` are passed on, so that a loss scaler can detect them.
    """
    limit = torch.finfo(dtype).max
    return torch.where(grad.isfinite(), (grad / scale).clamp(-limit, limit), grad).to(dtype)


class _Scale(torch.autograd.Function):
    """x / scale in scale's dtype; the gradient saturates at the largest number of x's dtype instead of overflowing.

    The gradient of a direction grows as 1/|x|, which float16 cannot hold below |x| of about 1e-5.
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
    """Direction and length over the last dimension, both zero with zero gradient where the length is at most ``tiny``.

    Returns:
        Direction like ``x`` and length ``(..., 1)``, both in the dtype of the arithmetic. NaN stays NaN.
    """
    dtype = working_dtype(x.dtype)
    tiny = tiny_of(x.dtype) if tiny is None else tiny
    # Squares of numbers scaled to 1 can neither overflow nor vanish. Neither result depends on the scale, so it
    # counts as a constant.
    scale = x.detach().abs().amax(-1, keepdim=True).to(dtype)
    scale = torch.where(scale == 0, 1.0, scale)
    # torch.compile refuses a Function with a rule for forward mode; there the plain division serves
    scaled = _Scale.apply(x, scale) if forward_ad._current_level < 0 else x.to(dtype) / scale
    none = scale * dot(scaled, scaled).detach().sqrt() <= tiny  # False for NaN, which must not be repaired
    # Replaced before the square root, not only after: a NaN gradient would pass through the second where.
    safe = torch.where(none, 1.0, scaled)
    length = dot(safe, safe).sqrt()
    return torch.where(none, 0.0, safe / length), torch.where(none, 0.0, scale * length)


def unit(x: Tensor) -> Tensor:
    """x/|x| over the last dimension; zero, with zero gradient, where ``x`` is too short to have a direction."""
    return polar(x)[0]


def orthogonal_to(e: Tensor) -> Tensor:
    """A fixed unit vector orthogonal to the unit vector ``e``, without gradient: the axis where ``e`` is smallest,
    made orthogonal to ``e``."""
    e = e.detach()
    smallest = e.abs().argmin(-1, keepdim=True)  # the first one where several are equal
    axis = (torch.arange(e.shape[-1], device=e.device) == smallest).to(e.dtype)
    return unit(axis - dot(axis, e) * e)


def bisector(e: Tensor, w: Tensor) -> Tensor:
    """The unit vector half-way between unit vectors ``e`` and ``w``; a constant orthogonal to ``e`` if opposite."""
    # |e + w| comes from the sum, never as 2 (1 + e.w): that cancels. Near a half turn the sum is short and what
    # rounding left of |e| - |w| tilts it; it is taken out, exactly zero in theory and so without gradient.
    apart = (e - w).detach()
    square = dot(apart, apart)
    tilt = torch.where(square > 2, dot((e + w).detach(), apart) / square, 0.0) * apart
    m, length = polar(e + w - tilt, tiny=max(opposite_of(e.dtype), opposite_of(w.dtype)))
    return torch.where(length == 0, orthogonal_to(e), m)


def reflectors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The unit vectors e and m of R(a, b) = H_m H_e in the dtype of the arithmetic; both zero where R = I by policy."""
    (e, a_length), (w, b_length) = polar(a), polar(b)
    fixed = (a_length == 0) | (b_length == 0) | (e.shape[-1] == 1)  # a line has no rotation but 1
    fixed = fixed & ~(a_length + b_length).isnan()
    return torch.where(fixed, 0.0, e), torch.where(fixed, 0.0, bisector(e, w))
