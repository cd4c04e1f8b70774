"""The LSTM recurrence as its equations, step by step; the fused backend is tested against this file."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.masks import keep_mask, stream_seeds
from ..kernels.precision import working_dtype
from .options import LstmOptions
from .types import LstmInputs

STREAMS = 2  # of masks: h, c


def lstm_step_reference(
    xp: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    keeps: tuple[Tensor | None, Tensor | None],
    options: LstmOptions,
) -> tuple[Tensor, Tensor]:
    """One step: projected input ``xp`` ``(B, 4H)`` and state ``h, c`` ``(B, H)`` -> new h, new c.

    ``keeps`` are true where zoneout lets the new h and the new c through; None outside training.
    """
    H = h.shape[-1]

    def norm(x: Tensor, block: int) -> Tensor:
        if ln_weight is None or ln_bias is None:
            return x
        rows = slice(block * H, (block + 1) * H)
        return F.layer_norm(x, (H,), ln_weight[rows].to(x.dtype), ln_bias[rows].to(x.dtype), options.ln_eps)

    gates = xp.to(h.dtype) + F.linear(h.to(xp.dtype), weight_hh).to(h.dtype)
    i, j, f, o = (norm(gate, block) for block, gate in enumerate(gates.split(H, -1)))
    new_c = c * torch.sigmoid(f + options.forget_bias) + torch.sigmoid(i) * torch.tanh(j)
    new_h = torch.tanh(norm(new_c, 4)) * torch.sigmoid(o)
    return zone(new_h, h, options.zoneout, keeps[0]), zone(new_c, c, options.zoneout_cell, keeps[1])


def zone(new: Tensor, old: Tensor, chance: float, keep: Tensor | None) -> Tensor:
    if chance == 0:
        return new
    return torch.where(keep, new, old) if keep is not None else (1 - chance) * new + chance * old


def zoneout_masks(
    seeds: Tensor | None, t: int, B: int, H: int, options: LstmOptions
) -> tuple[Tensor | None, Tensor | None]:
    """Masks of h and c for step ``t``, from the streams ``seeds`` ``(2,)``."""
    if seeds is None or not options.training:
        return None, None
    chances = (options.zoneout, options.zoneout_cell)
    h, c = (keep_mask(seeds[k], t, B, H, p) if p > 0 else None for k, p in enumerate(chances))
    return h, c


def lstm_scan_reference(inputs: LstmInputs, options: LstmOptions) -> tuple[Tensor, Tensor, Tensor]:
    """A whole sequence ``xp`` ``(T, B, 4H)`` -> states h ``(T, B, H)``, last h and last c."""
    xp, h0, c0, weight_hh, ln_weight, ln_bias, lengths, seed = inputs
    B, H = h0.shape
    dtype = working_dtype(xp.dtype)
    h, c = h0.to(dtype), c0.to(dtype)
    seeds = stream_seeds(seed, STREAMS) if seed is not None and options.draws else None
    states = []
    for t, x in enumerate(xp.unbind(0)):
        keeps = zoneout_masks(seeds, t, B, H, options)
        new_h, new_c = lstm_step_reference(x, h, c, weight_hh, ln_weight, ln_bias, keeps, options)
        if lengths is not None:
            going = (t < lengths).unsqueeze(-1)  # (B, 1)
            new_h, new_c = torch.where(going, new_h, h), torch.where(going, new_c, c)
        h, c = new_h, new_c
        states.append(h)
    out = torch.stack(states).to(xp.dtype) if states else xp.new_empty(0, B, H)
    return out, h.to(h0.dtype), c.to(c0.dtype)
