"""The equations of RUM's gated form, step by step; every faster backend is tested against this file."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrum.ops.gated_scan.types import GatedInputs, GatedOptions
from torchrum.ops.kernels.linear import working_dtype
from torchrum.ops.kernels.masks import keep_mask
from torchrum.ops.rotation import rotate


def rotate_heads(eps: Tensor, tau: Tensor, h: Tensor, head_size: int) -> Tensor:
    """Rotate ``h`` ``(..., K)`` in heads of ``head_size`` units, each head by its own parts of ``eps`` and ``tau``."""
    K = h.shape[-1]
    whole = K - K % head_size
    rotated = []
    for start, end, size in ((0, whole, head_size), (whole, K, K - whole)):
        if start < end:
            parts = (x[..., start:end].unflatten(-1, (-1, size)) for x in (eps, tau, h))
            rotated.append(rotate(*parts).flatten(-2))
    return torch.cat(rotated, -1) if rotated else h


def gated_step_reference(
    xp: Tensor,
    h: Tensor,
    weight_hh: Tensor,
    bias_hh: Tensor | None,
    keep: Tensor | None,
    options: GatedOptions,
    mask: Tensor | None = None,
) -> Tensor:
    """Run one step: projected input ``xp`` ``(B, 3H)``, blocks r, u, n, and state ``h`` ``(B, H)`` -> new state.

    ``keep`` ``(B, H)`` is true where zoneout takes the new value; None outside training. ``mask`` ``(B, H)`` multiplies
    the h that the matmul reads; the rotation and the gate read all of h.
    """
    x_r, x_u, eps = xp.to(h.dtype).chunk(3, -1)
    seen = h if mask is None else h * mask
    h_r, h_u, tau = F.linear(seen.to(xp.dtype), weight_hh, bias_hh).to(h.dtype).chunk(3, -1)
    return gated_update(torch.sigmoid(x_r + h_r), torch.sigmoid(x_u + h_u), tau, eps, h, keep, options)


def gated_update(
    r: Tensor, u: Tensor, tau: Tensor, eps: Tensor, h: Tensor, keep: Tensor | None, options: GatedOptions
) -> Tensor:
    """Compute the new state from the gates and the two vectors of the rotation, ``(B, H)`` each."""
    K = options.rotated_units
    rotated = rotate_heads(eps[..., :K], tau[..., :K], h[..., :K], options.head_size)
    candidate = torch.tanh(eps + r * (tau + F.pad(rotated, (0, h.shape[-1] - K))))
    new = u * h + (1 - u) * candidate
    if options.zoneout > 0:
        new = torch.where(keep, new, h) if keep is not None else (1 - options.zoneout) * new + options.zoneout * h
    return new


def gated_scan_reference(inputs: GatedInputs, options: GatedOptions, mask: Tensor | None = None) -> Tensor:
    """Run a sequence ``xp`` ``(T, B, 3H)`` -> states ``(T, B, H)``; rows past their length keep their state."""
    xp, h0, weight_hh, bias_hh, lengths, seed = inputs
    h, (B, H) = h0.to(working_dtype(xp.dtype)), h0.shape
    states = []
    for t, x in enumerate(xp.unbind(0)):
        keep = keep_mask(seed, t, B, H, options.zoneout) if seed is not None and options.draws else None
        new = gated_step_reference(x, h, weight_hh, bias_hh, keep, options, mask)
        h = new if lengths is None else torch.where((t < lengths).unsqueeze(-1), new, h)
        states.append(h)
    return torch.stack(states).to(xp.dtype) if states else xp[..., :H]
