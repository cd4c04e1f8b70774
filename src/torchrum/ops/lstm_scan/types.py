"""What an LSTM scan is given."""

from typing import NamedTuple

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
