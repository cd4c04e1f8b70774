"""What a Fast-Slow scan is given."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchrum.ops.kernels.weights import CellWeights

State = tuple[Tensor, ...]


class FastSlowInputs(NamedTuple):
    """The tensors of one scan; ``H`` and ``S`` are the hidden units of the fast cells and of the slow one."""

    xp: Tensor
    """``(T, B, 4H)``, the first fast cell's ``x W_ih^T + b`` in blocks i, j, f, o; dropped out by the caller."""
    fast: State
    """h and c of the fast cells, ``(B, H)``."""
    slow: State
    """h ``(B, S)`` of the slow cell, and its c if it is an LSTM."""
    weights: Sequence[CellWeights]
    """Of the cells in the order F1, S, F2, F3, ..."""
    seed: Tensor | None = None
    """int64 scalar that the masks of zoneout and dropout come from."""
