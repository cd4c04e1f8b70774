"""The gated scan in plain PyTorch with a hand-written backward, on any device. README.md has the derivation."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchrum.ops.gated_scan.types import GatedGradients, GatedInputs, GatedOptions, keep_shares
from torchrum.ops.kernels.linear import recurrent_weight_gradient, working_dtype
from torchrum.ops.kernels.machine import without_autocast
from torchrum.ops.rotation import dot, opposite_of, orthogonal_to, reflect, tiny_of


def obstacle(inputs: GatedInputs, options: GatedOptions) -> str | None:
    """Return None: this design can run every scan."""
    return None


def direction(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x/|x| and 1/|x| over the last dimension, both zero where ``x`` has no direction."""
    length = dot(x, x).sqrt_()
    inverse = length.reciprocal().masked_fill_(length <= tiny_of(x.dtype), 0.0)
    return x * inverse, inverse


class Plane(NamedTuple):
    """The plane of each head's rotation z = H_m H_e h, with e, w and m ``(..., heads, size)``.

    e and m are zero where nothing rotates. The inverse lengths ``(..., heads, 1)`` of eps, tau and e + w are zero where
    there is no gradient.
    """

    e: Tensor
    w: Tensor
    m: Tensor
    inv_eps: Tensor
    inv_tau: Tensor
    inv_s: Tensor

    @classmethod
    def between(cls, e: Tensor, inv_eps: Tensor, tau: Tensor) -> "Plane":
        w, inv_tau = direction(tau)
        s, apart = e + w, e - w
        square = dot(s, s)
        # rotation.md: the rounding error of |e| - |w| tilts a short s along e - w
        s = s - dot(s, apart) / (4 - square).clamp_(min=2) * apart
        length = square.sqrt_()
        opposite = length <= opposite_of(tau.dtype)
        inv_s = length.reciprocal().masked_fill_(opposite, 0.0)
        m = s * inv_s
        if not m.is_cpu or opposite.any():  # on a GPU the test would synchronise
            m = torch.where(opposite, orthogonal_to(e), m)
            inv_tau = inv_tau.masked_fill(opposite, 0.0)
        rotates = inv_eps * inv_tau + opposite  # nonzero where a head rotates; NaN stays NaN
        fixed = (inv_eps == 0) | (rotates == 0)
        if tau.shape[-1] == 1:  # in one dimension the only rotation is the identity
            fixed = torch.ones_like(fixed)
        if not m.is_cpu or fixed.any():
            e, m, inv_eps, inv_tau, inv_s = (x.masked_fill(fixed, 0.0) for x in (e, m, inv_eps, inv_tau, inv_s))
        return cls(e, w, m, inv_eps, inv_tau, inv_s)

    def rotate(self, h: Tensor) -> Tensor:
        return reflect(self.m, reflect(self.e, h))

    def backward(self, h: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of eps, tau and h from ``grad``, the gradient of z."""
        e, w, m, inv_eps, inv_tau, inv_s = self
        p, m_grad = dot(e, h), dot(m, grad)
        g = h - 2 * p * e
        grad_g, m_g = grad - 2 * m_grad * m, dot(m, g)
        e_grad = dot(e, grad_g)
        grad_s = (4 * m_g * m_grad * m - 2 * (m_g * grad + m_grad * g)) * inv_s
        along = dot(e, grad_s)  # w.grad_s = -along, since grad_s is orthogonal to e + w
        grad_eps = grad_s - 2 * (p * grad_g + e_grad * h) + (4 * p * e_grad - along) * e
        return grad_eps * inv_eps, (grad_s + along * w) * inv_tau, grad_g - 2 * e_grad * e


class Heads(NamedTuple):
    """Units ``start`` to ``end`` of a state, in heads of ``size``."""

    start: int
    end: int
    size: int

    @classmethod
    def of(cls, options: GatedOptions) -> "list[Heads]":
        """Return the heads of full size and, if there is one, the shorter last head."""
        K, size = options.rotated_units, options.head_size
        whole = K - K % size
        heads = [cls(0, whole, size), cls(whole, K, K - whole)]
        return [part for part in heads if part.start < part.end]

    def view(self, x: Tensor) -> Tensor:
        """Return these units of ``x`` ``(..., H)`` as a view ``(..., heads, size)``."""
        return x[..., self.start : self.end].unflatten(-1, (-1, self.size))


def forward(inputs: GatedInputs, options: GatedOptions, save: bool = True) -> tuple[Tensor, Tensor]:
    """Compute the states and, with ``save``, the gates."""
    with without_autocast(inputs.xp):
        return _forward(inputs, options, save)


def _forward(inputs: GatedInputs, options: GatedOptions, save: bool) -> tuple[Tensor, Tensor]:
    xp, h0, weight_hh, bias_hh = inputs[:4]
    H, dtype = h0.shape[1], working_dtype(xp.dtype)
    out, gates = inputs.empty_results(save)
    shares, eps = keep_shares(inputs, options), xp[..., 2 * H :].to(dtype)
    heads = [(part, *direction(part.view(eps))) for part in Heads.of(options)]
    h, weight = h0.to(dtype), weight_hh.to(xp.dtype).t().contiguous()
    bias = xp.new_zeros(3 * H) if bias_hh is None else bias_hh.to(xp.dtype)
    for t, x in enumerate(xp[..., : 2 * H].to(dtype)):
        sums = torch.addmm(bias, h.to(xp.dtype), weight).to(dtype)
        r, u = torch.sigmoid(x + sums[:, : 2 * H]).chunk(2, -1)
        tau = sums[:, 2 * H :]
        inner = tau.clone()
        for part, e, inv_eps in heads:
            part.view(inner).add_(Plane.between(e[t], inv_eps[t], part.view(tau)).rotate(part.view(h)))
        candidate = torch.addcmul(eps[t], r, inner).tanh_()
        new = torch.lerp(candidate, h, u)
        h = new if shares is None else torch.lerp(h, new, shares[t].expand_as(h))
        out[t] = h
        if save:
            torch.cat((r, u, tau), -1, out=gates[t])
    return out, gates


def backward(
    grad_out: Tensor, inputs: GatedInputs, out: Tensor, gates: Tensor, options: GatedOptions
) -> GatedGradients:
    """Compute the gradients of the inputs from the gradient of the states."""
    with without_autocast(inputs.xp):
        return _backward(grad_out, inputs, out, gates, options)


def _backward(
    grad_out: Tensor, inputs: GatedInputs, out: Tensor, gates: Tensor, options: GatedOptions
) -> GatedGradients:
    xp, h0, weight_hh = inputs[:3]
    T, H, dtype = xp.shape[0], h0.shape[1], working_dtype(xp.dtype)
    shares = keep_shares(inputs, options)
    # compute everything that does not depend on the gradient for all steps at once
    eps, (r, u, tau) = xp[..., 2 * H :].to(dtype), gates.chunk(3, -1)
    h = torch.cat((h0.to(dtype).unsqueeze(0), out[:-1].to(dtype)))
    inner, heads = tau.clone(), []
    for part in Heads.of(options):
        plane = Plane.between(*direction(part.view(eps)), part.view(tau))
        part.view(inner).add_(plane.rotate(part.view(h)))
        heads.append((part, plane))
    candidate = torch.addcmul(eps, r, inner).tanh_()
    to_sum = (1 - u) * (1 - candidate * candidate)  # derivative of the new state to tanh's argument
    to_gates = torch.stack((to_sum * inner * r * (1 - r), (h - candidate) * u * (1 - u), to_sum * r), 2)
    grad_gates = torch.empty_like(to_gates)  # (T, B, 3, H): r and u before their sigmoids, tau
    grad_eps, weight = torch.empty_like(h), weight_hh.to(xp.dtype)
    grad_h = torch.zeros_like(h0, dtype=dtype)
    for t in reversed(range(T)):
        total = grad_h + grad_out[t].to(dtype)
        grad = total if shares is None else total * shares[t]
        torch.mul(to_gates[t], grad.unsqueeze(1), out=grad_gates[t])
        torch.mul(to_sum[t], grad, out=grad_eps[t])
        grad_h = grad * u[t] if shares is None else grad * u[t] + (total - grad)
        grad_tau = grad_gates[t, :, 2]
        for part, plane in heads:
            of_step = Plane(*(x[t] for x in plane))
            to_eps, to_tau, to_h = of_step.backward(part.view(h[t]), part.view(grad_tau))
            for target, found in ((grad_eps[t], to_eps), (grad_tau, to_tau), (grad_h, to_h)):
                part.view(target).add_(found)
        grad_h = grad_h + (grad_gates[t].flatten(1).to(xp.dtype) @ weight).to(dtype)
    grad_xp = torch.cat((grad_gates[:, :, :2].flatten(2), grad_eps), -1).to(xp.dtype)
    return GatedGradients(grad_xp, grad_h.to(h0.dtype), *weight_gradients(grad_gates.flatten(2), inputs, out))


def weight_gradients(grad_gates: Tensor, inputs: GatedInputs, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of ``weight_hh`` and ``bias_hh`` from those of the gates' sums ``(T, B, 3H)``."""
    weight_hh, bias_hh = inputs.weight_hh, inputs.bias_hh
    grad_weight = recurrent_weight_gradient(grad_gates.to(out.dtype), weight_hh.shape[0], inputs.h0, out)
    grad_bias = None if bias_hh is None else grad_gates.sum((0, 1)).to(bias_hh.dtype)
    return grad_weight.to(weight_hh.dtype), grad_bias
