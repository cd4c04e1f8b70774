"""The scan in plain PyTorch with a hand-written backward, on any device, for lam 0 and 1.

The forward saves the raw gates and, with lam = 0, a few scalars per row or, with lam = 1, R h and the update of R of
each step. The backward recomputes the rest for a block of steps at once, so that only the computations that depend on
the gradient run step by step; R is reconstructed in reverse by subtracting the updates. README.md has the derivation.
"""

import torch
from torch import Tensor

from torchrum.ops.kernels.linear import recurrent_weight_gradient, working_dtype
from torchrum.ops.kernels.masks import keep_mask
from torchrum.ops.rotation import tiny_of
from torchrum.ops.rum_scan.options import ACTIVATIONS, RumOptions
from torchrum.ops.rum_scan.torch_rotation import (
    WINDOW,
    Angle,
    Constants,
    Memory,
    MemoryBackward,
    RotationBackward,
    add_rotated,
    find_angle,
    find_plane,
    half_turns,
    length_of,
    safe_inverse,
)
from torchrum.ops.rum_scan.types import NO_COPIES, Copies, Gradients, Residuals, Results, ScanInputs

__all__ = ["backward", "empty_results", "forward", "obstacle"]


def obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """Return None: this design can run every scan."""
    return None


class Scan:
    """The constant operands of one scan, and the parts of a forward step, for one step or a block of steps."""

    def __init__(self, inputs: ScanInputs, options: RumOptions) -> None:
        xp, h0, _, weight_hh, ln_weight, ln_bias, lengths, seed = inputs
        self.options, self.seed = options, seed
        self.T, self.B = xp.shape[:2]
        self.H = h0.shape[-1]
        self.dtype = working_dtype(xp.dtype)
        self.weight = weight_hh.to(xp.dtype)
        self.eps = xp[..., -self.H :].to(self.dtype)  # (T, B, H)
        self.active = None
        if lengths is not None:
            self.active = (torch.arange(self.T, device=xp.device).unsqueeze(1) < lengths).unsqueeze(-1)  # (T, B, 1)
        self.mixes_only = options.eta is None and options.zoneout == 0 and lengths is None and self.dtype == xp.dtype
        self.ln = None
        if ln_weight is not None and ln_bias is not None:
            self.ln = (ln_weight.to(self.dtype).view(-1, self.H), ln_bias.to(self.dtype).view(-1, self.H))

    def inverse_eps(self, at: slice = slice(None)) -> Tensor:
        """Return 1/|eps| ``(T, B, 1)``, and 0 where nothing rotates."""
        inverse = safe_inverse(length_of(self.eps[at]), tiny_of(self.dtype))
        if self.active is not None:
            inverse = inverse * self.active[at]
        return torch.zeros_like(inverse) if self.H == 1 else inverse  # in one dimension only the identity

    def ordinary(self, inv_eps: Tensor) -> list[bool]:
        """Return for each step if all ``inv_eps`` are above 0; False on a GPU, where the test would synchronise."""
        if inv_eps.device.type != "cpu" or inv_eps.numel() == 0:
            return [False] * len(inv_eps)
        return (inv_eps > 0).flatten(1).all(1).tolist()

    def norm(self, x: Tensor, block: int) -> Tensor:
        if self.ln is None:
            return x
        return torch.native_layer_norm(x, [self.H], self.ln[0][block], self.ln[1][block], self.options.ln_eps)[0]

    def tau(self, gates: Tensor) -> Tensor:
        return self.norm(gates[..., : self.H], 0)

    def gate(self, gates: Tensor) -> Tensor | None:
        if not self.options.update_gate:
            return None
        raw = gates[..., self.H : 2 * self.H]
        return self.norm(raw.sigmoid(), 1) if self.options.ln_order == "authors" else self.norm(raw, 1).sigmoid()

    def candidate(self, total: Tensor) -> Tensor:
        """Compute the candidate from ``eps + R h``."""
        return ACTIVATIONS[str(self.options.activation)](self.norm(total, self.options.num_gates))

    def keep(self, t: int) -> Tensor | None:
        if not self.options.draws:
            return None
        assert self.seed is not None
        return keep_mask(self.seed, t, self.B, self.H, self.options.zoneout)

    def finish(self, t: int, h: Tensor, u: Tensor | None, candidate: Tensor, buffer: Tensor) -> Tensor:
        """Compute the new state from the candidate and write it to ``buffer``: gate, eta, zoneout, lengths."""
        if self.mixes_only and u is not None:
            return torch.lerp(candidate, h, u, out=buffer)
        new = candidate if u is None else torch.lerp(candidate, h, u)
        if self.options.eta is not None:
            new = new * (self.options.eta * safe_inverse(length_of(new)))
        if self.options.zoneout > 0:
            keep = self.keep(t)
            new = torch.where(keep, new, h) if keep is not None else torch.lerp(new, h, self.options.zoneout)
        new = new if self.active is None else torch.where(self.active[t], new, h)
        buffer.copy_(new)
        return new


