"""The scan as two opaque operators: it compiles whole, exports with its gradients, and composes with torch.func.

The derivative is the operator's own kernel for the Autograd key, as that of torch's operators is; a rule from
``torch.library.register_autograd`` fails under ``torch.func.grad``, and a Function around the operator is lost by
``torch.export``. The backward is an operator too, and where it is differentiated a Function by way of the reference.
"""

import functools
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, library
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import batching, native, torch_scan
from .options import RumOptions
from .reference import rum_scan_reference

_OPTION_SCHEMA = (
    "float lam, float? eta, str activation, bool update_gate, bool layer_norm, str ln_order, float ln_eps, "
    "float zoneout, bool training, str backend"
)
_OPTION_NAMES = [part.split()[-1] for part in _OPTION_SCHEMA.split(", ")][:-1]
assert set(_OPTION_NAMES) == {field.name for field in fields(RumOptions)} - {"target_activation"}

_INPUTS = (
    "Tensor xp, Tensor h0, Tensor? R0, Tensor weight_hh, Tensor? ln_weight, Tensor? ln_bias, "
    "Tensor? lengths, Tensor? seed"
)
NUM_INPUTS = len(_INPUTS.split(", "))
# save: whether to keep what the backward needs; without it the last two results are empty
library.define("torchrum::rum_scan", f"({_INPUTS}, {_OPTION_SCHEMA}, bool save) -> (Tensor, Tensor, Tensor, Tensor)")
library.define(
    "torchrum::rum_scan_backward",
    f"(Tensor grad_out, Tensor? grad_R, {_INPUTS}, Tensor out, Tensor gates, Tensor R_n, Tensor ends, "
    f"{_OPTION_SCHEMA}, bool need_R0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _flags(options: RumOptions, backend: str) -> tuple[Any, ...]:
    return (*(getattr(options, name) for name in _OPTION_NAMES), backend)


@functools.lru_cache(64)
def _options(flags: tuple[Any, ...]) -> tuple[RumOptions, str]:
    return RumOptions(**dict(zip(_OPTION_NAMES, flags[:-1], strict=True))), flags[-1]


def _kernels(backend: str, xp: Tensor) -> Any:
    if backend == "native" and native.can_run(xp):
        return native
    if backend in ("native", "torch"):  # a program may be exported where native runs and used where it does not
        return torch_scan
    from . import fused  # triton is absent on machines without CUDA

    return fused


def _or_empty(part: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if part is None else part


def _or_none(part: Tensor) -> Tensor | None:
    return None if part.numel() == 0 and part.dim() == 1 else part


@library.impl("torchrum::rum_scan", "default")
@torch.no_grad()  # an exported program calls the operator itself, with weights that ask for gradients
def _forward(xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed, *flags):
    (options, backend), save = _options(flags[:-1]), flags[-1]
    inputs, kernels = (xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed), _kernels(backend, xp)
    results = kernels.forward(*inputs, options) if save else (*kernels.infer(*inputs, options), None, None)
    return tuple(_or_empty(part, xp) for part in results)


@library.impl("torchrum::rum_scan_backward", "default")
@torch.no_grad()
def _backward(
    grad_out, grad_R, xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed, out, gates, R_n, ends, *flags
):
    (options, backend), need_R0 = _options(flags[:-1]), flags[-1]
    saved = (out, gates, _or_none(R_n), _or_none(ends))
    inputs = (xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed)
    grads = _kernels(backend, xp).backward(grad_out, grad_R, *inputs, *saved, options, need_R0)
    return tuple(_or_empty(part, xp) for part in grads)


@library.register_fake("torchrum::rum_scan")
def _fake_forward(xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed, *flags):
    options, backend = _options.__wrapped__(flags[:-1])  # a compiler's symbolic numbers cannot be looked up
    out, R_n, *saved = _kernels(backend, xp).empty_results(xp, h0.shape[-1], options)
    return tuple(_or_empty(part, xp) for part in (out, R_n, *(saved if flags[-1] else (None, None))))


@library.register_fake("torchrum::rum_scan_backward")
def _fake_backward(
    grad_out, grad_R, xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed, out, gates, R_n, ends, *flags
):
    like = [xp, h0, R_n if flags[-1] else None, weight_hh, ln_weight, ln_bias]
    return tuple(
        xp.new_empty(0) if part is None else torch.empty_like(part, memory_format=torch.contiguous_format)
        for part in like
    )


library.register_vmap("torchrum::rum_scan", batching.forward_rule)
library.register_vmap("torchrum::rum_scan_backward", batching.backward_rule)


class _RumScan(torch.autograd.Function):
    """The derivative of the operator; ``_autograd`` below is its only caller."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        # gradients stay on: below this level may be another one of functorch, which a Function would turn off
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            output = torch.ops.torchrum.rum_scan(*args[:-1], True)
        ctx.flags = args[NUM_INPUTS:-1]
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args[:NUM_INPUTS], *output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_R: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
        *inputs, out, R_n, gates, ends = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        need_R0 = ctx.needs_input_grad[2]
        args, flags = (grad_out, grad_R, *inputs, out, gates, R_n, ends), (*ctx.flags, need_R0)
        if torch.is_grad_enabled():  # somebody differentiates this backward in turn
            grads = _RumScanBackward.apply(*args, flags)
        else:
            grads = torch.ops.torchrum.rum_scan_backward(*args, *flags)
        # one gradient for each tensor input; those that were not given, lengths, seed and flags have none
        given = [part is not None for part in inputs[:6]]
        given[2] = need_R0
        nones = [None] * (len(inputs) - 6 + len(ctx.flags) + 1)  # the last one is of save
        return *(grad if there else None for there, grad in zip(given, grads, strict=True)), *nones


# Function.apply without its inspect.signature, which costs as much as a small scan; ``forward`` has no defaults to bind
_apply = super(torch.autograd.Function, _RumScan).apply


@library.impl("torchrum::rum_scan", "Autograd")
def _autograd(*args: Any) -> tuple[Tensor, ...]:
    """The operator with gradients.

    They hang on the operator itself, as for one of torch's own: a program of ``torch.export`` calls nothing else, and
    functorch hands each of its levels to this key.
    """
    if forward_ad._current_level >= 0:  # rum_scan takes the reference then; this is a program that names the operator
        raise NotImplementedError(
            "torchrum::rum_scan has no forward-mode derivative. Differentiate the RUM itself instead of a program that "
            "was exported from it, or take the gradient in reverse mode."
        )
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        with enable_single_level_autograd_function():  # functorch asks who calls a Function with ctx in its forward
            return _apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.torchrum.rum_scan(*args)


class _RumScanBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_out, grad_R, xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed, out, gates, R_n, ends, flags
    ):
        inputs = (xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed)
        return torch.ops.torchrum.rum_scan_backward(grad_out, grad_R, *inputs, out, gates, R_n, ends, *flags)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.flags = inputs
        ctx.save_for_backward(*tensors[:10])

    @staticmethod
    def backward(ctx: Any, *grads):
        """Second derivatives, by differentiating the reference twice."""
        options, _ = _options(ctx.flags[:-1])
        *tensors, lengths, seed = ctx.saved_tensors  # grad_out, grad_R, xp, h0, R0, weight_hh, ln_weight, ln_bias
        given = [i for i, part in enumerate(tensors) if part is not None]
        inputs = [i for i in given if i >= 2]

        def gradients(*values: Tensor) -> tuple[Tensor, ...]:
            """What the backward computes, as a function of everything it depends on."""
            full = dict(zip(given, values, strict=True))

            def scan(*values: Tensor) -> Any:
                parts: dict[int, Any] = dict(zip(inputs, values, strict=True))
                xp, h0, weight_hh = parts[2], parts[3], parts[5]
                ln = parts.get(6), parts.get(7)
                out, R = rum_scan_reference(xp, h0, parts.get(4), weight_hh, *ln, lengths, seed, options)
                return (out, R) if 1 in full else (out,)

            pull = torch.func.vjp(scan, *(full[i] for i in inputs))[1]
            return pull((full[0], full[1]) if 1 in full else (full[0],))

        pull = torch.func.vjp(gradients, *(tensors[i] for i in given))[1]
        needed = [grads[i - 2] if i != 4 or ctx.flags[-1] else torch.zeros_like(tensors[4]) for i in inputs]
        seconds = dict(zip(given, pull(tuple(needed)), strict=True))
        return *(seconds.get(i) for i in range(8)), *[None] * 7


def rum_scan_op(
    xp: Tensor,
    h0: Tensor,
    R0: Tensor | None,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    options: RumOptions,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """States ``(T, B, H)`` and the last R by the ``fused``, ``native`` or ``torch`` backend, differentiable."""
    inputs = (xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed)
    out, R_n, _, _ = torch.ops.torchrum.rum_scan(*inputs, *_flags(options, backend), False)
    return out, R_n if options.keeps_rotation else None
