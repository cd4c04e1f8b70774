"""What an LSTM scan is given."""

from typing import NamedTuple

import torch
from torch import Tensor


class LstmInputs(NamedTuple):
    """The tensors of one scan; ``T B H`` are steps, batch and hidden units."""

    xp: Tensor
    """``(T, B, 4H)``, the projected input in blocks i, j, f, o."""
    h0: Tensor
    c0: Tensor
    """Both ``(B, H)``."""
    weight_hh: Tensor
    """``(4H, H)``"""
    ln_weight: Tensor | None = None
    ln_bias: Tensor | None = None
    """Both ``(5H,)``, blocks i, j, f, o, c, with layer norm."""
    lengths: Tensor | None = None
    """``(B,)`` int64; a row past its length keeps its state."""
    seed: Tensor | None = None
    """int64 scalar that zoneout's masks come from."""


class LstmStepWeights(NamedTuple):
    """The parameters that every step reads, with those of layer norm in the parts that it applies."""

    weight_hh: Tensor
    """``(4H, H)``"""
    ln_weight: Tensor | None = None
    ln_bias: Tensor | None = None
    """Both ``(4H,)``: of i, j, f, o."""
    ln_weight_c: Tensor | None = None
    ln_bias_c: Tensor | None = None
    """Both ``(H,)``: of c."""


def step_weights(
    weight_hh: Tensor, ln_weight: Tensor | None, ln_bias: Tensor | None, dtype: torch.dtype
) -> LstmStepWeights:
    """A step's weights from those of a scan, whose layer norm has all five blocks in one tensor.

    ``dtype`` is that of the state, which layer norm computes in.
    """
    if ln_weight is None or ln_bias is None:
        return LstmStepWeights(weight_hh)
    gates, c = weight_hh.shape[0], weight_hh.shape[1]
    gain, gain_c = ln_weight.to(dtype).split((gates, c))
    shift, shift_c = ln_bias.to(dtype).split((gates, c))
    return LstmStepWeights(weight_hh, gain, shift, gain_c, shift_c)
