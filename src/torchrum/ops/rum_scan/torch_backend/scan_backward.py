"""Backward of the RUM recurrence in plain PyTorch, written by hand; the scan's README.md derives it.

What the forward did not keep is recomputed for a block of steps at once, so that only what depends on the gradient runs
step by step; R is reconstructed in reverse by taking off what was added.
"""

import torch
from torch import Tensor

from torchrum.ops.kernels.weights import recurrent_weight_gradient
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.torch_backend.rotate import Angle, TurnBackward, add_turned, length_of, safe_inverse
from torchrum.ops.rum_scan.torch_backend.scan import Scan
from torchrum.ops.rum_scan.torch_backend.turn import WINDOW, MemoryBackward, find_plane
from torchrum.ops.rum_scan.types import Gradients, Results, ScanInputs

BLOCK = 32
"""Steps of lam = 0 that the backward recomputes at once: enough to hide the cost of a call, few enough to stay in the
cache. With lam = 1 it is a ``WINDOW``."""


def backward(
    grad_out: Tensor, grad_R: Tensor | None, inputs: ScanInputs, results: Results, options: RumOptions, need_R0: bool
) -> Gradients:
    """Gradients of the inputs from those of the states and of the last R."""
    xp, h0, _, weight_hh = inputs[:4]
    out, R_n, (saved, kept) = results
    assert saved is not None and kept is not None
    scan = Scan(inputs, options)
    gated = options.num_gates * scan.H
    grad_xp = torch.empty_like(xp, memory_format=torch.contiguous_format)
    sums = [torch.zeros_like(part) for part in scan.ln] if scan.ln is not None else []
    grad_gates = (grad_xp[..., :gated], grad_xp[..., : scan.H], grad_xp[..., scan.H : gated])
    memory = None
    if R_n is not None:
        outer = torch.zeros_like(R_n) if grad_R is None else torch.bmm(grad_R.to(R_n.dtype), R_n.mT)
        memory = (R_n.clone(), outer)

    grad_h = torch.zeros_like(h0, dtype=scan.dtype)
    size = BLOCK if memory is None else WINDOW
    for start in reversed(range(0, scan.T, size)):
        at = slice(start, min(start + size, scan.T))
        before = out[start - 1 : at.stop - 1] if start > 0 else torch.cat([h0.to(xp.dtype)[None], out[: at.stop - 1]])
        block = _Block(scan, at, saved[at].to(scan.dtype), before.to(scan.dtype), memory, kept, sums)
        views = zip(grad_out[at].unbind(0), *(part[at].unbind(0) for part in grad_gates), strict=True)
        for i, (given, *buffers) in reversed(list(enumerate(views))):
            grad_h = block.step(i, grad_h.add_(given), *buffers)
        block.finish(grad_xp)

    grad_weight = recurrent_weight_gradient(grad_xp, gated, None if inputs.from_zero else h0, out).to(weight_hh.dtype)
    grad_R0 = torch.bmm(memory[1], memory[0]) if memory is not None and need_R0 else None
    grad_ln_weight, grad_ln_bias = (total.view(-1) for total in sums) if sums else (None, None)
    grad_h = grad_h.to(h0.dtype).contiguous()
    return Gradients(grad_xp, grad_h, grad_R0, grad_weight, grad_ln_weight, grad_ln_bias)


