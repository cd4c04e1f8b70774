"""The native CPU backend: the scan in C, compiled on first use, on the tensors' own memory. README.md says how."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.machine import constant_when_traced
from ...kernels.precision import working_dtype
from ..options import RumOptions
from ..types import Gradients, Residuals, Results, ScanInputs, StepWeights
from .build import load_library
from .library import call_scan
from .watching import is_unwatched

__all__ = ["backward", "empty_results", "forward", "infer_projecting", "is_unwatched", "obstacle"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """Why the native scan cannot run on such an input, in words, or None; compiles it if need be."""
    xp = inputs.xp
    if xp.device.type != "cpu":
        return f"the input is on {xp.device.type}"
    if xp.dtype not in DTYPES:
        return f"the dtype is {xp.dtype}, and it takes float32, float64, bfloat16 and float16"
    return library_obstacle(xp.dtype == torch.float64)


@constant_when_traced
def library_obstacle(double: bool) -> str | None:
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


def _plain(part: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if part is None or (part.dtype is dtype and part.is_contiguous()):
        return part
    return part.to(dtype).contiguous()


def _plain_memory(R0: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """R_0 as C reads it; where all rows share one, as at the start of a sequence, it is not copied for each."""
    if R0 is None or R0.shape[0] == 0 or R0.stride(0) > 0:
        return _plain(R0, dtype)
    shared = _plain(R0[0], dtype)
    return None if shared is None else shared.expand_as(R0)


def forward(inputs: ScanInputs, options: RumOptions, save: bool = True) -> Results:
    """Run the scan; without ``save`` no memory but the results grows with T."""
    if save:
        results = empty_results(inputs, options)
    else:
        xp, (B, H) = inputs.xp, inputs.h0.shape
        R_n = xp.new_empty(B, H, H, dtype=working_dtype(xp.dtype)) if options.lam == 1 else None
        results = Results(xp.new_empty(*xp.shape[:2], H), R_n)
    return results._replace(out=_run(inputs, results, options))


def infer_projecting(
    x: Tensor,
    state: Sequence[Tensor],
    weight_ih: Tensor,
    bias: Tensor | None,
    weights: StepWeights,
    lengths: Tensor | None,
    options: RumOptions,
) -> tuple[Tensor, Tensor | None]:
    """A scan from the input ``x`` ``(T, B, I)`` itself, where ``is_unwatched``: no projected input is stored.

    Args:
        state: h ``(B, H)`` and, with lam = 1, R ``(B, H, H)``.
        weight_ih, bias: ``(3H, I)`` and ``(3H,)`` or None; ``(2H, I)`` and ``(2H,)`` without update gate.
        weights, lengths: as those of ``rum_scan``; zoneout does not draw masks.
    """
    h0, R0 = state if len(state) == 2 else (state[0], None)
    (T, B, _), H, dtype = x.shape, h0.shape[-1], x.dtype
    given = (x, weight_ih, bias, h0, *weights)
    names = ("x", "weight_ih", "bias", "h0", "weight", "ln_weight", "ln_bias")
    tensors = {name: _plain(part, dtype) for name, part in zip(names, given, strict=True)}
    out, R_n = x.new_empty(T, B, H), x.new_empty(B, H, H) if options.lam == 1 else None
    tensors.update(R0=_plain_memory(R0, dtype), lengths=_plain(lengths, torch.int64), out=out, R_n=R_n)
    call_scan(tensors, None, options)
    return out, R_n


def _run(inputs: ScanInputs, results: Results, options: RumOptions) -> Tensor:
    """Fill the results; returns the states in the dtype of ``out``."""
    out, R_n, (saved, kept) = results
    dtype = working_dtype(out.dtype)
    tensors = {name: _plain(part, dtype) for name, part in _named(inputs).items()}
    tensors["R0"], tensors["lengths"] = _plain_memory(inputs.R0, dtype), _plain(inputs.lengths, torch.int64)
    states = out.to(dtype)
    tensors.update(out=states, saved=saved, R_n=R_n, kept=kept)
    call_scan(tensors, inputs.seed, options)
    return states.to(out.dtype)


def _named(inputs: ScanInputs) -> dict[str, Tensor | None]:
    """What both directions hand to C as it is, by C's names."""
    weight, ln_weight, ln_bias = inputs.weights
    return dict(xp=inputs.xp, h0=inputs.h0, weight=weight, ln_weight=ln_weight, ln_bias=ln_bias)


@torch.autocast("cpu", enabled=False)  # each matmul has its dtype already
def backward(
    grad_out: Tensor, grad_R: Tensor | None, inputs: ScanInputs, results: Results, options: RumOptions, need_R0: bool
) -> Gradients:
    """Gradients of the inputs from those of the states and of the last R."""
    xp, h0, R0, weight_hh = inputs[:4]
    out, R_n, (saved, kept) = results
    assert saved is not None
    dtype, (T, B), H = working_dtype(xp.dtype), xp.shape[:2], h0.shape[-1]
    plain = {name: _plain(part, dtype) for name, part in _named(inputs).items()}
    states, grad_xp, grad_h0 = out.to(dtype).contiguous(), xp.new_empty(xp.shape, dtype=dtype), saved.new_empty(B, H)
    grad_weight = saved.new_empty(weight_hh.shape)
    outer = None if grad_R is None or R_n is None else torch.bmm(grad_R.to(dtype), R_n.mT)
    tensors = {
        **plain,
        "lengths": _plain(inputs.lengths, torch.int64),
        "out": states,
        "saved": saved.contiguous(),
        "R_n": _plain(R_n, dtype),
        "kept": _plain(kept, dtype),
        "grad_out": _plain(grad_out, dtype),
        "grad_K": None if outer is None else outer - outer.mT,
        "grad_xp": grad_xp,
        "grad_h0": grad_h0,
        "grad_weight": grad_weight,
        "grad_z": saved.new_empty(T, B, H) if need_R0 else None,
    }
    sums = call_scan(tensors, inputs.seed, options)
    grad_R0 = None
    if need_R0 and R0 is not None:
        added = torch.einsum("tbi,tbj->bij", tensors["grad_z"], saved[..., -H:])
        grad_R0 = torch.bmm(added if outer is None else added + outer, R0.to(dtype))
    norms = (None, None) if sums is None else (part.flatten() for part in sums)
    return Gradients(
        grad_xp.to(xp.dtype),
        grad_h0.to(h0.dtype),
        grad_R0,
        grad_weight.to(weight_hh.dtype),
        *norms,
    )
