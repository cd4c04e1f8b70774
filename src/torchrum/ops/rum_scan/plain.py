"""A plain call: projection and scan as one node of autograd that goes straight to the design.

The operators of ``op.py`` are for those who look at a call: compilers, exporters, torch.func and modes. The way through
torch's dispatcher takes longer than a small scan, so a call that nobody looks at passes it by, as does its backward.
Whoever differentiates or batches that backward gets the operators.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch import Backend, Design
from ..kernels.precision import autocast_dtype, without_autocast
from ..kernels.watching import is_unwatched
from .designs import NATIVE, decide
from .native.copying import copied
from .op import backward_by_operator, make_flags
from .options import RumOptions
from .projection import project, project_backward
from .types import Gradients, LayerInputs, Residuals, Results, ScanInputs

NUM_SCANNED = len(ScanInputs._fields)


class PlainCall(NamedTuple):
    """How to run a plain call."""

    options: RumOptions
    backend: Backend = "auto"
    returned: bool = False
    """Whether states and R go to a user, who may write to them: then the backward keeps copies of its own."""


def plain_scan(inputs: LayerInputs, call: PlainCall) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """All states ``(T, B, H)``, the last one ``(B, H)`` and the last R or None; nothing where the call is not plain.

    ``call.options`` must be such that ``operator_obstacle`` finds nothing in them.
    """
    x, weight_ih, weight_hh = inputs.x, inputs.weight_ih, inputs.weight_hh
    if x.dtype is not weight_ih.dtype or x.dtype is not weight_hh.dtype or call.backend == "reference":
        return None
    given = [part for part in inputs if part is not None]
    if not is_unwatched(*given) or autocast_dtype(x.device.type) is not None:
        return None
    if call.options.draws:
        inputs = inputs._replace(seed=torch.randint(2**31 - 1, (), device=x.device))
    if torch.is_grad_enabled() and any(part.requires_grad for part in given):
        return _apply(call, *inputs)
    out, R, _ = _run(inputs, call, save=False)[2]
    return out, out[-1].clone() if call.returned else out[-1], R


def _run(inputs: LayerInputs, call: PlainCall, save: bool) -> tuple[Design, ScanInputs, Results]:
    xp = project(inputs.x, inputs.weight_ih, inputs.bias, call.options, call.backend)
    scanned = inputs.projected(xp)
    design = decide(scanned, call.options, False, call.backend)
    return design, scanned, design.module.forward(scanned, call.options, save)


class _PlainScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: PlainCall, *args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        inputs = LayerInputs(*args)
        design, scanned, (out, R, residuals) = _run(inputs, call, save=True)
        ctx.call, ctx.design = call, design
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args[:3], *scanned, out, R, *residuals)
        last = out[-1].clone()
        if call.returned:
            copy = copied if design is NATIVE else torch.clone  # its threads are not torch's
            out, R = copy(out), None if R is None else copy(R)
        return out, last, R

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_last: Tensor | None, grad_R: Tensor | None) -> Any:
        call, design = ctx.call, ctx.design
        x, weight_ih, bias, *others = ctx.saved_tensors
        scanned, (out, R, *residuals) = ScanInputs(*others[:NUM_SCANNED]), others[NUM_SCANNED:]
        results = Results(out, R, Residuals(*residuals))
        needs, need_R0 = ctx.needs_input_grad[1:4], ctx.needs_input_grad[5]
        arriving = [part for part in (grad_out, grad_last, grad_R) if part is not None]
        plain = not torch.is_grad_enabled() and is_unwatched(*arriving)
        grad_out = _joined(grad_out, grad_last, out)
        with without_autocast(x.device.type):
            if plain:
                grads = design.module.backward(grad_out, grad_R, scanned, results, call.options, need_R0)
            else:  # somebody differentiates or batches this backward
                if torch.is_grad_enabled():
                    xp = project(x, weight_ih, bias, call.options)  # with a graph
                    scanned = scanned._replace(xp=xp)
                flags = make_flags(call.options, design.backend)
                grads = backward_by_operator(grad_out, grad_R, scanned, results, flags, need_R0)
            projected = project_backward(grads.xp, x, weight_ih, needs, native=plain and design is NATIVE)
        return None, *_all_gradients(projected, grads, bias), None, None


# Function.apply without what it asks on each call: there are no defaults to bind, and functorch is not at work
_apply = super(torch.autograd.Function, _PlainScan).apply


def _joined(grad_out: Tensor | None, grad_last: Tensor | None, out: Tensor) -> Tensor:
    """The gradient of all states, that of the last one among them."""
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if grad_last is None:
        return grad_out
    return torch.cat((grad_out[:-1], grad_out[-1:] + grad_last))


def _all_gradients(
    projected: tuple[Tensor | None, ...], grads: Gradients, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Of ``LayerInputs`` up to the layer norm's, from those of the projection and of the scan."""
    grad_x, grad_weight, grad_bias = projected
    if bias is not None and grad_bias is not None and grad_bias.shape != bias.shape:
        grad_bias = grad_bias[: bias.shape[0]]  # eps has none
    return grad_x, grad_weight, grad_bias, *grads[1:]
