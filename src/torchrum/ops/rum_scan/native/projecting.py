"""Scans from the input itself, projection included, for calls that nobody looks at: one call of C each way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrum.ops.rum_scan.native.build import load_library
from torchrum.ops.rum_scan.native.call import call_scan
from torchrum.ops.rum_scan.native.pulling import pull_back
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.projection import padded_bias
from torchrum.ops.rum_scan.types import LayerInputs, Residuals, Results

DTYPES = (torch.float32, torch.float64)


def named(inputs: LayerInputs) -> dict[str, Tensor | None]:
    """The inputs by C's names, but for the seed."""
    x, weight_ih, bias, h0, R0, weight, ln_weight, ln_bias, lengths, _ = inputs
    return {
        "x": x,
        "weight_ih": weight_ih,
        "bias": padded_bias(weight_ih, bias),
        "h0": h0,
        "R0": R0,
        "weight": weight,
        "ln_weight": ln_weight,
        "ln_bias": ln_bias,
        "lengths": lengths,
    }


def projects(x: Tensor) -> bool:
    """Whether these functions can run on ``x`` and on parameters of its dtype."""
    return x.is_cpu and x.dtype in DTYPES and not isinstance(load_library(x.dtype is torch.float64), str)


def infer_projecting(
    inputs: LayerInputs, options: RumOptions, lead: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All states, the last one by itself, and the last R; nothing but the first grows with T.

    ``lead`` stands before B in the shapes of the last ones.
    """
    x, B, H = inputs.x, inputs.x.shape[1], inputs.weight_hh.shape[1]
    out, last = x.new_empty(x.shape[0], B, H), x.new_empty(*lead, B, H)
    R_n = x.new_empty(*lead, B, H, H) if options.lam == 1 else None
    tensors = named(inputs)
    tensors["out"], tensors["last"], tensors["R_n"] = out, last, R_n
    call_scan(tensors, inputs.seed, options)
    return out, last, R_n


def forward_projecting(
    inputs: LayerInputs, options: RumOptions, returned: tuple[int, ...] | None
) -> tuple[Tensor, Tensor, Tensor | None, Results]:
    """All states, the last one and the last R for the caller, and the results for the backward.

    Where they are ``returned`` to a user, who may write to them, the backward has its own, and what ``returned`` says
    stands before B in the shapes of the last ones. The residuals are those of the operator with eps behind the gates.
    """
    x, (T, B), H, memory = inputs.x, inputs.x.shape[:2], inputs.weight_hh.shape[1], options.lam == 1
    states, saved = x.new_empty(T, B, H), x.new_empty(T, B, (options.num_inputs + memory) * H)
    R_n, kept = (x.new_empty(B, H, H), x.new_empty(T, B, 2, H)) if memory else (None, None)
    tensors, last = named(inputs), x.new_empty(*(returned or ()), B, H)
    tensors.update(out=states, last=last, saved=saved, R_n=R_n, kept=kept)
    out, R = states, R_n
    if returned is not None:
        out, R = torch.empty_like(states), None if R_n is None else x.new_empty(*returned, B, H, H)
        tensors.update(out_copy=out, R_copy=R)
    call_scan(tensors, inputs.seed, options)
    return out, last, R, Results(states, R_n, Residuals(saved, kept))


def backward_projecting(
    grads: Sequence[Tensor | None], inputs: LayerInputs, results: Results, options: RumOptions, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of ``inputs`` but for lengths and seed, from those of all states, the last one and the last R.

    The bias's is as long as the weight. ``needs`` says which are asked for; only those of x and R_0 are left out.
    """
    x, weight_ih, bias = inputs[:3]
    filled = {
        "grad_xp": x.new_empty(*x.shape[:2], weight_ih.shape[0]),
        "grad_weight": x.new_empty(inputs.weight_hh.shape),
        "grad_x": x.new_empty(x.shape) if needs[0] else None,
        "grad_weight_ih": x.new_empty(weight_ih.shape),
        "grad_bias": None if bias is None else x.new_empty(weight_ih.shape[0]),
    }
    R0 = inputs.R0 if needs[4] else None
    grad_h0, grad_R0, *norms = pull_back(grads, named(inputs), R0, results, filled, options, inputs.seed)
    projected = (filled["grad_x"], filled["grad_weight_ih"], filled["grad_bias"])
    return (*projected, grad_h0, grad_R0, filled["grad_weight"], *norms)


def operator_results(results: Results) -> Results:
    """What the operator would have kept of a scan by ``forward_projecting``."""
    saved, kept = results.residuals
    assert saved is not None
    return results._replace(residuals=Residuals(saved[..., : -results.out.shape[-1]], kept))
