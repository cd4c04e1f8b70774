"""The RUM recurrence with a hand-written backward, in plain PyTorch on any device; lam is 0 or 1.

README.md beside this file derives the backward. Only ``gates`` (the pre-activations) and the outputs are kept from the
forward; a step is recomputed from them. With lam = 1 the memory R is walked back by undoing each rotation, and
reloaded every ``SEGMENT`` steps so that rounding cannot build up.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .options import RumOptions
from .reference import ACTIVATIONS, working_dtype
from .turn import (
    Turn,
    advance,
    advance_backward,
    recall,
    rotate,
    rotate_backward,
    safe_inverse,
    turn,
    turn_backward,
    unit_inputs,
)
from .zoneout import keep_new

SEGMENT = 128
"""Steps of lam = 1 between two stored copies of R."""


class Step(NamedTuple):
    """One step's intermediate values, all ``(B, H)``."""

    u: Tensor | None
    turn: Turn
    turned: Tensor
    recalled: tuple[Tensor, Tensor, Tensor, Tensor] | None
    candidate: Tensor
    mixed: Tensor
    new: Tensor


class _Scan:
    """The constant operands of one scan, and the two halves of a step on them."""

    def __init__(self, xp, h0, weight_hh, ln_weight, ln_bias, lengths, seed, options: RumOptions) -> None:
        self.options, self.seed, self.lengths = options, seed, lengths
        self.T, self.B = xp.shape[:2]
        self.H = h0.shape[-1]
        self.dtype = working_dtype(xp.dtype)
        self.xp, self.weight = xp, weight_hh.to(xp.dtype)
        self.eps = xp[..., -self.H :].to(self.dtype)  # (T, B, H)
        going = None if lengths is None else torch.arange(self.T, device=xp.device).unsqueeze(1) < lengths
        self.going = None if going is None else going.unsqueeze(-1)  # (T, B, 1)
        self.e, self.inv_eps = unit_inputs(self.eps, self.going)
        self.ln = None
        if options.layer_norm:
            self.ln = (ln_weight.to(self.dtype).view(-1, self.H), ln_bias.to(self.dtype).view(-1, self.H))

    def norm(self, x: Tensor, block: int) -> Tensor:
        if self.ln is None:
            return x
        return torch.native_layer_norm(x, [self.H], self.ln[0][block], self.ln[1][block], self.options.ln_eps)[0]

    def norm_backward(self, grad: Tensor, x: Tensor, block: int, sums: list[Tensor]) -> Tensor:
        """Gradient of ``norm``; the gradients of its weights are added to ``sums``."""
        if self.ln is None:
            return grad
        weight, bias = self.ln[0][block], self.ln[1][block]
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + self.options.ln_eps)
        args = (grad, x, [self.H], mean, rstd, weight, bias, [True, True, True])
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(*args)
        sums[0][block] += grad_weight
        sums[1][block] += grad_bias
        return grad_x

    def step(self, t: int, gates: Tensor, h: Tensor, R: Tensor | None, keep: Tensor | None, again: bool = False) -> Step:
        """Everything of step ``t`` after the matrix product. ``R`` (stored transposed) is moved to time ``t`` in place;
        done ``again``, from the backward, it is there already and stays."""
        options, H = self.options, self.H
        tau = self.norm(gates[:, :H], 0)
        u = None
        if options.update_gate:
            u = gates[:, H:]
            u = self.norm(u.sigmoid(), 1) if options.ln_order == "authors" else self.norm(u, 1).sigmoid()
        plane = turn(self.e[t], tau, self.inv_eps[t])
        recalled = None
        if R is None:
            turned = rotate(plane, h)
        elif again:
            recalled = recall(plane, h, R)
            turned = recalled[-1]
        else:
            turned = advance(plane, h, R)
        candidate = ACTIVATIONS[str(options.activation)](self.norm(self.eps[t] + turned, options.num_gates))
        mixed = candidate if u is None else torch.lerp(candidate, h, u)
        new = mixed
        if options.eta is not None:
            new = mixed * (options.eta * safe_inverse(torch.linalg.vector_norm(mixed, dim=-1, keepdim=True)))
        if options.zoneout > 0:
            new = torch.where(keep, new, h) if keep is not None else torch.lerp(new, h, options.zoneout)
        if self.going is not None:
            new = torch.where(self.going[t], new, h)
        return Step(u, plane, turned, recalled, candidate, mixed, new)

    def keep(self, t: int) -> Tensor | None:
        if self.options.zoneout > 0 and self.options.training:
            return keep_new(self.seed, t, self.B, self.H, self.options)
        return None


