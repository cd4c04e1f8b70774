"""The parameters of one cell of a chain."""

from typing import NamedTuple

from torch import Tensor


class CellWeights(NamedTuple):
    """Parameters of one cell, in the layout of its scan.

    An LSTM has 4 row blocks i, j, f, o and a layer norm of 5 (with c); a RUM has tau, u, eps, of which eps has no rows
    in ``weight_hh``, and a layer norm of 3. ``weight_ih`` is None for a cell that reads nothing and, as its bias, for
    one whose input comes projected.
    """

    weight_ih: Tensor | None
    weight_hh: Tensor
    bias: Tensor | None
    ln_weight: Tensor | None
    ln_bias: Tensor | None
