"""The designs of the scan, fastest first, and the choice among them.

Each folder exports the same four functions::

    obstacle(inputs, options) -> why it cannot run, in words, or None; looks at shapes, dtype and device alone
    empty_results(inputs, options) -> Results, unfilled: what ``forward`` returns, for a compiler
    forward(inputs, options, save=True) -> Results; without ``save`` the residuals may be left out
    backward(grad_out, grad_R, inputs, results, options, need_R0) -> Gradients

Those ``by_driver`` take more::

    forward(inputs, options, save=True, copies=NO_COPIES, bias=None)
    backward(grad_out, grad_R, inputs, results, options, need_R0, bias=None, need_bias=False)

``copies``, ``Copies`` of the results, are filled too. ``bias``, ``(3H,)``, is what ``xp`` lacks: it is added where
``xp`` is read. ``need_bias`` asks for ``Gradients.bias``; a design need not have it, and then the caller sums that of
``xp``. One that ``projects`` takes ``x`` and ``weight_ih`` at the end of ``forward``, and fills ``xp``.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

from torchrum.ops._dispatch import REFERENCE, Design, choose_backend
from torchrum.ops.rum_scan import lam1, native, persistent, stepwise, torch_backend
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.types import ScanInputs

PERSISTENT = Design("persistent", "fused", persistent, lam=0.0, sized=True, by_driver=True, projects=True)
STEPWISE = Design("stepwise", "fused", stepwise, lam=0.0)
LAM1 = Design("lam1", "fused", lam1, lam=1.0, by_driver=True)
NATIVE = Design("native", "native", native)
TORCH = Design("torch", "torch", torch_backend)

DESIGNS = (PERSISTENT, STEPWISE, LAM1, NATIVE, TORCH)

MOST_DECISIONS = 4096


def operator_obstacle(options: RumOptions, learnable_lam: bool) -> str | None:
    """Why no design can run a recurrence, so that only the reference is left, or None."""
    if forward_ad._current_level >= 0:  # torch.func.jvp enters a level too, and a compiler guards the number
        return "forward-mode differentiation is on, and the operator is differentiated in reverse mode only"
    if learnable_lam or options.lam not in (0, 1):
        return f"lam is {'learnable' if learnable_lam else options.lam}, and only lam 0 and 1 are supported"
    if not isinstance(options.activation, str):
        return "activation is a callable, whose derivative only autograd knows"
    if options.target_activation is not None:
        return "target_activation is given, and only a linear target is supported"
    return None


def choose_design(inputs: ScanInputs, options: RumOptions, learnable_lam: bool, asked: str) -> tuple[Design, str]:
    """The design that runs a scan, and why; ``REFERENCE`` where none does."""
    common, tracing = operator_obstacle(options, learnable_lam), torch.compiler.is_compiling()

    def obstacle_of(design: Design) -> str | None:
        return None if design is REFERENCE else common or design.module.obstacle(inputs, options)

    designs = DESIGNS if common is not None else designs_for(options, tracing)
    return choose_backend(asked, (*designs, REFERENCE), obstacle_of)


def designs_for(options: RumOptions, tracing: bool = False) -> tuple[Design, ...]:
    """Those that are written for such a recurrence; a compiler need not know which of a backend's designs will run."""
    return tuple(d for d in DESIGNS if d.lam in (None, options.lam) and not (tracing and d.sized))


_decisions: dict[tuple[Any, ...], Design] = {}


def decide(inputs: ScanInputs, options: RumOptions, learnable_lam: bool, asked: str) -> Design:
    """``choose_design``, once for each kind of input."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return choose_design(inputs, options, learnable_lam, asked)[0]
    return look_up(inputs, options, learnable_lam, asked)


def look_up(inputs: ScanInputs, options: RumOptions, learnable_lam: bool, asked: str) -> Design:
    """``decide`` where no compiler is at work, and no forward-mode differentiation."""
    xp = inputs.xp
    key = (xp.shape, xp.dtype, xp.device, options, learnable_lam, asked)
    found = _decisions.get(key)
    if found is None:
        found = _remember(key, choose_design(inputs, options, learnable_lam, asked)[0])
    return found


def runnable_design(backend: str, inputs: ScanInputs, options: RumOptions) -> Design:
    """The design that runs an operator call which was made for ``backend``: one of that, or else of a slower one.

    A program may be exported where a backend runs and used where it does not.
    """
    designs = designs_for(options)
    first = next((i for i, design in enumerate(designs) if backend in (design.backend, design.name)), 0)
    return next(design for design in designs[first:] if design.module.obstacle(inputs, options) is None)


def decide_call(flags: tuple[Any, ...], inputs: ScanInputs, options: RumOptions) -> Design:
    """``runnable_design`` for the backend that ``flags`` ends with, once for each kind of input."""
    xp = inputs.xp
    key = (xp.shape, xp.dtype, xp.device, flags)
    found = _decisions.get(key)
    return _remember(key, runnable_design(flags[-1], inputs, options)) if found is None else found


def _remember(key: tuple[Any, ...], design: Design) -> Design:
    if len(_decisions) >= MOST_DECISIONS:  # sequences of ever new lengths
        _decisions.clear()
    _decisions[key] = design
    return design


def forget_decisions() -> None:
    """Choose anew, after what decides has changed: a compiler was installed, say."""
    _decisions.clear()
