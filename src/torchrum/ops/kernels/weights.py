"""Parameters of a cell, and their gradients after the last step of the backward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrum.ops.kernels.machine import autocasts, without_autocast


class CellWeights(NamedTuple):
    """Parameters of one cell, in the layout of its scan.

    An LSTM has 4 row blocks i, j, f, o and a layer norm of 5 (with c); a RUM has tau, u, eps, of which eps has no rows
    in ``weight_hh``, and a layer norm of 3. ``weight_ih`` is None for a cell that reads nothing and, as its bias, for
    one whose input comes projected.
    """

    weight_ih: Tensor | None
    weight_hh: Tensor
    bias: Tensor | None
    ln_weight: Tensor | None
    ln_bias: Tensor | None


WORTH_PADDING = 2**20
"""Operands of fewer numbers are not copied to aligned rows. At 6784 x 100 float32 on an H200 copying both takes
7 us and four launches, and the matmul itself 8 us."""


def recurrent_weight_gradient(grads: Tensor, rows: int, h0: Tensor | None, out: Tensor) -> Tensor:
    """Sum over steps of (gradient of the raw gates)^T (state before the step), ``(rows, H)`` in the dtype of ``grads``.

    Args:
        grads: ``(T, B, ...)``, the raw gates' in the first ``rows`` columns.
        rows: of the weight, gates times H.
        h0: ``(B, H)``, the state before the first step; None if it was zero.
        out: ``(T, B, H)``, the states after each.
    """
    if autocasts(grads):
        with without_autocast(grads):  # it would round float32
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
    # one view each: a chain of slices costs as much as the matmul at small sizes
    right = out.as_strided((steps, H), (H, 1), out.storage_offset())
    if steps * width < WORTH_PADDING or not (_misaligned(grads, steps * rows, width) or _misaligned(out, steps * H, H)):
        left = grads.as_strided((rows, steps), (1, width), start + B * width)
        return left.mm(right) if first is None else first.addmm_(left, right)
    left = aligned_rows(grads.as_strided((steps, rows), (width, 1), start + B * width))
    rest = left.t().mm(aligned_rows(right))[:rows, :H]
    return rest if first is None else first.add_(rest)


def weight_gradient(grad_gates: Tensor, inputs: Tensor) -> Tensor:
    """Sum over all steps and rows of gate gradients ``(T, B, G*H)`` times inputs ``(T, B, K)``: ``(G*H, K)``."""
    left, right = aligned_rows(grad_gates.flatten(0, 1)), aligned_rows(inputs.flatten(0, 1))
    return (left.t() @ right)[: grad_gates.shape[-1], : inputs.shape[-1]]


def aligned_rows(x: Tensor) -> Tensor:
    """Rows on 16-byte boundaries, zero-padded where they are not: cuBLAS is several times slower otherwise.

    Small ones are left as they are: the matmul takes less time than the padding.
    """
    return F.pad(x, (0, -x.shape[1] % (16 // x.element_size()))) if _misaligned(x, x.numel(), x.stride(0)) else x


def _misaligned(x: Tensor, count: int, stride: int) -> bool:
    """Whether ``count`` numbers of ``x``, in rows ``stride`` apart, are worth a copy to aligned rows."""
    return count >= WORTH_PADDING and x.is_cuda and stride % (16 // x.element_size()) != 0


def reference_gradients(
    scan: Any, inputs: tuple[Any, ...], grads: tuple[Tensor | None, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of ``scan(*inputs)`` with a graph of their own; None for inputs that need none."""
    pairs = [(out, grad) for out, grad in zip(scan(*inputs), grads, strict=True) if grad is not None]
    chosen = [number for number, wants in enumerate(wanted) if wants]
    found = torch.autograd.grad(
        [out for out, _ in pairs], [inputs[n] for n in chosen], [grad for _, grad in pairs],
        create_graph=True, allow_unused=True,
    )  # fmt: skip
    by_number = dict(zip(chosen, found, strict=True))
    return tuple(by_number.get(number) for number in range(len(inputs)))
