"""The Rotational Unit of Memory, one step at a time."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops._checks import check_choice, check_finite, check_flags, check_positive_int, check_probability
from ..ops._dispatch import BACKENDS, Backend
from ..ops._onednn import explained_linear
from ..ops._precision import autocast_dtype, exact_products, rounds_products
from ..ops._split import split_linear
from ..ops.rum_scan import ACTIVATIONS, RumOptions, native, rum_scan, torch_obstacle
from ..ops.rum_scan.native.linear import linear_applies, native_linear
from ..ops.rum_scan.options import Activation, LNOrder
from ..ops.rum_scan.reference import working_dtype
from .base import Cell, State
from .calling import call_as_nn

Weights = Mapping[str, Tensor | None]

PAPER_OPTIONS: dict[str, Any] = {
    "activation": "relu",
    "target_bias_init": 1.0,
    "update_bias_init": 1.0,
    "embed_bias_init": 0.0,
}
"""The options of the paper's own models, whatever the defaults are: ``RUM(10, 20, **PAPER_OPTIONS)``."""

EXACT_UNITS = 512
"""Hidden units up to which the fused scan of lam = 0 goes forward in exact products while torch rounds to TF32; beyond,
its products have sixteen bits."""

PART_STEPS = 1024
"""Steps, at least, of a part of a sequence that runs without gradients: many enough that its calls cost nothing."""
PART_NUMBERS = 2**18
"""Numbers, about, in the outputs of such a part; what it needs beside them is eight times that."""


