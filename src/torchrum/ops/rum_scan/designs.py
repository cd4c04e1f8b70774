"""The designs of the scan, fastest first, and the choice among them.

Each design exports the same four functions::

    obstacle(inputs, options) -> the reason why it cannot run, or None; depends only on shapes, dtype and device
    empty_results(inputs, options) -> Results, unfilled: the shapes of the results of ``forward``, for a compiler
    forward(inputs, options, save=True, copies=NO_COPIES) -> Results; without ``save`` the residuals may be missing
    backward(grad_out, grad_R, inputs, results, options, need_R0) -> Gradients

``forward`` also fills ``copies``. Autocast is off in all of them. Designs with ``by_driver`` take more arguments::

    forward(inputs, options, save=True, copies=NO_COPIES, bias=None)
    backward(grad_out, grad_R, inputs, results, options, need_R0, bias=None, need_bias=False)

``bias``, ``(3H,)``, is added to ``xp`` as it is read. ``need_bias`` requests ``Gradients.bias``; if a design does not
return it, the caller sums the gradient of ``xp``. A design that ``projects`` takes ``x`` and ``weight_ih`` as the last
arguments of ``forward`` and fills ``xp``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchrum.ops._dispatch import REFERENCE, Design, choose_backend
from torchrum.ops.rum_scan import lam1, native, persistent, stepwise, torch_scan
from torchrum.ops.rum_scan.options import SCAN_OPTIONS, RumOptions
from torchrum.ops.rum_scan.types import ScanInputs

OPERATOR_OPTIONS = frozenset(
    ("lam", "eta", "activation", "update_gate", "layer_norm", "ln_order", "ln_eps", "zoneout", "training")
)
"""The options that the operator passes to its designs."""

PERSISTENT = Design("persistent", "fused", persistent, lam=0.0, sized=True, by_driver=True, projects=True)
STEPWISE = Design("stepwise", "fused", stepwise, lam=0.0)
LAM1 = Design("lam1", "fused", lam1, lam=1.0, by_driver=True)
NATIVE = Design("native", "native", native)
TORCH = Design("torch", "torch", torch_scan)

DESIGNS = (PERSISTENT, STEPWISE, LAM1, NATIVE, TORCH)

MAX_CACHED_DESIGNS = 4096


def operator_obstacle(options: RumOptions, learnable_lam: bool) -> str | None:
    """Return the reason why no design can run a recurrence, which leaves only the reference, or None."""
    if forward_ad._current_level >= 0:  # torch.func.jvp enters a level too, and a compiler guards the number
        return "forward-mode differentiation is on, and the operator is differentiated in reverse mode only"
    if learnable_lam or options.lam not in (0, 1):
        return f"lam is {'learnable' if learnable_lam else options.lam}, and only lam 0 and 1 are supported"
    if not isinstance(options.activation, str):
        return "activation is a callable, whose derivative only autograd knows"
    for name, default in SCAN_OPTIONS.items():
        if name not in OPERATOR_OPTIONS and getattr(options, name) != default:
            return f"{name} is given, and only {name}={default!r} is supported"
    return None


_design_cache: dict[tuple[Any, ...], tuple[Design, str]] = {}


def choose_design(
    inputs: ScanInputs, options: RumOptions, requested: str, *, learnable_lam: bool = False, strict: bool = True
) -> tuple[Design, str]:
    """Choose the design that runs a scan, once for each shape, dtype, device and set of options.

    Args:
        inputs, options: the scan.
        requested: ``"auto"``, a backend or a design.
        learnable_lam: whether lam is a parameter.
        strict: raise ``ValueError`` if ``requested`` cannot run. An operator call passes False and takes the next
            slower design instead: a program may be exported on a machine with the backend and used on one without it.

    Returns:
        The design, ``REFERENCE`` if no other can run, and the reason.
    """
    xp = inputs.xp
    if type(xp) is not Tensor or torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return _choose(inputs, options, requested, learnable_lam, strict)
    key = (xp.shape, xp.dtype, xp.device, options, learnable_lam, requested, strict)
    found = _design_cache.get(key)
    if found is None:
        if len(_design_cache) >= MAX_CACHED_DESIGNS:  # for example if the length of the sequences keeps changing
            _design_cache.clear()
        found = _design_cache[key] = _choose(inputs, options, requested, learnable_lam, strict)
    return found


def _choose(
    inputs: ScanInputs, options: RumOptions, requested: str, learnable_lam: bool, strict: bool
) -> tuple[Design, str]:
    common = operator_obstacle(options, learnable_lam) if strict else None
    # a compiler must not specialise on the batch size, on which the choice among a backend's designs depends
    tracing = strict and torch.compiler.is_compiling()
    designs = [d for d in DESIGNS if common or (d.lam in (None, options.lam) and not (tracing and d.sized))]
    if not strict:
        first = next((i for i, design in enumerate(designs) if requested in (design.backend, design.name)), 0)
        designs, requested = designs[first:], "auto"

    def obstacle_of(design: Design) -> str | None:
        return None if design is REFERENCE else common or design.module.obstacle(inputs, options)

    return choose_backend(requested, (*designs, REFERENCE), obstacle_of)


def clear_design_cache() -> None:
    """Clear the cached choices after the machine has changed, for example if a compiler was installed."""
    _design_cache.clear()
