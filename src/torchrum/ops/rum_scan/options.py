"""The options of a RUM. Each option's type, default, description and check is declared here once.

:class:`torchrum.RUM` and :class:`torchrum.RUMCell` name the options in their signatures and build their documentation
from the descriptions here. A new option works as soon as the reference implements it: the other designs reject an
option that is missing from their set in ``designs.py``.
"""

# ruff: noqa: RUF009  # _option returns a dataclass field

import functools
import inspect
import math
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrum.ops._checks import check_choice, check_finite, check_flags, check_positive_int, check_probability
from torchrum.ops._dispatch import BACKENDS, Backend
from torchrum.ops.kernels.masks import zoneout_flags

Activation = str | Callable[[Tensor], Tensor]
Eta = float | Literal["sqrt"] | None
LNOrder = Literal["before", "authors"]
Form = Literal["gated", "paper"]
Class = TypeVar("Class", bound=type)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
}


def _option(default: Any, about: str, *, form: Form | None = "paper", scan: bool = True) -> Any:
    """Declare an argument of the constructors; ``about`` is its description in their documentation.

    ``form`` is the only form that has the option, or None for both. ``scan`` is True if a step of the paper's form
    reads the option; the other options are read elsewhere in a layer or cell.
    """
    return field(default=default, metadata={"about": about, "form": form, "scan": scan})


