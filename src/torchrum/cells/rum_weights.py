"""The parameters of one RUM recurrence: their names, shapes and starts, and the state before the first step."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from torchrum.cells.base import State
from torchrum.cells.rum_settings import RumSettings
from torchrum.cells.starts import orthogonal
from torchrum.ops._checks import ArgumentTypeError, MismatchError
from torchrum.ops.kernels.precision import working_dtype
from torchrum.ops.rum_scan.options import RumOptions

Weights = Mapping[str, Tensor | None]
"""Of one recurrence, by the names in ``RUM_PARAMETERS``."""

RUM_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "ln_weight", "ln_bias", "lam")


def check_dtype(where: str, dtype: object) -> None:
    """A RUM computes in real floating point numbers; torch would build it in others too."""
    if dtype not in (None, float, torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ArgumentTypeError(
            f"{where}: dtype={dtype!r} is not allowed; it must be torch.float64, float32, bfloat16 or float16."
        )


def misfit(where: str, name: str, part: Tensor, shape: tuple[int, ...], device: torch.device) -> MismatchError:
    """The error for a parameter that is not of its shape and on the input's device; kernels know its address alone."""
    return MismatchError(
        f"{where}: {name} has shape {tuple(part.shape)}, on {part.device}; it must be {shape}, on {device} as the "
        "input is. Move it, or load the weights again."
    )


def rum_shapes(I: int, H: int, options: RumOptions, bias: bool, embed_bias: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of one recurrence; a name that is missing is not a parameter."""
    gates, inputs = options.num_gates, options.num_inputs
    shapes: dict[str, tuple[int, ...]] = {"weight_ih": (inputs * H, I), "weight_hh": (gates * H, H)}
    if bias:
        shapes["bias_ih"] = ((inputs if embed_bias else gates) * H,)
    if options.layer_norm:
        shapes["ln_weight"] = shapes["ln_bias"] = (inputs * H,)
    if math.isnan(options.lam):
        shapes["lam"] = ()
    return shapes


@torch.no_grad()
def init_rum_weights(weights: Weights, settings: RumSettings) -> None:
    """Each gate's block is orthogonal over its input and state together, as in the original implementation."""
    weight_ih, weight_hh = weights["weight_ih"], weights["weight_hh"]
    assert weight_ih is not None and weight_hh is not None
    H, I = weight_hh.shape[1], weight_ih.shape[1]
    gates = weight_hh.shape[0] // H
    for gate in range(gates):
        rows = slice(gate * H, (gate + 1) * H)
        block = orthogonal(H, I + H, weight_ih)
        weight_ih[rows], weight_hh[rows] = settings.gate_scale * block[:, :I], settings.gate_scale * block[:, I:]
    weight_ih[-H:] = orthogonal(H, I, weight_ih)
    if settings.embed_scale is not None:
        weight_ih[-H:] *= settings.embed_scale * math.sqrt(max(H / I, 1))  # inputs of unit variance: eps has that scale
    bias, ln_weight, ln_bias, lam = (weights[name] for name in ("bias_ih", "ln_weight", "ln_bias", "lam"))
    if bias is not None:
        bias.zero_()
        bias[:H] = settings.target_bias_init
        if gates == 2:
            bias[H : 2 * H] = settings.update_bias_init
        if settings.embed_bias_init > 0 and bias.shape[0] == weight_ih.shape[0]:
            bias[-H:].normal_(0, settings.embed_bias_init)
    if ln_weight is not None and ln_bias is not None:
        ln_weight.fill_(1)
        ln_bias.zero_()
    if lam is not None:
        lam.fill_(settings.lam)


def rum_initial_state(B: int, H: int, options: RumOptions, device: torch.device, dtype: torch.dtype) -> State:
    """Zeros for h; the identity for R, in float32 at least."""
    h = torch.zeros(B, H, device=device, dtype=dtype)
    if not options.keeps_rotation:
        return (h,)
    return h, torch.eye(H, device=device, dtype=working_dtype(dtype)).expand(B, H, H)
