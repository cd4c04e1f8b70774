"""What a RUM can vary beside its sizes: every option once, with its default, its check and its place in ``repr``."""

import math
import warnings
from dataclasses import InitVar, dataclass, fields
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from torchrum.ops._checks import check_choice, check_finite, check_flags
from torchrum.ops._dispatch import BACKENDS, Backend
from torchrum.ops.rum_scan import ACTIVATIONS, RumOptions
from torchrum.ops.rum_scan.options import Activation, LNOrder

Eta = float | Literal["sqrt"] | None


@dataclass(frozen=True, kw_only=True)
class RumSettings:
    """The options of :class:`torchrum.RUMCell` and :class:`torchrum.RUM`, checked; what they mean stands there."""

    lam: float = 0
    learn_lam: bool = False
    eta: Eta = "sqrt"
    activation: Activation = "tanh"
    target_activation: Activation | None = None
    update_gate: bool = True
    layer_norm: bool = False
    ln_order: LNOrder = "before"
    zoneout: float = 0.0
    embed_bias: bool = True
    target_bias_init: float = 0.0
    update_bias_init: float = 1.0
    embed_bias_init: float = 1.0
    embed_scale: float | None = 2.0
    gate_scale: float = 0.25
    backend: Backend = "auto"
    where: InitVar[str] = "RUM"
    """Who is told of a wrong option: the name of the class that it was given to."""

    @classmethod
    def given(cls, where: str, arguments: dict[str, Any]) -> "RumSettings":
        """The options among the arguments of the constructor of class ``where``."""
        return cls(where=where, **{field.name: arguments[field.name] for field in fields(cls)})

    def __post_init__(self, where: str) -> None:
        self._check_numbers(where)
        check_flags(
            where,
            learn_lam=self.learn_lam,
            update_gate=self.update_gate,
            layer_norm=self.layer_norm,
            embed_bias=self.embed_bias,
        )
        for name in ("activation", "target_activation"):
            value = getattr(self, name)
            if isinstance(value, type):
                raise ValueError(
                    f"{where}: {name} is the class {value.__name__}; pass one of its instances, as {value.__name__}()."
                )
            if isinstance(value, str) and value not in ACTIVATIONS and callable(getattr(F, value, None)):
                raise ValueError(
                    f"{where}: {name}={value!r} is not among {', '.join(map(repr, ACTIVATIONS))}; pass the function "
                    f"itself, {name}=torch.nn.functional.{value}."
                )
            if value is not None and not callable(value):
                check_choice(where, name, value, tuple(ACTIVATIONS))
        if self.activation is None:
            raise ValueError(
                f"{where}: activation=None is not allowed; pass torch.nn.Identity() for a linear candidate."
            )
        check_choice(where, "ln_order", self.ln_order, ("before", "authors"))
        check_choice(where, "backend", self.backend, BACKENDS)
        if self.ln_order != "before" and not (self.layer_norm and self.update_gate):
            raise ValueError(
                f"{where}: ln_order={self.ln_order!r} has an effect only with layer_norm=True and update_gate=True."
            )
        if abs(self.lam) > 1:
            warnings.warn(
                f"{where}: lam={self.lam} multiplies the angles of R by {self.lam} per step, and training is likely to "
                "diverge; take a lam from 0 to 1.",
                stacklevel=5,  # the line that builds the layer or the cell
            )

    def _check_numbers(self, where: str) -> None:
        starts = {name: getattr(self, name) for name in ("target_bias_init", "update_bias_init", "embed_bias_init")}
        check_finite(where, lam=self.lam, **starts)
        if self.embed_bias_init < 0:
            raise ValueError(
                f"{where}: embed_bias_init={self.embed_bias_init!r} is a standard deviation; it must be 0 or more."
            )
        if self.eta is not None and self.eta != "sqrt":
            if isinstance(self.eta, str):
                raise ValueError(
                    f"{where}: eta={self.eta!r} is not known; it must be a number above 0, 'sqrt' or None."
                )
            check_finite(where, eta=self.eta)
            if self.eta <= 0:
                raise ValueError(
                    f"{where}: eta={self.eta!r} is not allowed; it must be above 0, or None for no normalisation."
                )
        for name, hint in (("embed_scale", ", or None"), ("gate_scale", "")):
            value = getattr(self, name)
            if value is None and hint:
                continue
            check_finite(where, **{name: value})
            if value <= 0:
                raise ValueError(f"{where}: {name}={value!r} is not allowed; it must be above 0{hint}.")
        check_finite(where, zoneout=self.zoneout)
        if not 0 <= self.zoneout < 1:
            raise ValueError(
                f"{where}: zoneout={self.zoneout!r} is not allowed; it must be at least 0 and below 1, "
                "since 1 would keep every state for ever."
            )

    def options(self, hidden_size: int) -> RumOptions:
        """What the scan needs of them; a learnable lam is written NaN."""
        shared = {field.name: getattr(self, field.name) for field in fields(RumOptions) if hasattr(self, field.name)}
        shared["lam"] = math.nan if self.learn_lam else float(self.lam)
        shared["eta"] = math.sqrt(hidden_size) if self.eta == "sqrt" else self.eta
        shared["zoneout"] = float(self.zoneout)
        return RumOptions(**shared)

    def describe(self, lam: Tensor | None) -> str:
        """The options that differ from their defaults, for ``repr``; ``lam`` is the parameter, where it is one."""
        shown: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default and field.name != "learn_lam"
        }
        if lam is not None:
            shown["lam"] = f"{lam.item():.4g} (learnable)" if lam.device.type != "meta" else "learnable"
        return "".join(f", {name}={value}" for name, value in shown.items())


USUAL = RumSettings()
"""The defaults."""

PAPER_OPTIONS: dict[str, Any] = {
    "activation": "relu",
    "eta": None,
    "target_bias_init": 1.0,
    "update_bias_init": 1.0,
    "embed_bias_init": 0.0,
    "embed_scale": None,
    "gate_scale": 1.0,
}
"""The options of the paper's own models, whatever the defaults are: ``RUM(10, 20, **PAPER_OPTIONS)``."""

TANH_OPTIONS: dict[str, Any] = {
    "activation": "tanh",
    "eta": "sqrt",
    "target_bias_init": 0.0,
    "update_bias_init": 1.0,
    "embed_bias_init": 1.0,
    "embed_scale": 2.0,
    "gate_scale": 0.25,
}
"""The defaults as they are now, for recipes: a recorded run keeps its meaning if they change."""
