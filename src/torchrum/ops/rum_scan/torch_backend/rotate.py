"""The rotation of lam = 0 for the torch backend: R(eps, tau) h as a combination of h, eps and tau, and its gradients.

With e = eps/|eps|, w = tau/|tau| and s = e + w,  R h = h + 2 p w - 2 k s,  p = e.h,  k = s.h / s.s.  A step therefore
needs four inner products and two vector updates, and its backward two inner products with the gradient d: everything
else is a combination of d, h, eps and tau whose coefficients are linear in those two. README.md has the derivation.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchrum.ops.rotation import dot, opposite_of, orthogonal_to, tiny_of

NARROW = 0.02
"""s.s under which 2 + 2 e.w has lost too many digits, and the sum is taken anew from the vectors."""


class Angle(NamedTuple):
    """Scalars of the plane a state turns in, ``(..., B, 1)``; where nothing turns all but p and 1/|eps| are zero."""

    p: Tensor
    k: Tensor
    inv_eps: Tensor
    inv_tau: Tensor
    inv_square: Tensor
    """1/s.s"""
    opposite: Tensor
    """1 where tau points against eps and the turn is a half turn, else 0."""


class Constants(NamedTuple):
    """Numbers as tensors ``(B, 1)``: a Python number costs a small operation as much again."""

    zeros: Tensor
    ones: Tensor
    twos: Tensor

    @classmethod
    def like(cls, x: Tensor) -> "Constants":
        return cls(torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2))


def safe_inverse(length: Tensor, tiny: float = 0.0) -> Tensor:
    """``1 / length``, and 0 where the length is at most ``tiny``."""
    return length.reciprocal().masked_fill_(length <= tiny, 0.0)


def length_of(x: Tensor) -> Tensor:
    """|x| over the last dimension, which stays; faster than the library's norm for short rows."""
    return dot(x, x).sqrt_()


def find_angle(eps: Tensor, inv_eps: Tensor, tau: Tensor, h: Tensor, plain: Constants | None) -> Angle:
    """The plane of the rotation from ``eps`` to ``tau`` and what it does to ``h``; ``inv_eps`` 0 means no turn.

    ``plain`` is given where every ``inv_eps`` is above 0: then the ordinary case is tried first.
    """
    p = dot(eps, h) * inv_eps
    if plain is not None:
        inv_tau = length_of(tau).reciprocal_()
        square = torch.addcmul(plain.twos, dot(eps, tau), inv_eps * inv_tau, value=2)
        if square.min().item() >= NARROW:  # not where tau is zero either: then it is NaN
            inv_square = square.reciprocal_()
            k = torch.addcmul(p, dot(tau, h), inv_tau).mul_(inv_square)  # s.h / s.s
            return Angle(p, k, inv_eps, inv_tau, inv_square, plain.zeros)
    inv_tau = safe_inverse(length_of(tau), tiny_of(tau.dtype))
    s = eps * inv_eps + tau * inv_tau
    square = dot(s, s)
    opposite = ((square <= opposite_of(tau.dtype) ** 2) & (inv_eps * inv_tau > 0)).to(p.dtype)
    inv_tau = inv_tau * (1 - opposite)
    inv_square = square.reciprocal().masked_fill_(inv_eps * inv_tau <= 0, 0.0)
    return Angle(p, dot(s, h) * inv_square, inv_eps, inv_tau, inv_square, opposite)


def half_turns(angle: Angle) -> bool:
    """Whether rows with opposite vectors must be looked after; a GPU is not asked, and does so always."""
    return angle.opposite.device.type != "cpu" or bool(angle.opposite.any())


def add_turned(angle: Angle, eps: Tensor, tau: Tensor, h: Tensor, half_turns: bool, ones: Tensor) -> Tensor:
    """eps + R h; ``ones`` has a row for each of h."""
    p, k, inv_eps, inv_tau, _, opposite = angle
    by_eps = torch.addcmul(ones, k, inv_eps, value=-2)
    total = torch.addcmul(h, by_eps, eps).addcmul_((p - k) * inv_tau, tau, value=2)
    if half_turns:
        f = orthogonal_to(eps * inv_eps)
        total = total - 2 * opposite * (p * inv_eps * eps + dot(f, h) * f)
    return total


