"""Real powers of rotation matrices through their eigenvalues e^{i phi}, with gradients even for repeated eigenvalues.

From top to bottom: the public function, the eigenvectors and angles (one custom op, without gradient), and the power
with its gradient (``_Power``). orthogonal_power.md has the derivation.
"""

import math
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd import forward_ad

from torchrum.ops._checks import check_finite, check_floating, check_square
from torchrum.ops.kernels.machine import without_autocast
from torchrum.ops.rotation import saturate

__all__ = ["orthogonal_power"]

# Eigenvectors are computed from the Hermitian part of e^{-i SHIFT} R, which cannot distinguish two angles with
# phi + phi' = 2 SHIFT. So SHIFT is a number that no sum of two relevant angles hits.
SHIFT = 0.7390851332151607
# An angle closer to pi than this counts as pi: its two eigenvectors are rounding noise in float64.
HALF_TURN = 1e-7


def orthogonal_power(R: Tensor, lam: float | Tensor) -> Tensor:
    """Raise rotation matrices to a real power, which multiplies every angle of ``R`` by ``lam``.

    ``R^lam = exp(lam log R)`` with the principal logarithm, angles in (-pi, pi]. An integer ``lam`` needs only matmuls.
    Any other number, and every tensor, needs an eigendecomposition in float64, O(N^3) per matrix, which is practical
    for N up to about 256.

    Args:
        R: ``(..., N, N)``, orthogonal with determinant +1, floating.
        lam: a number, or a tensor with one element, which may be learnable.

    Returns:
        ``R^lam``, like ``R``. It is differentiable in ``R`` and in a tensor ``lam``, even where eigenvalues repeat, as
        at R = I. The gradient is the one along rotations. The plane of a half turn is undefined, so it is fixed.
        Second derivatives exist only for integer numbers and raise an error otherwise.

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


def _adjoint(x: Tensor) -> Tensor:
    """Return x^H without ``x.mH``, whose lazy conjugation PyTorch drops in a custom op inside a compiled graph."""
    return x.mT.conj_physical()


@library.custom_op("torchrum::rotation_phases", mutates_args=())
def rotation_phases(R: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the eigenvectors U and angles phi of rotations, ``R = U diag(e^{i phi}) U^H``.

    This is one opaque op, since half turns and invalid input need decisions that a traced graph cannot make.

    Args:
        R: ``(..., N, N)``, any floating dtype.

    Returns:
        U ``(..., N, N)`` complex128 and phi ``(..., N)`` float64, in (-pi, pi]; NaN where ``R`` is not finite.
    """
    eye = torch.eye(R.shape[-1], dtype=torch.float64, device=R.device)
    finite = R.isfinite().all(-1).all(-1)[..., None, None]
    Q = torch.where(finite, R.double(), eye)
    error = (Q.mT @ Q - eye).abs().max().item() if Q.numel() else 0.0
    if error > 0.1:
        raise ValueError(
            f"orthogonal_power: R is not orthogonal, max|R^T R - I| = {error:.2g}; only rotation matrices have a real "
            "power. Pass rotations, for example from rotation_matrix."
        )
    # go to the nearest orthogonal matrix: a small gap between eigenvalues magnifies float32's rounding by 1/gap
    for _ in range(4):
        Q = Q @ (1.5 * eye - 0.5 * Q.mT @ Q)
    shifted = torch.polar(torch.ones_like(eye[0, 0]), torch.full_like(eye[0, 0], -SHIFT)) * Q
    _, U = torch.linalg.eigh((shifted + _adjoint(shifted)) / 2)
    phi = (U.conj_physical() * (Q.to(U.dtype) @ U)).sum(-2).angle()
    if bool((phi.abs() > math.pi - HALF_TURN).any()):
        U, phi = _orient_half_turns(U, phi)
    U = torch.where(finite, U, torch.nan).contiguous()  # eigh is column-major; a compiled graph expects row-major
    return U, torch.where(finite.squeeze(-1), phi, torch.nan).contiguous()


@rotation_phases.register_fake
def _(R: Tensor) -> tuple[Tensor, Tensor]:
    return R.new_empty(R.shape, dtype=torch.complex128), R.new_empty(R.shape[:-1], dtype=torch.float64)


