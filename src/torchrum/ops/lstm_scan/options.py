"""What an LSTM step can vary, in one place that every backend reads, and the parameters of a cell in a chain."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LstmOptions:
    """Hyper-parameters of one LSTM scan."""

    layer_norm: bool = False
    """Normalise each gate and the cell state that h is made from."""
    ln_eps: float = 1e-3
    """Added to the variance in layer norm."""
    forget_bias: float = 1.0
    """Added to f in every step."""
    zoneout: float = 0.0
    """Chance that a unit of h keeps its old value."""
    zoneout_cell: float = 0.0
    """The same for c."""
    training: bool = False
    """Zoneout draws masks when training and takes their expectation otherwise."""

    @property
    def draws(self) -> bool:
        """Whether a scan needs a seed."""
        return self.training and (self.zoneout > 0 or self.zoneout_cell > 0)


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
