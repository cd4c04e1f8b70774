"""The scan as two opaque operators with an autograd rule: it compiles whole, and composes with torch.func.

An operator's define/impl pair under an ``autograd.Function`` is the one form that passes fullgraph compilation,
``torch.func.grad`` and ``vmap`` together. The backward is a Function too, differentiated by the reference.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, library

from . import batching, torch_scan
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
library.define("torchrum::rum_scan", f"({_INPUTS}, {_OPTION_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)")
library.define(
    "torchrum::rum_scan_backward",
    f"(Tensor grad_out, Tensor? grad_R, {_INPUTS}, Tensor out, Tensor gates, Tensor R_n, Tensor ends, "
    f"{_OPTION_SCHEMA}, bool need_R0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _flags(options: RumOptions, backend: str) -> tuple[Any, ...]:
    return (*(getattr(options, name) for name in _OPTION_NAMES), backend)


def _options(flags: tuple[Any, ...]) -> tuple[RumOptions, str]:
    return RumOptions(**dict(zip(_OPTION_NAMES, flags[:-1], strict=True))), flags[-1]


def _kernels(backend: str) -> Any:
    if backend == "torch":
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
    options, backend = _options(flags)
    results = _kernels(backend).forward(xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed, options)
    return tuple(_or_empty(part, xp) for part in results)


@library.impl("torchrum::rum_scan_backward", "default")
@torch.no_grad()
def _backward(
    grad_out, grad_R, xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed, out, gates, R_n, ends, *flags
):
    (options, backend), need_R0 = _options(flags[:-1]), flags[-1]
    saved = (out, gates, _or_none(R_n), _or_none(ends))
    inputs = (xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed)
    grads = _kernels(backend).backward(grad_out, grad_R, *inputs, *saved, options, need_R0)
    return tuple(_or_empty(part, xp) for part in grads)


@library.register_fake("torchrum::rum_scan")
def _fake_forward(xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed, *flags):
    options, backend = _options(flags)
    return tuple(_or_empty(part, xp) for part in _kernels(backend).empty_results(xp, h0.shape[-1], options))


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
    generate_vmap_rule = True

    @staticmethod
    def forward(xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed, flags):
        inputs = (xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed)
        return torch.ops.torchrum.rum_scan(*inputs, *flags)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.flags = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad_out, grad_R, *unused):
        *inputs, out, R_n, gates, ends = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        need_R0 = ctx.needs_input_grad[2]
        flags = (*ctx.flags, need_R0)
        grads = list(_RumScanBackward.apply(grad_out, grad_R, *inputs, out, gates, R_n, ends, flags))
        # one gradient for each tensor input; those that were not given, lengths, seed and flags have none
        given = [part is not None for part in inputs[:6]]
        given[2] = need_R0
        return *(grad if there else None for there, grad in zip(given, grads, strict=True)), None, None, None


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
    """States ``(T, B, H)`` and the last R by the ``torch`` or ``fused`` backend, differentiable."""
    inputs = (xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed)
    out, R_n, _, _ = _RumScan.apply(*inputs, _flags(options, backend))
    return out, R_n if options.keeps_rotation else None
