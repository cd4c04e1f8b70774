"""The equations of the Fast-Slow recurrence, step by step, with its options and inputs.

The fused backend is tested against this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrum.ops.gated_scan import GatedOptions, gated_update
from torchrum.ops.kernels.linear import CellWeights, working_dtype
from torchrum.ops.kernels.masks import CELL_STREAMS, keep_mask, stream_seeds
from torchrum.ops.lstm_scan import LstmOptions, lstm_step, step_weights, zoneout_masks
from torchrum.ops.rum_scan import RumOptions, StepWeights, rum_step_reference

State = tuple[Tensor, ...]
CellOptions = LstmOptions | RumOptions | GatedOptions


@dataclass(frozen=True, kw_only=True)
class FastSlowOptions:
    """Hyper-parameters of one Fast-Slow scan."""

    fast: tuple[LstmOptions, ...]
    """Options of two or more fast cells."""
    slow: CellOptions
    """Options of the slow cell: an LSTM, a RUM of the paper's form with lam 0, or a gated RUM."""
    dropout: float = 0.0
    """Chance of dropout: after F1 on the way to S, after S, and after the last fast cell."""
    slow_dropout: float | None = None
    """Chance of dropout on the way from F1 to S; None means ``dropout``."""
    training: bool = False
    """Whether dropout is active."""

    @property
    def cells(self) -> tuple[CellOptions, ...]:
        """The cells' options in the order of a step: F1, S, F2, F3, ..."""
        return self.fast[0], self.slow, *self.fast[1:]

    @property
    def drops(self) -> tuple[float, ...]:
        """Chance of dropout after each cell; 0 outside training."""
        if not self.training:
            return (0.0,) * (len(self.fast) + 1)
        first = self.dropout if self.slow_dropout is None else self.slow_dropout
        return first, self.dropout, *[0.0] * (len(self.fast) - 2), self.dropout

    @property
    def draws(self) -> bool:
        """Whether a scan needs a seed."""
        return self.slow.draws or any(fast.draws for fast in self.fast) or any(self.drops)


class FastSlowInputs(NamedTuple):
    """The tensors of one scan; ``H`` and ``S`` are the hidden units of the fast cells and of the slow one."""

    xp: Tensor
    """``(T, B, 4H)``, the first fast cell's ``x W_ih^T + b`` in blocks i, j, f, o; dropped out by the caller."""
    fast: State
    """h and c of the fast cells, ``(B, H)``."""
    slow: State
    """h ``(B, S)`` of the slow cell, and its c if it is an LSTM."""
    weights: Sequence[CellWeights]
    """Weights of the cells in the order F1, S, F2, F3, ..."""
    seed: Tensor | None = None
    """int64 scalar from which the masks of zoneout and dropout are derived."""
    masks: Sequence[Tensor | None] = ()
    """``(B, H)`` or None per cell: multiplies the h that its matmul reads in every step. Empty if no cell has one."""


def cell_step(
    x: Tensor,
    state: State,
    weights: CellWeights,
    seeds: Tensor | None,
    t: int,
    options: CellOptions,
    mask: Tensor | None,
) -> State:
    """Run one step of an LSTM or a RUM on the projected input ``x`` -> the new state, output first."""
    B, H = state[0].shape
    parameters = (weights.weight_hh, weights.ln_weight, weights.ln_bias)
    if isinstance(options, LstmOptions):
        masks = zoneout_masks(None if seeds is None else seeds[:2], t, state[0], options)
        return lstm_step(x, state[0], state[1], step_weights(*parameters, state[0].dtype), masks, options, mask)
    keep = keep_mask(seeds[0], t, B, H, options.zoneout) if seeds is not None and options.draws else None
    if isinstance(options, GatedOptions):
        return (gated_step(x, state[0], weights.weight_hh, keep, options, mask),)
    return (rum_step_reference(x, state[0], None, StepWeights(*parameters), keep, options, mask=mask)[0],)


def gated_step(
    x: Tensor, h: Tensor, weight_hh: Tensor, keep: Tensor | None, options: GatedOptions, mask: Tensor | None
) -> Tensor:
    """Run one step of a gated RUM whose projected input ``x`` ``(B, 4H)`` holds all biases: blocks r, u, tau, eps."""
    H = h.shape[-1]
    seen = h if mask is None else h * mask
    given, eps = x.to(h.dtype).split((3 * H, H), -1)
    r, u, tau = (given + F.linear(seen.to(x.dtype), weight_hh).to(h.dtype)).chunk(3, -1)
    return gated_update(torch.sigmoid(r), torch.sigmoid(u), tau, eps, h, keep, options)


def project(x: Tensor, weights: CellWeights, dtype: torch.dtype) -> Tensor:
    """Return the projected input, in ``dtype``, of a cell that reads the state ``x``; the bias if it has no input."""
    bias = None if weights.bias is None else weights.bias.to(dtype)
    if weights.weight_ih is not None:
        return F.linear(x.to(dtype), weights.weight_ih, bias)
    assert bias is not None
    return bias.expand(len(x), -1)


def fast_slow_scan_reference(inputs: FastSlowInputs, options: FastSlowOptions) -> tuple[Tensor, State, State]:
    """Run a sequence -> outputs ``(T, B, H)``, last state of the fast cells, last state of the slow cell."""
    xp, fast, slow, weights, seed, masks = inputs
    dtype, B = working_dtype(xp.dtype), xp.shape[1]
    kinds = [part.dtype for part in (*fast, *slow)]
    fast, slow = tuple(part.to(dtype) for part in fast), tuple(part.to(dtype) for part in slow)
    count = CELL_STREAMS * len(weights)
    seeds = None if seed is None else stream_seeds(seed, count).view(-1, CELL_STREAMS)

    def drop(x: Tensor, number: int, t: int) -> Tensor:
        p = options.drops[number]
        if p == 0:
            return x
        assert seeds is not None
        keep = keep_mask(seeds[number, 2], t, B, x.shape[-1], p)
        return torch.where(keep, x / (1 - p) if p < 1 else x, 0)

    def step(number: int, x: Tensor, state: State, t: int) -> State:
        streams = None if seeds is None else seeds[number]
        mask = masks[number] if masks else None
        return cell_step(x, state, weights[number], streams, t, options.cells[number], mask)

    outputs = []
    for t, x in enumerate(xp.unbind(0)):
        fast = step(0, x, fast, t)
        slow = step(1, project(drop(fast[0], 0, t), weights[1], xp.dtype), slow, t)
        fast = step(2, project(drop(slow[0], 1, t), weights[2], xp.dtype), fast, t)
        for number in range(3, len(weights)):
            fast = step(number, project(fast[0], weights[number], xp.dtype), fast, t)
        outputs.append(drop(fast[0], len(weights) - 1, t))
    out = torch.stack(outputs).to(xp.dtype) if outputs else xp.new_empty(0, *fast[0].shape)
    last = tuple(part.to(kind) for part, kind in zip((*fast, *slow), kinds, strict=True))
    return out, last[: len(fast)], last[len(fast) :]
