"""The gradient of the recurrent weight, which no step waits for: one product over all steps."""

import torch
from torch import Tensor
from torch.nn import functional as F


def weight_gradient(dxp: Tensor, h0: Tensor, out: Tensor, gates: int) -> Tensor:
    """Sum over steps of (gradient of the raw gates)^T (state before the step), ``(gates*H, H)`` in dxp's dtype.

    Args:
        dxp: ``(T, B, ...)``, the gradients of the raw gates first.
        h0: ``(B, H)``, the state before the first step.
        out: ``(T, B, H)``, the states after each.
        gates: how many there are.
    """
    T, H = out.shape[0], out.shape[2]
    dgates = dxp[..., : gates * H]
    with torch.autocast(dxp.device.type, enabled=False):  # it would round float32
        first = dgates[0].t() @ h0.to(dxp.dtype)
        if T == 1:
            return first
        left, right = aligned_rows(dgates[1:].flatten(0, 1)), aligned_rows(out[:-1].flatten(0, 1))
        if left.shape[1] == gates * H and right.shape[1] == H:
            return torch.addmm(first, left.t(), right)
        return first + (left.t() @ right)[: gates * H, :H]


def aligned_rows(x: Tensor) -> Tensor:
    """Rows on 16-byte boundaries, zero-padded where they are not: cuBLAS is several times slower otherwise."""
    unit = 16 // x.element_size()
    return F.pad(x, (0, -x.shape[1] % unit)) if x.is_cuda and x.stride(0) % unit else x
