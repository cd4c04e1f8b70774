"""Copies of large tensors by the scan's own threads: torch's would spin on the cores that the scan needs next."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from .build import load_library
from .library import count_threads
from .watching import is_unwatched

SMALL_COPY = 32768
"""Numbers below which torch copies with one thread too."""


def copied(x: Tensor) -> Tensor:
    """A contiguous copy of ``x``, differentiable, as ``x.clone()``."""
    if not is_unwatched(x, x) or x.numel() < SMALL_COPY or not x.is_contiguous():
        return x.clone(memory_format=torch.contiguous_format)
    return _Copy.apply(x) if torch.is_grad_enabled() and x.requires_grad else _copy(x)


def _copy(x: Tensor) -> Tensor:
    y, count = torch.empty_like(x), x.numel()
    library = load_library(x.dtype is torch.float64)
    assert isinstance(library, ctypes.CDLL)
    sizes = map(ctypes.c_int64, (count, count_threads(count, count)))
    if library.torchrum_copy(*sizes, ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr())) != 0:
        raise MemoryError(f"the native copy of {count} numbers found no memory for its threads.")
    return y


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _copy(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