class TurnBackward:
    """The gradient of ``add_turned`` for a block of steps: what needs no gradient is done for all of them at once."""

    def __init__(self, angle: Angle, eps: Tensor, tau: Tensor, h: Tensor) -> None:
        p, k, inv_eps, inv_tau, _, _ = self.angle = angle
        # directions, not the vectors: 1/|tau| twice and 1/s.s would overflow where tau is short and against eps
        self.e, self.w, self.h = eps * inv_eps, tau * inv_tau, h
        zero, one = torch.zeros_like(p), torch.ones_like(p)
        self.by_e = self._coefficients(zero, one)  # (K, 8, B, 1), for each d.e
        self.by_w = self._coefficients(one, zero)  # and for each d.w
        self.tau_d, self.eps_d = 2 * (p - k) * inv_tau, 1 - 2 * k * inv_eps
        self.half_turns = half_turns(angle)
        self.weights = torch.empty_like(self.by_e)
        parts = (self.e, self.w, h, self.weights, self.by_e, self.by_w, self.tau_d, *self.weights[:, :5].unbind(1))
        self.steps = list(zip(*(part.unbind(0) for part in parts), strict=True))

    def _coefficients(self, d_w: Tensor, d_e: Tensor) -> Tensor:
        """Of e and w in the gradient of h; of h, e, w in those of tau and of eps; from d.w and d.e."""
        p, k, inv_eps, inv_tau, inv_square, _ = self.angle
        scaled = inv_square * (d_w + d_e)
        rest, cross = d_w - scaled, 4 * k * scaled
        to_tau = 2 * ((2 * k - p) * scaled - (p - k) * d_w)
        to_eps = cross - 2 * p * rest - 2 * k * d_w
        of_tau = [inv_tau * part for part in (-2 * scaled, cross, to_tau)]
        return torch.stack(
            [2 * rest, -2 * scaled, *of_tau, *(inv_eps * part for part in (2 * rest, to_eps, cross))], -3
        )

    def step(self, t: int, grad: Tensor, to_tau: Tensor) -> Tensor:
        """Step ``t`` of the block, from the gradient of the sum: tau's is written, h's returned."""
        e, w, h, weights, by_e, by_w, tau_d, h_e, h_w, tau_h, tau_e, tau_w = self.steps[t]
        torch.mul(by_e, dot(grad, e), out=weights).addcmul_(by_w, dot(grad, w))
        combined = (grad * tau_d).addcmul_(tau_h, h).addcmul_(tau_e, e)
        torch.addcmul(combined, tau_w, w, out=to_tau)
        to_h = torch.addcmul(grad, h_e, e).addcmul_(h_w, w)
        return to_h - 2 * self.angle.opposite[t] * sum(self._reversed(t, grad)) if self.half_turns else to_h

    def eps_gradients(self, grad: Tensor) -> Tensor:
        """Gradients of all eps of the block, as summands and as directions."""
        eps_h, eps_e, eps_w = self.weights[:, 5:].unbind(1)
        total = (grad * self.eps_d).addcmul_(eps_h, self.h).addcmul_(eps_e, self.e).addcmul_(eps_w, self.w)
        if self.half_turns:
            p, inv_eps = self.angle.p, self.angle.inv_eps
            change = dot(grad, self.e) * self.h + p * grad - 2 * p * sum(self._reversed(slice(None), grad))
            total = total - 2 * self.angle.opposite * inv_eps * change
        return total

    def _reversed(self, at: int | slice, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of ``grad`` along e and along the vector orthogonal to it that a half turn reverses."""
        e = self.e[at]
        f = orthogonal_to(e)
        return dot(grad, e) * e, dot(grad, f) * f