def empty_results(inputs: ScanInputs, options: RumOptions) -> Results:
    """Allocate the results of ``forward``.

    ``gates`` holds the raw gates and, with lam = 1, R h of each step. ``kept`` holds the ``Angle`` of each step or,
    with lam = 1, its update of R.
    """
    xp, (T, B), H = inputs.xp, inputs.xp.shape[:2], inputs.h0.shape[-1]
    out, gates = xp.new_empty(T, B, H), xp.new_empty(T, B, (options.num_gates + options.keeps_rotation) * H)
    dtype = working_dtype(xp.dtype)
    if not options.keeps_rotation:
        return Results(out, None, Residuals(gates, xp.new_empty(T, B, len(Angle._fields), dtype=dtype)))
    R = xp.new_empty(B, H, H, dtype=dtype)
    windows = T // WINDOW + 2  # at least one more than used: torch.export specialises T if a size can be 0 or 1
    return Results(out, R, Residuals(gates, R.new_empty(windows, B, 2 * WINDOW, H)))


def forward(inputs: ScanInputs, options: RumOptions, save: bool = True, copies: Copies = NO_COPIES) -> Results:
    """Run the scan and fill ``copies``; the residuals are saved even without ``save``."""
    xp, h0, R0 = inputs[:3]
    scan = Scan(inputs, options)
    T, H, gated = scan.T, scan.H, options.num_gates * scan.H
    results = empty_results(inputs, options)
    out, R, (saved, kept) = results
    assert saved is not None and kept is not None
    h, inv_eps, weight = h0.to(scan.dtype), scan.inverse_eps(), scan.weight.t().contiguous()
    ordinary, constants = scan.ordinary(inv_eps), Constants.like(inv_eps[0])
    memory = None
    if R is not None:
        memory = Memory(R.copy_(torch.eye(H, device=xp.device) if R0 is None else R0.mT), kept)
    # create the views of all steps at once: a slice per step takes as long as a small operation
    steps = [part.unbind(0) for part in (xp[..., :gated], saved[..., :gated], scan.eps, inv_eps, out)]
    for t, (x, raw, eps, inverse, buffer) in enumerate(zip(*steps, strict=True)):
        gates = torch.addmm(x, h.to(xp.dtype), weight, out=raw).to(scan.dtype)
        tau = scan.tau(gates)
        if memory is None:
            angle = find_angle(eps, inverse, tau, h, constants if ordinary[t] else None)
            torch.cat(angle, -1, out=kept[t])
            has_half_turns = angle.opposite is not constants.zeros and half_turns(angle)
            total = add_rotated(angle, eps, tau, h, has_half_turns, constants.ones)
        else:
            z = memory.advance(t, eps, inverse, tau, h, ordinary[t])
            saved[t, :, gated:] = z
            total = eps + z
        h = scan.finish(t, h, scan.gate(gates), scan.candidate(total), buffer)
    if memory is None:
        copies.fill(results)
        return results
    last, steps_of_last = (T - 1) // WINDOW, (T - 1) % WINDOW + 1
    memory.form(steps_of_last)
    kept[last, :, 2 * steps_of_last :] = 0  # the unused part: an operator's results must be deterministic
    kept[last + 1 :] = 0
    results = results._replace(R=memory.R.mT.contiguous())
    copies.fill(results)
    return results


