"""The input projection of a scan, ``x W_ih^T + b``, and its gradients."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrum.ops._onednn import explained_linear
from torchrum.ops.kernels.machine import autocast_dtype, autocasts
from torchrum.ops.kernels.precision import ExactMatmuls, bf16x3_linear, rounds_matmuls, working_dtype
from torchrum.ops.kernels.weights import WORTH_PADDING
from torchrum.ops.rum_scan.options import RumOptions

EXACT_UNITS = 512
"""Hidden units up to which the fused scan of lam = 0 goes forward in exact matmuls while torch rounds to TF32; beyond,
its matmuls have sixteen bits."""
SMALL_NUMBERS = 2**22
"""Numbers of a result up to which a GPU adds the bias by itself."""
PROJECTED_NUMBERS = 1024
"""Numbers of an input up to which a scan's kernel projects it: the host saves a launch, which costs more than what the
kernel takes longer."""
ROWS_AT_ONCE = 1024
"""Rows from which a GPU's sum over them shares each column out to many blocks."""


def padded_bias(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """``bias`` with zeros for eps, where that has none."""
    if bias is None or bias.shape[0] == weight.shape[0]:
        return bias
    return F.pad(bias, (0, weight.shape[0] - bias.shape[0]))


def project(x: Tensor, weight: Tensor, bias: Tensor | None, options: RumOptions) -> Tensor:
    """``x W_ih^T + b`` for any leading dimensions.

    TF32 would cost more than its ten bits: ReLU units whose sign it flips spoil the gradients far more than the
    rounding itself, and with lam other than 0 R accumulates every step's rotation. So this matmul has at least the
    digits of the recurrent one.

    Args:
        x: ``(..., I)``.
        weight: ``(3H, I)``, or ``(2H, I)`` without update gate.
        bias: as long as ``weight``, or without the H of eps; None for zeros.
    """
    if torch.compiler.is_compiling():  # the program keeps the precision that is set
        return F.linear(x, weight, padded_bias(weight, bias))
    return project_eagerly(x, weight, bias, options)


def project_eagerly(x: Tensor, weight: Tensor, bias: Tensor | None, options: RumOptions) -> Tensor:
    """``project`` where no compiler is at work."""
    if bias is not None and bias.shape[0] != weight.shape[0]:
        bias = padded_bias(weight, bias)
    if not rounds_matmuls(x):
        return _linear(x, weight, bias)
    if options.keeps_rotation or weight.shape[0] <= EXACT_UNITS * options.num_inputs:
        with ExactMatmuls():
            return _linear(x, weight, bias)
    return bf16x3_linear(x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.numel() >= WORTH_PADDING and (zeros := missing_zeros(x, weight)) is not None:
        inner, outer = zeros
        bias = None if bias is None else F.pad(bias, (0, outer))
        projected = F.linear(F.pad(x, (0, inner)), F.pad(weight, (0, inner, 0, outer)), bias)
        return projected[..., : weight.shape[0]].contiguous()
    if bias is None or not adds_apart(x, weight):
        return explained_linear(x, weight, bias)
    projected = F.linear(x, weight)
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return projected + bias
    return projected.add_(bias)


def missing_zeros(x: Tensor, weight: Tensor) -> tuple[int, int] | None:
    """Columns and rows of zeros behind ``weight`` that put the rows of a 16-bit matmul on 16-byte boundaries.

    None where all are there already, or on a CPU. Without them cuBLAS took 1.2 ms on an H200 for 19,200 rows of 1500
    numbers by 4500, and as long for each of the two gradients; with them a training step of two such layers took 12.2
    ms, about one less than in an earlier run without.
    """
    if not x.is_cuda or (autocast_dtype("cuda") or x.dtype).itemsize != 2:
        return None
    outer, inner = (-size % 8 for size in weight.shape)
    return (inner, outer) if inner or outer else None


def adds_apart(x: Tensor, weight: Tensor) -> bool:
    """Whether it costs less to add the bias apart from the matmul, by a second launch or by the scan that reads it.

    With a bias torch asks cuBLASLt, which looks for an algorithm on every call: 80 us of host time where a matmul takes
    30. In 16 bits the sum would be rounded twice.
    """
    if not x.is_cuda or x.dtype is not torch.float32 or autocasts(x):
        return False
    return x.numel() // x.shape[-1] * weight.shape[0] <= SMALL_NUMBERS


def kernel_projects(x: Tensor) -> bool:
    """Whether a scan's kernel may project ``x``, outside of autocast."""
    return x.is_cuda and x.dtype is torch.float32 and x.numel() <= PROJECTED_NUMBERS


def project_backward(
    grad: Tensor, x: Tensor, weight: Tensor, grad_bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, the weight and the padded bias, where ``needs`` asks for them; the last may be known."""
    if needs[2] and grad_bias is None:
        grad_bias = sum_rows(grad)
    outer, inner = weight.shape
    if x.numel() >= WORTH_PADDING and (zeros := missing_zeros(x, weight)) is not None:
        x, grad = F.pad(x, (0, zeros[0])), F.pad(grad, (0, zeros[1]))
        weight = F.pad(weight, (0, zeros[0], 0, zeros[1]))
    grad_x = torch.matmul(grad, weight) if needs[0] else None
    grad_weight = grad.reshape(-1, grad.shape[-1]).t().mm(x.reshape(-1, x.shape[-1])) if needs[1] else None
    if weight.shape != (outer, inner):
        grad_x = None if grad_x is None else grad_x[..., :inner].contiguous()
        grad_weight = None if grad_weight is None else grad_weight[:outer, :inner].contiguous()
    return grad_x, grad_weight, grad_bias


def sum_rows(x: Tensor) -> Tensor:
    """Sum of ``(T, B, W)`` over steps and batch, ``(W,)``."""
    if x.is_cuda and x.shape[0] * x.shape[1] >= ROWS_AT_ONCE:
        return sum_in_turn(x)
    return x.sum((0, 1))


def sum_in_turn(x: Tensor) -> Tensor:
    """``sum_rows`` over one axis after the other, the shorter one first.

    Where torch shares a column out to many blocks it takes 512 bytes of memory per block and column, as many as 130 MB
    in all: it would be the peak of a training call.
    """
    total = x.sum(0 if x.shape[0] <= x.shape[1] else 1, dtype=working_dtype(x.dtype)).sum(0)
    return total if total.dtype is x.dtype else total.to(x.dtype)
