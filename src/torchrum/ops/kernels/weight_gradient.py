"""The gradient of a recurrent weight, which no step waits for: one matmul over all steps, for every backend."""

from torch import Tensor
from torch.nn import functional as F

from torchrum.ops.kernels.precision import without_autocast

WORTH_PADDING = 2**20
"""Numbers from which rows are copied to aligned ones. At 6784 x 100 float32 on an H200 the copies of both operands take
7 us and four launches, where such a matmul takes 8 us."""


def recurrent_weight_gradient(grad_gates: Tensor, h0: Tensor | None, out: Tensor) -> Tensor:
    """Sum over steps of (gradient of the raw gates)^T (state before the step), ``(G*H, H)`` in grad_gates' dtype.

    Args:
        grad_gates: ``(T, B, G*H)``, may be a slice of a wider tensor.
        h0: ``(B, H)``, the state before the first step; None if it was zero.
        out: ``(T, B, H)``, the states after each.
    """
    (T, H), rows = (out.shape[0], out.shape[2]), grad_gates.shape[2]
    with without_autocast(grad_gates.device.type):  # it would round float32
        if T == 0 or (T == 1 and h0 is None):
            return grad_gates.new_zeros(rows, H)
        first = None
        if h0 is not None:
            first = grad_gates[0].t().mm(h0 if h0.dtype is grad_gates.dtype else h0.to(grad_gates.dtype))
        if T == 1:
            assert first is not None
            return first
        left, right = aligned_rows(grad_gates[1:].flatten(0, 1)), aligned_rows(out[:-1].flatten(0, 1))
        if first is not None and left.shape[1] == rows and right.shape[1] == H:
            return first.addmm_(left.t(), right)
        rest = left.t().mm(right)[:rows, :H]
        return rest if first is None else first.add_(rest)


def weight_gradient(grad_gates: Tensor, inputs: Tensor) -> Tensor:
    """Sum over all steps and rows of gate gradients ``(T, B, G*H)`` times inputs ``(T, B, K)``: ``(G*H, K)``."""
    left, right = aligned_rows(grad_gates.flatten(0, 1)), aligned_rows(inputs.flatten(0, 1))
    return (left.t() @ right)[: grad_gates.shape[-1], : inputs.shape[-1]]


def aligned_rows(x: Tensor) -> Tensor:
    """Rows on 16-byte boundaries, zero-padded where they are not: cuBLAS is several times slower otherwise.

    A small matmul is over before the padding is.
    """
    if not x.is_cuda or x.numel() < WORTH_PADDING:
        return x
    unit = 16 // x.element_size()
    return F.pad(x, (0, -x.shape[1] % unit)) if x.stride(0) % unit else x