def forward(
    xp: Tensor,
    h0: Tensor,
    R0: Tensor | None,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    options: RumOptions,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Run the scan: states ``(T, B, H)``, the last R, the raw gates ``(T, B, 2H)`` and R at the ends of segments."""
    scan = _Scan(xp, h0, weight_hh, ln_weight, ln_bias, lengths, seed, options)
    T, B, H = scan.T, scan.B, scan.H
    gates, out = xp.new_empty(T, B, options.num_gates * H), xp.new_empty(T, B, H)
    h = h0.to(scan.dtype)
    R = segment_ends = None
    if options.keeps_rotation:
        eye = torch.eye(H, dtype=scan.dtype, device=xp.device)
        R = (eye.expand(B, H, H) if R0 is None else R0.mT).to(scan.dtype).contiguous().clone()  # transposed
        segment_ends = R.new_empty((T - 1) // SEGMENT, B, H, H)
    for t in range(T):
        torch.addmm(xp[t, :, : gates.shape[-1]], h.to(xp.dtype), scan.weight.t(), out=gates[t])
        h = scan.step(t, gates[t].to(scan.dtype), h, R, scan.keep(t)).new
        out[t] = h
        if R is not None and segment_ends is not None and (t + 1) % SEGMENT == 0 and t + 1 < T:
            segment_ends[(t + 1) // SEGMENT - 1] = R
    return out, None if R is None else R.mT.contiguous(), gates, segment_ends


def backward(
    grad_out: Tensor,
    grad_R: Tensor | None,
    xp: Tensor,
    h0: Tensor,
    R0: Tensor | None,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    gates: Tensor,
    R_n: Tensor | None,
    segment_ends: Tensor | None,
    options: RumOptions,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``xp, h0, R0, weight_hh, ln_weight, ln_bias``, from those of the states and of the last R."""
    scan = _Scan(xp, h0, weight_hh, ln_weight, ln_bias, lengths, seed, options)
    T, H, G = scan.T, scan.H, gates.shape[-1]
    grad_gates, grad_e = xp.new_empty(gates.shape), torch.empty_like(scan.eps)
    grad_eps = torch.empty_like(scan.eps)
    sums = [torch.zeros_like(part) for part in scan.ln] if scan.ln is not None else []
    R = adjoint = None
    if R_n is not None:
        R = R_n.mT.contiguous().clone()
        adjoint = torch.zeros_like(R) if grad_R is None else torch.bmm(R, grad_R.to(R.dtype))  # R^T dL/dR

    grad_h = torch.zeros_like(h0, dtype=scan.dtype)
    for t in reversed(range(T)):
        if R is not None and segment_ends is not None and (t + 1) % SEGMENT == 0 and t + 1 < T:
            R.copy_(segment_ends[(t + 1) // SEGMENT - 1])
        h = (out[t - 1] if t > 0 else h0).to(scan.dtype)
        grad_h = grad_h + grad_out[t]
        grad_h, grad_raw, grad_eps[t], grad_e[t] = _step_backward(
            scan, t, grad_h, gates[t].to(scan.dtype), h, R, adjoint, sums
        )
        grad_gates[t] = grad_raw
        grad_h = grad_h + grad_gates[t].mm(scan.weight).to(scan.dtype)

    e = scan.e
    grad_eps += (grad_e - (e * grad_e).sum(-1, keepdim=True) * e) * scan.inv_eps
    previous = torch.cat([h0.to(xp.dtype).unsqueeze(0), out[:-1]])
    grad_weight = grad_gates.flatten(0, 1).t().mm(previous.flatten(0, 1)).to(weight_hh.dtype)
    grad_xp = torch.cat([grad_gates, grad_eps.to(xp.dtype)], -1)
    grad_R0 = None if adjoint is None or R is None else torch.bmm(R.mT, adjoint)
    ln_grads = [total.view(-1) for total in sums] or [None, None]
    return grad_xp, grad_h.to(h0.dtype), grad_R0, grad_weight, ln_grads[0], ln_grads[1]


def _step_backward(
    scan: _Scan, t: int, grad: Tensor, gates: Tensor, h: Tensor, R: Tensor | None, adjoint: Tensor | None, sums: list
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of one step: of ``h``, the raw gates, ``eps`` where it is added, and the unit vector ``e``."""
    options, H = scan.options, scan.H
    keep = scan.keep(t)
    step = scan.step(t, gates, h, R, keep, again=True)
    grad_h = torch.zeros_like(grad)
    if scan.going is not None:
        grad_h = torch.where(scan.going[t], grad_h, grad)
        grad = torch.where(scan.going[t], grad, 0)
    if options.zoneout > 0:
        through = keep.to(grad.dtype) if keep is not None else 1 - options.zoneout
        grad_h = grad_h + grad * (1 - through)
        grad = grad * through
    if options.eta is not None:
        scale = safe_inverse(torch.linalg.vector_norm(step.mixed, dim=-1, keepdim=True))
        direction = step.mixed * scale
        grad = (grad - (grad * direction).sum(-1, keepdim=True) * direction) * (options.eta * scale)
    if step.u is not None:
        grad_u = grad * (h - step.candidate)
        grad_h = torch.addcmul(grad_h, grad, step.u)
        grad = torch.addcmul(grad, grad, step.u, value=-1)
    grad = activation_backward(str(options.activation), grad, step.candidate)
    grad = scan.norm_backward(grad, scan.eps[t] + step.turned, options.num_gates, sums)
    if R is None or adjoint is None or step.recalled is None:
        grad_turned, grad_m, grad_e = rotate_backward(step.turn, h, grad)
    else:
        grad_turned, grad_m, grad_e = advance_backward(step.turn, h, grad, R, adjoint, step.recalled)
    grad_h = grad_h + grad_turned
    grad_tau, grad_e = turn_backward(step.turn, grad_m, grad_e)
    grad_tau = scan.norm_backward(grad_tau, gates[:, :H], 0, sums)
    if step.u is None:
        return grad_h, grad_tau, grad, grad_e
    raw = gates[:, H:]
    if options.ln_order == "authors" and scan.ln is not None:
        u = raw.sigmoid()
        grad_u = scan.norm_backward(grad_u, u, 1, sums) * u * (1 - u)
    else:
        grad_u = scan.norm_backward(grad_u * step.u * (1 - step.u), raw, 1, sums)
    return grad_h, torch.cat([grad_tau, grad_u], -1), grad, grad_e


def activation_backward(name: str, grad: Tensor, output: Tensor) -> Tensor:
    """Gradient through a named activation, from its output alone."""
    if name == "relu":
        return grad * (output > 0)
    if name == "tanh":
        return grad * (1 - output * output)
    if name == "sigmoid":
        return grad * output * (1 - output)
    assert name == "softsign"
    return grad * (1 - output.abs()).square()

