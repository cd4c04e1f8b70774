"""Building blocks of the torch backend: the plane a step turns in, and the rotation with its gradients.

R(eps, tau) = H_m H_e with H_x = I - 2 x x^T, e and w the directions of eps and tau, m the bisector of e and w.
Without a memory the rotated state is h + 2 (e.h) w - 2 (s.h / s.s) s with s = e + w. With one, n = H_e m writes the
same rotation as H_e H_n, whose products with the memory from the right and from the left have one form.
README.md has the derivations. Every function takes any leading dimensions: one step, or many at once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..rotation.reference import dot, opposite_of, orthogonal_to, polar, tiny_of


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


def safe_inverse(length: Tensor, tiny: float = 0.0) -> Tensor:
    """``1 / length``, and 0 where the length is not above ``tiny``."""
    return torch.where(length > tiny, length.reciprocal(), 0.0)


def unit_inputs(eps: Tensor, going: Tensor | None) -> tuple[Tensor, Tensor]:
    """Directions of all ``eps`` ``(T, B, H)`` and their inverse lengths ``(T, B, 1)``; zero where nothing turns."""
    length = torch.linalg.vector_norm(eps, dim=-1, keepdim=True)
    if eps.shape[-1] == 1:
        return torch.zeros_like(eps), torch.zeros_like(length)  # the only rotation of a line is 1
    ordinary = (
        eps.device.type == "cpu" and length.numel() > 0 and float(length.min()) > 1e-12 and float(length.max()) < 1e18
    )
    if ordinary:
        inverse = length.reciprocal()
        e = eps * inverse
    else:  # squares may have overflowed or vanished
        e, length = polar(eps)
        inverse = safe_inverse(length)
    return (e, inverse) if going is None else (e * going, inverse * going)


def find_plane(e: Tensor, inv_eps: Tensor, tau: Tensor) -> Plane:
    """The plane that turns the direction ``e`` into that of ``tau``."""
    inv_tau = safe_inverse(torch.linalg.vector_norm(tau, dim=-1, keepdim=True), tiny_of(tau.dtype))
    w = tau * inv_tau
    s = e + w
    length = torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    opposite = None
    # asking costs a synchronisation on a GPU, and the answer is nearly always no
    if e.device.type != "cpu" or bool((length <= opposite_of(tau.dtype)).any()):
        opposite = (length <= opposite_of(tau.dtype)) & (inv_eps > 0) & (inv_tau > 0)
        w, s = torch.where(opposite, -e, w), torch.where(opposite, orthogonal_to(e), s)
        length = torch.where(opposite, 1.0, length)
    inv_square = torch.where(inv_tau * inv_eps > 0, length.pow(-2), 0.0)
    return Plane(e, w, s, inv_tau if opposite is None else inv_tau * ~opposite, inv_square, opposite)


def rotate(plane: Plane, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R h, and the scalars p = e.h and k = s.h / s.s."""
    p, k = dot(plane.e, h), dot(plane.s, h) * plane.inv_square
    return torch.addcmul(torch.addcmul(h, p, plane.w, value=2), k, plane.s, value=-2), p, k


class RotateBackward:
    """The gradient of ``rotate`` for a block of steps: what needs no gradient is done for all of them at once."""

    def __init__(self, plane: Plane, h: Tensor) -> None:
        e, w, s, inv_tau, inv_square, _ = plane
        self.plane, self.h = plane, h
        self.turned, self.p, self.k = rotate(plane, h)
        self.basis = torch.stack([w, s], -2)  # (K, B, 2, H)
        self.along = 2 * (self.p - self.k) * inv_tau
        # w.s = s.s/2 and s.h = e.h + w.h leave -p as the coefficient of w
        scale = 2 * inv_square * inv_tau
        self.tau_s = torch.addcmul((2 * scale * self.k) * s, scale, h, value=-1).addcmul_(scale * self.p, w, value=-1)
        self.h_w, self.h_s = 2 * e, -2 * inv_square * s
        self.products: list[Tensor] = []

    def step(self, t: int, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of h and tau in step ``t`` of the block, from that of the rotated state."""
        products = (self.basis[t] * grad.unsqueeze(-2)).sum(-1)  # (B, 2)
        self.products.append(products)
        along_w, along_s = products[:, :1], products[:, 1:]
        grad_tau = torch.addcmul(grad, along_w, self.plane.w[t], value=-1).mul_(self.along[t])
        grad_tau.addcmul_(along_s, self.tau_s[t])
        return torch.addcmul(grad, along_w, self.h_w[t]).addcmul_(along_s, self.h_s[t]), grad_tau

    def directions(self, grad: Tensor) -> Tensor:
        """Gradients of all e of the block, from those of the rotated states ``(K, B, H)``."""
        _, _, s, _, inv_square, opposite = self.plane
        along = torch.stack(self.products[::-1])  # the block was walked backwards
        along_w, along_s = along[..., :1], along[..., 1:] * inv_square
        k, along_h = self.k, along_s
        if opposite is not None:  # s is a constant there, and w is -e
            k, along_h = torch.where(opposite, self.p, k), along_s * ~opposite
        grad_e = (2 * (along_w * (inv_square > 0) - along_h)) * self.h
        return grad_e.addcmul_(k, grad, value=-2).addcmul_(along_s * k, s, value=4)


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
    """Gradients of ``h``, tau and the direction e from that of ``advance``'s result.

    ``R`` (transposed) and ``adjoint`` = R^T dL/dR go back one step, in place: R <- R Q^T and A <- Q A Q^T with
    Q = H_e H_n; the first undoes the rotation exactly.
    """
    e, m, n = reflectors(plane)
    both = torch.stack([e, n], 1)  # (B, 2, H)
    e_n = dot(e, n)
    k = torch.bmm(R, grad.unsqueeze(-1)).squeeze(-1)  # R^T grad
    # adjoint gains k h^T in this step: its products with e and n from both sides
    right = torch.bmm(adjoint, both.mT).mT + dot(both, h.unsqueeze(1)) * k.unsqueeze(1)
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
    return k, grad_tau, (grad_e + grad_s) * (plane.inv_square > 0)
