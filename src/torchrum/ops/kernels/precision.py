"""The precision of matmuls: TF32, and the bf16x3 matmul that replaces it."""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrum.ops.kernels.machine import autocasts


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """16-bit dtypes carry the state and do everything but the matmul in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def rounds_matmuls(x: Tensor) -> bool:
    """Whether a matmul of ``x`` would be TF32."""
    if not x.is_cuda or x.dtype is not torch.float32:
        return False
    return tf32_allowed() and not autocasts(x) and has_tf32(x.device)


@functools.cache
def has_tf32(device: torch.device) -> bool:
    """Whether a GPU has TF32 matmuls."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def tf32_allowed() -> bool:
    """Whether torch takes TF32 for float32 matmuls on a GPU, by either of its two interfaces."""
    read = torch._C._get_fp32_precision_getter  # torch.backends calls it, ten times slower
    asked = read("cuda", "matmul")
    return (read("generic", "all") if asked == "none" else asked) == "tf32"


class ExactMatmuls:
    """Context manager for FP32 matmuls (TF32 off) on the GPU, by the interface that set the precision.

    A class: a generator would take longer than setting the precision.
    """

    def __enter__(self) -> None:
        self.older: str | None = None
        try:
            self.older = torch.get_float32_matmul_precision()
        except RuntimeError:  # set by the newer interface, and the older one then raises
            self.newer = torch.backends.cuda.matmul.fp32_precision
            torch.backends.cuda.matmul.fp32_precision = "ieee"
            return
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *error: object) -> None:
        if self.older is None:
            torch.backends.cuda.matmul.fp32_precision = self.newer
        else:
            torch.set_float32_matmul_precision(self.older)


BF16 = torch.bfloat16  # as wide in range as float32


def split_left(x: Tensor) -> Tensor:
    """``(..., K)`` -> ``(..., 3 K)``: head, rest, head."""
    head, rest = _split(x)
    return torch.cat((head, rest, head), -1)


def split_right(x: Tensor) -> Tensor:
    """The same for the other factor, whose inner axis is last as well: head, head, rest."""
    head, rest = _split(x)
    return torch.cat((head, head, rest), -1)


def matmul_16bit(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """``left @ right`` of a 16-bit dtype, in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return torch.mm(left.float(), right.float(), out=out)  # the same numbers, one matmul at a time


def bf16x3_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`torch.nn.functional.linear` with this matmul; the gradients take torch's own."""
    y = _SplitMatmul.apply(x, weight)
    return y if bias is None else y + bias


class _SplitMatmul(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        y = matmul_16bit(split_left(_rows(x)), split_right(weight).t())
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        dweight = _rows(grad).t() @ _rows(x) if ctx.needs_input_grad[1] else None
        return dx, dweight

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dweight: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        parts = ([] if dx is None else [F.linear(dx, weight)]) + ([] if dweight is None else [F.linear(x, dweight)])
        return sum(parts[1:], parts[0])


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    head = x.to(BF16)
    return head, (x - head).to(BF16)
