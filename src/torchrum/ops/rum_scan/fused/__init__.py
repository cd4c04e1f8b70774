"""The fused GPU backend. Triton is imported on first use: it is absent on machines without a GPU."""

import functools
import importlib.util
import os
import shutil
from typing import Any

import torch
from torch import Tensor

from ..options import RumOptions

__all__ = ["backward", "forward", "infer", "obstacle"]

KERNEL_ACTIVATIONS = ("relu", "tanh", "sigmoid", "softsign")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PERSISTENT = True
"""Take the persistent kernels where they can run; the benchmark turns them off to time the other design."""
LARGEST_HIDDEN = 8192  # a whole row stands in one program's registers


@torch.compiler.assume_constant_result  # the compiler cannot trace a look at the machine
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU and slowly: for tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@torch.compiler.assume_constant_result
def triton_obstacle() -> str | None:
    """Why Triton cannot compile here, or None; it builds a small launcher in C for each kernel."""
    return _triton_obstacle()


@functools.cache
def _triton_obstacle() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "gcc", "clang", "cc"))):
        return "Triton finds no C compiler (install gcc or clang, or set CC)"
    return None


@torch.compiler.assume_constant_result
def device_obstacle(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device, or None."""
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 7 else f"the GPU has compute capability {major}.{minor}, and Triton needs 7.0"


def obstacle(xp: Tensor, options: RumOptions) -> str | None:
    """Why the fused scan cannot run on such an input, in words, or None."""
    if options.lam == 1:
        from .lam1 import lam1_obstacle

        return lam1_obstacle(xp, options)
    if options.lam != 0:
        return f"lam is {options.lam}, and the kernels are written for lam 0 and 1"
    if not isinstance(options.activation, str):
        return "activation is a callable, and the kernels know only " + ", ".join(KERNEL_ACTIVATIONS)
    if options.activation not in KERNEL_ACTIVATIONS:
        return f"activation is {options.activation!r}, and the kernels know only " + ", ".join(KERNEL_ACTIVATIONS)
    if options.target_activation is not None:
        return "target_activation is given, and the kernels have none"
    if xp.dtype not in KERNEL_DTYPES:
        return f"the dtype is {xp.dtype}, and the kernels take float32, bfloat16 and float16"
    hidden = xp.shape[-1] // options.num_inputs
    if hidden > LARGEST_HIDDEN:
        return f"the hidden size is {hidden}, and a row of at most {LARGEST_HIDDEN} fits in one program"
    if interpreted():
        return None if importlib.util.find_spec("triton") else "Triton is not installed"
    if xp.device.type != "cuda":
        return f"the input is on {xp.device.type}"
    return triton_obstacle() or device_obstacle(xp.device)


def runs_persistent(xp: Tensor, H: int, options: RumOptions) -> bool:
    """Whether one launch takes the whole lam=0 scan; else each step is a product and a row kernel."""
    if not PERSISTENT or interpreted() or xp.device.type != "cuda" or options.layer_norm:
        return False
    from .persistent import make_plan, persistent_obstacle, resident_blocks

    if persistent_obstacle(xp, options) is not None:
        return False
    # a batch that does not fit at once would go through the whole sequence again and again
    return make_plan(xp.shape[1], H, xp.dtype, options, False, resident_blocks(xp.device)).waves == 1


def empty_results(xp: Tensor, H: int, options: RumOptions) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Room for what ``forward`` returns."""
    T, B = xp.shape[:2]
    out = xp.new_empty(T, B, H)
    if options.lam == 0:
        gates = xp.new_empty(T, B, options.num_gates * H)
        if not runs_persistent(xp, H, options):
            return out, None, gates, None
        from .persistent import STATS

        return out, None, gates, xp.new_empty(T, B, STATS, dtype=torch.float32)
    from .lam1 import CHECKPOINT_EVERY

    R = xp.new_empty(B, H, H, dtype=torch.float32)
    return out, R, R.new_empty(0), R.new_empty((T - 1) // CHECKPOINT_EVERY, B, H, H)  # gates are computed anew


def forward(
    xp: Tensor,
    h0: Tensor,
    R0: Tensor | None,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    options: RumOptions,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """States, final R, raw gates and what else the backward keeps; with lam 0 there is no R and nothing else."""
    if options.lam == 1:
        from .lam1 import lam1_forward

        out, R_n, ends = lam1_forward(xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed, options)
        return out, R_n, R_n.new_empty(0), ends
    inputs = (xp, h0, weight_hh, ln_weight, ln_bias, lengths, seed)
    if runs_persistent(xp, weight_hh.shape[1], options):
        from .persistent import persistent_forward

        out, gates, stats = persistent_forward(*inputs, options)
        return out, None, gates, stats
    from .lam0_forward import lam0_forward

    out, gates = lam0_forward(*inputs, options)
    return out, None, gates, None


def infer(*inputs: Any) -> tuple[Tensor, Tensor | None]:
    """``forward`` without what the backward needs."""
    return forward(*inputs)[:2]


def backward(
    grad_out: Tensor,
    grad_R: Tensor | None,
    xp: Tensor,
    h0: Tensor,
    R0: Tensor | None,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    gates: Tensor,
    R_n: Tensor | None,
    ends: Tensor | None,
    options: RumOptions,
    need_R0: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Gradients of xp, h0, R0, weight_hh, ln_weight and ln_bias."""
    if options.lam == 1:
        from .lam1 import lam1_backward

        assert R_n is not None
        assert ends is not None
        args = (xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed)
        grads = lam1_backward(grad_out, grad_R, *args, out, R_n, ends, options, need_R0=need_R0)
        return *grads[:2], grads[2] if need_R0 else None, *grads[3:]
    inputs = (xp, h0, weight_hh, ln_weight, ln_bias, lengths, seed)
    if ends is not None:
        from .persistent import persistent_backward

        dxp, dh0, dweight, _, _ = persistent_backward(grad_out, *inputs, out, gates, ends, options)
        return dxp, dh0, None, dweight, None, None
    from .lam0_backward import lam0_backward

    dxp, dh0, dweight, dln_weight, dln_bias = lam0_backward(grad_out, *inputs, out, gates, options)
    return dxp, dh0, None, dweight, dln_weight, dln_bias
