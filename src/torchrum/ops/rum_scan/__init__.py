"""A whole RUM sequence: from projected inputs and an initial state to all states."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._dispatch import Backend, Choice, choose_backend
from . import native
from .flops import register_flops
from .op import rum_scan_op
from .options import RumOptions
from .reference import ACTIVATIONS, rum_scan_reference

__all__ = ["ACTIVATIONS", "RumOptions", "rum_scan", "rum_scan_choice"]


def torch_obstacle(options: RumOptions, learnable_lam: bool) -> str | None:
    """Why the torch, native and fused backends cannot run a recurrence, or None."""
    if forward_ad._current_level >= 0:  # torch.func.jvp enters a level too, and a compiler guards the number
        return "forward-mode differentiation is on, and the operator is differentiated in reverse mode only"
    if learnable_lam or options.lam not in (0, 1):
        return f"lam is {'learnable' if learnable_lam else options.lam}, and its backward is written for lam 0 and 1"
    if not isinstance(options.activation, str):
        return "activation is a callable, whose derivative only autograd knows"
    if options.target_activation is not None:
        return "target_activation is given, and its backward is written for a linear target"
    return None


def fused_obstacle(xp: Tensor, options: RumOptions, learnable_lam: bool) -> str | None:
    """Why the fused backend cannot run, or None."""
    obstacle = torch_obstacle(options, learnable_lam)
    if obstacle is not None:
        return obstacle
    if xp.device.type != "cuda":
        return f"the input is on {xp.device.type}"
    from . import fused

    return fused.obstacle(xp, options)


def native_obstacle(xp: Tensor, options: RumOptions, learnable_lam: bool) -> str | None:
    """Why the native backend cannot run, or None."""
    return torch_obstacle(options, learnable_lam) or native.obstacle(xp)


def rum_scan_choice(
    xp: Tensor, options: RumOptions, *, learnable_lam: bool = False, backend: Backend = "auto"
) -> Choice:
    """The backend that ``rum_scan`` takes for such an input, and why."""
    fused = fused_obstacle(xp, options, learnable_lam) if backend in ("auto", "fused") else None
    own = None
    if backend == "native" or (backend == "auto" and fused is not None):  # it may have to be built to be asked
        own = native_obstacle(xp, options, learnable_lam)
    return choose_backend(backend, fused=fused, native=own, torch=torch_obstacle(options, learnable_lam))


def rum_scan(
    xp: Tensor,
    h0: Tensor,
    R0: Tensor | None,
    weight_hh: Tensor,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    *,
    options: RumOptions,
    lengths: Tensor | None = None,
    seed: Tensor | None = None,
    lam: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Run a RUM over a sequence whose inputs are projected already.

    Args:
        xp: ``(T, B, 3H)``, ``x W_ih^T + b`` in blocks tau, u, eps; ``(T, B, 2H)``, tau and eps, without update gate.
        h0: ``(B, H)``. R0: ``(B, H, H)``, the identity if None; only with lam other than 0.
        weight_hh: ``(2H, H)``, rows tau, u; ``(H, H)`` without update gate.
        ln_weight, ln_bias: ``(3H,)``, blocks tau, u, candidate (``(2H,)`` without update gate), with layer norm.
        options: everything a step can vary.
        lengths: ``(B,)`` int64; a row past its length keeps its state.
        seed: int64 scalar that zoneout's masks come from; drawn if None.
        lam: a learnable exponent, instead of ``options.lam``.
        backend: ``"auto"`` takes the fastest that can run; ``"fused"``, ``"native"``, ``"torch"`` or ``"reference"``
            insists.

    Returns:
        All states ``(T, B, H)``, the last one being the final state, and the final R, or None with lam 0.
    """
    if seed is None and options.zoneout > 0 and options.training:
        seed = torch.randint(2**31 - 1, (), device=xp.device)
    weight_hh = weight_hh.to(xp.dtype)  # under autocast the projected input comes in the lower precision
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        from .scan_form import rum_scan_form

        return rum_scan_form(xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, options)
    choice = rum_scan_choice(xp, options, learnable_lam=lam is not None, backend=backend)
    inputs = (xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed, options)
    if not torch.compiler.is_compiling():
        register_flops()
    if choice.backend == "reference":
        return rum_scan_reference(*inputs, lam=lam)
    return rum_scan_op(*inputs, choice.backend)
