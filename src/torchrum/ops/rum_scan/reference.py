"""The equations of the RUM recurrence, step by step; every faster backend is tested against this file."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrum.ops._checks import MismatchError, check_floating
from torchrum.ops.kernels.linear import working_dtype
from torchrum.ops.kernels.masks import keep_mask
from torchrum.ops.orthogonal_power import orthogonal_power
from torchrum.ops.rotation import reflect, reflectors, rotate, unit
from torchrum.ops.rum_scan.options import ACTIVATIONS, Activation, RumOptions
from torchrum.ops.rum_scan.types import ScanInputs, StepWeights


def activate(x: Tensor, activation: Activation, name: str) -> Tensor:
    """Apply ``activation`` to ``x`` and check the result of a user's callable; errors call the option ``name``."""
    if isinstance(activation, str):
        return ACTIVATIONS[activation](x)
    y = activation(x)
    check_floating("RUM", **{f"{name}(x)": y})
    if y.shape != x.shape:  # it would broadcast, or fail steps later
        raise MismatchError(
            f"RUM: {name}(x) has shape {tuple(y.shape)}, but x has {tuple(x.shape)}; {name} must be elementwise."
        )
    return y


def block_norm(x: Tensor, block: int, weights: StepWeights, options: RumOptions) -> Tensor:
    """Apply layer norm to ``x`` ``(B, H)`` with the ``block``-th H gains and shifts; without these, return ``x``."""
    _, weight, bias = weights
    if weight is None or bias is None:
        return x
    H = x.shape[-1]
    rows = slice(block * H, (block + 1) * H)
    return F.layer_norm(x, (H,), weight[rows].to(x.dtype), bias[rows].to(x.dtype), options.ln_eps)


def rotation_vectors(
    xp: Tensor, h: Tensor, weights: StepWeights, options: RumOptions, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the vectors that span the rotation, eps and tau ``(B, H)``, and the gates' sums ``(B, num_gates * H)``."""
    H = h.shape[-1]
    seen = h if mask is None else h * mask
    eps = xp[..., -H:].to(h.dtype)
    gates = xp[..., :-H].to(h.dtype) + F.linear(seen.to(xp.dtype), weights.weight_hh).to(h.dtype)
    tau = block_norm(gates[..., :H], 0, weights, options)
    if options.target_activation is not None:
        tau = activate(tau, options.target_activation, "target_activation")
    return eps, tau, gates


def rum_step_reference(
    xp: Tensor,
    h: Tensor,
    R: Tensor | None,
    weights: StepWeights,
    keep: Tensor | None,
    options: RumOptions,
    lam: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run one step: projected input ``xp`` ``(B, 3H)`` and state ``h`` ``(B, H)``, ``R`` ``(B, H, H)`` -> new h, new R.

    ``keep`` ``(B, H)`` is true where zoneout takes the new value; None outside training. ``mask`` ``(B, H)`` multiplies
    the h that the matmul reads; the rotation and the gate read all of h.
    """
    H = h.shape[-1]
    eps, tau, gates = rotation_vectors(xp, h, weights, options, mask)

    def norm(x: Tensor, block: int) -> Tensor:
        return block_norm(x, block, weights, options)

    if R is None:
        rotated_h = rotate(eps, tau, h)
    else:
        R = accumulate(R, eps, tau, options.lam if lam is None else lam)
        rotated_h = (R @ h.to(R.dtype).unsqueeze(-1)).squeeze(-1).to(h.dtype)
    new = activate(norm(eps + rotated_h, options.num_gates), options.activation, "activation")

    if options.update_gate:
        u = gates[..., H:]
        u = norm(torch.sigmoid(u), 1) if options.ln_order == "authors" else torch.sigmoid(norm(u, 1))
        new = u * h + (1 - u) * new
    if options.eta is not None:
        new = options.eta * unit(new)
    if options.zoneout > 0:
        new = torch.where(keep, new, h) if keep is not None else (1 - options.zoneout) * new + options.zoneout * h
    return new, R


def accumulate(R: Tensor, eps: Tensor, tau: Tensor, lam: float | Tensor) -> Tensor:
    """Return ``R^lam . Rotation(eps, tau)``: the new rotation is applied first, the memory after it."""
    e, m = reflectors(eps.to(R.dtype).unsqueeze(-2), tau.to(R.dtype).unsqueeze(-2))
    # the rotation is H_m H_e, so row i of the product is H_e H_m (row i of R^lam)
    return reflect(e, reflect(m, orthogonal_power(R, lam)))


def rum_scan_reference(
    inputs: ScanInputs, options: RumOptions, lam: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run a sequence ``xp`` ``(T, B, 3H)`` -> states ``(T, B, H)``, last R; rows past their length keep their state."""
    xp, h0, R0, *_, lengths, seed = inputs
    B, H = h0.shape
    h = h0.to(working_dtype(xp.dtype))
    R = None if R0 is None else R0.to(h.dtype)
    if options.keeps_rotation and R is None:
        R = torch.eye(H, dtype=h.dtype, device=h.device).expand(B, H, H)
    assert seed is not None or not options.draws
    states = []
    for t, x in enumerate(xp.unbind(0)):
        keep = keep_mask(seed, t, B, H, options.zoneout) if seed is not None and options.draws else None
        new, new_R = rum_step_reference(x, h, R, inputs.weights, keep, options, lam, mask)
        if lengths is not None:
            active = (t < lengths).unsqueeze(-1)  # (B, 1)
            new = torch.where(active, new, h)
            new_R = None if new_R is None or R is None else torch.where(active.unsqueeze(-1), new_R, R)
        h, R = new, new_R
        states.append(h)
    return torch.stack(states).to(xp.dtype), R