class RUMCell(Cell):
    """One step of the Rotational Unit of Memory (Dangovski et al., TACL 2019; arXiv 1710.09537).

    ::

        tau = W_tau x + U_tau h + b_tau;  u = sigmoid(W_u x + U_u h + b_u);  eps = W_eps x + b_eps
        R' = R^lam . Rotation(eps, tau);  h~ = f(eps + R' h);  h' = u * h + (1 - u) * h~
        and with eta:  h' = eta h' / |h'|

    It is called as :class:`torch.nn.GRUCell` is, ``h = cell(x, h)``, and with any ``lam`` but 0 as
    :class:`torch.nn.LSTMCell` is, ``h, R = cell(x, (h, R))``. x is ``(B, I)`` or ``(I,)``, h ``(B, H)`` or ``(H,)`` and
    R, which is orthogonal, ``(B, H, H)`` or ``(H, H)``.

    Args:
        input_size, hidden_size, bias, device, dtype: as in :class:`torch.nn.GRUCell`.
        lam: exponent of the accumulated rotation R. 0 keeps none; 1 multiplies the rotations up; other integers and
            reals raise R to that power in every step, at a cost of H^3.
        learn_lam: make ``lam`` a parameter that starts at the value given.
        eta: norm given to every new state (time normalisation), or None.
        activation: f, by name ("relu", "tanh", "sigmoid", "softsign") or any elementwise callable.
        target_activation: the same for the target tau; None, as in the paper, leaves it linear.
        update_gate: False takes the candidate h~ as the new state.
        layer_norm: normalise tau, u and the argument of f.
        ln_order: "before" normalises u before its sigmoid, "authors" after it, as the authors' code did.
        zoneout: chance that a unit keeps its old value; in evaluation the two values are mixed in that proportion.
        embed_bias: False leaves out b_eps.
        target_bias_init, update_bias_init: start values of b_tau and b_u.
        embed_bias_init: expected norm of the random vector that b_eps starts from; 0 starts it at zero.
        backend: "auto", or "fused", "native", "torch" or "reference" to insist on one.

    Example:
        >>> cell, h = RUMCell(10, 20), torch.zeros(3, 20)
        >>> for x in torch.randn(6, 3, 10):
        ...     h = cell(x, h)
        >>> h.shape
        torch.Size([3, 20])
        >>> h, R = RUMCell(10, 20, lam=1)(torch.randn(3, 10))
        >>> R.shape
        torch.Size([3, 20, 20])
    """

    weight_ih: nn.Parameter

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        lam: float = 0,
        learn_lam: bool = False,
        eta: float | None = None,
        activation: Activation = "relu",
        target_activation: Activation | None = None,
        update_gate: bool = True,
        layer_norm: bool = False,
        ln_order: LNOrder = "before",
        zoneout: float = 0.0,
        embed_bias: bool = True,
        target_bias_init: float = 1.0,
        update_bias_init: float = 1.0,
        embed_bias_init: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        check_positive_int("RUMCell", input_size=input_size, hidden_size=hidden_size)
        check_flags("RUMCell", bias=bias, embed_bias=embed_bias)
        super().__init__(input_size, hidden_size)
        self.options = rum_options(
            "RUMCell",
            lam=lam,
            learn_lam=learn_lam,
            eta=eta,
            activation=activation,
            target_activation=target_activation,
            update_gate=update_gate,
            layer_norm=layer_norm,
            ln_order=ln_order,
            zoneout=zoneout,
            backend=backend,
        )
        self.backend: Backend = backend
        self.starts = RumStarts("RUMCell", lam, target_bias_init, update_bias_init, embed_bias_init)
        shapes = rum_shapes(input_size, hidden_size, self.options, bias, embed_bias)
        for name in RUM_PARAMETERS:
            shape = shapes.get(name)
            self.register_parameter(
                name, None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            )
        self.state_names = ("h", "R") if self.options.keeps_rotation else ("h",)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: orthogonal blocks, biases at their start values."""
        init_rum_weights(self._weights(), self.options, self.starts)

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return rum_initial_state(batch_size, self.hidden_size, self.options, device, dtype)

    def forward(  # type: ignore[override]  # the engine calls step and scan; a user calls the cell as torch.nn's
        self, input: Tensor, hx: Tensor | tuple[Tensor | None, ...] | None = None
    ) -> Tensor | State:
        """One step.

        Args:
            input: ``(B, I)``, or ``(I,)`` without a batch.
            hx: h, or ``(h, R)`` with lam other than 0; zeros (and the identity) if None, the identity for R = None.

        Returns:
            The new h, or ``(h, R)``, in the form of ``hx``.
        """
        return call_as_nn(self, input, hx, self.weight_ih)

    def project(self, x: Tensor) -> Tensor:
        return project_rum(x, self._weights(), self.options)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        weights = self._weights()
        output, state = scan_rum(x.unsqueeze(0), state, weights, self.options, None, self.training, self.backend)
        return output.squeeze(0), state

    def scan(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        return run_rum(x, state, self._weights(), self.options, lengths, self.training, self.backend)

    def _weights(self) -> Weights:
        return {name: getattr(self, name) for name in RUM_PARAMETERS}

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + describe_options(
            self.options, self._weights()["lam"], self.backend
        )


RUM_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "ln_weight", "ln_bias", "lam")


class RumStarts:
    """Values the biases and a learnable lam start from."""

    def __init__(self, where: str, lam: float, target_bias: float, update_bias: float, embed_bias: float) -> None:
        check_finite(where, target_bias_init=target_bias, update_bias_init=update_bias, embed_bias_init=embed_bias)
        if embed_bias < 0:
            raise ValueError(f"{where}: embed_bias_init={embed_bias!r} is a norm; it must be 0 or more.")
        self.lam, self.target_bias, self.update_bias, self.embed_bias = float(lam), target_bias, update_bias, embed_bias


def rum_options(
    where: str,
    *,
    lam: float,
    learn_lam: bool,
    eta: float | None,
    activation: Activation,
    target_activation: Activation | None,
    update_gate: bool,
    layer_norm: bool,
    ln_order: LNOrder,
    zoneout: float,
    backend: Backend,
) -> RumOptions:
    """Check the options of a cell or layer and gather them; a learnable lam is written NaN."""
    check_finite(where, lam=lam)
    if eta is not None:
        check_finite(where, eta=eta)
        if eta <= 0:
            raise ValueError(f"{where}: eta={eta!r} is not allowed; it must be above 0, or None for no normalisation.")
    for name, value in (("activation", activation), ("target_activation", target_activation)):
        if value is not None and not callable(value):
            check_choice(where, name, value, tuple(ACTIVATIONS))
    if activation is None:
        raise ValueError(f"{where}: activation=None is not allowed; pass torch.nn.Identity() for a linear candidate.")
    check_choice(where, "ln_order", ln_order, ("before", "authors"))
    check_choice(where, "backend", backend, BACKENDS)
    if ln_order != "before" and not (layer_norm and update_gate):
        raise ValueError(
            f"{where}: ln_order={ln_order!r} has an effect only with layer_norm=True and update_gate=True."
        )
    check_probability(where, zoneout=zoneout)
    if zoneout == 1:
        raise ValueError(f"{where}: zoneout=1 would keep every state for ever; it must be below 1.")
    check_flags(where, learn_lam=learn_lam, update_gate=update_gate, layer_norm=layer_norm)
    if abs(lam) > 1:
        warnings.warn(
            f"{where}: with lam={lam} the angles of R grow {abs(lam)}-fold a step; expect chaos.", stacklevel=3
        )
    return RumOptions(
        lam=math.nan if learn_lam else float(lam),
        eta=eta,
        activation=activation,
        target_activation=target_activation,
        update_gate=update_gate,
        layer_norm=layer_norm,
        ln_order=ln_order,
        zoneout=float(zoneout),
    )


def rum_shapes(I: int, H: int, options: RumOptions, bias: bool, embed_bias: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of one recurrence; a name that is missing is not a parameter."""
    gates, inputs = options.num_gates, options.num_inputs
    shapes: dict[str, tuple[int, ...]] = {"weight_ih": (inputs * H, I), "weight_hh": (gates * H, H)}
    if bias:
        shapes["bias_ih"] = ((inputs if embed_bias else gates) * H,)
    if options.layer_norm:
        shapes["ln_weight"] = shapes["ln_bias"] = (inputs * H,)
    if math.isnan(options.lam):
        shapes["lam"] = ()
    return shapes


