"""The memory of lam = 1 for the torch backend: turning it, and the gradients.

R(eps, tau) = H_m H_e = H_e H_n with H_x = I - 2 x x^T, e and w the directions of eps and tau, m their bisector and
n = H_e m. A step takes two outer products 2 y x^T off R, one for each reflection x, where y is R x before it. R is
formed only every ``WINDOW`` steps; in between it is the last R that was formed and the x and y since, which are far
less to read. The backward keeps the gradient of R in a frame that does not turn, so that it is formed once per window
too. README.md has the derivation.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchrum.ops.rotation import dot, opposite_of, orthogonal_to, tiny_of
from torchrum.ops.rum_scan.torch_backend.rotate import length_of, safe_inverse

WINDOW = 16
"""Steps between two R that are formed: the cost of forming one is shared, that of the x and y since stays small."""


class Plane(NamedTuple):
    """Where a step turns; vectors ``(..., B, H)``, scalars ``(..., B, 1)``. e and n are zero where nothing turns."""

    e: Tensor
    n: Tensor
    w: Tensor
    inv_s: Tensor
    """1/|e + w|; 0 where m has no gradient."""
    inv_tau: Tensor


def find_plane(
    eps: Tensor, inv_eps: Tensor, tau: Tensor, ordinary: bool, e: Tensor | None = None, n: Tensor | None = None
) -> Plane:
    """The plane that turns ``eps`` into the direction of ``tau``; ``inv_eps`` is 1/|eps|, 0 where nothing turns.

    ``ordinary`` says that every ``inv_eps`` is above 0: then the ordinary case is tried first. ``e`` and ``n`` may be
    given as buffers for the plane's.
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
    turns = inv_tau * inv_eps > 0
    opposite = (length <= opposite_of(tau.dtype)) & turns
    m = torch.where(opposite, orthogonal_to(e), s * (safe_inverse(length) * turns))
    n = torch.addcmul(m, dot(e, m), e, value=-2, out=n)
    moving = turns & ~opposite  # m is a constant where the vectors are opposite
    return Plane(e.mul_(turns), n, w, safe_inverse(length) * moving, inv_tau * moving)


class Memory:
    """R of the forward: the last one that was formed, transposed, which reads faster, and the x and y since."""

    def __init__(self, R: Tensor, kept: Tensor) -> None:
        """``kept`` ``(windows, B, 2 * WINDOW, H)`` takes the y of all steps."""
        self.R, self.kept = R, kept
        self.x = R.new_empty(R.shape[0], 2 * WINDOW + 1, R.shape[1])
        rows = self.x.unbind(1)
        self.views = [  # of the last three rows and of all of them, step by step
            (self.x[:, i : i + 3], self.x[:, : i + 3].mT, *rows[i : i + 3]) for i in range(0, 2 * WINDOW, 2)
        ]

    def advance(self, t: int, eps: Tensor, inv_eps: Tensor, tau: Tensor, h: Tensor, ordinary: bool) -> Tensor:
        """Turn the memory, R <- R H_e H_n, and return the new R h."""
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
        # 1, but for what rounding has added to |R n|, which is so taken out again
        torch.mul(R_n, torch.rsub(dot(R_n, R_n), 1.25, alpha=0.25), out=y_n)
        return R_h.addcmul_(e_h, R_e, value=-2).addcmul_(n_h, y_n, value=-2)

    def form(self, steps: int) -> None:
        """Take the outer products of the last ``steps`` steps off R."""
        self.R.baddbmm_(self.x[:, : 2 * steps].mT, self.y[:, : 2 * steps], alpha=-2)


class MemoryBackward:
    """The gradients of a window of steps; what needs no gradient is done for all of them at once.

    ``R`` goes back to before the window at the start, ``outer`` = dL/dR R^T at the end (``eps_gradients``), in place.
    """

    def __init__(self, plane: Plane, inv_eps: Tensor, z: Tensor, y: Tensor, R: Tensor, outer: Tensor) -> None:
        steps = len(z)
        self.plane, self.inv_eps, self.R, self.outer = plane, inv_eps, R, outer
        e, n = plane.e.transpose(0, 1), plane.n.transpose(0, 1)
        self.x, self.y, self.z = torch.stack([e, n], 2).flatten(1, 2), y[:, : 2 * steps], z.transpose(0, 1).contiguous()
        R.baddbmm_(self.y.mT, self.x, alpha=2)
        # -R e and -R n after each step, (B, 2 steps, H)
        y_e, y_n = self.y.unflatten(1, (steps, 2)).unbind(2)
        turned = torch.stack([torch.addcmul(y_e, dot(e, n), y_n, value=2), y_n], 2).flatten(1, 2)
        images = torch.bmm(turned, outer.mT).baddbmm_(turned, outer, alpha=-1)
        z_turned = torch.bmm(turned, self.z.mT)  # (B, 2 steps, steps)
        self.grad_z = torch.empty_like(self.z)
        self.products = z.new_empty(*z.shape[:2], 3, z.shape[2])
        by_step = (plane.e, plane.w + 2 * plane.e, 2 * plane.inv_s * plane.inv_tau, self.products)
        by_row = (part.split(2, 1) for part in (turned, images, z_turned))
        self.steps = list(zip(*(part.unbind(0) for part in by_step), self.grad_z.unbind(1), *by_row, strict=True))

    def step(self, i: int, grad: Tensor, to_tau: Tensor) -> Tensor:
        """Step ``i`` of the window, from the gradient of R h: tau's is written, h's returned."""
        e, toward, scale, products, grad_z, turned, images, z_turned = self.steps[i]
        grad_z.copy_(grad)
        grads, known = self.grad_z[:, i:], 2 * i + 2
        images = torch.baddbmm(images, torch.bmm(turned, grads.mT), self.z[:, i:], alpha=-1)
        rows = torch.cat([grad.unsqueeze(1), images.baddbmm_(z_turned[..., i:], grads)], 1)
        torch.bmm(rows, self.R, out=products)
        products.baddbmm_(torch.bmm(rows, self.y[:, :known].mT), self.x[:, :known], alpha=-2)
        to_h, _, K_n = products.unbind(1)
        torch.mul(torch.addcmul(K_n, dot(e, K_n), toward, value=-1), scale, out=to_tau)
        return to_h

    def eps_gradients(self, grad: Tensor) -> Tensor:
        """Gradients of all eps of the window, as summands and as directions."""
        self.outer.baddbmm_(self.grad_z.mT, self.z)
        _, K_e, K_n = self.products.unbind(2)
        e = self.plane.e
        across = torch.addcmul(K_n, dot(e, K_n), e, value=-1).mul_(self.plane.inv_s).add_(K_e)
        return torch.addcmul(grad, self.inv_eps, across, value=2)
