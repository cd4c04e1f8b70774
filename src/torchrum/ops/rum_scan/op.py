"""The scan as two opaque operators: it compiles as a whole, exports with its gradients and composes with torch.func.

As in torch's operators, the derivative is the operator's own kernel for the Autograd key: a rule from
``register_autograd`` fails under ``torch.func.grad``, and ``torch.export`` loses a Function around the operator. The
backward is an operator too. If it is itself differentiated, it is a Function that uses the reference. Below the
operators are their rules for vmap and for the FLOP counter.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from torchrum.ops.kernels.flops import counts_flops
from torchrum.ops.kernels.machine import without_autocast
from torchrum.ops.rum_scan.designs import OPERATOR_OPTIONS, PERSISTENT, STEPWISE, choose_design
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.reference import rum_scan_reference
from torchrum.ops.rum_scan.types import NUM_GRADIENTS, Gradients, Residuals, Results, ScanInputs

_OPTION_SCHEMA = (
    "float lam, float? eta, str activation, bool update_gate, bool layer_norm, str ln_order, float ln_eps, "
    "float zoneout, bool training, str backend"
)
_OPTION_NAMES = [part.split()[-1] for part in _OPTION_SCHEMA.split(", ")][:-1]
assert set(_OPTION_NAMES) == OPERATOR_OPTIONS

_INPUTS = (
    "Tensor xp, Tensor h0, Tensor? R0, Tensor weight_hh, Tensor? ln_weight, Tensor? ln_bias, "
    "Tensor? lengths, Tensor? seed"
)
NUM_INPUTS = len(ScanInputs._fields)
assert [part.split()[-1] for part in _INPUTS.split(", ")] == list(ScanInputs._fields)
# Programs that were already exported use these names, so `gates` and `ends` are kept: they are the Residuals.
# save: whether to return the residuals for the backward; without it the last two results are empty
library.define("torchrum::rum_scan", f"({_INPUTS}, {_OPTION_SCHEMA}, bool save) -> (Tensor, Tensor, Tensor, Tensor)")
library.define(
    "torchrum::rum_scan_backward",
    f"(Tensor grad_out, Tensor? grad_R, {_INPUTS}, Tensor out, Tensor gates, Tensor R_n, Tensor ends, "
    f"{_OPTION_SCHEMA}, bool need_R0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


Flags = tuple[Any, ...]
"""The options in the order of the operators' schema, and the backend."""


def make_flags(options: RumOptions, backend: str) -> Flags:
    return (*(getattr(options, name) for name in _OPTION_NAMES), backend)


@functools.lru_cache(64)
def _options(flags: Flags) -> tuple[RumOptions, str]:
    return RumOptions(**dict(zip(_OPTION_NAMES, flags[:-1], strict=True))), flags[-1]


