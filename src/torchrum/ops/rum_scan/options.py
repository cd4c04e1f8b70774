"""What a RUM step can vary, in one place that every backend reads."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchrum.ops.kernels.masks import zoneout_flags

Activation = str | Callable[[Tensor], Tensor]
LNOrder = Literal["before", "authors"]


@dataclass(frozen=True, kw_only=True)
class RumOptions:
    """Hyper-parameters of one RUM scan; a learnable ``lam`` travels beside them as a tensor."""

    lam: float = 0.0
    """Exponent of the accumulated rotation; 0 keeps no memory matrix."""
    eta: float | None = None
    """Norm that every state is given, or None."""
    activation: Activation = "relu"
    """Name in ``ACTIVATIONS`` or any elementwise callable."""
    target_activation: Activation | None = None
    """Applied to the target tau before the rotation; the paper has none."""
    update_gate: bool = True
    """Mix the old state with the candidate; without it the candidate is the state."""
    layer_norm: bool = False
    """Normalise the target, the gate and the candidate."""
    ln_order: LNOrder = "before"
    """Normalise the gate before its sigmoid, or after it as the original implementation does."""
    ln_eps: float = 1e-3
    """Added to the variance in layer norm."""
    zoneout: float = 0.0
    """Chance that a unit keeps its old value."""
    training: bool = False
    """Zoneout draws masks when training and takes their expectation otherwise."""

    def __hash__(self) -> int:
        return hash((self.lam, self.eta, self.zoneout, self.training))  # of few fields: every call looks plans up by it

    def with_training(self, training: bool) -> "RumOptions":
        """The same options in training or in evaluation."""
        if training == self.training:
            return self
        if torch.compiler.is_compiling():
            return _change_training(self, training)
        return _changed_training(self, training)

    def kernel_flags(self) -> dict[str, Any]:
        """What the Triton kernels of a step are compiled for."""
        zoneout, keep_below = zoneout_flags(self.zoneout, self.training)
        return {
            "GATE": self.update_gate,
            "LN": self.ln_order if self.layer_norm else "none",
            "LN_EPS": float(self.ln_eps) if self.layer_norm else 0.0,
            "ACTIVATION": self.activation,
            "ETA": None if self.eta is None else float(self.eta),
            "ZONEOUT": zoneout,
            "KEEP_BELOW": keep_below,
        }

    @property
    def num_gates(self) -> int:
        """Row blocks of ``weight_hh``: tau, and u with the update gate."""
        return 2 if self.update_gate else 1

    @property
    def num_inputs(self) -> int:
        """Row blocks of ``weight_ih``: tau, u with the update gate, eps."""
        return self.num_gates + 1

    @property
    def draws(self) -> bool:
        """Whether a scan needs a seed."""
        return self.training and self.zoneout > 0

    @property
    def keeps_rotation(self) -> bool:
        """Whether the state holds the accumulated rotation R beside h."""
        return self.lam != 0  # so for NaN, which stands for a learnable lam


def _change_training(options: RumOptions, training: bool) -> RumOptions:
    """Written out, since older compilers trace no more than that."""
    return RumOptions(
        lam=options.lam,
        eta=options.eta,
        activation=options.activation,
        target_activation=options.target_activation,
        update_gate=options.update_gate,
        layer_norm=options.layer_norm,
        ln_order=options.ln_order,
        ln_eps=options.ln_eps,
        zoneout=options.zoneout,
        training=training,
    )


_changed_training = functools.lru_cache(64)(_change_training)  # a training call asks for the same ones each time
