"""Matmuls by torch: their precision, the bf16x3 matmul in place of TF32, a cell's weights and their gradients."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrum.ops.kernels.machine import autocast_dtype, autocasts, linear_with_amx_advice, without_autocast


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the state and of everything but the matmul: float32 for 16-bit dtypes, else ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def rounds_matmuls(x: Tensor) -> bool:
    """Return whether a matmul of ``x`` would use TF32."""
    if not x.is_cuda or x.dtype is not torch.float32:
        return False
    return tf32_allowed() and not autocasts(x) and has_tf32(x.device)


@functools.cache
def has_tf32(device: torch.device) -> bool:
    """Return whether a GPU has TF32 matmuls."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def tf32_allowed() -> bool:
    """Return whether torch uses TF32 for float32 matmuls on a GPU, as set by either of its two interfaces."""
    read = torch._C._get_fp32_precision_getter  # ten times faster than through torch.backends
    setting = read("cuda", "matmul")
    return (read("generic", "all") if setting == "none" else setting) == "tf32"


class ExactMatmuls:
    """Context manager for FP32 matmuls (TF32 off) on the GPU, by the interface that set the precision.

    It is a class, since a generator would take longer than setting the precision.
    """

    def __enter__(self) -> None:
        self.old_precision: str | None = None
        try:
            self.old_precision = torch.get_float32_matmul_precision()
        except RuntimeError:  # the older interface raises if the precision was set by the newer one
            self.new_precision = torch.backends.cuda.matmul.fp32_precision
            torch.backends.cuda.matmul.fp32_precision = "ieee"
            return
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *error: object) -> None:
        if self.old_precision is None:
            torch.backends.cuda.matmul.fp32_precision = self.new_precision
        else:
            torch.set_float32_matmul_precision(self.old_precision)


BF16 = torch.bfloat16  # has the range of float32


def split_left(x: Tensor) -> Tensor:
    """Split float32 ``(..., K)`` into bfloat16 ``(..., 3 K)``: head, rest, head."""
    head, rest = _split(x)
    return torch.cat((head, rest, head), -1)


def split_right(x: Tensor) -> Tensor:
    """Split the other factor, whose inner axis is last too: head, head, rest."""
    head, rest = _split(x)
    return torch.cat((head, head, rest), -1)


