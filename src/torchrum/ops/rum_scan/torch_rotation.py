"""Rotations of the torch backend, with gradients; README.md has the derivations.

lam = 0: R(eps, tau) h is a combination of h, eps and tau. With e = eps/|eps|, w = tau/|tau| and s = e + w,
R h = h + 2 p w - 2 k s,  p = e.h,  k = s.h / s.s.  A step therefore needs four inner products and two vector updates.
Its backward needs two inner products with the gradient d: the rest is a combination of d, h, eps and tau with
coefficients that are linear in these two.

lam = 1: R(eps, tau) = H_m H_e = H_e H_n with H_x = I - 2 x x^T, m the bisector of e and w and n = H_e m. A step
subtracts two outer products 2 y x^T from R, one for each reflection x, where y is R x before it. R is formed only every
``WINDOW`` steps; between these it is represented by the last formed R and the x and y since, which are much smaller.
The backward keeps the gradient of R in a frame that does not rotate, so this is formed once per window too.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchrum.ops.rotation import dot, opposite_of, orthogonal_to, tiny_of

NARROW = 0.02
"""s.s below which 2 + 2 e.w has lost too many digits, so that s.s is computed again from the vectors."""


class Angle(NamedTuple):
    """Scalars of a state's rotation, ``(..., B, 1)``; where nothing rotates all but p and 1/|eps| are zero."""

    p: Tensor
    k: Tensor
    inv_eps: Tensor
    inv_tau: Tensor
    inv_square: Tensor
    """1/s.s"""
    opposite: Tensor
    """1 where tau is opposite to eps, so that the rotation is a half turn, else 0."""


class Constants(NamedTuple):
    """Constants as tensors ``(B, 1)``: a Python number doubles the time of a small operation."""

    zeros: Tensor
    ones: Tensor
    twos: Tensor

    @classmethod
    def like(cls, x: Tensor) -> "Constants":
        return cls(torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2))


def safe_inverse(length: Tensor, tiny: float = 0.0) -> Tensor:
    """Return ``1 / length``, and 0 where the length is at most ``tiny``."""
    return length.reciprocal().masked_fill_(length <= tiny, 0.0)


def length_of(x: Tensor) -> Tensor:
    """Return |x| over the last dimension, which is kept; faster than torch's norm for short rows."""
    return dot(x, x).sqrt_()


def find_angle(eps: Tensor, inv_eps: Tensor, tau: Tensor, h: Tensor, plain: Constants | None) -> Angle:
    """Compute the scalars of the rotation from ``eps`` to ``tau`` applied to ``h``; where ``inv_eps`` is 0 it is none.

    If every ``inv_eps`` is above 0, ``plain`` is given and the ordinary case is tried first.
    """
    p = dot(eps, h) * inv_eps
    if plain is not None:
        inv_tau = length_of(tau).reciprocal_()
        square = torch.addcmul(plain.twos, dot(eps, tau), inv_eps * inv_tau, value=2)
        if square.min().item() >= NARROW:  # also false for a zero tau, where square is NaN
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
    """Return whether there may be rows with opposite vectors; always True on a GPU, where a test would synchronise."""
    return angle.opposite.device.type != "cpu" or bool(angle.opposite.any())


def add_rotated(angle: Angle, eps: Tensor, tau: Tensor, h: Tensor, half_turns: bool, ones: Tensor) -> Tensor:
    """Return eps + R h; ``ones`` has a row for each row of h."""
    p, k, inv_eps, inv_tau, _, opposite = angle
    by_eps = torch.addcmul(ones, k, inv_eps, value=-2)
    total = torch.addcmul(h, by_eps, eps).addcmul_((p - k) * inv_tau, tau, value=2)
    if half_turns:
        f = orthogonal_to(eps * inv_eps)
        total = total - 2 * opposite * (p * inv_eps * eps + dot(f, h) * f)
    return total


