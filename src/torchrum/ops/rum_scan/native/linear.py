"""The projection of the input in C: torch's own spends most of its time on pages of memory that it touches first."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from .build import load_library
from .library import count_threads
from .watching import is_unwatched

SMALL_LINEAR = 1_000_000
"""Multiplications below which torch's own linear is as fast."""


def linear_applies(x: Tensor, weight: Tensor) -> bool:
    """Whether ``native_linear`` can stand in for torch's, and there is enough to do."""
    return is_unwatched(x, weight) and x.numel() * weight.shape[0] >= SMALL_LINEAR  # sizes may be symbols where watched


def native_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x weight^T + bias``, as :func:`torch.nn.functional.linear`, where ``linear_applies``.

    Args:
        x: ``(..., I)``. weight: ``(G, I)``. bias: ``(G,)`` or None.

    Returns:
        ``(..., G)``
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, bias)
    return _forward(x, weight, bias)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    _call("torchrum_linear", x, weight, bias, y)
    return y


def _call(name: str, x: Tensor, weight: Tensor, *others: Tensor | None) -> None:
    """Call the C function ``name`` on tensors, of which those that are read need not be contiguous."""
    parts = [None if part is None else part.contiguous() for part in (x, weight, *others)]
    (units, features), rows = weight.shape, x.numel() // weight.shape[1]
    library = load_library(x.dtype == torch.float64)
    assert isinstance(library, ctypes.CDLL)
    sizes = map(ctypes.c_int64, (rows, features, units, count_threads(rows * features * units, rows)))
    pointers = (ctypes.c_void_p(None if part is None else part.data_ptr()) for part in parts)
    if getattr(library, name)(*sizes, *pointers) != 0:
        raise MemoryError(f"the native projection found no memory to pack a weight of {units} x {features} numbers.")


def linear_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias where ``needs`` asks for them and ``linear_applies``."""
    to_x, to_weight, to_bias = needs
    grad_x = x.new_empty(x.shape) if to_x else None
    grad_weight = weight.new_empty(weight.shape) if to_weight or to_bias else None
    grad_bias = weight.new_empty(weight.shape[0]) if to_bias else None
    _call("torchrum_linear_backward", x, weight, grad, grad_x, grad_weight, grad_bias)
    return grad_x, grad_weight if to_weight else None, grad_bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        if torch.is_grad_enabled() or not is_unwatched(grad, weight):  # it may be differentiated or batched in turn
            rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
            return (
                grad @ weight if to_x else None,
                (rows.t() @ grads).t() if to_weight else None,
                grads.sum(0) if to_bias else None,
            )
        return linear_gradients(grad, x, weight, ctx.needs_input_grad)