@rotation_phases.register_vmap
def _(info: Any, in_dims: tuple[int], R: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return rotation_phases(R.movedim(in_dims[0], 0)), (0, 0)


def _orient_half_turns(U: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
    """Split each eigenspace of -1 into planes and give each plane the angles pi and -pi.

    The planes of a half turn are arbitrary; a fixed choice makes the power a rotation.
    """
    N = U.shape[-1]
    noise = torch.sin(torch.arange(1.0, N * N + 1, dtype=torch.float64, device=U.device) ** 2).view(N, N)
    direction = 1j * (noise - noise.mT)  # Hermitian; conjugation negates it
    shape, U, phi = U.shape, U.reshape(-1, N, N).clone(), phi.reshape(-1, N).clone()
    half = phi.abs() > math.pi - HALF_TURN
    for n in half.any(-1).nonzero().flatten().tolist():
        columns = half[n].nonzero().flatten()
        if len(columns) % 2:
            raise ValueError(
                "orthogonal_power: R has determinant -1; only rotation matrices, with determinant +1, have a real "
                "power. Flip the sign of one column to make it a rotation."
            )
        basis = U[n][:, columns]
        sign, planes = torch.linalg.eigh(_adjoint(basis) @ direction @ basis)
        U[n, :, columns] = basis @ planes
        phi[n, columns] = math.pi * sign.sign()
    return U.reshape(shape), phi.reshape(shape[:-1])


def _assemble(U: Tensor, middle: Tensor) -> Tensor:
    """Return the real part of U middle U^H."""
    return (U @ middle @ U.mH).real


class _OnceDifferentiable(torch.autograd.Function):
    """Identity of ``x`` whose backward, a second derivative in ``R`` or ``lam``, raises an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, R: Tensor, lam: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError(
            "orthogonal_power: the second derivative of a non-integer power is not implemented. "
            "Use an integer lam, or take gradients once."
        )


def _divided_difference(lam: Tensor, phi: Tensor) -> Tensor:
    """Return the divided differences of z^lam between all pairs of eigenvalues e^{i phi}, finite for equal ones."""
    half_sum = (phi.unsqueeze(-1) + phi.unsqueeze(-2)) / 2
    half_gap = (phi.unsqueeze(-1) - phi.unsqueeze(-2)) / 2
    # the plane of a half turn, whose two angles are 2 pi apart, is a constant
    split = half_gap.abs() > math.pi - HALF_TURN
    ratio = torch.sinc(lam * half_gap / math.pi) / torch.sinc(half_gap / math.pi)  # torch's sinc(x) is sin(pi x)/(pi x)
    return torch.where(split, 0.0, lam * ratio) * torch.exp(1j * (lam - 1) * half_sum)


class _Power(torch.autograd.Function):
    """R^lam from the eigenvectors and angles of R, with the Daleckii-Krein formula for the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(R: Tensor, lam: Tensor, U: Tensor, phi: Tensor) -> Tensor:
        return _assemble(U, torch.diag_embed(torch.exp(1j * lam * phi))).to(R.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        R, lam, U, phi = ctx.saved_tensors
        G = U.mH @ grad.to(U.dtype) @ U
        grad_R = saturate(_assemble(U, _divided_difference(lam, phi).conj() * G), R.dtype)
        slope = 1j * phi * torch.exp(1j * lam * phi)
        grad_lam = (slope * G.diagonal(dim1=-2, dim2=-1).conj()).real.sum()
        return _OnceDifferentiable.apply(grad_R, R, lam), _OnceDifferentiable.apply(grad_lam, R, lam), None, None


class _PowerInBothModes(_Power):
    """``_Power`` with forward-mode differentiation, in a separate class since torch.compile rejects a ``jvp``."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, R_tangent: Tensor | None, lam_tangent: Tensor | None, *unused: None) -> Tensor:
        R, lam, U, phi = ctx.saved_tensors
        tangent = torch.zeros_like(U)
        if R_tangent is not None:
            tangent = tangent + _divided_difference(lam, phi) * (U.mH @ R_tangent.to(U.dtype) @ U)
        if lam_tangent is not None:
            tangent = tangent + torch.diag_embed(lam_tangent * 1j * phi * torch.exp(1j * lam * phi))
        return _assemble(U, tangent).to(R.dtype)


def integer_power(R: Tensor, n: int) -> Tensor:
    """Compute R^n by matmuls; the inverse of a rotation is its transpose."""
    if n == 1:
        return R
    wide = R if R.dtype in (torch.float32, torch.float64) else R.float()
    with without_autocast(R):
        return torch.linalg.matrix_power(wide if n >= 0 else wide.mT, abs(n)).to(R.dtype)


def real_power(R: Tensor, lam: Tensor) -> Tensor:
    """Compute R^lam for a scalar tensor ``lam``, differentiably in both."""
    U, phi = rotation_phases(R.detach())
    power = _Power if forward_ad._current_level < 0 else _PowerInBothModes
    return power.apply(R, lam.to(R.device, torch.float64), U, phi)
