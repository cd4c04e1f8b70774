"""The gated scan as two opaque operators and, for unobserved calls, one autograd node.

As in the scan of the paper's form (``rum_scan/op.py``), the derivative is the operator's own kernel for the Autograd
key and the backward is an operator too. If the backward is itself differentiated, it is a Function that uses the
reference.
"""

import functools
from typing import Any

import torch
from torch import Tensor, library
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from torchrum.ops._dispatch import REFERENCE, Design
from torchrum.ops.gated_scan.designs import choose_design, run_backward, run_forward
from torchrum.ops.gated_scan.reference import gated_scan_reference
from torchrum.ops.gated_scan.types import GatedGradients, GatedInputs, GatedOptions
from torchrum.ops.kernels.flops import counts_flops, register_flops
from torchrum.ops.kernels.machine import is_unobserved

Flags = tuple[int, int, float, bool, str]
"""The options in the order of the operators' schema, and the backend."""

_INPUTS = "Tensor xp, Tensor h0, Tensor weight_hh, Tensor? bias_hh, Tensor? lengths, Tensor? seed"
_FLAGS = "int head_size, int rotated_units, float zoneout, bool training, str backend"
NUM_INPUTS, NUM_WEIGHED, NUM_FLAGS = len(GatedInputs._fields), 4, 5
# save: whether to return the gates for the backward; without it they are empty
library.define("torchrum::gated_scan", f"({_INPUTS}, {_FLAGS}, bool save) -> (Tensor, Tensor)")
library.define(
    "torchrum::gated_scan_backward",
    f"(Tensor grad_out, {_INPUTS}, Tensor out, Tensor gates, {_FLAGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)


def make_flags(options: GatedOptions, backend: str) -> Flags:
    return options.head_size, options.rotated_units, options.zoneout, options.training, backend


@functools.lru_cache(64)
def _options(flags: Flags) -> GatedOptions:
    head_size, rotated_units, zoneout, training, _ = flags
    return GatedOptions(head_size=head_size, rotated_units=rotated_units, zoneout=zoneout, training=training)


def check_inputs(inputs: GatedInputs, options: GatedOptions) -> None:
    """Raise if the tensors' shapes do not match."""
    xp, h0, weight_hh, bias_hh, lengths, _ = inputs
    if h0.dim() != 2:
        raise ValueError(f"gated_scan: h0 has shape {tuple(h0.shape)}, but it must be (B, H).")
    B, H = h0.shape
    wanted = {
        "xp": (xp, (xp.shape[0] if xp.dim() else 0, B, 3 * H)),
        "weight_hh": (weight_hh, (3 * H, H)),
        "bias_hh": (bias_hh, (3 * H,)),
        "lengths": (lengths, (B,)),
    }
    for name, (part, shape) in wanted.items():
        if part is not None and part.shape != shape:
            raise ValueError(f"gated_scan: {name} has shape {tuple(part.shape)}, but it must be {shape}.")
    if options.rotated_units > H:
        raise ValueError(f"gated_scan: rotated_units={options.rotated_units}, but there are only {H} units.")


@library.impl("torchrum::gated_scan", "default")
@torch.no_grad()  # an exported program calls the operator directly, with weights that require gradients
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, flags, save = GatedInputs(*args[:NUM_INPUTS]), args[NUM_INPUTS:-1], args[-1]
    options = _options(flags)
    check_inputs(inputs, options)
    design, _ = choose_design(inputs, options, flags[-1], strict=False)
    return run_forward(design, inputs, options, save)


def unrolled(*args: Any) -> tuple[Tensor, Tensor]:
    """Compute the forward operator by the reference, step by step; the gates for the backward are left empty."""
    states = gated_scan_reference(GatedInputs(*args[:NUM_INPUTS]), _options(tuple(args[NUM_INPUTS:-1])))
    return states, states.new_empty(0)


@library.impl("torchrum::gated_scan_backward", "default")
@torch.no_grad()
def _backward(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    inputs, (out, gates), flags = GatedInputs(*args[:NUM_INPUTS]), args[NUM_INPUTS:-NUM_FLAGS], args[-NUM_FLAGS:]
    options = _options(flags)
    check_inputs(inputs, options)
    if grad_out.shape != out.shape:
        raise ValueError(f"gated_scan: grad_out has shape {tuple(grad_out.shape)}, but it must be {tuple(out.shape)}.")
    design, _ = choose_design(inputs, options, flags[-1], strict=False)
    *grads, grad_bias = run_backward(design, grad_out, inputs, out, gates, options)
    return *grads, inputs.xp.new_empty(0) if grad_bias is None else grad_bias


@library.register_fake("torchrum::gated_scan")
def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    return GatedInputs(*args[:NUM_INPUTS]).empty_results(args[-1])


@library.register_fake("torchrum::gated_scan_backward")
def _fake_backward(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    contiguous = torch.contiguous_format
    return tuple(
        args[0].new_empty(0) if part is None else torch.empty_like(part, memory_format=contiguous)
        for part in args[:NUM_WEIGHED]
    )


def _run_one_by_one(op: Any, info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    """Run the samples of a mapped dimension one by one."""
    samples = [
        op(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, dims, strict=True)))
        for i in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
    return stacked, (0,) * len(stacked)


for _name in ("gated_scan", "gated_scan_backward"):
    library.register_vmap(f"torchrum::{_name}", functools.partial(_run_one_by_one, getattr(torch.ops.torchrum, _name)))


@counts_flops("gated_scan")
def _forward_flops(xp: Any, h0: Any, weight_hh: Any, *rest: Any, out_shape: Any = None) -> int:
    """Count two operations for each multiply-add of the matmuls, from shapes."""
    (T, B, _), (rows, H) = xp, weight_hh
    return 2 * T * B * rows * H


@counts_flops("gated_scan_backward")
def _backward_flops(grad_out: Any, *args: Any, out_shape: Any = None) -> int:
    return 2 * _forward_flops(*args)


class _GatedScan(torch.autograd.Function):
    """The derivative of the operator or, for an unobserved call, of ``design`` itself."""

    @staticmethod
    def forward(ctx: Any, design: Design | None, flags: Flags, *tensors: Any) -> Any:
        """Return the states and, from the operator, the gates."""
        if design is not None:
            results = run_forward(design, GatedInputs(*tensors), _options(flags), True)
        else:
            # keep gradients on: a Function turns them off, but another functorch level may be below this one
            with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
                results = torch.ops.torchrum.gated_scan(*tensors, *flags, True)
        ctx.design, ctx.flags = design, flags
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *results)
        if design is not None:
            return results[0]
        ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        *tensors, out, gates = ctx.saved_tensors
        rest = (None,) * (NUM_INPUTS - NUM_WEIGHED)
        if grad_out is None:
            return *[None] * (2 + NUM_WEIGHED), *rest
        inputs = GatedInputs(*tensors)
        if not torch.is_grad_enabled() and ctx.design is not None and is_unobserved((grad_out,)):
            grads = run_backward(ctx.design, grad_out, inputs, out, gates, _options(ctx.flags))
        else:
            grads = _backward_by_operator(grad_out, inputs, out, gates, ctx.flags)
        return None, None, *grads, *rest


def _backward_by_operator(
    grad_out: Tensor, inputs: GatedInputs, out: Tensor, gates: Tensor, flags: Flags
) -> GatedGradients:
    """Compute the gradients by the backward operator, differentiably if gradients are enabled."""
    if torch.is_grad_enabled():  # this backward is itself differentiated
        grads: tuple[Tensor, ...] = _GatedScanBackward.apply(flags, grad_out, *inputs, out, gates)
    else:
        grads = torch.ops.torchrum.gated_scan_backward(grad_out, *inputs, out, gates, *flags)
    to_xp, to_h0, to_weight, to_bias = grads
    return GatedGradients(to_xp, to_h0, to_weight, None if inputs.bias_hh is None else to_bias)


# Function.apply without its inspect.signature, which takes as long as a small scan
_apply = super(torch.autograd.Function, _GatedScan).apply


@library.impl("torchrum::gated_scan", "Autograd")
def _autograd(*args: Any) -> tuple[Tensor, Tensor]:
    """Run the operator with gradients."""
    if forward_ad._current_level >= 0:  # only a program that calls the operator directly: gated_scan uses the reference
        raise NotImplementedError(
            "torchrum::gated_scan has no forward-mode derivative. Differentiate the RUM itself instead of a program "
            "that was exported from it, or take the gradient in reverse mode."
        )
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        with enable_single_level_autograd_function():  # functorch allows a Function with ctx in its forward only here
            return _apply(None, args[NUM_INPUTS:-1], *args[:NUM_INPUTS])
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.torchrum.gated_scan(*args)


class _GatedScanBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(flags: Flags, *tensors: Any) -> tuple[Tensor, ...]:
        return torch.ops.torchrum.gated_scan_backward(*tensors, *flags)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.flags, *tensors = inputs
        ctx.save_for_backward(*tensors[: 1 + NUM_INPUTS])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Compute the second derivatives, by differentiating the reference twice."""
        *tensors, lengths, seed = ctx.saved_tensors  # grad_out, xp, h0, weight_hh, bias_hh
        given = [part for part in tensors if part is not None]
        options = _options(ctx.flags)

        def gradients(grad_out: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            def scan(xp: Tensor, h0: Tensor, weight_hh: Tensor, bias_hh: Tensor | None = None) -> Tensor:
                return gated_scan_reference(GatedInputs(xp, h0, weight_hh, bias_hh, lengths, seed), options)

            return torch.func.vjp(scan, *values)[1](grad_out)

        second_grads = torch.func.vjp(gradients, *given)[1](tuple(grads[: len(given) - 1]))
        return None, *second_grads, *[None] * (4 + NUM_WEIGHED - len(given) + 1)


def gated_scan_backward(
    grad_out: Tensor, inputs: GatedInputs, out: Tensor, gates: Tensor, options: GatedOptions, backend: str
) -> GatedGradients:
    """Compute the gradients of the inputs from the gradient of the states and a scan's ``out`` and ``gates``.

    The result is differentiable.
    """
    return _backward_by_operator(grad_out, inputs, out, gates, make_flags(options, backend))


def gated_scan_op(inputs: GatedInputs, options: GatedOptions, requested: str) -> Tensor:
    """Compute the states ``(T, B, H)`` by the chosen design, differentiably."""
    design, _ = choose_design(inputs, options, requested)
    if design is REFERENCE:
        return gated_scan_reference(inputs, options)
    # the operator itself chooses the design of a backend: an exported program may run on another machine
    flags = make_flags(options, design.backend)
    if is_unobserved([part for part in inputs if part is not None]):
        check_inputs(inputs, options)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs[:NUM_WEIGHED]):
            return _apply(design, flags, *inputs)
        with torch.no_grad():
            return run_forward(design, inputs, options, False)[0]
    if not torch.compiler.is_compiling():
        register_flops()
    return torch.ops.torchrum.gated_scan(*inputs, *flags, False)[0]
