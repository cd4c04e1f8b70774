"""A plain call: projection and scan as one node of autograd that goes straight to the design.

The operators of ``op.py`` are for those who look at a call: compilers, exporters, torch.func and modes. The way through
torch's dispatcher takes longer than a small scan, so a call that nobody looks at passes it by, as does its backward.
Whoever differentiates or batches that backward gets the operators.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrum.ops._dispatch import Backend, Design
from torchrum.ops.kernels.machine import is_unwatched
from torchrum.ops.kernels.masks import draw_seed
from torchrum.ops.kernels.precision import autocasts, without_autocast, working_dtype
from torchrum.ops.rum_scan.designs import NATIVE, choose_design
from torchrum.ops.rum_scan.native.projecting import (
    backward_projecting,
    forward_projecting,
    infer_projecting,
    operator_results,
    projects,
)
from torchrum.ops.rum_scan.op import NUM_GRADIENTS, backward_by_operator, make_flags
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.projection import (
    adds_apart,
    kernel_projects,
    padded_bias,
    project,
    project_backward,
    project_eagerly,
)
from torchrum.ops.rum_scan.types import NO_COPIES, Copies, LayerInputs, Residuals, Results, ScanInputs


class PlainCall(NamedTuple):
    """How to run a plain call."""

    options: RumOptions
    backend: Backend
    returned: tuple[int, ...] | None
    """What stands before B in the shapes of the last state and R where they go to a user, who may write to them and to
    all states: then the backward keeps copies of its own. None where they do not."""


@functools.lru_cache(256)
def _find_call(options: RumOptions, training: bool, backend: Backend, returned: tuple[int, ...] | None) -> PlainCall:
    """Made once: a layer is called in the same way again and again."""
    return PlainCall(options.with_training(training), backend, returned)


def plain_scan(
    inputs: LayerInputs, options: RumOptions, training: bool, backend: Backend, returned: tuple[int, ...] | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """All states ``(T, B, H)``, the last one ``(B, H)`` and the last R or None; nothing where the call is not plain.

    ``returned`` says whether the last two have another shape, as in ``PlainCall``. ``options`` must be such that
    ``operator_obstacle`` finds nothing in them.
    """
    x, weight_ih, weight_hh = inputs.x, inputs.weight_ih, inputs.weight_hh
    if x.dtype is not weight_ih.dtype or x.dtype is not weight_hh.dtype or backend == "reference":
        return None
    given = [part for part in inputs if part is not None]
    if not is_unwatched(given) or autocasts(x):
        return None
    call = _find_call(options, training, backend, returned)
    if call.options.draws:
        inputs = inputs._replace(seed=draw_seed(x.device))
    if torch.is_grad_enabled():
        for part in given:  # a loop, as in is_unwatched
            if part.requires_grad:
                return _apply(call, *inputs)
    if x.is_cpu and _is_native(inputs, call):
        return infer_projecting(inputs.with_zeros(), call.options, call.returned or ())
    design, scanned, lacking, unprojected = _project(inputs, call)
    if design.by_driver:
        copies = NO_COPIES if call.returned is None else _empty_copies(scanned, call, whole=False)
        out, R, _ = design.module.forward(scanned, call.options, False, copies, lacking, *unprojected)
    else:
        out, R, _ = results = design.module.forward(scanned, call.options, save=False)
        copies = NO_COPIES if call.returned is None else _copy(results, call, whole=False)
    if call.returned is None:
        return out, out[-1], R
    assert copies.last is not None
    return out, copies.last, R.view(*call.returned, *R.shape) if R is not None and call.returned else R


def _is_native(inputs: LayerInputs, call: PlainCall) -> bool:
    """Whether the native scan runs; it projects the input itself."""
    return call.backend in ("auto", "native") and projects(inputs.x)


def _project(inputs: LayerInputs, call: PlainCall) -> tuple[Design, ScanInputs, Tensor | None, tuple[Tensor, ...]]:
    """Project the input, or leave that to the design that runs.

    Returns:
        The design; what it scans; the bias, ``(3H,)``, that ``xp`` lacks, or None; and x and ``weight_ih`` where the
        design projects them into ``xp``, which is not filled yet, else nothing.
    """
    x, weight, bias = inputs[:3]
    if call.options.lam == 0 and kernel_projects(x):
        T, B, _ = x.shape
        scanned = inputs.projected(x.new_empty(T, B, weight.shape[0]))
        design, _ = choose_design(scanned, call.options, call.backend)
        if design.projects:
            return design, scanned, padded_bias(weight, bias), (x, weight)
    apart = adds_apart(x, weight)
    lacking = padded_bias(weight, bias) if apart else None
    xp = project_eagerly(x, weight, None if apart else bias, call.options)
    scanned = inputs.projected(xp)
    design, _ = choose_design(scanned, call.options, call.backend)
    if design.by_driver:
        return design, scanned, lacking, ()
    if lacking is not None:
        xp.add_(lacking)
    if inputs.h0 is None:
        scanned = inputs.with_zeros().projected(xp, from_zero=True)
    return design, scanned, None, ()


def _empty_copies(scanned: ScanInputs, call: PlainCall, whole: bool) -> Copies:
    """Memory for the last state, its shape behind ``call.returned``; if ``whole``, for all states and any R as well."""
    xp, lead = scanned.xp, call.returned or ()
    (T, B, _), H = xp.shape, scanned.weight_hh.shape[1]
    last = xp.new_empty(*lead, B, H)
    if not whole:
        return Copies(last)
    R = xp.new_empty(*lead, B, H, H, dtype=working_dtype(xp.dtype)) if call.options.keeps_rotation else None
    return Copies(last, xp.new_empty(T, B, H), R)


def _copy(results: Results, call: PlainCall, whole: bool) -> Copies:
    """``_empty_copies``, filled."""
    (out, R, _), lead = results, call.returned or ()
    last = out.new_empty(*lead, *out.shape[1:]).copy_(out[-1])
    if not whole:
        return Copies(last)
    return Copies(last, out.clone(), None if R is None else R.new_empty(*lead, *R.shape).copy_(R))


class _PlainScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: PlainCall, *args: Any) -> tuple[Tensor | None, ...]:
        inputs, xp, lacking = LayerInputs(*args), None, None
        out: Tensor | None
        last: Tensor | None
        if inputs.x.is_cpu and _is_native(inputs, call):
            design, inputs = NATIVE, inputs.with_zeros()
            out, last, R, results = forward_projecting(inputs, call.options, call.returned)
        else:
            design, scanned, lacking, unprojected = _project(inputs, call)
            xp, whole = scanned.xp, call.returned is not None
            if design.by_driver:
                last, out, R = copies = _empty_copies(scanned, call, whole)
                results = design.module.forward(scanned, call.options, True, copies, lacking, *unprojected)
            else:
                results = design.module.forward(scanned, call.options, save=True)
                last, out, R = _copy(results, call, whole)
            if not whole:
                out, R, _ = results
        ctx.call, ctx.design = call, design
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, xp, lacking, *results[:2], *results.residuals)
        return out, last, R

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> Any:
        *args, xp, lacking, out, R, gates, kept = ctx.saved_tensors
        inputs, projected, results = LayerInputs(*args), (xp, lacking), Results(out, R, Residuals(gates, kept))
        needs, bias, grad_R = ctx.needs_input_grad[1:], inputs.bias, arriving[2]
        if grad_R is not None and ctx.call.returned:
            arriving = (*arriving[:2], grad_R.reshape(grad_R.shape[len(ctx.call.returned) :]))
        if autocasts(inputs.x):
            with without_autocast(inputs.x.device.type):
                found = _gradients(ctx, needs, arriving, inputs, projected, results)
        else:
            found = _gradients(ctx, needs, arriving, inputs, projected, results)
        grad_x, grad_weight, grad_bias, grad_h0, *others = found
        if bias is not None and grad_bias is not None and grad_bias.shape != bias.shape:
            grad_bias = grad_bias[: bias.shape[0]]  # eps has none
        return None, grad_x, grad_weight, grad_bias, grad_h0 if needs[3] else None, *others, None, None


def _gradients(
    ctx: Any,
    needs: tuple[bool, ...],
    arriving: Sequence[Tensor | None],
    inputs: LayerInputs,
    projected: tuple[Tensor | None, Tensor | None],
    results: Results,
) -> tuple[Tensor | None, ...]:
    """Gradients of ``inputs`` up to the layer norm's, by the design or the operator and the projection's own.

    ``projected`` is xp, None where the native scan has projected, and the bias that xp lacks, or None.
    """
    call, design, (xp, lacking) = ctx.call, ctx.design, projected
    plain = not torch.is_grad_enabled() and is_unwatched([part for part in arriving if part is not None])
    if plain and xp is None:
        return backward_projecting(arriving, inputs, results, call.options, needs)
    grad_out, grad_last, grad_R = arriving
    if grad_out is None or grad_last is not None:
        grad_out = _joined(grad_out, grad_last, results.out, plain)
    if xp is None:
        results = operator_results(results)
    if xp is None or torch.is_grad_enabled():
        xp = project(inputs.x, inputs.weight_ih, inputs.bias, call.options)  # with a graph
    elif lacking is not None and not plain:
        xp = xp + lacking
    readable = inputs if plain and design.by_driver else inputs.with_zeros()
    scanned = readable.projected(xp, from_zero=inputs.h0 is None)
    if plain:
        more = (lacking, needs[2]) if design.by_driver else ()
        grads = design.module.backward(grad_out, grad_R, scanned, results, call.options, needs[4], *more)
    else:  # somebody differentiates or batches this backward
        flags = make_flags(call.options, design.backend)
        grads = backward_by_operator(grad_out, grad_R, scanned, results, flags, needs[4])
    projected_grads = project_backward(grads.xp, inputs.x, inputs.weight_ih, grads.bias, needs[:3])
    return *projected_grads, *grads[1:NUM_GRADIENTS]


# Function.apply without what it asks on each call: there are no defaults to bind, and functorch is not at work
_apply = super(torch.autograd.Function, _PlainScan).apply


def _joined(grad_out: Tensor | None, grad_last: Tensor | None, out: Tensor, plain: bool) -> Tensor:
    """The gradient of all states, that of the last one among them; if ``plain``, nobody differentiates the sum."""
    if grad_last is None:
        return torch.zeros_like(out) if grad_out is None else grad_out
    if plain:
        joined = torch.zeros_like(out) if grad_out is None else grad_out.clone()
        joined[-1:].add_(grad_last)
        return joined
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    return torch.cat((grad_out[:-1], grad_out[-1:] + grad_last))
