"""What ``torch.utils.flop_counter`` counts for the two operators."""

from typing import Any

from torchrum.ops.kernels.flops import counts_flops, register_flops

__all__ = ["register_flops"]


@counts_flops("rum_scan")
def scan_flops(xp: Any, h0: Any, R0: Any, weight_hh: Any, *rest: Any, out_shape: Any = None) -> int:
    """Two for each multiplication and addition of a matmul, from shapes: with the weight, and with lam 1 with R.

    R e, R n and R h are three matrix-vector products, and the step takes a matrix of rank 2 off R.
    """
    (T, B, _), (rows, H) = xp, weight_hh
    lam = rest[4]  # behind ln_weight, ln_bias, lengths and seed
    return T * B * (2 * rows * H + (10 * H * H if lam != 0 else 0))


@counts_flops("rum_scan_backward")
def scan_backward_flops(grad_out: Any, grad_R: Any, *args: Any, out_shape: Any = None) -> int:
    """Twice the forward, as for every matmul: once for each operand's gradient."""
    inputs, flags = args[:8], args[12:]  # out, gates, R_n and ends stand between
    return 2 * scan_flops(*inputs, *flags)