@dataclass(frozen=True, kw_only=True)
class RumOptions:
    """The options of a RUM of either form.

    ``rum_scan`` takes the result of :meth:`for_scan`, and a learnable ``lam`` as a separate tensor. For ``rum_scan``,
    ``RumOptions()`` is the cell of the paper.
    """

    form: Form | None = _option(
        None,
        'the equations: "gated" has the weights of a GRU, and "paper" is the cell of the paper. None takes "paper" '
        'with any ``lam`` but 0 or with ``learn_lam``, and "gated" otherwise.',
        form=None,
        scan=False,
    )
    head_size: int = _option(8, "units that rotate together, in one plane.", form="gated", scan=False)
    rotated: float = _option(
        0.5,
        "share of the units that take the rotated state, rounded to whole heads; the other units are a GRU's. 0 makes "
        "all of them so, and 1 none.",
        form="gated",
        scan=False,
    )
    reset_bias_init: float = _option(-0.5, "added to the initial b_ir.", form="gated", scan=False)
    update_bias_init: float | None = _option(
        None,
        "initial value of b_u in the paper's form, where None means 1; added to the initial b_iu in the gated form, "
        "where None means 0.",
        form=None,
        scan=False,
    )
    zoneout: float = _option(
        0.0,
        "probability that a unit keeps its old value, below 1. In evaluation the two values are mixed in that "
        "proportion.",
        form=None,
    )
    state_dropout: float = _option(
        0.0,
        "probability that a unit of h is hidden from W_hh, one mask for all steps of a call (Gal and Ghahramani, "
        "2016). The rotation and the update gate see all of h. Only the reference backend has it, in training.",
        form=None,
        scan=False,
    )
    lam: float = _option(
        0.0,
        "exponent of the accumulated rotation R. 0 keeps none; 1 accumulates the rotations; other integers and reals "
        "raise R to that power in every step, at a cost of H^3.",
    )
    learn_lam: bool = _option(False, "make ``lam`` a parameter that starts at the value given.", scan=False)
    eta: float | None = _option(
        None,
        'norm given to every new state (time normalisation), "sqrt" for the root of ``hidden_size``, or None for no '
        "normalisation.",
    )
    activation: Activation = _option(
        "relu", 'the function f, by name ("relu", "tanh", "sigmoid", "softsign") or any elementwise callable.'
    )
    target_activation: Activation | None = _option(
        None, "the same for the target tau; None, as in the paper, leaves it linear."
    )
    update_gate: bool = _option(True, "False takes the candidate h~ as the new state.")
    layer_norm: bool = _option(False, "normalise tau, u and the argument of f.")
    ln_order: LNOrder = _option(
        "before",
        '"before" normalises u before its sigmoid, "authors" after it, as the original implementation does.',
    )
    embed_bias: bool = _option(True, "False leaves out b_eps.", scan=False)
    target_bias_init: float = _option(1.0, "initial value of b_tau.", scan=False)
    embed_bias_init: float = _option(
        0.0, "standard deviation of the normal numbers that b_eps starts from; 0 starts it at zero.", scan=False
    )
    embed_scale: float | None = _option(
        None,
        "standard deviation that eps starts with, without b_eps, for inputs of mean 0 and variance 1; None, as in the "
        "paper, starts W_eps semi-orthogonal.",
        scan=False,
    )
    gate_scale: float = _option(
        1.0,
        "factor of the initial W_tau, U_tau, W_u and U_u, whose rows are orthonormal over both together.",
        scan=False,
    )
    backend: Backend = _option(
        "auto",
        '"auto" takes the fastest backend that can run; "fused", "native", "torch" or "reference" insists on one, and '
        '"persistent", "stepwise" or "lam1" on one design of "fused".',
        form=None,
        scan=False,
    )
    ln_eps: float = 1e-3
    """Added to the variance in layer norm."""
    training: bool = False
    """Whether zoneout draws masks; otherwise it takes their expectation."""
    gated: Any = None
    """The options of ``gated_scan`` in evaluation and in training, in the gated form."""

    def __hash__(self) -> int:
        return hash((self.lam, self.eta, self.zoneout, self.training))  # few fields, since every call needs the hash

    @classmethod
    def given(cls, where: str, arguments: dict[str, Any]) -> "RumOptions":
        """Return the options from the arguments of the constructor of class ``where``, after checking them."""
        options = cls(**{name: arguments[name] for name in option_names()})
        options._check_numbers(where)
        options._check_words(where)
        options = options._with_form(where)
        if abs(options.lam) > 1:
            warnings.warn(
                f"{where}: lam={options.lam} multiplies the angles of R by {options.lam} per step, and training is "
                "likely to diverge; take a lam from 0 to 1.",
                stacklevel=3,  # the line that builds the layer or the cell
            )
        return options

    def _check_numbers(self, where: str) -> None:
        starts = {name: getattr(self, name) for name in ("reset_bias_init", "target_bias_init", "embed_bias_init")}
        check_finite(where, lam=self.lam, zoneout=self.zoneout, **starts)
        check_positive_int(where, head_size=self.head_size)
        check_probability(where, rotated=self.rotated, state_dropout=self.state_dropout)
        if self.embed_bias_init < 0:
            raise ValueError(
                f"{where}: embed_bias_init={self.embed_bias_init!r} is a standard deviation; it must be 0 or more."
            )
        if not 0 <= self.zoneout < 1:
            raise ValueError(
                f"{where}: zoneout={self.zoneout!r} is not allowed; it must be at least 0 and below 1, "
                "since 1 would keep every state for ever."
            )
        if isinstance(self.eta, str) and self.eta != "sqrt":
            raise ValueError(f"{where}: eta={self.eta!r} is not known; it must be a number above 0, 'sqrt' or None.")
        if self.update_bias_init is not None:
            check_finite(where, update_bias_init=self.update_bias_init)
        hints = {"eta": ", or None for no normalisation", "embed_scale": ", or None", "gate_scale": ""}
        for name, hint in hints.items():
            value = getattr(self, name)
            if (value is None and hint) or value == "sqrt":
                continue
            check_finite(where, **{name: value})
            if value <= 0:
                raise ValueError(f"{where}: {name}={value!r} is not allowed; it must be above 0{hint}.")

    def _check_words(self, where: str) -> None:
        flags = ("learn_lam", "update_gate", "layer_norm", "embed_bias")
        check_flags(where, **{name: getattr(self, name) for name in flags})
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
        if self.form is not None:
            check_choice(where, "form", self.form, FORMS)
        check_choice(where, "ln_order", self.ln_order, ("before", "authors"))
        check_choice(where, "backend", self.backend, BACKENDS)
        if self.ln_order != "before" and not (self.layer_norm and self.update_gate):
            raise ValueError(
                f"{where}: ln_order={self.ln_order!r} has an effect only with layer_norm=True and update_gate=True."
            )

    def _with_form(self, where: str) -> "RumOptions":
        """Return the options with their form filled in, after checking that this form has all given options."""
        needed = self._usual_form()
        form = needed if self.form is None else self.form
        for option in fields(self):
            owner, value = option.metadata.get("form"), getattr(self, option.name)
            if owner is None or owner == form or value == option.default:
                continue
            hint = f"; pass form={owner!r}, or leave {option.name} out."
            if owner == "gated" and needed == "paper":
                other = f"lam={self.lam!r}" if self.lam != 0 else "learn_lam=True"
                hint = f", and {other} to form='paper'; leave one of them out."
            raise ValueError(f"{where}: {option.name}={value!r} belongs to form={owner!r}{hint}")
        start = UPDATE_BIAS_INIT[form] if self.update_bias_init is None else self.update_bias_init
        return replace(self, form=form, update_bias_init=start)

    def _usual_form(self) -> Form:
        """Return the form that these options get with ``form=None``."""
        return "paper" if self.lam != 0 or self.learn_lam else "gated"

    def rotated_units(self, hidden_size: int) -> int:
        """Return the number of units in the gated form that take the rotated state: whole heads, or all units."""
        if self.rotated in (0, 1):
            return int(self.rotated) * hidden_size
        heads = max(round(self.rotated * hidden_size / self.head_size), 1)
        return min(heads * self.head_size, hidden_size)

    def for_scan(self, hidden_size: int) -> "RumOptions":
        """Return the options for a scan: eta is a number or None, and a learnable lam is NaN."""
        eta: Any = math.sqrt(hidden_size) if self.eta == "sqrt" else self.eta
        lam = math.nan if self.learn_lam else float(self.lam)
        return replace(self, lam=lam, eta=eta, zoneout=float(self.zoneout))

    def with_training(self, training: bool) -> "RumOptions":
        """Return the same options in training or in evaluation."""
        if training == self.training:
            return self
        # a compiler warns about the cache
        return (_set_training if torch.compiler.is_compiling() else _with_training)(self, training)

    def describe(self, lam: Tensor | None) -> str:
        """Return the options that differ from the defaults, for ``repr``; ``lam`` is the parameter, if there is one."""
        usual = {"form": self._usual_form(), "update_bias_init": UPDATE_BIAS_INIT[self.form or "paper"]}
        shown = {name: getattr(self, name) for name in option_names() if name != "learn_lam"}
        shown = {name: value for name, value in shown.items() if value != usual.get(name, getattr(DEFAULTS, name))}
        if lam is not None:
            shown["lam"] = f"{lam.item():.4g} (learnable)" if lam.device.type != "meta" else "learnable"
        return "".join(f", {name}={value}" for name, value in shown.items())

    def kernel_flags(self) -> dict[str, Any]:
        """Return the compile-time arguments of the Triton kernels of a step."""
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
    def blocks(self) -> int:
        """Row blocks of ``weight_ih``, under the name that all cells of a chain use."""
        return self.num_inputs

    @property
    def norms(self) -> int:
        """Blocks of layer norm's gains; 0 without layer norm."""
        return self.num_inputs if self.layer_norm else 0

    @property
    def draws(self) -> bool:
        """Whether a scan needs a seed."""
        return self.training and self.zoneout > 0

    @property
    def keeps_rotation(self) -> bool:
        """Whether the state has an accumulated rotation R in addition to h."""
        return self.lam != 0  # True for the NaN of a learnable lam


