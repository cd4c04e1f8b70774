"""Plain calls: projection and scan as one autograd node that calls the design directly.

The operators of ``op.py`` are for calls that are observed, by compilers, exporters, torch.func or modes. Torch's
dispatcher takes longer than a small scan, so an unobserved call and its backward skip it. If the backward is itself
differentiated or batched, it uses the operators.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrum.ops._dispatch import Backend, Design
from torchrum.ops.gated_scan import GatedInputs, GatedOptions, gated_scan_backward
from torchrum.ops.gated_scan import native as gated_native
from torchrum.ops.kernels.linear import (
    ExactMatmuls,
    adds_bias_separately,
    bf16x3_linear,
    linear,
    linear_backward,
    padded_bias,
    rounds_matmuls,
    working_dtype,
)
from torchrum.ops.kernels.machine import autocasts, is_unobserved, without_autocast
from torchrum.ops.kernels.masks import draw_seed
from torchrum.ops.rum_scan import native
from torchrum.ops.rum_scan.designs import NATIVE, choose_design, operator_obstacle
from torchrum.ops.rum_scan.op import backward_by_operator, make_flags
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.types import NUM_GRADIENTS, Copies, LayerInputs, Residuals, Results, ScanInputs

EXACT_UNITS = 512
"""Hidden size up to which the fused scan of lam = 0 has an exact projection although torch allows TF32; above, its
matmuls have sixteen bits."""
PROJECTED_NUMBERS = 1024
"""Largest input, in numbers, that a scan's kernel projects: the saved launch takes longer than the kernel's extra
work."""


class PlainCall(NamedTuple):
    """The settings of a plain call."""

    options: RumOptions | GatedOptions
    """Options with the mode, training or not; ``GatedOptions`` for the gated form."""
    draws: bool
    keeps_rotation: bool
    """Both as in the options: a field is faster than a property."""
    backend: Backend
    returned: tuple[int, ...] | None
    """Dimensions before B in the shapes of the last state and R if the results go to a user. The user may write to
    them, so the backward keeps its own copies. None if the results do not go to a user."""
    outputs: bool
    """Whether all states go to the user too."""


@functools.lru_cache(256)
def _find_call(
    options: RumOptions | GatedOptions,
    training: bool,
    backend: Backend,
    returned: tuple[int, ...] | None,
    outputs: bool,
) -> PlainCall | None:
    """Return the settings of a call, or None if no design can run it; cached, since layers repeat their calls."""
    if isinstance(options, GatedOptions):
        return PlainCall(options, options.draws, False, backend, returned, outputs)
    if operator_obstacle(options, learnable_lam=False) is not None:
        return None
    options = options.with_training(training)
    return PlainCall(options, options.draws, options.keeps_rotation, backend, returned, outputs)


def plain_scan(
    inputs: LayerInputs,
    options: RumOptions,
    training: bool,
    backend: Backend,
    returned: tuple[int, ...] | None,
    outputs: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return all states ``(T, B, H)``, the last one ``(B, H)`` and the last R or None; None if the call is not plain.

    ``returned`` and ``outputs`` are as in ``PlainCall``; without ``outputs`` the last state may be returned in place of
    all states. A learnable lam is NaN in ``options``.
    """
    x, weight_ih, weight_hh = inputs.x, inputs.weight_ih, inputs.weight_hh
    dtype = x.dtype
    if dtype is not weight_ih.dtype or dtype is not weight_hh.dtype or backend == "reference":
        return None
    given = [part for part in inputs if part is not None]
    if not is_unobserved(given) or autocasts(x):
        return None
    if options.gated is not None and not native.projects(x, backend):
        return None
    form = options if options.gated is None else options.gated[training]
    call = _find_call(form, training, backend, returned, outputs)
    if call is None:
        return None
    if call.draws:
        inputs = inputs._replace(seed=draw_seed(x.device))
    if torch.is_grad_enabled():
        for part in given:  # a loop, as in is_unobserved
            if part.requires_grad:
                out, last, R = _apply(call, *inputs)
                return last if out is None else out, last, R
    _, _, _, (out, R, _), copies = _run(inputs, call, save=False)
    assert copies.last is not None
    return out, copies.last, R.view(*returned, *R.shape) if R is not None and returned else R


def _run(
    inputs: LayerInputs, call: PlainCall, save: bool
) -> tuple[Design, Tensor | None, Tensor | None, Results, Copies]:
    """Project and scan.

    Returns:
        The design; xp, or None if the native scan has projected; the bias to add to xp, or None; the results; and
        copies of them: with ``save`` of everything that goes to a user, else of the last state.
    """
    copies = _empty_copies(inputs, call, save and call.returned is not None)
    if isinstance(call.options, GatedOptions):
        return NATIVE, None, None, gated_native.forward_layer(inputs, call.options, save, copies), copies
    design, scan_inputs, more = _project(inputs, call)
    results = design.module.forward(scan_inputs, call.options, save, copies, *more)
    return design, None if scan_inputs is inputs else scan_inputs[0], more[0] if more else None, results, copies