class _Block:
    """A block of steps of the backward: recomputed at once, then differentiated step by step."""

    def __init__(
        self,
        scan: Scan,
        at: slice,
        saved: Tensor,
        h: Tensor,
        memory: tuple[Tensor, Tensor] | None,
        kept: Tensor,
        sums: list[Tensor],
    ) -> None:
        self.scan, self.at, self.h, self.sums = scan, at, h, sums
        self.gates = saved[..., : scan.options.num_gates * scan.H]
        eps, tau = scan.eps[at], scan.tau(self.gates)
        self.rotation: TurnBackward | MemoryBackward
        if memory is None:
            angle = Angle(*kept[at].split(1, -1))
            self.rotation = TurnBackward(angle, eps, tau, h)
            self.total = add_turned(angle, eps, tau, h, self.rotation.half_turns, torch.ones_like(angle.p))
        else:
            inv_eps, z = scan.inverse_eps(at), saved[..., -scan.H :]
            plane = find_plane(eps, inv_eps, tau, all(scan.ordinary(inv_eps)))
            self.rotation = MemoryBackward(plane, inv_eps, z, kept[at.start // WINDOW], *memory)
            self.total = eps + z
        self.u = scan.gate(self.gates)
        self.candidate = scan.candidate(self.total)
        self.grad_total = torch.empty_like(h)
        rate = activation_backward(str(scan.options.activation), self._shares(), self.candidate)
        parts = [self.grad_total, rate]
        if self.u is not None:
            parts += [self.u, self._gate_rate(h - self.candidate)]
        self.steps = list(zip(*(part.unbind(0) for part in parts), strict=True))
        if scan.options.eta is not None:
            mixed = self.candidate if self.u is None else torch.lerp(self.candidate, h, self.u)
            self.scale = safe_inverse(length_of(mixed))
            self.direction = mixed * self.scale

    def _shares(self) -> Tensor:
        """How much of a state's gradient reaches the candidate."""
        return torch.ones_like(self.candidate) if self.u is None else 1 - self.u

    def _gate_rate(self, change: Tensor) -> Tensor:
        """What takes a state's gradient to the gate, up to its sigmoid, or to the layer norm behind that."""
        assert self.u is not None
        if self.scan.ln is not None and self.scan.options.ln_order == "authors":
            return change
        return torch.ops.aten.sigmoid_backward(change, self.u)

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

    def step(self, i: int, grad: Tensor, grad_gates: Tensor, to_tau: Tensor, to_u: Tensor) -> Tensor:
        """Step ``i`` of the block: the gradient of its state in, that of the state before it out.

        The raw gates' gradients are written to ``to_tau`` and ``to_u``, which make up ``grad_gates``.
        """
        scan, options, H, t = self.scan, self.scan.options, self.scan.H, self.at.start + i
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

        buffer, rate, *gate = self.steps[i]
        direct = scan.ln is None and to_tau.dtype == scan.dtype  # then gradients are written where they belong
        if scan.ln is None:
            into = torch.mul(grad, rate, out=buffer)
        else:
            into = buffer.copy_(self.norm_backward(grad * rate, self.total[i], options.num_gates))
        grad_tau = to_tau if direct else torch.empty_like(grad)
        grad_h = self.rotation.step(i, into, grad_tau)
        if not direct:
            to_tau.copy_(self.norm_backward(grad_tau, self.gates[i, :, :H], 0))
        if gate:
            u, gate_rate = gate
            if direct:
                torch.mul(grad, gate_rate, out=to_u)
            else:
                to_u.copy_(self._gate_backward(i, grad * gate_rate))
            grad_h = grad_h.addcmul_(grad, u)
        if skipped is not None:
            grad_h = grad_h.add_(skipped)
        if grad_gates.dtype == grad_h.dtype:
            return grad_h.addmm_(grad_gates, scan.weight)
        return grad_h.add_(grad_gates.mm(scan.weight))

    def _gate_backward(self, i: int, grad: Tensor) -> Tensor:
        """From the product with ``_gate_rate`` to the raw gate."""
        raw = self.gates[i, :, self.scan.H :]
        if self.scan.ln is None or self.scan.options.ln_order == "before":
            return self.norm_backward(grad, raw, 1)
        u = raw.sigmoid()
        return torch.ops.aten.sigmoid_backward(self.norm_backward(grad, u, 1), u)

    def finish(self, grad_xp: Tensor) -> None:
        """Gradients of eps for the whole block: where it is added, and through its direction."""
        grad_xp[self.at, :, -self.scan.H :] = self.rotation.eps_gradients(self.grad_total)


def activation_backward(name: str, grad: Tensor, output: Tensor) -> Tensor:
    """Gradient through a named activation, from its output alone."""
    if name == "relu":
        return torch.ops.aten.threshold_backward(grad, output, 0)
    if name == "tanh":
        return torch.ops.aten.tanh_backward(grad, output)
    if name == "sigmoid":
        return torch.ops.aten.sigmoid_backward(grad, output)
    assert name == "softsign"
    return grad * (1 - output.abs()).square()
