"""The bf16x3 matmul: float32 operands as three bfloat16 ones, where torch rounds to TF32. As fast, with 16 bits for 10.

``x = head + rest`` with both in bfloat16, so ``x y`` is ``head head' + rest head' + head rest'`` up to ``rest rest'``.
Side by side along the inner axis they are one matmul of three times its length, summed in float32.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