BLOCK = 32
"""Steps that the backward recomputes at once with lam = 0: enough to hide the overhead of a call, few enough to stay in
the cache. With lam = 1 it recomputes a ``WINDOW``."""


def backward(
    grad_out: Tensor, grad_R: Tensor | None, inputs: ScanInputs, results: Results, options: RumOptions, need_R0: bool
) -> Gradients:
    """Compute the gradients of the inputs from the gradients of the states and of the last R."""
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
    """A block of steps in the backward: recomputed at once, then differentiated step by step."""

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
        self.rotation: RotationBackward | MemoryBackward
        if memory is None:
            angle = Angle(*kept[at].split(1, -1))
            self.rotation = RotationBackward(angle, eps, tau, h)
            self.total = add_rotated(angle, eps, tau, h, self.rotation.half_turns, torch.ones_like(angle.p))
        else:
            inv_eps, z = scan.inverse_eps(at), saved[..., -scan.H :]
            plane = find_plane(eps, inv_eps, tau, all(scan.ordinary(inv_eps)))
            self.rotation = MemoryBackward(plane, inv_eps, z, kept[at.start // WINDOW], *memory)
            self.total = eps + z
        self.u = scan.gate(self.gates)
        self.candidate = scan.candidate(self.total)
        self.grad_total = torch.empty_like(h)
        shares = torch.ones_like(self.candidate) if self.u is None else 1 - self.u  # the candidate's share
        rate = activation_backward(str(scan.options.activation), shares, self.candidate)
        parts = [self.grad_total, rate]
        if self.u is not None:
            parts += [self.u, self._gate_rate(h - self.candidate)]
        self.steps = list(zip(*(part.unbind(0) for part in parts), strict=True))
        if scan.options.eta is not None:
            mixed = self.candidate if self.u is None else torch.lerp(self.candidate, h, self.u)
            self.scale = safe_inverse(length_of(mixed))
            self.direction = mixed * self.scale

    def _gate_rate(self, change: Tensor) -> Tensor:
        """Return the factor from a state's gradient to the gradient of the sigmoid's argument.

        If layer norm follows the sigmoid, it is the factor to the gradient of layer norm's output.
        """
        assert self.u is not None
        if self.scan.ln is not None and self.scan.options.ln_order == "authors":
            return change
        return torch.ops.aten.sigmoid_backward(change, self.u)

    def norm_backward(self, grad: Tensor, x: Tensor, block: int) -> Tensor:
        """Compute the gradient of ``norm`` and add the gradients of its weights to ``sums``."""
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
        """Run step ``i`` of the block: from the gradient of its state, return the gradient of the state before it.

        The raw gates' gradients are written to ``to_tau`` and ``to_u``, the two parts of ``grad_gates``.
        """
        scan, options, H, t = self.scan, self.scan.options, self.scan.H, self.at.start + i
        skipped = None
        if scan.active is not None:
            skipped = torch.where(scan.active[t], 0.0, grad)
            grad = torch.where(scan.active[t], grad, 0.0)
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
        direct = scan.ln is None and to_tau.dtype == scan.dtype  # then gradients are written without a copy
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
        """Compute the raw gate's gradient from a state's gradient times ``_gate_rate``."""
        raw = self.gates[i, :, self.scan.H :]
        if self.scan.ln is None or self.scan.options.ln_order == "before":
            return self.norm_backward(grad, raw, 1)
        u = raw.sigmoid()
        return torch.ops.aten.sigmoid_backward(self.norm_backward(grad, u, 1), u)

    def finish(self, grad_xp: Tensor) -> None:
        """Write the gradients of eps for the whole block."""
        grad_xp[self.at, :, -self.scan.H :] = self.rotation.eps_gradients(self.grad_total)


def activation_backward(name: str, grad: Tensor, output: Tensor) -> Tensor:
    """Compute the gradient through a named activation, from its output."""
    if name == "relu":
        return torch.ops.aten.threshold_backward(grad, output, 0)
    if name == "tanh":
        return torch.ops.aten.tanh_backward(grad, output)
    if name == "sigmoid":
        return torch.ops.aten.sigmoid_backward(grad, output)
    assert name == "softsign"
    return grad * (1 - output.abs()).square()
