"""The RUM recurrence with a hand-written backward, in plain PyTorch on any device; lam is 0 or 1.

The forward keeps the raw gates (and, with lam = 1, the turned states) beside the outputs. The backward recomputes
everything else for a block of steps at once, so that only what depends on the gradient runs step by step. With lam = 1
the memory R is walked back by undoing each rotation, and reloaded every ``SEGMENT`` steps so that rounding cannot
build up. README.md beside this file derives the backward.
"""

import torch
from torch import Tensor

from .options import RumOptions
from .reference import ACTIVATIONS, working_dtype
from .turn import Plane, RotateBackward, advance, advance_backward, find_plane, rotate, safe_inverse, unit_inputs
from .zoneout import keep_new

SEGMENT = 128
"""Steps of lam = 1 between two stored copies of R."""
BLOCK = 16
"""Steps that the backward recomputes at once: enough to hide the cost of a call, few enough to stay in the cache."""


class _Scan:
    """The constant operands of one scan, and a step's forward on them for one step or a block of steps."""

    def __init__(self, xp, h0, weight_hh, ln_weight, ln_bias, lengths, seed, options: RumOptions) -> None:
        self.options, self.seed = options, seed
        self.T, self.B = xp.shape[:2]
        self.H = h0.shape[-1]
        self.dtype = working_dtype(xp.dtype)
        self.weight = weight_hh.to(xp.dtype)
        self.eps = xp[..., -self.H :].to(self.dtype)  # (T, B, H)
        self.going = None
        if lengths is not None:
            self.going = (torch.arange(self.T, device=xp.device).unsqueeze(1) < lengths).unsqueeze(-1)  # (T, B, 1)
        self.e, self.inv_eps = unit_inputs(self.eps, self.going)
        self.ln = None
        if options.layer_norm:
            self.ln = (ln_weight.to(self.dtype).view(-1, self.H), ln_bias.to(self.dtype).view(-1, self.H))

    def norm(self, x: Tensor, block: int) -> Tensor:
        if self.ln is None:
            return x
        return torch.native_layer_norm(x, [self.H], self.ln[0][block], self.ln[1][block], self.options.ln_eps)[0]

    def plane(self, at: int | slice, gates: Tensor) -> Plane:
        return find_plane(self.e[at], self.inv_eps[at], self.norm(gates[..., : self.H], 0))

    def gate(self, gates: Tensor) -> Tensor | None:
        if not self.options.update_gate:
            return None
        raw = gates[..., self.H : 2 * self.H]
        return self.norm(raw.sigmoid(), 1) if self.options.ln_order == "authors" else self.norm(raw, 1).sigmoid()

    def candidate(self, at: int | slice, turned: Tensor) -> Tensor:
        return ACTIVATIONS[str(self.options.activation)](self.norm(self.eps[at] + turned, self.options.num_gates))

    def keep(self, t: int) -> Tensor | None:
        if self.options.zoneout > 0 and self.options.training:
            return keep_new(self.seed, t, self.B, self.H, self.options)
        return None

    def finish(self, t: int, h: Tensor, u: Tensor | None, candidate: Tensor) -> Tensor:
        """Mix, normalise, zone out and freeze: from the candidate to the new state."""
        new = candidate if u is None else torch.lerp(candidate, h, u)
        if self.options.eta is not None:
            new = new * (self.options.eta * safe_inverse(torch.linalg.vector_norm(new, dim=-1, keepdim=True)))
        if self.options.zoneout > 0:
            keep = self.keep(t)
            new = torch.where(keep, new, h) if keep is not None else torch.lerp(new, h, self.options.zoneout)
        return new if self.going is None else torch.where(self.going[t], new, h)


