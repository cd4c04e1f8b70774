"""The rotation R(a, b) that takes the direction of one vector to that of another."""

import torch
from torch import Tensor

from torchrum.ops._checks import check_broadcast, check_floating, check_same_device
from torchrum.ops.rotation.reference import (
    dot,
    opposite_of,
    orthogonal_to,
    reflect,
    reflectors,
    rotate_reference,
    rotation_angle_reference,
    saturate,
    tiny_of,
    unit,
)

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
    return rotate_reference(a, b, h)


def rotation_matrix(a: Tensor, b: Tensor) -> Tensor:
    """The matrix of the rotation that takes the direction of ``a`` to that of ``b``.

    Args:
        a, b: ``(..., H)`` as in :func:`rotate`.

    Returns:
        ``R(a, b)``, ``(..., H, H)``, orthogonal with determinant +1; ``R @ h`` is ``rotate(a, b, h)`` for a column h.
    """
    check_floating("rotation_matrix", a=a, b=b)
    check_broadcast("rotation_matrix", a=a, b=b)
    check_same_device("rotation_matrix", a=a, b=b)
    axes = torch.eye(a.shape[-1], dtype=torch.promote_types(a.dtype, b.dtype), device=a.device)
    return rotate_reference(a.unsqueeze(-2), b.unsqueeze(-2), axes).mT  # row j was R e_j, column j of R


def rotation_angle(a: Tensor, b: Tensor) -> Tensor:
    """The angle between ``a`` and ``b``, by which :func:`rotate` turns their plane.

    Args:
        a, b: ``(..., H)`` as in :func:`rotate`.

    Returns:
        The angle in radians, from 0 to pi, shape ``(...)``, exact to rounding also near 0 and pi. It is 0 where ``a``
        or ``b`` is zero. The gradient is zero where it has no direction: zero, parallel and opposite vectors.
    """
    check_floating("rotation_angle", a=a, b=b)
    check_broadcast("rotation_angle", a=a, b=b)
    check_same_device("rotation_angle", a=a, b=b)
    return rotation_angle_reference(a, b)
