"""Scan of an LSTM with layer norm and zoneout: from projected inputs and an initial state to all states.

From top to bottom: options and inputs, the equations step by step, the public function, and the chain of one cell that
runs on a GPU and is tested against the equations.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrum.ops._dispatch import Backend, Choice, choose_fused
from torchrum.ops.kernels.linear import CellWeights, working_dtype
from torchrum.ops.kernels.machine import row_kernel_obstacle, tracing_obstacle
from torchrum.ops.kernels.masks import CELL_STREAMS, draw_seed, keep_mask, stream_seeds, zoneout_flags
from torchrum.ops.rotation import rotate

if TYPE_CHECKING:
    from torchrum.ops.kernels.chain import Plan

__all__ = [
    "CellWeights",
    "LstmInputs",
    "LstmOptions",
    "LstmStepWeights",
    "lstm_scan",
    "lstm_scan_choice",
    "lstm_scan_reference",
    "lstm_step",
    "norm_gates",
    "step_weights",
    "zoneout_masks",
]

Keeps = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class LstmOptions:
    """Hyper-parameters of one LSTM scan."""

    layer_norm: bool = False
    """Whether to normalise each gate, and the cell state from which h is computed."""
    ln_eps: float = 1e-3
    """Added to the variance in layer norm."""
    forget_bias: float = 1.0
    """Added to f in every step."""
    zoneout: float = 0.0
    """Probability that a unit of h keeps its old value."""
    zoneout_cell: float = 0.0
    """The same for c."""
    rotational: bool = False
    """Whether the candidate is tanh(eps + R(eps, tau) h): block j is tau, and the input has a fifth block, eps."""
    training: bool = False
    """Whether zoneout draws masks; otherwise it takes their expectation."""

    def with_training(self, training: bool) -> "LstmOptions":
        """Return the same options in training or in evaluation."""
        return self if training == self.training else replace(self, training=training)

    @property
    def draws(self) -> bool:
        """Whether a scan needs a seed."""
        return self.training and (self.zoneout > 0 or self.zoneout_cell > 0)

    @property
    def blocks(self) -> int:
        """Row blocks of ``weight_ih``."""
        return 5 if self.rotational else 4

    @property
    def norms(self) -> int:
        """Blocks of layer norm's gains; 0 without layer norm."""
        return self.blocks + 1 if self.layer_norm else 0

    def kernel_flags(self) -> dict[str, Any]:
        """Return the compile-time arguments of the kernels."""
        zoneout, keep_below = zoneout_flags(self.zoneout, self.training)
        zoneout_c, keep_below_c = zoneout_flags(self.zoneout_cell, self.training)
        return {
            "LN": self.layer_norm,
            "LN_EPS": float(self.ln_eps),
            "FORGET": float(self.forget_bias),
            "ROTATED": self.rotational,
            "ZONEOUT": zoneout,
            "KEEP_BELOW": keep_below,
            "ZONEOUT_C": zoneout_c,
            "KEEP_BELOW_C": keep_below_c,
        }


class LstmInputs(NamedTuple):
    """The tensors of one scan; ``T B H`` are steps, batch and hidden units."""

    xp: Tensor
    """``(T, B, 4H)``, the projected input in blocks i, j, f, o; ``(T, B, 5H)``, i, tau, f, o, eps, if rotational."""
    h0: Tensor
    c0: Tensor
    """Both ``(B, H)``."""
    weight_hh: Tensor
    """``(4H, H)``"""
    ln_weight: Tensor | None = None
    ln_bias: Tensor | None = None
    """Both ``(5H,)``, blocks i, j, f, o, c, with layer norm; ``(6H,)``, i, tau, f, o, c, candidate, if rotational."""
    lengths: Tensor | None = None
    """``(B,)`` int64; a row past its length keeps its state."""
    seed: Tensor | None = None
    """int64 scalar from which zoneout's masks are derived."""
    mask: Tensor | None = None
    """``(B, H)``, multiplies the h that the matmul of every step reads (state dropout)."""


class LstmStepWeights(NamedTuple):
    """Parameters of one step; layer norm's are separate for the gates, for c and for a rotated candidate."""

    weight_hh: Tensor
    """``(4H, H)``"""
    ln_weight: Tensor | None = None
    ln_bias: Tensor | None = None
    """Both ``(4H,)``, for i, j or tau, f, o."""
    ln_weight_c: Tensor | None = None
    ln_bias_c: Tensor | None = None
    """Both ``(H,)``, for c."""
    ln_weight_j: Tensor | None = None
    ln_bias_j: Tensor | None = None
    """Both ``(H,)``, for eps + R h."""