def empty_results(xp: Tensor, H: int, options: RumOptions) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Room for what ``forward`` returns."""
    T, B = xp.shape[:2]
    out, saved = xp.new_empty(T, B, H), xp.new_empty(T, B, (options.num_gates + options.keeps_rotation) * H)
    if not options.keeps_rotation:
        return out, None, saved, None
    R = xp.new_empty(B, H, H, dtype=working_dtype(xp.dtype))
    return out, R, saved, R.new_empty((T - 1) // SEGMENT, B, H, H)


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
    """Run the scan: states ``(T, B, H)``, the last R, what the backward needs of each step, R at segment ends."""
    scan = _Scan(xp, h0, weight_hh, ln_weight, ln_bias, lengths, seed, options)
    T, H, G = scan.T, scan.H, options.num_gates * scan.H
    out, R, saved, ends = empty_results(xp, H, options)
    h = h0.to(scan.dtype)
    if R is not None:
        R.copy_(torch.eye(H, device=xp.device) if R0 is None else R0.mT)  # transposed
    for t in range(T):
        raw = torch.addmm(xp[t, :, :G], h.to(xp.dtype), scan.weight.t(), out=saved[t, :, :G])
        gates = raw.to(scan.dtype)
        plane = scan.plane(t, gates)
        if R is None or ends is None:
            turned = rotate(plane, h)[0]
        else:
            turned = advance(plane, h, R)
            saved[t, :, G:] = turned
            if (t + 1) % SEGMENT == 0 and t + 1 < T:
                ends[(t + 1) // SEGMENT - 1] = R
        h = scan.finish(t, h, scan.gate(gates), scan.candidate(t, turned))
        out[t] = h
    return out, None if R is None else R.mT.contiguous(), saved, ends


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
    saved: Tensor,
    R_n: Tensor | None,
    ends: Tensor | None,
    options: RumOptions,
    need_R0: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``xp, h0, R0, weight_hh, ln_weight, ln_bias``, from those of the states and of the last R."""
    scan = _Scan(xp, h0, weight_hh, ln_weight, ln_bias, lengths, seed, options)
    G = options.num_gates * scan.H
    grad_xp = torch.empty_like(xp, memory_format=torch.contiguous_format)
    sums = [torch.zeros_like(part) for part in scan.ln] if scan.ln is not None else []
    memory = None
    if R_n is not None and ends is not None:
        R = R_n.mT.clone(memory_format=torch.contiguous_format)
        adjoint = torch.zeros_like(R) if grad_R is None else torch.bmm(R, grad_R.to(R.dtype))  # R^T dL/dR
        memory = (R, adjoint, ends)

    previous = torch.cat([h0.to(xp.dtype).unsqueeze(0), out[:-1]])
    grad_h = torch.zeros_like(h0, dtype=scan.dtype)
    for start in reversed(range(0, scan.T, BLOCK)):
        at = slice(start, min(start + BLOCK, scan.T))
        block = _Block(scan, at, saved[at].to(scan.dtype), previous[at].to(scan.dtype), memory, sums)
        for t in reversed(range(at.start, at.stop)):
            grad_h = block.step(t - at.start, grad_h + grad_out[t], grad_xp)
        block.finish(grad_xp)

    grad_weight = grad_xp[..., :G].flatten(0, 1).t().mm(previous.flatten(0, 1)).to(weight_hh.dtype)
    grad_R0 = torch.bmm(memory[0].mT, memory[1]) if memory is not None and need_R0 else None
    grad_ln_weight, grad_ln_bias = (total.view(-1) for total in sums) if sums else (None, None)
    return grad_xp, grad_h.to(h0.dtype), grad_R0, grad_weight, grad_ln_weight, grad_ln_bias