def _project(
    inputs: LayerInputs, call: PlainCall
) -> tuple[Design, LayerInputs | ScanInputs, tuple[Tensor | None, ...]]:
    """Project the input, or leave the projection to the design.

    Returns:
        The design; the inputs of its scan; and its further arguments: the bias, ``(3H,)``, to add to ``xp``, or None,
        and, if the design projects into ``xp``, which is not filled yet, x and ``weight_ih``.
    """
    x, weight, bias = inputs[:3]
    assert isinstance(call.options, RumOptions)
    if native.projects(x, call.backend):
        return NATIVE, inputs, ()
    if call.options.lam == 0 and kernel_projects(x):
        T, B, _ = x.shape
        scan_inputs = inputs.projected(x.new_empty(T, B, weight.shape[0]))
        design, _ = choose_design(scan_inputs, call.options, call.backend)
        if design.projects:
            return design, scan_inputs, (padded_bias(weight, bias), x, weight)
    separate = adds_bias_separately(x, weight)
    pending_bias = padded_bias(weight, bias) if separate else None
    xp = project_eagerly(x, weight, None if separate else bias, call.options)
    scan_inputs = inputs.projected(xp)
    design, _ = choose_design(scan_inputs, call.options, call.backend)
    if design.by_driver:
        return design, scan_inputs, (pending_bias,)
    if pending_bias is not None:
        xp.add_(pending_bias)
    if inputs.h0 is None:
        scan_inputs = inputs.with_zeros().projected(xp, from_zero=True)
    return design, scan_inputs, ()


def _empty_copies(inputs: LayerInputs, call: PlainCall, all_copies: bool) -> Copies:
    """Allocate the copy of the last state, with the dimensions ``call.returned`` before B, or ``all_copies``."""
    x, lead = inputs.x, call.returned or ()
    (T, B, _), H = x.shape, inputs.weight_hh.shape[1]
    last = x.new_empty(*lead, B, H)
    if not all_copies:
        return Copies(last)
    R = x.new_empty(*lead, B, H, H, dtype=working_dtype(x.dtype)) if call.keeps_rotation else None
    return Copies(last, x.new_empty(T, B, H) if call.outputs else None, R)


class _PlainScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: PlainCall, *args: Any) -> tuple[Tensor | None, ...]:
        design, xp, pending_bias, results, (last, out, R) = _run(LayerInputs(*args), call, save=True)
        ctx.call, ctx.design = call, design
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args, xp, pending_bias, *results[:2], *results.residuals)
        if call.returned is None:
            return results.out, last, results.R
        return out, last, R

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        *args, xp, pending_bias, out, R, gates, kept = ctx.saved_tensors
        inputs, projected, results = LayerInputs(*args), (xp, pending_bias), Results(out, R, Residuals(gates, kept))
        needs, bias, grad_R = ctx.needs_input_grad[1:], inputs.bias, grad_outputs[2]
        if grad_R is not None and ctx.call.returned:
            grad_outputs = (*grad_outputs[:2], grad_R.reshape(grad_R.shape[len(ctx.call.returned) :]))
        with without_autocast(inputs.x):
            if isinstance(ctx.call.options, GatedOptions):
                grads = _gated_gradients(ctx, needs, grad_outputs, inputs, results)
            else:
                grads = (*_gradients(ctx, needs, grad_outputs, inputs, projected, results), None)
        grad_x, grad_weight, grad_bias, grad_h0, *others, grad_bias_hh = grads
        if bias is not None and grad_bias is not None and grad_bias.shape != bias.shape:
            grad_bias = grad_bias[: bias.shape[0]]  # eps has no bias
        return None, grad_x, grad_weight, grad_bias, grad_h0 if needs[3] else None, *others, None, None, grad_bias_hh


