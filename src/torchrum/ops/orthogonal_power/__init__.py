"""The real power of a rotation matrix."""

import torch
from torch import Tensor

from torchrum.ops._checks import check_finite, check_floating, check_square
from torchrum.ops.orthogonal_power.power import integer_power, real_power

__all__ = ["orthogonal_power"]


def orthogonal_power(R: Tensor, lam: float | Tensor) -> Tensor:
    """Raise rotation matrices to a real power: every angle of ``R`` is multiplied by ``lam``.

    ``R^lam = exp(lam log R)`` with the principal logarithm, angles in (-pi, pi]. An integer number takes plain
    matmuls; any other number, and every tensor, an eigendecomposition in float64 that costs O(N^3) per matrix: fit for
    N up to about 256.

    Args:
        R: ``(..., N, N)``, orthogonal with determinant +1, floating.
        lam: a number, or a tensor with one element, which may be learnable.

    Returns:
        ``R^lam``, like ``R``; differentiable in ``R`` and in a tensor ``lam``, also where eigenvalues repeat, as they
        do at R = I. The gradient is the one along rotations. A half turn, whose direction is undefined, turns in a
        fixed plane. A second derivative exists for integer numbers only and is an error otherwise.

    Example:
        >>> import torch
        >>> from torchrum import orthogonal_power, rotation_matrix
        >>> quarter = rotation_matrix(*torch.eye(2))
        >>> eighth = orthogonal_power(quarter, 0.5)
        >>> torch.allclose(eighth @ eighth, quarter, atol=1e-6)
        True
    """
    check_floating("orthogonal_power", R=R)
    check_square("orthogonal_power", R=R)
    if isinstance(lam, Tensor):
        check_floating("orthogonal_power", lam=lam)
        if lam.numel() != 1:
            raise ValueError(
                f"orthogonal_power: lam has shape {tuple(lam.shape)}; it must be a number or a tensor with one element."
            )
        return real_power(R, lam.reshape(()))
    check_finite("orthogonal_power", lam=lam)
    if float(lam).is_integer():
        return integer_power(R, int(lam))
    return real_power(R, torch.tensor(lam, dtype=torch.float64, device=R.device))
