"""One step of one row with lam = 0, without gradients: the rotation's scalars as Python numbers.

A tensor operation costs two microseconds whatever its size, and a step of the general scan has thirty. Here three inner
products come out of one matmul, and what is made of them costs nothing.
"""

import math

import torch

from torchrum.ops.rotation import tiny_of
from torchrum.ops.rum_scan.options import ACTIVATIONS, RumOptions
from torchrum.ops.rum_scan.torch_backend.rotate import NARROW
from torchrum.ops.rum_scan.types import Results, ScanInputs


def single_applies(inputs: ScanInputs, options: RumOptions) -> bool:
    """Whether ``single_step`` is written for such inputs."""
    xp, h0 = inputs.xp, inputs.h0
    if xp.shape[0] != 1 or xp.shape[1] != 1 or xp.device.type != "cpu" or inputs.lengths is not None:
        return False
    if options.lam != 0 or options.layer_norm or options.zoneout > 0:
        return False
    return h0.shape[-1] > 1 and xp.dtype in (torch.float32, torch.float64) and xp.dtype is h0.dtype


def single_step(inputs: ScanInputs, options: RumOptions) -> Results | None:
    """The step, where ``single_applies``; None where its vectors have no direction or are nearly opposite."""
    h, H = inputs.h0, inputs.h0.shape[-1]
    gates, eps = inputs.xp[0].split((options.num_gates * H, H), 1)
    gates = torch.addmm(gates, h, inputs.weight_hh.t())
    tau = gates[:, :H] if options.update_gate else gates
    rows = torch.cat((eps, tau, h))
    (eps_eps, eps_tau, eps_h), (_, tau_tau, tau_h), _ = torch.mm(rows, rows.t()).tolist()
    coefficients = turn_coefficients(eps_eps, eps_tau, eps_h, tau_tau, tau_h, tiny_of(h.dtype))
    if coefficients is None:
        return None
    by_eps, by_tau = coefficients
    new = ACTIVATIONS[str(options.activation)](torch.add(h, eps, alpha=by_eps).add_(tau, alpha=by_tau))
    if options.update_gate:
        new = torch.lerp(new, h, gates[:, H:].sigmoid())
    if options.eta is not None:
        length = math.sqrt(torch.dot(new[0], new[0]).item())
        new = new.mul_(options.eta / length if length != 0 else 0.0)  # a zero state has no direction to give a norm
    return Results(new.unsqueeze(0), None)


def turn_coefficients(
    eps_eps: float, eps_tau: float, eps_h: float, tau_tau: float, tau_h: float, tiny: float
) -> tuple[float, float] | None:
    """``eps + R(eps, tau) h = h + a eps + b tau``: a and b from the inner products, as ``rotate.py`` has them.

    None where a vector has no direction, where 1 + cos has lost its digits, and for NaN.
    """
    if not (tiny * tiny < eps_eps < math.inf and tiny * tiny < tau_tau < math.inf):
        return None
    inv_eps, inv_tau = 1 / math.sqrt(eps_eps), 1 / math.sqrt(tau_tau)
    square = 2 + 2 * eps_tau * inv_eps * inv_tau
    p = eps_h * inv_eps
    k = (p + tau_h * inv_tau) / square if square >= NARROW else math.nan
    if not math.isfinite(k):
        return None
    return 1 - 2 * k * inv_eps, 2 * (p - k) * inv_tau
