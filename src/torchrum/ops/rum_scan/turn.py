"""Building blocks of the torch backend: the plane a step turns in, and the rotation with its gradients.

R(eps, tau) = H_m H_e with H_x = I - 2 x x^T, e and w the directions of eps and tau, m the bisector of e and w.
A zero vector reflects nothing, so "no rotation" is e = 0 or m = e. With n = H_e m the same rotation is H_e H_n,
which gives its right and left products with the memory one form. README.md has the derivations.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..rotation.reference import dot, opposite_of, orthogonal_to, polar, tiny_of


class Turn(NamedTuple):
    """The plane of one step; vectors ``(B, H)``, lengths ``(B, 1)``."""

    e: Tensor
    w: Tensor
    m: Tensor
    inv_tau: Tensor
    """1/|tau|; 0 where tau has no direction."""
    inv_sum: Tensor
    """1/|e + w|; 0 where m does not depend on them."""


def safe_inverse(length: Tensor, tiny: float = 0.0) -> Tensor:
    """``1 / length``, and 0 where the length is not above ``tiny``."""
    above = length > tiny
    return torch.where(above, length, 1.0).reciprocal() * above


def unit_inputs(eps: Tensor, going: Tensor | None) -> tuple[Tensor, Tensor]:
    """Directions of all ``eps`` ``(T, B, H)`` and their inverse lengths ``(T, B, 1)``; zero where nothing shall turn."""
    e, length = polar(eps)
    if eps.shape[-1] == 1:
        return torch.zeros_like(e), torch.zeros_like(length)  # the only rotation of a line is 1
    inverse = safe_inverse(length)
    return (e, inverse) if going is None else (e * going, inverse * going)


def turn(e: Tensor, tau: Tensor, inv_eps: Tensor) -> Turn:
    """The plane that turns the direction ``e`` into that of ``tau``."""
    inv_tau = safe_inverse(torch.linalg.vector_norm(tau, dim=-1, keepdim=True), tiny_of(tau.dtype))
    w = tau * inv_tau
    both = e + w
    length = torch.linalg.vector_norm(both, dim=-1, keepdim=True)
    inv_sum = safe_inverse(length, opposite_of(tau.dtype)) * (inv_eps > 0)
    m = both * inv_sum
    opposite = (length <= opposite_of(tau.dtype)) & (inv_eps > 0) & (inv_tau > 0)
    # asking costs a synchronisation on a GPU, and the answer is nearly always no
    if e.device.type != "cpu" or bool(opposite.any()):
        m = torch.where(opposite, orthogonal_to(e), m)
    return Turn(e, w, m, inv_tau, inv_sum)


def turn_backward(turn: Turn, grad_m: Tensor, grad_e: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradients of m and e to those of tau and of the direction e."""
    e, w, m, inv_tau, inv_sum = turn
    grad_sum = (grad_m - dot(m, grad_m) * m) * inv_sum
    grad_tau = (grad_sum - dot(w, grad_sum) * w) * inv_tau
    return grad_tau, (grad_e + grad_sum) * (inv_tau > 0)


def rotate(turn: Turn, h: Tensor) -> Tensor:
    """H_m H_e h."""
    g = torch.addcmul(h, dot(turn.e, h), turn.e, value=-2)
    return torch.addcmul(g, dot(turn.m, g), turn.m, value=-2)


def rotate_backward(turn: Turn, h: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``h``, ``m`` and ``e`` from that of ``rotate(turn, h)``."""
    e, m = turn.e, turn.m
    p = dot(e, h)
    g = torch.addcmul(h, p, e, value=-2)
    q, r = dot(m, g), dot(m, grad)
    grad_m = -2 * torch.addcmul(q * grad, r, g)
    grad_g = torch.addcmul(grad, r, m, value=-2)
    s = dot(e, grad_g)
    grad_e = -2 * torch.addcmul(p * grad_g, s, h)
    return torch.addcmul(grad_g, s, e, value=-2), grad_m, grad_e


def recall(turn: Turn, h: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``n`` and the products ``R e``, ``R n``, ``R h``, each ``(B, H)``; R is stored transposed, which reads faster."""
    n = torch.addcmul(turn.m, dot(turn.e, turn.m), turn.e, value=-2)
    products = torch.bmm(torch.stack([turn.e, n, h], 1), R)
    return n, *products.unbind(1)


def advance(turn: Turn, h: Tensor, R: Tensor) -> Tensor:
    """Turn the memory, R <- R H_e H_n, in place (R is stored transposed), and return the new ``R h``."""
    n, R_e, R_n, R_h = recall(turn, h, R)
    along_e = -2 * R_e
    along_n = -2 * torch.addcmul(R_n, dot(turn.e, n), R_e, value=-2)
    R.baddbmm_(torch.stack([turn.e, n], 2), torch.stack([along_e, along_n], 1))
    return torch.addcmul(torch.addcmul(R_h, dot(turn.e, h), along_e), dot(n, h), along_n)


def advance_backward(
    turn: Turn, h: Tensor, grad: Tensor, R: Tensor, adjoint: Tensor, recalled: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``h``, ``m`` and ``e`` from that of ``advance``'s result.

    ``R`` (transposed) and ``adjoint`` = R^T dL/dR go back one step, in place: R <- R Q^T and A <- Q A Q^T with
    Q = H_e H_n, the first undoing the rotation exactly.
    """
    e = turn.e
    n, R_e, R_n, _ = recalled
    k = torch.bmm(R, grad.to(R.dtype).unsqueeze(-1)).squeeze(-1)  # R^T grad
    e_n = dot(e, n)
    # adjoint gains k h^T now; its products with e and n from both sides
    plane = torch.stack([e, n], 1)  # (B, 2, H)
    right = torch.bmm(adjoint, plane.mT).mT + (plane * h.unsqueeze(1)).sum(-1, keepdim=True) * k.unsqueeze(1)
    left = torch.bmm(plane, adjoint) + (plane * k.unsqueeze(1)).sum(-1, keepdim=True) * h.unsqueeze(1)
    (A_e, A_n), (e_A, n_A) = right.unbind(1), left.unbind(1)
    grad_e = -2 * (A_e - e_A)
    grad_m = A_n - n_A
    grad_m = -2 * torch.addcmul(grad_m, dot(e, grad_m), e, value=-2)

    nAn = dot(n, A_n)
    shared = 2 * nAn * e_n * n
    B_e = A_e - 2 * (dot(n_A, e) * n + e_n * A_n - shared)
    e_B = e_A - 2 * (dot(A_n, e) * n + e_n * n_A - shared)
    columns = torch.stack([k, n, A_n, e, B_e], 2)
    rows = torch.stack([h, 4 * nAn * n - 2 * n_A, -2 * n, 4 * dot(e, B_e) * e - 2 * e_B, -2 * e], 1)
    adjoint.baddbmm_(columns, rows)

    along_n = -2 * R_n
    along_e = -2 * torch.addcmul(R_e, e_n, R_n, value=-2)
    R.baddbmm_(torch.stack([e, n], 2), torch.stack([along_e, along_n], 1))
    return k, grad_m, grad_e