@torch.no_grad()
def init_rum_weights(weights: Weights, options: RumOptions, starts: RumStarts) -> None:
    """The authors' initialisation: each gate's block is orthogonal over its input and state together."""
    weight_ih, weight_hh = weights["weight_ih"], weights["weight_hh"]
    assert weight_ih is not None and weight_hh is not None
    H, I = weight_hh.shape[1], weight_ih.shape[1]

    def orthogonal(columns: int) -> Tensor:
        dtype = working_dtype(torch.get_default_dtype())  # 16-bit dtypes have no QR
        return nn.init.orthogonal_(torch.empty(H, columns, device=weight_ih.device, dtype=dtype))

    for gate in range(options.num_gates):
        rows = slice(gate * H, (gate + 1) * H)
        block = orthogonal(I + H)
        weight_ih[rows], weight_hh[rows] = block[:, :I], block[:, I:]
    weight_ih[-H:] = orthogonal(I)
    bias, ln_weight, ln_bias, lam = (weights[name] for name in ("bias_ih", "ln_weight", "ln_bias", "lam"))
    if bias is not None:
        bias.zero_()
        bias[:H] = starts.target_bias
        if options.update_gate:
            bias[H : 2 * H] = starts.update_bias
        if starts.embed_bias > 0 and bias.shape[0] == weight_ih.shape[0]:
            bias[-H:].normal_(0, starts.embed_bias / math.sqrt(H))
    if ln_weight is not None and ln_bias is not None:
        ln_weight.fill_(1)
        ln_bias.zero_()
    if lam is not None:
        lam.fill_(starts.lam)


def rum_initial_state(B: int, H: int, options: RumOptions, device: torch.device, dtype: torch.dtype) -> State:
    """Zeros for h; the identity for R, in float32 at least."""
    h = torch.zeros(B, H, device=device, dtype=dtype)
    if not options.keeps_rotation:
        return (h,)
    return h, torch.eye(H, device=device, dtype=working_dtype(dtype)).expand(B, H, H)


def padded_bias(weights: Weights) -> Tensor | None:
    """The bias of the projection; zeros for eps where that has none."""
    weight, bias = weights["weight_ih"], weights["bias_ih"]
    if weight is None or bias is None or bias.shape[0] == weight.shape[0]:
        return bias
    return F.pad(bias, (0, weight.shape[0] - bias.shape[0]))


def project_rum(x: Tensor, weights: Weights, options: RumOptions, backend: Backend = "torch") -> Tensor:
    """``x W_ih^T + b`` for any leading dimensions; by the native scan's own matmul where ``backend`` allows it.

    TF32 would cost more than its ten bits: units of relu whose sign it turns over spoil the gradients far more than the
    rounding itself, and with lam other than 0 R adds up every step's rotation. So this product has at least the
    digits of the recurrent one.
    """
    weight, bias = weights["weight_ih"], padded_bias(weights)
    assert weight is not None
    if backend in ("auto", "native") and linear_applies(x, weight):
        return native_linear(x, weight, bias)
    if not rounds_products(x):
        return F.linear(x, weight, bias) if torch.compiler.is_compiling() else explained_linear(x, weight, bias)
    if options.keeps_rotation or weight.shape[0] <= EXACT_UNITS * options.num_inputs:
        with exact_products():
            return F.linear(x, weight, bias)
    return split_linear(x, weight, bias)


