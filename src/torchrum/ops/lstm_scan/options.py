"""What an LSTM step can vary, in one place that every backend reads."""

from dataclasses import dataclass
from typing import Any

from torchrum.ops.kernels.masks import zoneout_flags


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

    def with_training(self, training: bool) -> "LstmOptions":
        """The same options in training or in evaluation; written out, since older compilers trace no more than that."""
        if training == self.training:
            return self
        return LstmOptions(
            layer_norm=self.layer_norm,
            ln_eps=self.ln_eps,
            forget_bias=self.forget_bias,
            zoneout=self.zoneout,
            zoneout_cell=self.zoneout_cell,
            training=training,
        )

    @property
    def draws(self) -> bool:
        """Whether a scan needs a seed."""
        return self.training and (self.zoneout > 0 or self.zoneout_cell > 0)

    def kernel_flags(self) -> dict[str, Any]:
        """What the kernels of a step are compiled for."""
        zoneout, keep_below = zoneout_flags(self.zoneout, self.training)
        zoneout_c, keep_below_c = zoneout_flags(self.zoneout_cell, self.training)
        return {
            "LN": self.layer_norm,
            "LN_EPS": float(self.ln_eps),
            "FORGET": float(self.forget_bias),
            "ZONEOUT": zoneout,
            "KEEP_BELOW": keep_below,
            "ZONEOUT_C": zoneout_c,
            "KEEP_BELOW_C": keep_below_c,
        }
