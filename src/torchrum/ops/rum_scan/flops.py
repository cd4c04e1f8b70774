"""What ``torch.utils.flop_counter`` counts for the two operators.

Its module takes a while to import (it imports Triton), so the formulas are registered once somebody else has done so.
"""

import sys
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"
_registered = False


def register_flops() -> None:
    """Make the counter know the operators, if it is loaded; cheap, and called before every scan."""
    global _registered
    if not _registered and _COUNTER in sys.modules:
        _registered = True
        _register(sys.modules[_COUNTER])


def _register(counter: Any) -> None:
    formulas = {torch.ops.torchrum.rum_scan: scan_flops, torch.ops.torchrum.rum_scan_backward: scan_backward_flops}
    for operator, formula in formulas.items():
        counter.register_flop_formula(operator)(formula)
    # a counter that is counting already has taken its own copy of the formulas
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, counter._FlopCounterMode):
            mode.counter.flop_registry.update({key: counter.flop_registry[key] for key in formulas})


def scan_flops(xp: Any, h0: Any, R0: Any, weight_hh: Any, *rest: Any, out_shape: Any = None) -> int:
    """Two for each multiplication and addition of a matmul, from shapes: with the weight, and with lam 1 with R.

    R e, R n and R h are three matrix-vector products, and the step takes a matrix of rank 2 off R.
    """
    (T, B, _), (rows, H) = xp, weight_hh
    lam = rest[4]  # behind ln_weight, ln_bias, lengths and seed
    return T * B * (2 * rows * H + (10 * H * H if lam != 0 else 0))


def scan_backward_flops(grad_out: Any, grad_R: Any, *args: Any, out_shape: Any = None) -> int:
    """Twice the forward, as for every matmul: once for each operand's gradient."""
    inputs, flags = args[:8], args[12:]  # out, gates, R_n and ends stand between
    return 2 * scan_flops(*inputs, *flags)