def matmul_16bit(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``left @ right`` in float32, for operands of a 16-bit dtype."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return torch.mm(left.float(), right.float(), out=out)  # products of 16-bit numbers are exact in float32


def bf16x3_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`torch.nn.functional.linear` with the bf16x3 matmul; the gradients use torch's own matmul."""
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


class CellWeights(NamedTuple):
    """Parameters of one cell, in the layout of its scan.

    An LSTM has 4 row blocks i, j, f, o and a layer norm of 5 (with c). A RUM has 3 row blocks tau, u, eps, of which eps
    has no rows in ``weight_hh``, and a layer norm of 3. ``weight_ih`` is None for a cell without input. If the input is
    already projected, ``weight_ih`` and ``bias`` are None.
    """

    weight_ih: Tensor | None
    weight_hh: Tensor
    bias: Tensor | None
    ln_weight: Tensor | None
    ln_bias: Tensor | None


MIN_NUMBERS_TO_PAD = 2**20
"""Smallest operand, in numbers, that is copied to aligned rows. At 6784 x 100 float32 on an H200 copying both operands
takes 7 us and four launches, and the matmul itself 8 us."""


def recurrent_weight_gradient(grads: Tensor, rows: int, h0: Tensor | None, out: Tensor) -> Tensor:
    """Sum (gradient of the raw gates)^T (state before the step) over steps: ``(rows, H)`` in the dtype of ``grads``.

    Args:
        grads: ``(T, B, ...)``, gradients of the raw gates in the first ``rows`` columns.
        rows: rows of the weight, the number of gates times H.
        h0: ``(B, H)``, the state before the first step; None if it was zero.
        out: ``(T, B, H)``, the states after each step.
    """
    if autocasts(grads):
        with without_autocast(grads):  # autocast would round float32
            return recurrent_weight_gradient(grads, rows, h0, out)
    (T, B, H), width = out.shape, grads.shape[2]
    grads, out, steps = grads.contiguous(), out.contiguous(), (T - 1) * B
    if T == 0 or (T == 1 and h0 is None):
        return grads.new_zeros(rows, H)
    start, first = grads.storage_offset(), None
    if h0 is not None:
        h0 = h0 if h0.dtype is grads.dtype else h0.to(grads.dtype)
        first = grads.as_strided((rows, B), (1, width), start).mm(h0)
    if T == 1:
        assert first is not None
        return first
    # one view per operand: at small sizes a chain of slices takes as long as the matmul
    right = out.as_strided((steps, H), (H, 1), out.storage_offset())
    if steps * width < MIN_NUMBERS_TO_PAD or not (
        _misaligned(grads, steps * rows, width) or _misaligned(out, steps * H, H)
    ):
        left = grads.as_strided((rows, steps), (1, width), start + B * width)
        return left.mm(right) if first is None else first.addmm_(left, right)
    left = aligned_rows(grads.as_strided((steps, rows), (width, 1), start + B * width))
    rest = left.t().mm(aligned_rows(right))[:rows, :H]
    return rest if first is None else first.add_(rest)


def weight_gradient(grad_gates: Tensor, inputs: Tensor) -> Tensor:
    """Sum gate gradients ``(T, B, G*H)`` times inputs ``(T, B, K)`` over all steps and rows: ``(G*H, K)``."""
    left, right = aligned_rows(grad_gates.flatten(0, 1)), aligned_rows(inputs.flatten(0, 1))
    return (left.t() @ right)[: grad_gates.shape[-1], : inputs.shape[-1]]


def aligned_rows(x: Tensor) -> Tensor:
    """Return ``x`` with rows on 16-byte boundaries, zero-padded if needed: cuBLAS is several times slower otherwise.

    Small operands are returned unchanged: their matmul takes less time than the padding.
    """
    return F.pad(x, (0, -x.shape[1] % (16 // x.element_size()))) if _misaligned(x, x.numel(), x.stride(0)) else x


def _misaligned(x: Tensor, count: int, stride: int) -> bool:
    """Return whether ``count`` numbers of ``x``, in rows ``stride`` apart, are worth a copy to aligned rows."""
    return count >= MIN_NUMBERS_TO_PAD and x.is_cuda and stride % (16 // x.element_size()) != 0


def reference_gradients(
    scan: Any, inputs: tuple[Any, ...], grads: tuple[Tensor | None, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Compute differentiable gradients of ``scan(*inputs)``; None for inputs that need no gradient."""
    pairs = [(out, grad) for out, grad in zip(scan(*inputs), grads, strict=True) if grad is not None]
    chosen = [number for number, wants in enumerate(wanted) if wants]
    found = torch.autograd.grad(
        [out for out, _ in pairs], [inputs[n] for n in chosen], [grad for _, grad in pairs],
        create_graph=True, allow_unused=True,
    )  # fmt: skip
    by_number = dict(zip(chosen, found, strict=True))
    return tuple(by_number.get(number) for number in range(len(inputs)))


MAX_SEPARATE_BIAS_NUMBERS = 2**22
"""Largest result, in numbers, to which a GPU adds the bias in a separate launch."""
MIN_SPLIT_ROWS = 1024
"""Number of rows from which torch's sum over them on a GPU divides each column among many blocks."""


def padded_bias(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``bias``, padded with zeros for eps if eps has no bias."""
    if bias is None or bias.shape[0] == weight.shape[0]:
        return bias
    return F.pad(bias, (0, weight.shape[0] - bias.shape[0]))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute :func:`torch.nn.functional.linear`, with padded operands if this is faster."""
    if x.numel() >= MIN_NUMBERS_TO_PAD and (padding := alignment_padding(x, weight)) is not None:
        inner, outer = padding
        bias = None if bias is None else F.pad(bias, (0, outer))
        projected = F.linear(F.pad(x, (0, inner)), F.pad(weight, (0, inner, 0, outer)), bias)
        return projected[..., : weight.shape[0]].contiguous()
    if bias is None or not adds_bias_separately(x, weight):
        return linear_with_amx_advice(x, weight, bias)
    projected = F.linear(x, weight)
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return projected + bias
    return projected.add_(bias)


def alignment_padding(x: Tensor, weight: Tensor) -> tuple[int, int] | None:
    """Return how many columns and rows of zeros after ``weight`` put the rows of a 16-bit matmul on 16-byte boundaries.

    None if all rows are aligned, for other dtypes and on a CPU. Without the zeros cuBLAS took 1.2 ms on an H200 for
    19,200 rows of 1500 numbers by 4500, and as long for each of the two gradients. With them a training step of two
    such layers took 12.2 ms, about 1 ms less than in an earlier run without.
    """
    if not x.is_cuda or (autocast_dtype("cuda") or x.dtype).itemsize != 2:
        return None
    outer, inner = (-size % 8 for size in weight.shape)
    return (inner, outer) if inner or outer else None


def adds_bias_separately(x: Tensor, weight: Tensor) -> bool:
    """Return whether it is faster to add the bias outside the matmul, by a second launch or by the scan that reads it.

    With a bias torch uses cuBLASLt, which searches for an algorithm on every call: 80 us of host time, compared to 30
    for a matmul without bias. In 16 bits the sum would be rounded twice.
    """
    if not x.is_cuda or x.dtype is not torch.float32 or autocasts(x):
        return False
    return x.numel() // x.shape[-1] * weight.shape[0] <= MAX_SEPARATE_BIAS_NUMBERS


def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, grad_bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, the weight and the padded bias that ``needs`` asks for.

    If ``grad_bias`` is given, it is returned as it is.
    """
    if needs[2] and grad_bias is None:
        grad_bias = sum_rows(grad)
    outer, inner = weight.shape
    if x.numel() >= MIN_NUMBERS_TO_PAD and (padding := alignment_padding(x, weight)) is not None:
        x, grad = F.pad(x, (0, padding[0])), F.pad(grad, (0, padding[1]))
        weight = F.pad(weight, (0, padding[0], 0, padding[1]))
    grad_x = torch.matmul(grad, weight) if needs[0] else None
    grad_weight = grad.reshape(-1, grad.shape[-1]).t().mm(x.reshape(-1, x.shape[-1])) if needs[1] else None
    if weight.shape != (outer, inner):
        grad_x = None if grad_x is None else grad_x[..., :inner].contiguous()
        grad_weight = None if grad_weight is None else grad_weight[:outer, :inner].contiguous()
    return grad_x, grad_weight, grad_bias


def sum_rows(x: Tensor) -> Tensor:
    """Sum ``(T, B, W)`` over steps and batch: ``(W,)``."""
    if x.is_cuda and x.shape[0] * x.shape[1] >= MIN_SPLIT_ROWS:
        return sum_by_axis(x)
    return x.sum((0, 1))


def sum_by_axis(x: Tensor) -> Tensor:
    """Compute ``sum_rows`` over one axis after the other, the shorter one first.

    If torch divides a column among many blocks, it allocates 512 bytes per block and column, up to 130 MB in total,
    which would be the peak memory of a training call.
    """
    total = x.sum(0 if x.shape[0] <= x.shape[1] else 1, dtype=working_dtype(x.dtype)).sum(0)
    return total if total.dtype is x.dtype else total.to(x.dtype)
