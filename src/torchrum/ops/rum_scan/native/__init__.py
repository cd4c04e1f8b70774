"""The native CPU backend: the scan in C, compiled on first use, on the tensors' own memory. README.md says how."""

import torch
from torch import Tensor

from ..options import RumOptions
from ..reference import working_dtype
from .build import load_library
from .library import call_scan
from .watching import is_unwatched

__all__ = ["backward", "can_run", "empty_results", "forward", "infer", "infer_projecting", "is_unwatched", "obstacle"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def obstacle(xp: Tensor) -> str | None:
    """Why the native scan cannot run on such an input, in words, or None; compiles it if need be."""
    if xp.device.type != "cpu":
        return f"the input is on {xp.device.type}"
    if xp.dtype not in DTYPES:
        return f"the dtype is {xp.dtype}, and it takes float32, float64, bfloat16 and float16"
    return library_obstacle(xp.dtype == torch.float64)


def library_obstacle(double: bool) -> str | None:
    """Why there is no compiled scan, or None."""
    found = load_library(double)
    return found if isinstance(found, str) else None


# torch.compiler.assume_constant_result, without its import of the compiler: it cannot trace a look at the machine
library_obstacle._dynamo_marked_constant = True  # type: ignore[attr-defined]


def can_run(xp: Tensor) -> bool:
    """Whether the native scan can run on such an input."""
    return obstacle(xp) is None


def empty_results(xp: Tensor, H: int, options: RumOptions) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Buffers for what ``forward`` returns; with lam = 1 the last part holds what each step added to R."""
    T, B = xp.shape[:2]
    dtype, memory = working_dtype(xp.dtype), options.lam == 1
    out, saved = xp.new_empty(T, B, H), xp.new_empty(T, B, (options.num_gates + memory) * H, dtype=dtype)
    if not memory:
        return out, None, saved, None
    return out, saved.new_empty(B, H, H), saved, saved.new_empty(T, B, 2, H)


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
    """Run the scan: states ``(T, B, H)``, the last R, and what the backward needs."""
    out, R_n, saved, kept = empty_results(xp, h0.shape[-1], options)
    inputs = _named(xp, h0, weight_hh, ln_weight, ln_bias)
    return _run(inputs, R0, lengths, seed, options, out, R_n, saved, kept), R_n, saved, kept


def infer(
    xp: Tensor,
    h0: Tensor,
    R0: Tensor | None,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    options: RumOptions,
) -> tuple[Tensor, Tensor | None]:
    """``forward`` without what the backward needs: no memory but the results grows with T."""
    out, (B, H) = xp.new_empty(*xp.shape[:2], h0.shape[-1]), h0.shape
    R_n = xp.new_empty(B, H, H, dtype=working_dtype(xp.dtype)) if options.lam == 1 else None
    return _run(_named(xp, h0, weight_hh, ln_weight, ln_bias), R0, lengths, seed, options, out, R_n), R_n


def infer_projecting(
    x: Tensor,
    h0: Tensor,
    R0: Tensor | None,
    weight_ih: Tensor,
    bias: Tensor | None,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    lengths: Tensor | None,
    options: RumOptions,
) -> tuple[Tensor, Tensor | None]:
    """``infer`` from the input ``x`` ``(T, B, I)`` itself, where ``is_unwatched``: no projected input is stored.

    Args:
        weight_ih, bias: ``(3H, I)`` and ``(3H,)`` or None; ``(2H, I)`` and ``(2H,)`` without update gate.
        others: as those of ``rum_scan``; zoneout does not draw masks.
    """
    (T, B, _), H, dtype = x.shape, h0.shape[-1], x.dtype
    given = (x, weight_ih, bias, h0, weight_hh, ln_weight, ln_bias)
    names = ("x", "weight_ih", "bias", "h0", "weight", "ln_weight", "ln_bias")
    tensors = {name: _plain(part, dtype) for name, part in zip(names, given, strict=True)}
    out, R_n = x.new_empty(T, B, H), x.new_empty(B, H, H) if options.lam == 1 else None
    tensors.update(R0=_plain_memory(R0, dtype), lengths=_plain(lengths, torch.int64), out=out, R_n=R_n)
    call_scan(tensors, None, options)
    return out, R_n


def _run(
    inputs: dict[str, Tensor | None],
    R0: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    options: RumOptions,
    out: Tensor,
    R_n: Tensor | None,
    saved: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Fill the results; returns the states in the dtype of ``out``."""
    dtype = working_dtype(out.dtype)
    tensors = {name: _plain(part, dtype) for name, part in inputs.items()}
    tensors["R0"], tensors["lengths"] = _plain_memory(R0, dtype), _plain(lengths, torch.int64)
    states = out.to(dtype)
    tensors.update(out=states, saved=saved, R_n=R_n, kept=kept)
    call_scan(tensors, seed, options)
    return states.to(out.dtype)


def _named(xp, h0, weight_hh, ln_weight, ln_bias) -> dict[str, Tensor | None]:
    return dict(xp=xp, h0=h0, weight=weight_hh, ln_weight=ln_weight, ln_bias=ln_bias)


@torch.autocast("cpu", enabled=False)  # each matmul has its dtype already
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
    saved: Tensor,
    R_n: Tensor | None,
    kept: Tensor | None,
    options: RumOptions,
    need_R0: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``xp, h0, R0, weight_hh, ln_weight, ln_bias``, from those of the states and of the last R."""
    dtype, (T, B), H = working_dtype(xp.dtype), xp.shape[:2], h0.shape[-1]
    inputs = {name: _plain(part, dtype) for name, part in _named(xp, h0, weight_hh, ln_weight, ln_bias).items()}
    states, grad_xp, grad_h0 = out.to(dtype).contiguous(), xp.new_empty(xp.shape, dtype=dtype), saved.new_empty(B, H)
    grad_weight = saved.new_empty(weight_hh.shape)
    outer = None if grad_R is None or R_n is None else torch.bmm(grad_R.to(dtype), R_n.mT)
    tensors = {
        **inputs,
        "lengths": _plain(lengths, torch.int64),
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
    sums = call_scan(tensors, seed, options)
    grad_R0 = None
    if need_R0 and R0 is not None:
        added = torch.einsum("tbi,tbj->bij", tensors["grad_z"], saved[..., -H:])
        grad_R0 = torch.bmm(added if outer is None else added + outer, R0.to(dtype))
    norms = (None, None) if sums is None else (part.flatten() for part in sums)
    return (
        grad_xp.to(xp.dtype),
        grad_h0.to(h0.dtype),
        grad_R0,
        grad_weight.to(weight_hh.dtype),
        *norms,
    )
