"""vmap rules of the two operators: a mapped dimension joins the batch, since the rows of a batch are independent.

Where the weights themselves are mapped, or layer norm or zoneout tie a result to its place, the samples run in turn.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrum.ops.rum_scan.types import ScanInputs

Dims = tuple[int | None, ...]


def _in_turn(op: Callable, size: int, dims: Dims, args: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], Dims]:
    samples = [
        op(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, dims, strict=True)))
        for i in range(size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
    return stacked, (0,) * len(stacked)


def _fold(x: Tensor | None, dim: int | None, at: int, size: int) -> Tensor | None:
    """Join the mapped dimension to the batch dimension, number ``at`` of the sample; an unmapped tensor is repeated.

    Contiguous, as a call without vmap would have it: flattening a batch of one leaves a view in another order.
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
    """The arguments with the mapped dimension folded in, or None where that would be wrong."""
    given = dict(zip(names, zip(args, dims, strict=False), strict=False))
    if any(given[name][1] is not None for name in ("weight_hh", "ln_weight", "ln_bias", "seed")):
        return None
    if given["ln_weight"][0] is not None or given["seed"][0] is not None:
        return None
    folded = []
    for name, (arg, dim) in given.items():
        empty = arg is not None and arg.dim() == 1 and arg.numel() == 0  # what a design leaves out
        foldable = name in _BATCH_DIM and not empty
        folded.append(_fold(arg, dim, _BATCH_DIM[name], size) if foldable else arg)
    return [*folded, *args[len(names) :]]


def forward_rule(info: Any, dims: Dims, *args: Any) -> tuple[tuple[Tensor, ...], Dims]:
    op, size = torch.ops.torchrum.rum_scan, info.batch_size
    folded = _folded(_FORWARD, size, dims, args)
    if folded is None:
        return _in_turn(op, size, dims, args)
    results = op(*folded)
    places = tuple(None if part.dim() == 1 else at for part, at in zip(results, (1, 0, 1, 1), strict=True))
    return tuple(x if at is None else _unfold(x, at, size) for x, at in zip(results, places, strict=True)), places


def backward_rule(info: Any, dims: Dims, *args: Any) -> tuple[tuple[Tensor, ...], Dims]:
    op, size = torch.ops.torchrum.rum_scan_backward, info.batch_size
    folded = _folded(_BACKWARD, size, dims, args)
    if folded is None:
        return _in_turn(op, size, dims, args)
    grad_xp, grad_h0, grad_R0, _, *no_ln = op(*folded)
    grad_xp, grad_h0 = _unfold(grad_xp, 1, size), _unfold(grad_h0, 0, size)
    named = dict(zip(_BACKWARD, folded, strict=False))
    states = torch.cat([named["h0"].to(named["out"].dtype).unsqueeze(0), named["out"][:-1]])
    grad_gates = grad_xp[..., : named["weight_hh"].shape[0]]
    grad_weight = torch.einsum("tvbg,tvbh->vgh", grad_gates, _unfold(states, 1, size))  # one matrix per sample
    R_dim = None if grad_R0.dim() == 1 else 0
    grad_R0 = grad_R0 if R_dim is None else _unfold(grad_R0, 0, size)
    return (grad_xp, grad_h0, grad_R0, grad_weight, *no_ln), (1, 0, R_dim, 0, None, None)
