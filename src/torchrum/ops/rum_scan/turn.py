"""The memory of lam = 1 for the torch backend: turning it, and the gradients.

R(eps, tau) = H_m H_e with H_x = I - 2 x x^T, e and w the directions of eps and tau, m the bisector of e and w. With
n = H_e m the same rotation is H_e H_n, whose products with the memory from the right and from the left have one form.
README.md has the derivation.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..rotation.reference import dot, opposite_of, orthogonal_to, tiny_of
from .rotate import length_of, safe_inverse


class Plane(NamedTuple):
    """Where a step turns; vectors ``(..., B, H)``, scalars ``(..., B, 1)``."""

    e: Tensor
    w: Tensor
    s: Tensor
    """e + w; where they are opposite, a unit vector orthogonal to e."""
    inv_tau: Tensor
    """1/|tau|; 0 where tau has no gradient."""
    inv_square: Tensor
    """1/s.s; 0 where nothing turns."""
    opposite: Tensor | None
    """Rows where w is -e; None if there are none."""

    def at(self, i: int) -> "Plane":
        """Step ``i`` of a block of planes."""
        opposite = None if self.opposite is None else self.opposite[i]
        return Plane(self.e[i], self.w[i], self.s[i], self.inv_tau[i], self.inv_square[i], opposite)


def find_plane(eps: Tensor, inv_eps: Tensor, tau: Tensor) -> Plane:
    """The plane that turns ``eps`` into the direction of ``tau``; ``inv_eps`` is 1/|eps|, 0 where nothing turns."""
    e = eps * inv_eps
    inv_tau = safe_inverse(length_of(tau), tiny_of(tau.dtype))
    w = tau * inv_tau
    s = e + w
    length = length_of(s)
    opposite = None
    # asking costs a synchronisation on a GPU, and the answer is nearly always no
    if e.device.type != "cpu" or bool((length <= opposite_of(tau.dtype)).any()):
        opposite = (length <= opposite_of(tau.dtype)) & (inv_eps > 0) & (inv_tau > 0)
        w, s = torch.where(opposite, -e, w), torch.where(opposite, orthogonal_to(e), s)
        length = torch.where(opposite, 1.0, length)
    inv_square = length.pow(-2).masked_fill_(inv_tau * inv_eps <= 0, 0.0)
    return Plane(e, w, s, inv_tau if opposite is None else inv_tau * ~opposite, inv_square, opposite)


def reflectors(plane: Plane) -> tuple[Tensor, Tensor, Tensor]:
    """e, m = s/|s| and n = H_e m, all zero where nothing turns."""
    e, m = plane.e * (plane.inv_square > 0), plane.s * plane.inv_square.sqrt()
    return e, m, torch.addcmul(m, dot(e, m), e, value=-2)


def reflected(R_x: Tensor) -> Tensor:
    """-2 R x, for R <- R H_x; the factor leaves 2 by what rounding has added to |R x|, and so takes it out again."""
    return R_x * (0.5 * dot(R_x, R_x) - 2.5)


def advance(plane: Plane, h: Tensor, R: Tensor) -> Tensor:
    """Turn the memory, R <- R H_e H_n, in place, and return the new R h. R is stored transposed, which reads faster."""
    e, _, n = reflectors(plane)
    R_e, R_n, R_h = torch.bmm(torch.stack([e, n, h], 1), R).unbind(1)
    along_e = reflected(R_e)
    along_n = reflected(torch.addcmul(R_n, dot(e, n), along_e))
    R.baddbmm_(torch.stack([e, n], 2), torch.stack([along_e, along_n], 1))
    return torch.addcmul(torch.addcmul(R_h, dot(e, h), along_e), dot(n, h), along_n)


def advance_backward(
    plane: Plane, h: Tensor, grad: Tensor, R: Tensor, adjoint: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``h``, tau and (but for the factor 1/|eps|) eps from that of ``advance``'s result.

    ``R`` (transposed) and ``adjoint`` = R^T dL/dR go back one step, in place: R <- R Q^T and A <- Q A Q^T with
    Q = H_e H_n; the first undoes the rotation exactly.
    """
    e, m, n = reflectors(plane)
    both = torch.stack([e, n], 1)  # (B, 2, H)
    e_n = dot(e, n)
    k = torch.bmm(grad.unsqueeze(1), R.mT).squeeze(1)  # R^T grad; a row from the left is three times as fast
    # adjoint gains k h^T in this step: its products with e and n from both sides
    right = torch.bmm(both, adjoint.mT) + dot(both, h.unsqueeze(1)) * k.unsqueeze(1)
    left = torch.bmm(both, adjoint) + dot(both, k.unsqueeze(1)) * h.unsqueeze(1)
    (A_e, A_n), (e_A, n_A) = right.unbind(1), left.unbind(1)
    grad_e = -2 * (A_e - e_A)
    grad_m = A_n - n_A
    grad_m = -2 * torch.addcmul(grad_m, dot(e, grad_m), e, value=-2)

    n_A_n = dot(n, A_n)
    shared = 2 * n_A_n * e_n * n
    B_e = A_e - 2 * (dot(n_A, e) * n + e_n * A_n - shared)
    e_B = e_A - 2 * (dot(A_n, e) * n + e_n * n_A - shared)
    columns = torch.stack([k, n, A_n, e, B_e], 2)
    rows = torch.stack([h, 4 * n_A_n * n - 2 * n_A, -2 * n, 4 * dot(e, B_e) * e - 2 * e_B, -2 * e], 1)
    adjoint.baddbmm_(columns, rows)

    R_e, R_n = torch.bmm(both, R).unbind(1)
    along_n = reflected(R_n)
    along_e = reflected(torch.addcmul(R_e, e_n, along_n))
    R.baddbmm_(both.mT, torch.stack([along_e, along_n], 1))

    grad_s = (grad_m - dot(m, grad_m) * m) * plane.inv_square.sqrt()
    if plane.opposite is not None:
        grad_s = grad_s * ~plane.opposite  # m is a constant there
    grad_tau = (grad_s - dot(plane.w, grad_s) * plane.w) * plane.inv_tau
    grad_e = (grad_e + grad_s) * (plane.inv_square > 0)
    return k, grad_tau, grad_e - dot(e, grad_e) * e
