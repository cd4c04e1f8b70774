"""Forward of the RUM recurrence in plain PyTorch on any device; lam is 0 or 1.

It keeps the raw gates beside the outputs and, with lam = 0, a few scalars per row, with lam = 1, R h and what each step
added to R.
"""

import torch
from torch import Tensor

from torchrum.ops.kernels.masks import keep_mask
from torchrum.ops.kernels.precision import working_dtype
from torchrum.ops.rotation import tiny_of
from torchrum.ops.rum_scan.options import ACTIVATIONS, RumOptions
from torchrum.ops.rum_scan.torch_backend.rotate import (
    Angle,
    Constants,
    add_turned,
    find_angle,
    half_turns,
    length_of,
    safe_inverse,
)
from torchrum.ops.rum_scan.torch_backend.single import single_applies, single_step
from torchrum.ops.rum_scan.torch_backend.turn import WINDOW, Memory
from torchrum.ops.rum_scan.types import NO_COPIES, Copies, Residuals, Results, ScanInputs


class Scan:
    """The constant operands of one scan, and the forward of a step on them for one step or a block of steps."""

    def __init__(self, inputs: ScanInputs, options: RumOptions) -> None:
        xp, h0, _, weight_hh, ln_weight, ln_bias, lengths, seed = inputs
        self.options, self.seed = options, seed
        self.T, self.B = xp.shape[:2]
        self.H = h0.shape[-1]
        self.dtype = working_dtype(xp.dtype)
        self.weight = weight_hh.to(xp.dtype)
        self.eps = xp[..., -self.H :].to(self.dtype)  # (T, B, H)
        self.going = None
        if lengths is not None:
            self.going = (torch.arange(self.T, device=xp.device).unsqueeze(1) < lengths).unsqueeze(-1)  # (T, B, 1)
        self.mixes_only = options.eta is None and options.zoneout == 0 and lengths is None and self.dtype == xp.dtype
        self.ln = None
        if ln_weight is not None and ln_bias is not None:
            self.ln = (ln_weight.to(self.dtype).view(-1, self.H), ln_bias.to(self.dtype).view(-1, self.H))

    def inverse_eps(self, at: slice = slice(None)) -> Tensor:
        """1/|eps| ``(T, B, 1)``, and 0 where nothing shall turn."""
        inverse = safe_inverse(length_of(self.eps[at]), tiny_of(self.dtype))
        if self.going is not None:
            inverse = inverse * self.going[at]
        return torch.zeros_like(inverse) if self.H == 1 else inverse  # the only rotation of a line is 1

    def ordinary(self, inv_eps: Tensor) -> list[bool]:
        """Steps where every row has a direction to turn from; a GPU is not asked."""
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
        """From ``eps + R h``."""
        return ACTIVATIONS[str(self.options.activation)](self.norm(total, self.options.num_gates))

    def keep(self, t: int) -> Tensor | None:
        if not self.options.draws:
            return None
        assert self.seed is not None
        return keep_mask(self.seed, t, self.B, self.H, self.options.zoneout)

    def finish(self, t: int, h: Tensor, u: Tensor | None, candidate: Tensor, buffer: Tensor) -> Tensor:
        """Mix, normalise, zone out and freeze: from the candidate to the new state, written to ``buffer`` too."""
        if self.mixes_only and u is not None:
            return torch.lerp(candidate, h, u, out=buffer)
        new = candidate if u is None else torch.lerp(candidate, h, u)
        if self.options.eta is not None:
            new = new * (self.options.eta * safe_inverse(length_of(new)))
        if self.options.zoneout > 0:
            keep = self.keep(t)
            new = torch.where(keep, new, h) if keep is not None else torch.lerp(new, h, self.options.zoneout)
        new = new if self.going is None else torch.where(self.going[t], new, h)
        buffer.copy_(new)
        return new


def empty_results(inputs: ScanInputs, options: RumOptions) -> Results:
    """Buffers for what ``forward`` returns.

    ``gates`` holds the raw gates and, with lam = 1, R h of each step; ``kept`` the angles of each step or, with
    lam = 1, what it added to R.
    """
    xp, (T, B), H = inputs.xp, inputs.xp.shape[:2], inputs.h0.shape[-1]
    out, gates = xp.new_empty(T, B, H), xp.new_empty(T, B, (options.num_gates + options.keeps_rotation) * H)
    dtype = working_dtype(xp.dtype)
    if not options.keeps_rotation:
        return Results(out, None, Residuals(gates, xp.new_empty(T, B, len(Angle._fields), dtype=dtype)))
    R = xp.new_empty(B, H, H, dtype=dtype)
    windows = T // WINDOW + 2  # at least one more than is used: a size that can be 0 or 1 binds an exported T
    return Results(out, R, Residuals(gates, R.new_empty(windows, B, 2 * WINDOW, H)))


def forward(inputs: ScanInputs, options: RumOptions, save: bool = True, copies: Copies = NO_COPIES) -> Results:
    """Run the scan and fill ``copies``; the residuals come with it but for a single step without ``save``."""
    results = single_step(inputs, options) if not save and single_applies(inputs, options) else None
    if results is None:
        results = _run(inputs, options)
    copies.fill(results)
    return results


def _run(inputs: ScanInputs, options: RumOptions) -> Results:
    xp, h0, R0 = inputs[:3]
    scan = Scan(inputs, options)
    T, H, gated = scan.T, scan.H, options.num_gates * scan.H
    results = empty_results(inputs, options)
    out, R, (saved, kept) = results
    assert saved is not None and kept is not None
    h, inv_eps, weight = h0.to(scan.dtype), scan.inverse_eps(), scan.weight.t().contiguous()
    ordinary, numbers = scan.ordinary(inv_eps), Constants.like(inv_eps[0])
    memory = None
    if R is not None:
        memory = Memory(R.copy_(torch.eye(H, device=xp.device) if R0 is None else R0.mT), kept)
    # one view of each step, taken at once: a slice per step costs as much as a small operation
    steps = [part.unbind(0) for part in (xp[..., :gated], saved[..., :gated], scan.eps, inv_eps, out)]
    for t, (x, raw, eps, inverse, buffer) in enumerate(zip(*steps, strict=True)):
        gates = torch.addmm(x, h.to(xp.dtype), weight, out=raw).to(scan.dtype)
        tau = scan.tau(gates)
        if memory is None:
            angle = find_angle(eps, inverse, tau, h, numbers if ordinary[t] else None)
            torch.cat(angle, -1, out=kept[t])
            has_half_turns = angle.opposite is not numbers.zeros and half_turns(angle)
            total = add_turned(angle, eps, tau, h, has_half_turns, numbers.ones)
        else:
            z = memory.advance(t, eps, inverse, tau, h, ordinary[t])
            saved[t, :, gated:] = z
            total = eps + z
        h = scan.finish(t, h, scan.gate(gates), scan.candidate(total), buffer)
    if memory is None:
        return results
    last, steps_of_last = (T - 1) // WINDOW, (T - 1) % WINDOW + 1
    memory.form(steps_of_last)
    kept[last, :, 2 * steps_of_last :] = 0  # what no step wrote: an operator's results may not be left to chance
    kept[last + 1 :] = 0
    return results._replace(R=memory.R.mT.contiguous())