def _gated_gradients(
    ctx: Any,
    needs: tuple[bool, ...],
    grad_outputs: Sequence[Tensor | None],
    inputs: LayerInputs,
    results: Results,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients as in ``_gradients`` for the gated form, and the gradient of ``bias_hh``."""
    options, (grad_out, grad_last, _) = ctx.call.options, grad_outputs
    out, gates = results.out, results.residuals.gates
    assert gates is not None
    if not torch.is_grad_enabled() and is_unobserved([part for part in grad_outputs if part is not None]):
        grads = gated_native.backward_layer(grad_out, grad_last, inputs, results, options, needs[0], needs[3])
        return grads.x, grads.weight_ih, grads.bias, *grads[1:NUM_GRADIENTS], grads.bias_hh
    if grad_out is None or grad_last is not None:
        grad_out = _add_grad_last(grad_out, grad_last, out, plain=False)
    gates = gates[..., : -out.shape[-1]].contiguous()  # without eps
    whole = inputs.with_zeros()
    assert whole.h0 is not None
    xp = F.linear(inputs.x, inputs.weight_ih, inputs.bias)
    scan_inputs = GatedInputs(xp, whole.h0, inputs.weight_hh, inputs.bias_hh, inputs.lengths, inputs.seed)
    to_xp, to_h0, to_weight, to_bias = gated_scan_backward(grad_out, scan_inputs, out, gates, options, NATIVE.backend)
    projected = linear_backward(to_xp, inputs.x, inputs.weight_ih, None, (*needs[:2], inputs.bias is not None))
    return *projected, to_h0, None, to_weight, None, None, to_bias


def _gradients(
    ctx: Any,
    needs: tuple[bool, ...],
    grad_outputs: Sequence[Tensor | None],
    inputs: LayerInputs,
    projected: tuple[Tensor | None, Tensor | None],
    results: Results,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of ``inputs`` up to the layer norm's, by the design or the operator and the projection.

    ``projected`` is xp, or None if the native scan has projected, and the bias to add to xp, or None.
    """
    call, design, (xp, pending_bias) = ctx.call, ctx.design, projected
    plain = not torch.is_grad_enabled() and is_unobserved([part for part in grad_outputs if part is not None])
    grad_out, grad_last, grad_R = grad_outputs
    if plain and xp is None:
        grads = native.backward(grad_out, grad_R, inputs, results, call.options, needs[4], grad_last, needs[0])
        return grads.x, grads.weight_ih, grads.bias, *grads[1:NUM_GRADIENTS]
    if grad_out is None or grad_last is not None:
        grad_out = _add_grad_last(grad_out, grad_last, results.out, plain)
    if xp is None:
        results = native.drop_saved_eps(results)
    if xp is None or torch.is_grad_enabled():
        xp = project(inputs.x, inputs.weight_ih, inputs.bias, call.options)  # differentiably
    elif pending_bias is not None and not plain:
        xp = xp + pending_bias
    readable = inputs if plain and design.by_driver else inputs.with_zeros()
    scan_inputs = readable.projected(xp, from_zero=inputs.h0 is None)
    if plain:
        more = (pending_bias, needs[2]) if design.by_driver else ()
        grads = design.module.backward(grad_out, grad_R, scan_inputs, results, call.options, needs[4], *more)
    else:  # this backward is itself differentiated or batched
        flags = make_flags(call.options, design.backend)
        grads = backward_by_operator(grad_out, grad_R, scan_inputs, results, flags, needs[4])
    assert grads.xp is not None
    projected_grads = linear_backward(grads.xp, inputs.x, inputs.weight_ih, grads.bias, needs[:3])
    return *projected_grads, *grads[1:NUM_GRADIENTS]


# Function.apply without its checks on each call: there are no defaults to bind, and functorch is not active
_apply = super(torch.autograd.Function, _PlainScan).apply


def _add_grad_last(grad_out: Tensor | None, grad_last: Tensor | None, out: Tensor, plain: bool) -> Tensor:
    """Add the gradient of the last state to the gradient of all states; if ``plain``, the sum is not differentiated."""
    if grad_last is None:
        return torch.zeros_like(out) if grad_out is None else grad_out
    if plain:
        joined = torch.zeros_like(out) if grad_out is None else grad_out.clone()
        joined[-1:].add_(grad_last)
        return joined
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    return torch.cat((grad_out[:-1], grad_out[-1:] + grad_last))


def project(x: Tensor, weight: Tensor, bias: Tensor | None, options: RumOptions) -> Tensor:
    """Return ``x W_ih^T + b`` for any leading dimensions.

    The effect of TF32 is larger than its rounding: ReLU units whose sign it flips harm the gradients far more, and with
    lam other than 0 R accumulates the rotations of all steps. So this matmul is at least as accurate as the recurrent
    one.

    Args:
        x: ``(..., I)``.
        weight: ``(3H, I)``, or ``(2H, I)`` without update gate.
        bias: ``(3H,)``, or without the H numbers of eps; None for zeros.
    """
    if torch.compiler.is_compiling():  # the program uses the precision that is set
        return F.linear(x, weight, padded_bias(weight, bias))
    return project_eagerly(x, weight, bias, options)


def project_eagerly(x: Tensor, weight: Tensor, bias: Tensor | None, options: RumOptions) -> Tensor:
    """Compute ``project`` outside of a compiler."""
    if bias is not None and bias.shape[0] != weight.shape[0]:
        bias = padded_bias(weight, bias)
    if not rounds_matmuls(x):
        return linear(x, weight, bias)
    if options.keeps_rotation or weight.shape[0] <= EXACT_UNITS * options.num_inputs:
        with ExactMatmuls():
            return linear(x, weight, bias)
    return bf16x3_linear(x, weight, bias)


def kernel_projects(x: Tensor) -> bool:
    """Return whether a scan's kernel may project ``x``, outside of autocast."""
    return x.is_cuda and x.dtype is torch.float32 and x.numel() <= PROJECTED_NUMBERS