def step_weights(
    weight_hh: Tensor, ln_weight: Tensor | None, ln_bias: Tensor | None, dtype: torch.dtype
) -> LstmStepWeights:
    """Split the weights of a scan, which has all blocks of layer norm in one tensor, into the weights of a step.

    ``dtype`` is the dtype of the state, in which layer norm is computed.
    """
    if ln_weight is None or ln_bias is None:
        return LstmStepWeights(weight_hh)
    gates, H = weight_hh.shape
    gain, *gains = ln_weight.to(dtype).tensor_split((gates, gates + H))
    shift, *shifts = ln_bias.to(dtype).tensor_split((gates, gates + H))
    (gain_c, gain_j), (shift_c, shift_j) = gains, shifts
    if gain_j.numel() == 0:
        return LstmStepWeights(weight_hh, gain, shift, gain_c, shift_c)
    return LstmStepWeights(weight_hh, gain, shift, gain_c, shift_c, gain_j, shift_j)


def lstm_step(
    xp: Tensor,
    h: Tensor,
    c: Tensor,
    weights: LstmStepWeights,
    keeps: Keeps,
    options: LstmOptions,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one step: projected input ``xp`` ``(B, 4H)`` or ``(B, 5H)``, state ``h, c`` ``(B, H)`` -> new h, new c.

    ``keeps`` holds two masks, true where zoneout takes the new h and the new c; None outside training. ``mask`` is as
    in ``LstmInputs``.
    """
    H = h.shape[-1]
    seen = h if mask is None else h * mask
    weight_hh, ln_weight, ln_bias, ln_weight_c, ln_bias_c, ln_weight_j, ln_bias_j = weights
    given = xp[..., : 4 * H] if options.rotational else xp
    if xp.dtype == h.dtype:
        gates = given + F.linear(seen, weight_hh)  # (B, 4H)
    else:  # the state has the higher precision
        gates = given.to(h.dtype) + F.linear(seen.to(xp.dtype), weight_hh).to(h.dtype)
    if ln_weight is None or ln_bias is None:
        i, j, f, o = gates.chunk(4, -1)
    else:
        i, j, f, o = norm_gates(gates.reshape(-1, 4, H), ln_weight, ln_bias, options.ln_eps).unbind(-2)
    if options.rotational:  # j is tau
        eps = xp[..., 4 * H :].to(h.dtype)
        j = eps + rotate(eps, j, h)
        if ln_weight_j is not None and ln_bias_j is not None:
            j = F.layer_norm(j, (H,), ln_weight_j, ln_bias_j, options.ln_eps)
    squashed = new_c = c * torch.sigmoid(f + options.forget_bias) + torch.sigmoid(i) * torch.tanh(j)
    if ln_weight_c is not None and ln_bias_c is not None:
        squashed = F.layer_norm(new_c, (H,), ln_weight_c, ln_bias_c, options.ln_eps)
    new_h = torch.tanh(squashed) * torch.sigmoid(o)
    return apply_zoneout(new_h, h, options.zoneout, keeps[0]), apply_zoneout(new_c, c, options.zoneout_cell, keeps[1])


def norm_gates(gates: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Apply layer norm to each gate separately: ``gates`` ``(B, G, H)``, ``gain`` and ``shift`` ``(G H,)``."""
    shape = gates.shape[-2:]
    return F.layer_norm(gates, shape[-1:], eps=eps) * gain.view(shape) + shift.view(shape)


def apply_zoneout(new: Tensor, old: Tensor, chance: float, keep: Tensor | None) -> Tensor:
    """Apply zoneout: take ``old`` where ``keep`` is false or, without a mask, the expectation of the two."""
    if chance == 0:
        return new
    return torch.where(keep, new, old) if keep is not None else torch.lerp(new, old, chance)


def zoneout_masks(seeds: Tensor | None, t: int, like: Tensor, options: LstmOptions) -> Keeps:
    """Return the masks of h and c for step ``t``, like ``like`` ``(B, H)``; None for a part without zoneout.

    They are derived from the streams ``seeds`` ``(2,)``, as in the kernels, or else drawn from torch's generator.
    """
    if not options.draws:
        return None, None
    B, H = like.shape

    def mask(stream: int, chance: float) -> Tensor | None:
        if chance == 0:
            return None
        if seeds is None:  # float32: 16-bit dtypes round chances
            return torch.rand(B, H, device=like.device, dtype=torch.float32) >= chance
        return keep_mask(seeds[stream], t, B, H, chance)

    return mask(0, options.zoneout), mask(1, options.zoneout_cell)


def lstm_scan_reference(inputs: LstmInputs, options: LstmOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Run a sequence ``xp`` ``(T, B, 4H)`` -> states h ``(T, B, H)``, last h and last c."""
    xp, h0, c0, weight_hh, ln_weight, ln_bias, lengths, seed, mask = inputs
    dtype = working_dtype(xp.dtype)
    h, c = h0.to(dtype), c0.to(dtype)
    weights = step_weights(weight_hh, ln_weight, ln_bias, dtype)
    seeds = None if seed is None else stream_seeds(seed, CELL_STREAMS)
    states = []
    for t, x in enumerate(xp.unbind(0)):
        new_h, new_c = lstm_step(x, h, c, weights, zoneout_masks(seeds, t, h, options), options, mask)
        if lengths is not None:
            active = (t < lengths).unsqueeze(-1)  # (B, 1)
            new_h, new_c = torch.where(active, new_h, h), torch.where(active, new_c, c)
        h, c = new_h, new_c
        states.append(h)
    out = torch.stack(states).to(xp.dtype) if states else xp.new_empty(0, *h0.shape)
    return out, h.to(h0.dtype), c.to(c0.dtype)


def lstm_scan_choice(xp: Tensor, options: LstmOptions, *, backend: Backend = "auto") -> Choice:
    """Return the backend that ``lstm_scan`` takes for ``xp``, and the reason; "torch" and "reference" are the same."""
    return choose_fused(backend, lambda: fused_obstacle(xp, options))


def fused_obstacle(xp: Tensor, options: LstmOptions) -> str | None:
    """Return the reason why the fused backend cannot run on ``xp``, or None."""
    return f"the input is on {xp.device.type}" if xp.device.type != "cuda" else kernel_obstacle(xp, options)


def kernel_obstacle(xp: Tensor, options: LstmOptions) -> str | None:
    """Return the reason why the kernels cannot run on ``xp``, or None; Triton's interpreter runs them on the CPU."""
    return tracing_obstacle(xp) or row_kernel_obstacle(xp, xp.shape[-1] // options.blocks)


def lstm_scan(inputs: LstmInputs, options: LstmOptions, *, backend: Backend = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Run an LSTM over a sequence of projected inputs.

    Args:
        inputs: the tensors. Without a seed, zoneout's masks are drawn from torch's generator.
        options: the hyper-parameters.
        backend: ``"auto"`` takes the fastest backend that can run; ``"fused"``, ``"torch"`` or ``"reference"`` insists
            on one.

    Returns:
        h of all steps ``(T, B, H)``, the last h and the last c, both ``(B, H)``.
    """
    xp = inputs.xp
    # under autocast the projected input has the lower precision
    inputs = inputs._replace(weight_hh=inputs.weight_hh.to(xp.dtype))
    if lstm_scan_choice(xp, options, backend=backend).backend != "fused":
        return lstm_scan_reference(inputs, options)
    seed = inputs.seed if options.draws else None
    if options.draws and seed is None:
        seed = draw_seed(xp.device)
    return lstm_scan_fused(inputs._replace(seed=seed), options)


@functools.lru_cache(256)
def lstm_plans(hidden: int, options: LstmOptions, masked: bool = False) -> tuple["Plan", ...]:
    """Return the chain of a single LSTM, which reads its own state."""
    from torchrum.ops.kernels.chain import LstmBackward, LstmForward, Plan  # triton is absent on machines without CUDA

    plan = Plan(
        stages=(LstmForward, LstmBackward),
        number=0,
        hidden=hidden,
        inputs=(hidden,),
        blocks=options.blocks,
        norms=options.norms,
        state=(0, 1),
        plain=(0, 0),
        dropped=None,
        dropout=0.0,
        masked=masked,
        flags=tuple(options.kernel_flags().items()),
    )
    return (plan,)


@torch.compiler.disable  # it has its own graphs and kernels, which a compiler cannot improve
def lstm_scan_fused(inputs: LstmInputs, options: LstmOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Run the scan with the arguments and results of ``lstm_scan_reference``."""
    from torchrum.ops.kernels.chain import chain_scan

    xp, h0, c0, weight_hh, ln_weight, ln_bias, lengths, seed, mask = inputs

    def reference(xp: Tensor, states: Sequence[Tensor], weights: Sequence[CellWeights]) -> tuple[Tensor, ...]:
        (h0, c0), (_, weight_hh, _, ln_weight, ln_bias) = states, weights[0]
        given = LstmInputs(xp, h0, c0, weight_hh, ln_weight, ln_bias, lengths, seed, mask)
        return lstm_scan_reference(given, options)

    weights = [CellWeights(None, weight_hh, None, ln_weight, ln_bias)]
    plans = lstm_plans(weight_hh.shape[1], options, mask is not None)
    out, (h, c) = chain_scan(plans, xp, (h0, c0), weights, seed, lengths, (mask,), options.training, reference)
    return out, h, c