class _Block:
    """A block of steps of the backward: recomputed at once, then walked backwards."""

    def __init__(self, scan: _Scan, at: slice, saved: Tensor, h: Tensor, memory, sums: list[Tensor]) -> None:
        self.scan, self.at, self.h, self.memory, self.sums = scan, at, h, memory, sums
        self.gates = saved[..., : scan.options.num_gates * scan.H]
        self.plane = scan.plane(at, self.gates)
        self.rotation = None if memory is not None else RotateBackward(self.plane, h)
        self.turned = saved[..., -scan.H :] if self.rotation is None else self.rotation.turned
        self.u = scan.gate(self.gates)
        candidate = scan.candidate(at, self.turned)
        self.to_candidate = activation_slope(str(scan.options.activation), candidate)
        if self.u is not None:
            closed = 1 - self.u
            self.to_candidate = self.to_candidate * closed
            self.to_gate = h - candidate
            if scan.ln is None or scan.options.ln_order == "before":
                self.to_gate = self.to_gate * (self.u * closed)
        if scan.options.eta is not None:
            mixed = candidate if self.u is None else torch.lerp(candidate, h, self.u)
            self.scale = safe_inverse(torch.linalg.vector_norm(mixed, dim=-1, keepdim=True))
            self.direction = mixed * self.scale
        self.grad_turned, self.grad_e = torch.empty_like(h), torch.empty_like(h)

    def norm_backward(self, grad: Tensor, x: Tensor, block: int) -> Tensor:
        """Gradient of ``norm``; the gradients of its weights are added to ``sums``."""
        if self.scan.ln is None:
            return grad
        weight, bias = self.scan.ln[0][block], self.scan.ln[1][block]
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + self.scan.options.ln_eps)
        args = (grad, x, [self.scan.H], mean, rstd, weight, bias, [True, True, True])
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(*args)
        self.sums[0][block] += grad_weight
        self.sums[1][block] += grad_bias
        return grad_x

    def step(self, i: int, grad: Tensor, grad_xp: Tensor) -> Tensor:
        """Walk step ``i`` of the block: the gradient of its state in, that of the state before it out."""
        scan, options, H, t, h = self.scan, self.scan.options, self.scan.H, self.at.start + i, self.h[i]
        skipped = None
        if scan.going is not None:
            skipped = torch.where(scan.going[t], 0.0, grad)
            grad = torch.where(scan.going[t], grad, 0.0)
        if options.zoneout > 0:
            keep = scan.keep(t)
            through = grad * (1 - options.zoneout) if keep is None else grad * keep
            skipped = grad - through if skipped is None else skipped + (grad - through)
            grad = through
        if options.eta is not None:
            direction = self.direction[i]
            along = (grad * direction).sum(-1, keepdim=True)
            grad = torch.addcmul(grad, along, direction, value=-1).mul_(options.eta * self.scale[i])

        into = self.norm_backward(grad * self.to_candidate[i], scan.eps[t] + self.turned[i], options.num_gates)
        self.grad_turned[i] = into
        if self.rotation is not None:
            grad_h, grad_tau = self.rotation.step(i, into)
        else:
            R, adjoint, ends = self.memory
            if (t + 1) % SEGMENT == 0 and t + 1 < scan.T:
                R.copy_(ends[(t + 1) // SEGMENT - 1])
            grad_h, grad_tau, self.grad_e[i] = advance_backward(self.plane.at(i), h, into, R, adjoint)
        grad_gates = grad_xp[t, :, :-H]
        grad_gates[:, :H] = self.norm_backward(grad_tau, self.gates[i, :, :H], 0)
        if self.u is not None:
            grad_gates[:, H:] = self._gate_backward(i, grad * self.to_gate[i])
            grad_h = torch.addcmul(grad_h, grad, self.u[i])
        if skipped is not None:
            grad_h = grad_h + skipped
        return grad_h + grad_gates.mm(scan.weight)

    def _gate_backward(self, i: int, grad: Tensor) -> Tensor:
        if self.scan.ln is None:
            return grad
        raw = self.gates[i, :, self.scan.H :]
        if self.scan.options.ln_order == "before":
            return self.norm_backward(grad, raw, 1)
        u = raw.sigmoid()
        return self.norm_backward(grad, u, 1) * u * (1 - u)

    def finish(self, grad_xp: Tensor) -> None:
        """Gradients of eps for the whole block: where it is added, and through its direction."""
        grad_e = self.grad_e if self.rotation is None else self.rotation.directions(self.grad_turned)
        e = self.scan.e[self.at]
        grad_e = (grad_e - (e * grad_e).sum(-1, keepdim=True) * e) * self.scan.inv_eps[self.at]
        grad_xp[self.at, :, -self.scan.H :] = self.grad_turned + grad_e


def activation_slope(name: str, output: Tensor) -> Tensor:
    """Derivative of a named activation, from its output alone."""
    if name == "relu":
        return (output > 0).to(output.dtype)
    if name == "tanh":
        return 1 - output * output
    if name == "sigmoid":
        return output * (1 - output)
    assert name == "softsign"
    return (1 - output.abs()).square()