def run_rum(
    x: Tensor,
    state: State,
    weights: Weights,
    options: RumOptions,
    lengths: Tensor | None,
    training: bool,
    backend: Backend,
) -> tuple[Tensor, State]:
    """Project and scan ``x`` ``(T, B, I)`` -> outputs ``(T, B, H)`` and the last state.

    Where no gradient is recorded only the outputs grow with T: the native scan projects step by step, and else a long
    sequence goes through in parts.
    """
    if not torch.is_grad_enabled() and backend in ("auto", "native"):
        found = infer_rum(x, state, weights, options, lengths, training)
        if found is not None:
            return found
    steps = steps_at_once(x, state[0], options, training)
    if steps is None:
        return scan_rum(project_rum(x, weights, options, backend), state, weights, options, lengths, training, backend)
    outputs = []
    for start in range(0, x.shape[0], steps):
        xp = project_rum(x[start : start + steps], weights, options, backend)
        left = None if lengths is None else (lengths - start).clamp(min=0)
        output, state = scan_rum(xp, state, weights, options, left, training, backend)
        outputs.append(output)
    return torch.cat(outputs), state


def infer_rum(
    x: Tensor, state: State, weights: Weights, options: RumOptions, lengths: Tensor | None, training: bool
) -> tuple[Tensor, State] | None:
    """``run_rum`` by the native scan alone, None where it cannot; zoneout's masks would need a seed from torch."""
    weight_ih, weight_hh = weights["weight_ih"], weights["weight_hh"]
    assert weight_ih is not None and weight_hh is not None
    if not native.is_unwatched(x, weight_ih) or (options.zoneout > 0 and training):
        return None
    if torch_obstacle(options, weights["lam"] is not None) is not None:
        return None
    bias = padded_bias(weights)
    (h, R), norms = state if len(state) == 2 else (state[0], None), (weights["ln_weight"], weights["ln_bias"])
    output, R = native.infer_projecting(x, h, R, weight_ih, bias, weight_hh, *norms, lengths, options)
    return output, (output[-1],) if R is None else (output[-1], R)


def steps_at_once(x: Tensor, h: Tensor, options: RumOptions, training: bool) -> int | None:
    """How many steps a part of a long sequence has; None where it is to run as a whole."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if x.dtype != working_dtype(x.dtype) or autocast_dtype(x.device.type) is not None:
        return None  # a scan carries its state in float32, which would be rounded between parts
    if options.zoneout > 0 and training:
        return None  # the masks are one draw for the sequence, which a checkpoint's second run must meet again
    steps = max(PART_STEPS, PART_NUMBERS // max(h.numel(), 1) // PART_STEPS * PART_STEPS)
    return steps if x.shape[0] > 2 * steps else None


def scan_rum(
    xp: Tensor,
    state: State,
    weights: Weights,
    options: RumOptions,
    lengths: Tensor | None,
    training: bool,
    backend: Backend,
) -> tuple[Tensor, State]:
    """Run one recurrence over projected inputs ``(T, B, ...)`` -> outputs and the last state."""
    options = options.with_training(training)
    weight_hh = weights["weight_hh"]
    assert weight_hh is not None
    output, R = rum_scan(
        xp,
        state[0],
        state[1] if len(state) == 2 else None,
        weight_hh,
        weights["ln_weight"],
        weights["ln_bias"],
        options=options,
        lengths=lengths,
        lam=weights["lam"],
        backend=backend,
    )
    return output, (output[-1],) if R is None else (output[-1], R)


def describe_options(options: RumOptions, lam: Tensor | None, backend: str) -> str:
    """The options that differ from their defaults, for ``repr``."""
    usual = RumOptions()
    shown = {name: value for name, value in vars(options).items() if value != getattr(usual, name)}
    shown.pop("training", None)
    if lam is not None:
        shown["lam"] = f"{lam.item():.4g} (learnable)" if lam.device.type != "meta" else "learnable"
    if backend != "auto":
        shown["backend"] = backend
    return "".join(f", {name}={value}" for name, value in shown.items())