class RotationBackward:
    """The backward of ``add_rotated`` for a block of steps; everything but the gradient is computed for all at once."""

    def __init__(self, angle: Angle, eps: Tensor, tau: Tensor, h: Tensor) -> None:
        p, k, inv_eps, inv_tau, _, _ = self.angle = angle
        # directions instead of vectors: with a short tau opposite to eps, 1/|tau|^2 / s.s would overflow
        self.e, self.w, self.h = eps * inv_eps, tau * inv_tau, h
        zero, one = torch.zeros_like(p), torch.ones_like(p)
        self.by_e = self._coefficients(zero, one)  # (K, 8, B, 1), factors of d.e
        self.by_w = self._coefficients(one, zero)  # factors of d.w
        self.tau_d, self.eps_d = 2 * (p - k) * inv_tau, 1 - 2 * k * inv_eps
        self.half_turns = half_turns(angle)
        self.weights = torch.empty_like(self.by_e)
        parts = (self.e, self.w, h, self.weights, self.by_e, self.by_w, self.tau_d, *self.weights[:, :5].unbind(1))
        self.steps = list(zip(*(part.unbind(0) for part in parts), strict=True))

    def _coefficients(self, d_w: Tensor, d_e: Tensor) -> Tensor:
        """Compute coefficients from d.w and d.e: of e and w in h's gradient, of h, e and w in tau's and in eps's."""
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
        """Run step ``t`` of the block: from the gradient of the sum, write tau's gradient and return h's."""
        e, w, h, weights, by_e, by_w, tau_d, h_e, h_w, tau_h, tau_e, tau_w = self.steps[t]
        torch.mul(by_e, dot(grad, e), out=weights).addcmul_(by_w, dot(grad, w))
        combined = (grad * tau_d).addcmul_(tau_h, h).addcmul_(tau_e, e)
        torch.addcmul(combined, tau_w, w, out=to_tau)
        to_h = torch.addcmul(grad, h_e, e).addcmul_(h_w, w)
        return to_h - 2 * self.angle.opposite[t] * sum(self._reversed(t, grad)) if self.half_turns else to_h

    def eps_gradients(self, grad: Tensor) -> Tensor:
        """Return the gradients of all eps of the block, both as summands and as directions."""
        eps_h, eps_e, eps_w = self.weights[:, 5:].unbind(1)
        total = (grad * self.eps_d).addcmul_(eps_h, self.h).addcmul_(eps_e, self.e).addcmul_(eps_w, self.w)
        if self.half_turns:
            p, inv_eps = self.angle.p, self.angle.inv_eps
            change = dot(grad, self.e) * self.h + p * grad - 2 * p * sum(self._reversed(slice(None), grad))
            total = total - 2 * self.angle.opposite * inv_eps * change
        return total

    def _reversed(self, at: int | slice, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of ``grad`` along e and along the orthogonal vector f, which a half turn reverses."""
        e = self.e[at]
        f = orthogonal_to(e)
        return dot(grad, e) * e, dot(grad, f) * f


WINDOW = 16
"""Steps after which R is formed: enough to share the cost of forming it, few enough that the x and y stay small."""


class Plane(NamedTuple):
    """The plane of a step's rotation: vectors ``(..., B, H)`` and scalars ``(..., B, 1)``.

    e and n are zero where nothing rotates.
    """

    e: Tensor
    n: Tensor
    w: Tensor
    inv_s: Tensor
    """1/|e + w|; 0 where m has no gradient."""
    inv_tau: Tensor


def find_plane(
    eps: Tensor, inv_eps: Tensor, tau: Tensor, ordinary: bool, e: Tensor | None = None, n: Tensor | None = None
) -> Plane:
    """Compute the plane of the rotation from ``eps`` to ``tau``; ``inv_eps`` is 1/|eps|, 0 where nothing rotates.

    If every ``inv_eps`` is above 0, ``ordinary`` is True and the ordinary case is tried first. ``e`` and ``n`` are
    optional buffers for the results.
    """
    e = torch.mul(eps, inv_eps, out=e)
    square = dot(tau, tau)
    if ordinary:
        inv_tau = square.rsqrt()
        w = tau * inv_tau
        s = e + w
        s_s = dot(s, s)
        low, high = square.aminmax()
        usual = float(low) > tiny_of(s.dtype) ** 2 and float(high) < math.inf
        if usual and float(s_s.amin()) > opposite_of(s.dtype) ** 2:
            inv_s = s_s.rsqrt()
            n = torch.mul(torch.addcmul(s, s_s, e, value=-1), inv_s, out=n)  # e.s = s.s/2
            return Plane(e, n, w, inv_s, inv_tau)
    inv_tau = safe_inverse(square.sqrt(), tiny_of(tau.dtype))
    w = tau * inv_tau
    s = e + w
    length = length_of(s)
    rotates = inv_tau * inv_eps > 0
    opposite = (length <= opposite_of(tau.dtype)) & rotates
    m = torch.where(opposite, orthogonal_to(e), s * (safe_inverse(length) * rotates))
    n = torch.addcmul(m, dot(e, m), e, value=-2, out=n)
    differentiable = rotates & ~opposite  # m is constant where the vectors are opposite
    return Plane(e.mul_(rotates), n, w, safe_inverse(length) * differentiable, inv_tau * differentiable)


class Memory:
    """R in the forward: the last formed R, transposed for faster reads, and the x and y since.

    ``kept`` ``(windows, B, 2 * WINDOW, H)`` receives the y of all steps.
    """

    def __init__(self, R: Tensor, kept: Tensor) -> None:
        self.R, self.kept = R, kept
        self.x = R.new_empty(R.shape[0], 2 * WINDOW + 1, R.shape[1])
        rows = self.x.unbind(1)
        self.views = [  # for each step: the last three rows, all rows so far, and the three rows one by one
            (self.x[:, i : i + 3], self.x[:, : i + 3].mT, *rows[i : i + 3]) for i in range(0, 2 * WINDOW, 2)
        ]

    def advance(self, t: int, eps: Tensor, inv_eps: Tensor, tau: Tensor, h: Tensor, ordinary: bool) -> Tensor:
        """Rotate the memory, R <- R H_e H_n, and return the new R h."""
        step = t % WINDOW
        known = 2 * step
        if step == 0:
            if t > 0:
                self.form(WINDOW)
            self.y = self.kept[t // WINDOW]
            self.y_rows = self.y.unbind(1)
        rows, all_rows, e, n, last = self.views[step]
        find_plane(eps, inv_eps, tau, ordinary, e, n)
        last.copy_(h)
        inner = torch.bmm(rows, all_rows)  # (B, 3, known + 3)
        products = torch.bmm(rows, self.R)
        if known:
            products.baddbmm_(inner[..., :known], self.y[:, :known], alpha=-2)
        R_e, R_n, R_h = products.unbind(1)
        _, e_n, e_h, _, _, n_h, *_ = inner[..., known:].flatten(1).split(1, 1)

        y_e, y_n = self.y_rows[known : known + 2]
        y_e.copy_(R_e)
        R_n = R_n.addcmul_(e_n, R_e, value=-2)
        # the factor is 1 up to rounding, and corrects the rounding error of |R n|
        torch.mul(R_n, torch.rsub(dot(R_n, R_n), 1.25, alpha=0.25), out=y_n)
        return R_h.addcmul_(e_h, R_e, value=-2).addcmul_(n_h, y_n, value=-2)

    def form(self, steps: int) -> None:
        """Subtract the outer products of the last ``steps`` steps from R."""
        self.R.baddbmm_(self.x[:, : 2 * steps].mT, self.y[:, : 2 * steps], alpha=-2)


class MemoryBackward:
    """The backward of a window of steps; everything but the gradient is computed for all steps at once.

    ``R`` and ``outer`` = dL/dR R^T are updated in place to their values before the window: ``R`` by the constructor,
    ``outer`` by ``eps_gradients``.
    """

    def __init__(self, plane: Plane, inv_eps: Tensor, z: Tensor, y: Tensor, R: Tensor, outer: Tensor) -> None:
        steps = len(z)
        self.plane, self.inv_eps, self.R, self.outer = plane, inv_eps, R, outer
        e, n = plane.e.transpose(0, 1), plane.n.transpose(0, 1)
        self.x, self.y, self.z = torch.stack([e, n], 2).flatten(1, 2), y[:, : 2 * steps], z.transpose(0, 1).contiguous()
        R.baddbmm_(self.y.mT, self.x, alpha=2)
        # -R e and -R n after each step, (B, 2 steps, H)
        y_e, y_n = self.y.unflatten(1, (steps, 2)).unbind(2)
        rotated_axes = torch.stack([torch.addcmul(y_e, dot(e, n), y_n, value=2), y_n], 2).flatten(1, 2)
        images = torch.bmm(rotated_axes, outer.mT).baddbmm_(rotated_axes, outer, alpha=-1)
        axes_dot_z = torch.bmm(rotated_axes, self.z.mT)  # (B, 2 steps, steps)
        self.grad_z = torch.empty_like(self.z)
        self.products = z.new_empty(*z.shape[:2], 3, z.shape[2])
        by_step = (plane.e, plane.w + 2 * plane.e, 2 * plane.inv_s * plane.inv_tau, self.products)
        by_row = (part.split(2, 1) for part in (rotated_axes, images, axes_dot_z))
        self.steps = list(zip(*(part.unbind(0) for part in by_step), self.grad_z.unbind(1), *by_row, strict=True))

    def step(self, i: int, grad: Tensor, to_tau: Tensor) -> Tensor:
        """Run step ``i`` of the window: from the gradient of R h, write tau's gradient and return h's."""
        e, toward, scale, products, grad_z, rotated_axes, images, axes_dot_z = self.steps[i]
        grad_z.copy_(grad)
        grads, known = self.grad_z[:, i:], 2 * i + 2
        images = torch.baddbmm(images, torch.bmm(rotated_axes, grads.mT), self.z[:, i:], alpha=-1)
        rows = torch.cat([grad.unsqueeze(1), images.baddbmm_(axes_dot_z[..., i:], grads)], 1)
        torch.bmm(rows, self.R, out=products)
        products.baddbmm_(torch.bmm(rows, self.y[:, :known].mT), self.x[:, :known], alpha=-2)
        to_h, _, K_n = products.unbind(1)
        torch.mul(torch.addcmul(K_n, dot(e, K_n), toward, value=-1), scale, out=to_tau)
        return to_h

    def eps_gradients(self, grad: Tensor) -> Tensor:
        """Return the gradients of all eps of the window, both as summands and as directions."""
        self.outer.baddbmm_(self.grad_z.mT, self.z)
        _, K_e, K_n = self.products.unbind(2)
        e = self.plane.e
        across = torch.addcmul(K_n, dot(e, K_n), e, value=-1).mul_(self.plane.inv_s).add_(K_e)
        return torch.addcmul(grad, self.inv_eps, across, value=2)
