"""The gated scan in plain PyTorch with a hand-written backward, on any device. README.md has the derivation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrum.ops.gated_scan.types import GatedGradients, GatedInputs, GatedOptions, keep_shares
from torchrum.ops.kernels.precision import without_autocast, working_dtype
from torchrum.ops.kernels.weights import recurrent_weight_gradient
from torchrum.ops.rotation import tiny_of
from torchrum.ops.rum_scan.torch_backend.rotate import (
    Angle,
    Constants,
    TurnBackward,
    add_turned,
    find_angle,
    half_turns,
    length_of,
    safe_inverse,
)


def obstacle(inputs: GatedInputs, options: GatedOptions) -> str | None:
    """None: this runs whatever the operator takes."""
    return None


@dataclass
class Heads:
    """Units ``start`` to ``end`` of a state, in heads of ``size``; each head of each row turns as a row of its own."""

    start: int
    end: int
    size: int

    @classmethod
    def of(cls, options: GatedOptions) -> "list[Heads]":
        """The heads of equal size and a last one that may be shorter."""
        K, size = options.rotated_units, options.head_size
        whole = K - K % size
        heads = [cls(0, whole, size), cls(whole, K, K - whole)]
        return [part for part in heads if part.start < part.end]

    def inverse(self, eps: Tensor) -> Tensor:
        """1/|eps| of rows of heads, and 0 where nothing turns."""
        inverse = safe_inverse(length_of(eps), tiny_of(eps.dtype))
        return torch.zeros_like(inverse) if self.size == 1 else inverse  # the only rotation of a line is 1

    def rows(self, x: Tensor) -> Tensor:
        """``(..., B, H)`` -> ``(..., B * heads, size)``."""
        x = x[..., self.start : self.end]
        return x.reshape(*x.shape[:-2], x.shape[-2] * (x.shape[-1] // self.size), self.size)

    def units(self, x: Tensor) -> Tensor:
        """The columns of these heads ``(..., B, H)`` as rows of heads; a view that is written to."""
        return x[..., self.start : self.end].unflatten(-1, (-1, self.size))

    def turn(self, angle: Angle, eps: Tensor, tau: Tensor, h: Tensor) -> Tensor:
        """R h, rows of heads."""
        return add_turned(angle, eps, tau, h, half_turns(angle), torch.zeros_like(angle.p))


def forward(inputs: GatedInputs, options: GatedOptions, save: bool = True) -> tuple[Tensor, Tensor]:
    """Run the scan: the states and, with ``save``, the gates."""
    with without_autocast(inputs.xp.device.type):
        return _forward(inputs, options, save)


def _forward(inputs: GatedInputs, options: GatedOptions, save: bool) -> tuple[Tensor, Tensor]:
    xp, h0, weight_hh, bias_hh = inputs[:4]
    (_, B, rows), H, dtype = xp.shape, h0.shape[1], working_dtype(xp.dtype)
    out, gates = inputs.empty_results(save)
    heads, shares, eps = Heads.of(options), keep_shares(inputs, options), xp[..., 2 * H :].to(dtype)
    turning = []
    for part in heads:
        eps_rows = part.rows(eps)
        inverse = part.inverse(eps_rows)
        usual = xp.device.type == "cpu" and bool((inverse > 0).all())
        numbers = Constants.like(inverse[0]) if usual else None
        turning.append((part, eps_rows, inverse, numbers))
    h, weight = h0.to(dtype), weight_hh.to(xp.dtype).t().contiguous()
    bias = xp.new_zeros(rows) if bias_hh is None else bias_hh.to(xp.dtype)
    for t, x in enumerate(xp[..., : 2 * H].to(dtype)):
        sums = torch.addmm(bias, h.to(xp.dtype), weight).to(dtype)
        r, u = torch.sigmoid(x + sums[:, : 2 * H]).chunk(2, -1)
        tau = sums[:, 2 * H :]
        inner = tau.clone() if heads else tau
        for part, eps_rows, inverse, numbers in turning:
            tau_rows, h_rows = part.rows(tau), part.rows(h)
            angle = find_angle(eps_rows[t], inverse[t], tau_rows, h_rows, numbers)
            part.units(inner).add_(part.turn(angle, eps_rows[t], tau_rows, h_rows).view(B, -1, part.size))
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
    """Gradients of the inputs from that of the states."""
    with without_autocast(inputs.xp.device.type):
        return _backward(grad_out, inputs, out, gates, options)


def _backward(
    grad_out: Tensor, inputs: GatedInputs, out: Tensor, gates: Tensor, options: GatedOptions
) -> GatedGradients:
    xp, h0, weight_hh = inputs[:3]
    (T, B, _), H, dtype = xp.shape, h0.shape[1], working_dtype(xp.dtype)
    heads, shares = Heads.of(options), keep_shares(inputs, options)
    # everything that does not depend on the gradient, for all steps at once
    eps, (r, u, tau) = xp[..., 2 * H :].to(dtype), gates.chunk(3, -1)
    h = torch.cat((h0.to(dtype).unsqueeze(0), out[:-1].to(dtype)))
    inner, turns = tau.clone(), []
    for part in heads:
        eps_rows, tau_rows, h_rows = part.rows(eps), part.rows(tau), part.rows(h)
        angle = find_angle(eps_rows, part.inverse(eps_rows), tau_rows, h_rows, None)
        part.units(inner).add_(part.turn(angle, eps_rows, tau_rows, h_rows).view(T, B, -1, part.size))
        turns.append((part, TurnBackward(angle, eps_rows, tau_rows, h_rows)))
    candidate = torch.addcmul(eps, r, inner).tanh_()
    to_sum = (1 - u) * (1 - candidate * candidate)  # from the gradient of the new state to that of tanh's argument
    to_gates = torch.stack((to_sum * inner * r * (1 - r), (h - candidate) * u * (1 - u), to_sum * r), 2)
    grad_gates = torch.empty_like(to_gates)  # (T, B, 3, H): r, u before their sigmoids, tau
    grads, weight = torch.empty_like(h), weight_hh.to(xp.dtype)
    grad_turned = [torch.empty_like(part.rows(h)) for part in heads]
    grad_h = torch.zeros_like(h0, dtype=dtype)
    for t in reversed(range(T)):
        grad_h = grad_h + grad_out[t].to(dtype)
        grad = grads[t].copy_(grad_h if shares is None else grad_h * shares[t])
        kept = 0 if shares is None else grad_h - grad
        _, _, grad_tau = torch.mul(to_gates[t], grad.unsqueeze(1), out=grad_gates[t]).unbind(1)
        grad_h = grad * u[t] + kept
        for (part, turn), turned in zip(turns, grad_turned, strict=True):
            turned[t] = part.rows(grad_tau)
            to_tau = torch.empty_like(turned[t])
            part.units(grad_h).add_(turn.step(t, turned[t], to_tau).view(B, -1, part.size))
            part.units(grad_tau).add_(to_tau.view(B, -1, part.size))
        grad_h = grad_h + (grad_gates[t].flatten(1).to(xp.dtype) @ weight).to(dtype)
    grad_eps = to_sum * grads
    for (part, turn), turned in zip(turns, grad_turned, strict=True):
        part.units(grad_eps).add_((turn.eps_gradients(turned) - turned).view(T, B, -1, part.size))
    grad_xp = torch.cat((grad_gates[:, :, :2].flatten(2), grad_eps), -1).to(xp.dtype)
    return GatedGradients(grad_xp, grad_h.to(h0.dtype), *weight_gradients(grad_gates.flatten(2), inputs, out))


def weight_gradients(grad_gates: Tensor, inputs: GatedInputs, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``weight_hh`` and ``bias_hh`` from those of the gates' sums ``(T, B, 3H)``."""
    weight_hh, bias_hh = inputs.weight_hh, inputs.bias_hh
    grad_weight = recurrent_weight_gradient(grad_gates.to(out.dtype), weight_hh.shape[0], inputs.h0, out)
    grad_bias = None if bias_hh is None else grad_gates.sum((0, 1)).to(bias_hh.dtype)
    return grad_weight.to(weight_hh.dtype), grad_bias