def _set_training(options: RumOptions, training: bool) -> RumOptions:
    return replace(options, training=training)


_with_training = functools.lru_cache(64)(_set_training)  # training calls repeat the same options


def option_names() -> list[str]:
    """Return the names of the options that the constructors take."""
    return [option.name for option in fields(RumOptions) if option.metadata]


SCAN_OPTIONS = {option.name: option.default for option in fields(RumOptions) if option.metadata.get("scan", True)}
"""The options that a step reads, each with its value for the paper's cell."""

FORMS: tuple[str, ...] = get_args(Form)
UPDATE_BIAS_INIT: dict[str, float] = {"gated": 0.0, "paper": 1.0}

RELU_OPTIONS: dict[str, Any] = {
    "activation": "relu",
    "eta": None,
    "target_bias_init": 1.0,
    "update_bias_init": 1.0,
    "embed_bias_init": 0.0,
    "embed_scale": None,
    "gate_scale": 1.0,
}
"""The values of the paper's models, fixed for recipes so that recorded runs do not depend on the defaults."""

TANH_OPTIONS: dict[str, Any] = {
    "activation": "tanh",
    "eta": "sqrt",
    "target_bias_init": 0.0,
    "update_bias_init": 1.0,
    "embed_bias_init": 1.0,
    "embed_scale": 2.0,
    "gate_scale": 0.25,
}
"""Values for the paper's form with bounded states, chosen on everyday tasks."""

PAPER_OPTIONS: dict[str, Any] = {"form": "paper", **RELU_OPTIONS}
"""The options of the paper's models, independent of the defaults: ``RUM(10, 20, **PAPER_OPTIONS)``."""

DEFAULTS = RumOptions()
"""The defaults of :class:`torchrum.RUM` and :class:`torchrum.RUMCell`."""


def documents_options(kind: Class) -> Class:
    """Replace the line ``{options}`` in a class docstring by the descriptions and defaults of all options."""
    lines = []
    for option in fields(RumOptions):
        if option.metadata:
            default = getattr(DEFAULTS, option.name)
            owner = option.metadata["form"]
            only = "" if owner is None else f" Only in form {owner!r}."
            text = f"{option.name}: {option.metadata['about']}{only} Default: ``{default!r}``."
            lines += textwrap.wrap(text, 110, initial_indent=" " * 4, subsequent_indent=" " * 8)
    document = inspect.cleandoc(kind.__doc__ or "")
    assert "    {options}" in document
    kind.__doc__ = document.replace("    {options}", "\n".join(lines))
    return kind