def _or_empty(part: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if part is None else part


def _or_none(part: Tensor) -> Tensor | None:
    return None if part.numel() == 0 and part.dim() == 1 else part


def _flatten(results: Results, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(_or_empty(part, like) for part in (results.out, results.R, *results.residuals))


def _check(inputs: ScanInputs, options: RumOptions) -> None:
    """Raise if the tensors do not match, since an exported program or a user may call the operators directly."""
    xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed = inputs
    normalised = (ln_weight is not None, ln_bias is not None)
    if normalised != (options.layer_norm, options.layer_norm):
        raise ValueError("torchrum::rum_scan: ln_weight and ln_bias must be given with layer_norm, and only then.")
    if seed is None and options.draws:
        raise ValueError("torchrum::rum_scan: zoneout in training needs a seed.")
    if h0.dim() != 2:
        raise ValueError(f"torchrum::rum_scan: h0 has shape {tuple(h0.shape)}, but it must be (B, H).")
    B, H = h0.shape
    norm = (options.num_inputs * H,)
    wanted = {
        "xp": (xp, (xp.shape[0] if xp.dim() else 0, B, options.num_inputs * H)),
        "R0": (R0, (B, H, H)),
        "weight_hh": (weight_hh, (options.num_gates * H, H)),
        "ln_weight": (ln_weight, norm),
        "ln_bias": (ln_bias, norm),
        "lengths": (lengths, (B,)),
    }
    for name, (part, shape) in wanted.items():
        if part is not None and part.shape != shape:
            raise ValueError(f"torchrum::rum_scan: {name} has shape {tuple(part.shape)}, but it must be {shape}.")


@library.impl("torchrum::rum_scan", "default")
@torch.no_grad()  # an exported program calls the operator directly, with weights that require gradients
def _forward(*args: Any) -> tuple[Tensor, ...]:
    inputs, flags, save = ScanInputs(*args[:NUM_INPUTS]), args[NUM_INPUTS:-1], args[-1]
    options, backend = _options(flags)
    _check(inputs, options)
    design, _ = choose_design(inputs, options, backend, strict=False)
    with without_autocast(inputs.xp):  # autocast would round R and the carried state at every step
        results = design.module.forward(inputs, options, save)
    if not save:
        return _flatten(results._replace(residuals=Residuals()), inputs.xp)
    (gates, kept), R = results.residuals, results.R
    if R is not None and kept is None:  # no checkpoint: return the shape that the fake kernel declares
        results = results._replace(residuals=Residuals(gates, R.new_empty(0, *R.shape)))
    return _flatten(results, inputs.xp)


def unrolled(*args: Any) -> tuple[Tensor, ...]:
    """Compute the forward operator by the reference, step by step; the residuals for the backward are left empty."""
    inputs, (options, _) = ScanInputs(*args[:NUM_INPUTS]), _options(tuple(args[NUM_INPUTS:-1]))
    return _flatten(Results(*rum_scan_reference(inputs, options), Residuals()), inputs.xp)


@library.impl("torchrum::rum_scan_backward", "default")
@torch.no_grad()
def _backward(*args: Any) -> tuple[Tensor, ...]:
    grad_out, grad_R = args[:2]
    inputs, results, flags, need_R0 = _unpack_backward(args)
    options, backend = _options(flags)
    _check(inputs, options)
    if grad_out.shape != results.out.shape:
        raise ValueError(
            f"torchrum::rum_scan_backward: grad_out has shape {tuple(grad_out.shape)}, but it must be "
            f"{tuple(results.out.shape)}, as out has."
        )
    (design, _), kept = choose_design(inputs, options, backend, strict=False), results.residuals.kept
    if design in (PERSISTENT, STEPWISE):  # use the forward's design: under vmap its batch size may be different
        design = STEPWISE if kept is None else PERSISTENT
    with without_autocast(inputs.xp):
        grads = design.module.backward(grad_out, grad_R, inputs, results, options, need_R0)
    return tuple(_or_empty(part, inputs.xp) for part in grads[:NUM_GRADIENTS])


def _unpack_backward(args: Sequence[Any]) -> tuple[ScanInputs, Results, Flags, bool]:
    """Unpack the arguments of the backward operator after the two gradients."""
    end = 2 + NUM_INPUTS
    out, gates, R_n, kept = args[end : end + 4]
    results = Results(out, _or_none(R_n), Residuals(_or_none(gates), _or_none(kept)))
    return ScanInputs(*args[2:end]), results, tuple(args[end + 4 : -1]), args[-1]


@library.register_fake("torchrum::rum_scan")
def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    inputs, flags, save = ScanInputs(*args[:NUM_INPUTS]), args[NUM_INPUTS:-1], args[-1]
    options, backend = _options.__wrapped__(flags)  # a compiler's symbolic numbers cannot be hashed
    design, _ = choose_design(inputs, options, backend, strict=False)
    results = design.module.empty_results(inputs, options)
    return _flatten(results if save else results._replace(residuals=Residuals()), inputs.xp)


@library.register_fake("torchrum::rum_scan_backward")
def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    inputs, results, _, need_R0 = _unpack_backward(args)
    like = Gradients(*inputs[:6])._replace(R0=results.R if need_R0 else None)
    return tuple(
        inputs.xp.new_empty(0) if part is None else torch.empty_like(part, memory_format=torch.contiguous_format)
        for part in like[:NUM_GRADIENTS]
    )


class _RumScan(torch.autograd.Function):
    """The derivative of the operator; ``_autograd`` below is its only caller."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        # keep gradients on: a Function turns them off, but another functorch level may be below this one
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            output = torch.ops.torchrum.rum_scan(*args[:-1], True)
        ctx.flags = args[NUM_INPUTS:-1]
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args[:NUM_INPUTS], *output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_R: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
        *given, out, R_n, gates, kept = ctx.saved_tensors
        inputs, results = ScanInputs(*given), Results(out, R_n, Residuals(gates, kept))
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = backward_by_operator(grad_out, grad_R, inputs, results, ctx.flags, ctx.needs_input_grad[2])
        # lengths, seed, flags and save have no gradients
        return *grads, *[None] * (NUM_INPUTS - len(grads) + len(ctx.flags) + 1)


# Function.apply without its inspect.signature, which takes as long as a small scan; ``forward`` has no defaults to bind
_apply = super(torch.autograd.Function, _RumScan).apply


@library.impl("torchrum::rum_scan", "Autograd")
def _autograd(*args: Any) -> tuple[Tensor, ...]:
    """Run the operator with gradients.

    The gradients belong to the operator itself, as in torch's own operators: a program of ``torch.export`` calls only
    the operator, and functorch dispatches each of its levels to this key.
    """
    if forward_ad._current_level >= 0:  # only a program that calls the operator directly: rum_scan uses the reference
        raise NotImplementedError(
            "torchrum::rum_scan has no forward-mode derivative. Differentiate the RUM itself instead of a program that "
            "was exported from it, or take the gradient in reverse mode."
        )
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        with enable_single_level_autograd_function():  # functorch allows a Function with ctx in its forward only here
            return _apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.torchrum.rum_scan(*args)


class _RumScanBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        *tensors, flags = args
        return torch.ops.torchrum.rum_scan_backward(*tensors, *flags)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.flags = inputs
        ctx.save_for_backward(*tensors[:10])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Compute the second derivatives, by differentiating the reference twice."""
        options, _ = _options(ctx.flags[:-1])
        *tensors, lengths, seed = ctx.saved_tensors  # grad_out, grad_R, xp, h0, R0, weight_hh, ln_weight, ln_bias
        given = [i for i, part in enumerate(tensors) if part is not None]
        inputs = [i for i in given if i >= 2]

        def gradients(*values: Tensor) -> tuple[Tensor, ...]:
            """Compute the backward as a function of everything that it depends on."""
            full = dict(zip(given, values, strict=True))

            def scan(*values: Tensor) -> Any:
                parts: dict[int, Any] = dict(zip(inputs, values, strict=True))
                scan_inputs = ScanInputs._make((*(parts.get(i) for i in range(2, 8)), lengths, seed))
                out, R = rum_scan_reference(scan_inputs, options)
                return (out, R) if 1 in full else (out,)

            pullback = torch.func.vjp(scan, *(full[i] for i in inputs))[1]
            return pullback((full[0], full[1]) if 1 in full else (full[0],))

        pullback = torch.func.vjp(gradients, *(tensors[i] for i in given))[1]
        needed = [grads[i - 2] if i != 4 or ctx.flags[-1] else torch.zeros_like(tensors[4]) for i in inputs]
        second_grads = dict(zip(given, pullback(tuple(needed)), strict=True))
        return *(second_grads.get(i) for i in range(8)), *[None] * 7


def backward_by_operator(
    grad_out: Tensor, grad_R: Tensor | None, inputs: ScanInputs, results: Results, flags: Flags, need_R0: bool
) -> Gradients:
    """Compute the gradients of a scan's inputs by the backward operator, differentiably if gradients are enabled."""
    out, R_n, (gates, kept) = results
    saved = (out, *(_or_empty(part, out) for part in (gates, R_n, kept)))
    args = (grad_out, grad_R, *inputs, *saved)
    if torch.is_grad_enabled():  # this backward is itself differentiated
        grads = _RumScanBackward.apply(*args, (*flags, need_R0))
    else:
        grads = torch.ops.torchrum.rum_scan_backward(*args, *flags, need_R0)
    is_given = [part is not None for part in inputs[:6]]
    is_given[2] = need_R0
    parts: list[Any] = [grad if given else None for given, grad in zip(is_given, grads, strict=True)]
    return Gradients(*parts)


def rum_scan_op(inputs: ScanInputs, options: RumOptions, backend: str) -> tuple[Tensor, Tensor | None]:
    """Compute the states ``(T, B, H)`` and the last R, differentiably, by the given backend or design."""
    out, R_n, _, _ = torch.ops.torchrum.rum_scan(*inputs, *make_flags(options, backend), False)
    return out, R_n if options.keeps_rotation else None


# vmap: a mapped dimension is folded into the batch, since the rows of a batch are independent. The samples run one by
# one if the weights are mapped, or with layer norm (its gradients are sums over the batch) or zoneout (its masks depend
# on the row).

Dims = tuple[int | None, ...]


def _run_one_by_one(op: Callable, size: int, dims: Dims, args: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], Dims]:
    samples = [
        op(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, dims, strict=True)))
        for i in range(size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
    return stacked, (0,) * len(stacked)


def _fold(x: Tensor | None, dim: int | None, at: int, size: int) -> Tensor | None:
    """Fold the mapped dimension into the batch dimension ``at`` of the sample; an unmapped tensor is repeated.

    The result is contiguous, as in a call without vmap: flattening a batch of one gives a view with another order.
    """
    if x is None:
        return None
    x = x.unsqueeze(at).expand(*x.shape[:at], size, *x.shape[at:]) if dim is None else x.movedim(dim, at)
    return x.flatten(at, at + 1).contiguous()


def _unfold(x: Tensor, at: int, size: int) -> Tensor:
    return x.unflatten(at, (size, -1))


_BATCH_DIM = {
    "xp": 1,
    "h0": 0,
    "R0": 0,
    "lengths": 0,
    "grad_out": 1,
    "grad_R": 0,
    "out": 1,
    "gates": 1,
    "R_n": 0,
    "kept": 1,
}
_FORWARD = ScanInputs._fields
_BACKWARD = ("grad_out", "grad_R", *_FORWARD, "out", "gates", "R_n", "kept")


def _folded(names: tuple[str, ...], size: int, dims: Dims, args: tuple[Any, ...]) -> list[Any] | None:
    """Return the arguments with the mapped dimension folded into the batch, or None if that would be wrong."""
    given = dict(zip(names, zip(args, dims, strict=False), strict=False))
    if any(given[name][1] is not None for name in ("weight_hh", "ln_weight", "ln_bias", "seed")):
        return None
    if given["ln_weight"][0] is not None or given["seed"][0] is not None:
        return None
    folded = []
    for name, (arg, dim) in given.items():
        empty = arg is not None and arg.dim() == 1 and arg.numel() == 0  # a result that the design does not have
        foldable = name in _BATCH_DIM and not empty
        folded.append(_fold(arg, dim, _BATCH_DIM[name], size) if foldable else arg)
    return [*folded, *args[len(names) :]]


@library.register_vmap("torchrum::rum_scan")
def _vmap_forward(info: Any, dims: Dims, *args: Any) -> tuple[tuple[Tensor, ...], Dims]:
    op, size = torch.ops.torchrum.rum_scan, info.batch_size
    folded = _folded(_FORWARD, size, dims, args)
    if folded is None:
        return _run_one_by_one(op, size, dims, args)
    results = op(*folded)
    batch_dims = tuple(None if part.dim() == 1 else at for part, at in zip(results, (1, 0, 1, 1), strict=True))
    return tuple(
        x if at is None else _unfold(x, at, size) for x, at in zip(results, batch_dims, strict=True)
    ), batch_dims


@library.register_vmap("torchrum::rum_scan_backward")
def _vmap_backward(info: Any, dims: Dims, *args: Any) -> tuple[tuple[Tensor, ...], Dims]:
    op, size = torch.ops.torchrum.rum_scan_backward, info.batch_size
    folded = _folded(_BACKWARD, size, dims, args)
    if folded is None:
        return _run_one_by_one(op, size, dims, args)
    grad_xp, grad_h0, grad_R0, _, *no_ln = op(*folded)
    grad_xp, grad_h0 = _unfold(grad_xp, 1, size), _unfold(grad_h0, 0, size)
    named = dict(zip(_BACKWARD, folded, strict=False))
    states = torch.cat([named["h0"].to(named["out"].dtype).unsqueeze(0), named["out"][:-1]])
    grad_gates = grad_xp[..., : named["weight_hh"].shape[0]]
    grad_weight = torch.einsum("tvbg,tvbh->vgh", grad_gates, _unfold(states, 1, size))  # one matrix per sample
    R_dim = None if grad_R0.dim() == 1 else 0
    grad_R0 = grad_R0 if R_dim is None else _unfold(grad_R0, 0, size)
    return (grad_xp, grad_h0, grad_R0, grad_weight, *no_ln), (1, 0, R_dim, 0, None, None)


@counts_flops("rum_scan")
def scan_flops(xp: Any, h0: Any, R0: Any, weight_hh: Any, *rest: Any, out_shape: Any = None) -> int:
    """Count two operations for each multiply-add of a matmul, from shapes: with the weight and, with lam 1, with R.

    R e, R n and R h are three matrix-vector products, and the step subtracts a matrix of rank 2 from R.
    """
    (T, B, _), (rows, H) = xp, weight_hh
    lam = rest[4]  # after ln_weight, ln_bias, lengths and seed
    return T * B * (2 * rows * H + (10 * H * H if lam != 0 else 0))


@counts_flops("rum_scan_backward")
def scan_backward_flops(grad_out: Any, grad_R: Any, *args: Any, out_shape: Any = None) -> int:
    """Count twice the forward, as for every matmul: once for each operand's gradient."""
    inputs, flags = args[:8], args[12:]  # out, gates, R_n and ends are in between
    return 2 * scan_flops(*inputs, *flags)
