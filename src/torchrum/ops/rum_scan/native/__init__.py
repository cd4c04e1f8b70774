"""The native CPU backend: the scan in C, compiled on first use, on the tensors' own memory. README.md says how."""

import torch
from torch import Tensor

from torchrum.ops.kernels.machine import constant_when_traced
from torchrum.ops.kernels.precision import working_dtype
from torchrum.ops.rum_scan.native import call
from torchrum.ops.rum_scan.native.build import load_library
from torchrum.ops.rum_scan.native.call import as_read, call_scan
from torchrum.ops.rum_scan.native.pulling import pull_back
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.types import Gradients, Residuals, Results, ScanInputs

__all__ = ["DTYPES", "backward", "build_obstacle", "call", "empty_results", "forward", "load_library", "obstacle"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """Why the native scan cannot run on such an input, in words, or None; compiles it if need be."""
    xp = inputs.xp
    if xp.device.type != "cpu":
        return f"the input is on {xp.device.type}"
    if xp.dtype not in DTYPES:
        return f"the dtype is {xp.dtype}, and it takes float32, float64, bfloat16 and float16"
    return build_obstacle(xp.dtype == torch.float64)


@constant_when_traced
def build_obstacle(double: bool) -> str | None:
    """Why there is no compiled scan, or None."""
    found = load_library(double)
    return found if isinstance(found, str) else None


def empty_results(inputs: ScanInputs, options: RumOptions) -> Results:
    """Buffers for what ``forward`` returns.

    ``gates`` holds the raw gates and, with lam = 1, R h of each step; ``kept`` what each step of lam = 1 added to R.
    """
    xp, (T, B), H = inputs.xp, inputs.xp.shape[:2], inputs.h0.shape[-1]
    dtype, memory = working_dtype(xp.dtype), options.lam == 1
    out, saved = xp.new_empty(T, B, H), xp.new_empty(T, B, (options.num_gates + memory) * H, dtype=dtype)
    if not memory:
        return Results(out, None, Residuals(saved))
    return Results(out, saved.new_empty(B, H, H), Residuals(saved, saved.new_empty(T, B, 2, H)))


def forward(inputs: ScanInputs, options: RumOptions, save: bool = True) -> Results:
    """Run the scan; without ``save`` no memory but the results grows with T."""
    if save:
        results = empty_results(inputs, options)
    else:
        xp, (B, H) = inputs.xp, inputs.h0.shape
        R_n = xp.new_empty(B, H, H, dtype=working_dtype(xp.dtype)) if options.lam == 1 else None
        results = Results(xp.new_empty(*xp.shape[:2], H), R_n)
    return results._replace(out=_run(inputs, results, options))


def _run(inputs: ScanInputs, results: Results, options: RumOptions) -> Tensor:
    """Fill the results; returns the states in the dtype of ``out``."""
    out, R_n, (saved, kept) = results
    dtype = working_dtype(out.dtype)
    states = out.to(dtype)
    results_by_name = dict(out=states, saved=saved, R_n=R_n, kept=kept)
    call_scan({**_named(inputs), "R0": inputs.R0, **results_by_name}, inputs.seed, options)
    return states.to(out.dtype)


def _named(inputs: ScanInputs) -> dict[str, Tensor | None]:
    """What both directions hand to C as it is, by C's names."""
    weight, ln_weight, ln_bias = inputs.weights
    lengths = inputs.lengths
    return dict(xp=inputs.xp, h0=inputs.h0, weight=weight, ln_weight=ln_weight, ln_bias=ln_bias, lengths=lengths)


@torch.autocast("cpu", enabled=False)  # each matmul has its dtype already
def backward(
    grad_out: Tensor, grad_R: Tensor | None, inputs: ScanInputs, results: Results, options: RumOptions, need_R0: bool
) -> Gradients:
    """Gradients of the inputs from those of the states and of the last R."""
    xp, h0, R0, weight_hh = inputs[:4]
    dtype = working_dtype(xp.dtype)
    results = results._replace(out=as_read(results.out, dtype))
    gradients = {
        "grad_xp": xp.new_empty(xp.shape, dtype=dtype),
        "grad_weight": xp.new_empty(weight_hh.shape, dtype=dtype),
    }
    grads, asked_R0 = (grad_out, None, grad_R), R0 if need_R0 else None
    grad_h0, grad_R0, *norms = pull_back(grads, _named(inputs), asked_R0, results, gradients, options, inputs.seed)
    return Gradients(
        gradients["grad_xp"].to(xp.dtype),
        grad_h0.to(h0.dtype),
        grad_R0,
        gradients["grad_weight"].to(weight_hh.dtype),
        *norms,
    )
