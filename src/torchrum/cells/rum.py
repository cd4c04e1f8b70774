"""The Rotational Unit of Memory: its cell, its parameters, and one recurrence over a sequence."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from torchrum.cells.base import Cell, State, call_as_nn, warn_unquantized
from torchrum.cells.init import orthogonal
from torchrum.ops._checks import ArgumentTypeError, MismatchError, check_flags
from torchrum.ops._dispatch import Backend
from torchrum.ops.gated_scan import GatedOptions, gated_scan
from torchrum.ops.kernels.linear import working_dtype
from torchrum.ops.kernels.machine import autocast_dtype
from torchrum.ops.rum_scan import RumOptions, ScanInputs, native, rum_scan
from torchrum.ops.rum_scan.options import (
    DEFAULTS,
    PAPER_OPTIONS,
    RELU_OPTIONS,
    TANH_OPTIONS,
    Activation,
    Eta,
    Form,
    LNOrder,
    documents_options,
)
from torchrum.ops.rum_scan.plain import plain_scan, project
from torchrum.ops.rum_scan.steps import NativeSteps, prepare_steps
from torchrum.ops.rum_scan.types import LayerInputs

__all__ = ["PAPER_OPTIONS", "RELU_OPTIONS", "TANH_OPTIONS", "RUMCell"]

PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "ln_weight", "ln_bias", "lam")
Weights = Mapping[str, Any]
"""The parameters of one recurrence by the names in ``PARAMETERS``; None for an absent one."""

PART_STEPS = 1024
"""Fewest steps in a part of a sequence without gradients, enough to make the overhead of a call negligible."""
PART_NUMBERS = 2**18
"""Approximate number of output values in such a part; its other buffers are eight times as large."""


@documents_options
class RUMCell(Cell):
    """One step of the Rotational Unit of Memory (Dangovski et al., TACL 2019; arXiv 1710.09537).

    The default, ``form="gated"``, has the weights of :class:`torch.nn.GRUCell` and adds one term to its candidate::

        r = sigmoid(W_ir x + b_ir + W_hr h + b_hr);  u = sigmoid(W_iu x + b_iu + W_hu h + b_hu)
        eps = W_in x + b_in;  tau = W_hn h + b_hn
        h~ = tanh(eps + r * (tau + P Rotation(eps, tau) h));  h' = u * h + (1 - u) * h~

    Each head of ``head_size`` units rotates in the plane of its own parts of eps and tau. P keeps the first units, a
    share ``rotated`` of all, and sets the others to zero; with ``rotated=0`` the cell is a GRU.

    ``form="paper"`` is the cell of the paper::

        eps = W_eps x + b_eps
        tau = W_tau x + U_tau h + b_tau;  u = sigmoid(W_u x + U_u h + b_u)
        R' = R^lam . Rotation(eps, tau);  h~ = f(eps + R' h);  h' = u * h + (1 - u) * h~
        and with eta:  h' = eta h' / |h'|

    It is called like :class:`torch.nn.GRUCell`, ``h = cell(x, h)``, or, if ``lam`` is not 0, like
    :class:`torch.nn.LSTMCell`, ``h, R = cell(x, (h, R))``. x is ``(B, I)`` or ``(I,)``, h ``(B, H)`` or ``(H,)``, and
    R, which is orthogonal, ``(B, H, H)`` or ``(H, H)``.

    Args:
        input_size: number of input features I.
        hidden_size: number of hidden units H.
        bias: if False, the cell has no biases. Default: ``True``.
        device: device of the parameters. Default: ``None``, torch's default device.
        dtype: dtype of the parameters. Default: ``None``, torch's default dtype.
        {options}

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

    qconfig = property(fset=warn_unquantized)
    weight_ih: nn.Parameter

    _steps: NativeSteps | None = None  # prepared for the last step without gradients

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        form: Form | None = DEFAULTS.form,
        head_size: int = DEFAULTS.head_size,
        rotated: float = DEFAULTS.rotated,
        reset_bias_init: float = DEFAULTS.reset_bias_init,
        update_bias_init: float | None = DEFAULTS.update_bias_init,
        zoneout: float = DEFAULTS.zoneout,
        state_dropout: float = DEFAULTS.state_dropout,
        lam: float = DEFAULTS.lam,
        learn_lam: bool = DEFAULTS.learn_lam,
        eta: Eta = DEFAULTS.eta,
        activation: Activation = DEFAULTS.activation,
        target_activation: Activation | None = DEFAULTS.target_activation,
        update_gate: bool = DEFAULTS.update_gate,
        layer_norm: bool = DEFAULTS.layer_norm,
        ln_order: LNOrder = DEFAULTS.ln_order,
        embed_bias: bool = DEFAULTS.embed_bias,
        target_bias_init: float = DEFAULTS.target_bias_init,
        embed_bias_init: float = DEFAULTS.embed_bias_init,
        embed_scale: float | None = DEFAULTS.embed_scale,
        gate_scale: float = DEFAULTS.gate_scale,
        backend: Backend = DEFAULTS.backend,
    ) -> None:
        check_flags("RUMCell", bias=bias)
        check_dtype("RUMCell", dtype)
        super().__init__(input_size, hidden_size)
        self.settings = RumOptions.given("RUMCell", locals())
        self.options = options_for_scan(self.settings, hidden_size)
        self.state_dropout = self.settings.state_dropout
        self.backend: Backend = backend
        self._shapes = parameter_shapes(input_size, hidden_size, self.settings, bias)
        for name in PARAMETERS:
            shape = self._shapes.get(name)
            self.register_parameter(
                name, None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            )
        self.state_names = ("h", "R") if self.options.keeps_rotation else ("h",)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights and biases according to the constructor's arguments."""
        init_parameters(self._weights(), self.settings)

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return rum_initial_state(batch_size, self.hidden_size, self.options, device, dtype)

    def forward(  # type: ignore[override]  # layers call step and scan; a user calls the cell like torch.nn's
        self, input: Tensor, hx: Tensor | tuple[Tensor | None, ...] | None = None
    ) -> Tensor | State:
        """Run one step.

        Args:
            input: ``(B, I)``, or ``(I,)`` without a batch.
            hx: h, or ``(h, R)`` with lam other than 0; zeros (and the identity) if None, the identity for R = None.

        Returns:
            The new h, or ``(h, R)``, in the form of ``hx``.
        """
        if not torch.is_grad_enabled() and torch.jit.is_tracing():
            with torch.enable_grad():  # the same graph in both modes, since torch.jit.trace compares them
                return RUMCell.forward(self, input, hx)
        H = self.hidden_size
        if isinstance(hx, Tensor) and self._needs_no_checks(input, hx):
            steps = None if torch.is_grad_enabled() else self._native_steps(input, hx)
            if steps is not None:
                return steps(input, hx, None)[1]
            return self._advance(input.unsqueeze(0), (hx,))[0]
        shapes = ((H,), (H, H))[: len(self.state_names)]
        return call_as_nn(self, input, hx, self.weight_ih, shapes, self._advance)

    def _advance(self, x: Tensor, state: State) -> State:
        """Return the state after the single step ``x`` ``(1, B, I)``; with gradients, it is safe to modify in place."""
        returned, training = () if torch.is_grad_enabled() else None, self.training
        weights, mask = self._fitting(x), self.draw_mask(x)
        end = run_rum(x, state, weights, self.options, None, training, self.backend, returned, False, mask)[1]
        usual = state[0].dtype if state else x.dtype
        if end[0].dtype is not usual and x.device.type == "cpu":  # nn.GRUCell keeps it under autocast
            return end[0].to(usual), *end[1:]
        return end

    def _needs_no_checks(self, x: Tensor, h: Tensor) -> bool:
        """Return whether a CPU call can skip ``call_as_nn``, which would pass ``x`` and ``h`` on as they are."""
        weight = self._parameters.get("weight_ih")
        return (
            weight is not None
            and isinstance(x, Tensor)
            and (x.is_cpu and h.is_cpu and not x.is_nested and not h.is_nested)
            and (x.layout is torch.strided and h.layout is torch.strided)
            and (x.dtype is weight.dtype and h.dtype is weight.dtype)
            and (x.dim() == 2 and x.shape[1] == self.input_size and h.shape == (x.shape[0], self.hidden_size))
            and len(self.state_names) == 1
        )

    def _native_steps(self, x: Tensor, h: Tensor) -> NativeSteps | None:
        """Return the prepared call of C for a step without gradients, or None if it cannot be used."""
        if self.training and (self.options.zoneout > 0 or self.state_dropout > 0):
            return None
        steps, parts = self._steps, list(self._parameters.values())
        if steps is None or steps.rows != x.shape[0] or not steps.current(parts):
            if len(parts) < len(PARAMETERS) or any(type(part) not in (nn.Parameter, NoneType) for part in parts):
                return None  # parametrised, or replaced for one call
            steps = self._steps = prepare_steps([self._weights()], x.shape[0], self.options, self.backend)
        return steps if steps is not None and steps.accepts(x, h, None) else None

    def project(self, x: Tensor) -> Tensor:
        return project_rum(x, self._fitting(x), self.options)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        x, mask = self.split_mask(x)
        weights, training = self._fitting(x), self.training
        output, state = scan_rum(x.unsqueeze(0), state, weights, self.options, None, training, self.backend, mask)
        return output.squeeze(0), state

    def scan(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        weights, mask = self._fitting(x), self.draw_mask(x)
        return run_rum(x, state, weights, self.options, lengths, self.training, self.backend, mask=mask)

    def _weights(self) -> Weights:
        own = self._parameters  # nn.Module's attribute lookup takes as long as a small step
        return {name: own[name] if name in own else getattr(self, name) for name in PARAMETERS}

    def _fitting(self, x: Tensor) -> Weights:
        """Return the weights after checking that kernels can read them for an input on the device of ``x``."""
        weights, on_cpu = self._weights(), x.is_cpu
        for name, shape in self._shapes.items():
            part = weights[name]
            if part is None:  # a bias that was removed
                continue
            beside = part.is_cpu if on_cpu else part.device == x.device  # comparing devices takes longer
            if not beside or part.shape != shape:
                raise misfit("RUMCell", name, part, shape, x.device)
        return weights

    def __getstate__(self) -> dict[str, Any]:
        return pickled(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(unpickled(state))

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + self.settings.describe(self._weights()["lam"])


def pickled(module: nn.Module) -> dict[str, Any]:
    """Return the state to pickle, as plain values: ``torch.load`` needs only one safe global, the module's class."""
    state = {**module.__dict__, "settings": vars(module.settings).copy()}
    del state["options"]
    state.pop("_steps", None)
    return state


def unpickled(state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module from the state that ``pickled`` returned."""
    settings = RumOptions(**state["settings"])
    return {**state, "settings": settings, "options": options_for_scan(settings, state["hidden_size"])}


def check_dtype(where: str, dtype: object) -> None:
    """Raise unless ``dtype`` is real floating point, since torch also creates parameters of other dtypes."""
    if dtype not in (None, float, torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ArgumentTypeError(
            f"{where}: dtype={dtype!r} is not allowed; it must be torch.float64, float32, bfloat16 or float16."
        )


def misfit(where: str, name: str, part: Tensor, shape: tuple[int, ...], device: torch.device) -> MismatchError:
    """Build the error for a parameter with a wrong shape or device, which a kernel cannot detect from its address."""
    return MismatchError(
        f"{where}: {name} has shape {tuple(part.shape)}, on {part.device}; it must be {shape}, on {device} as the "
        "input is. Move it, or load the weights again."
    )


def parameter_shapes(I: int, H: int, options: RumOptions, bias: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of one recurrence by name, without the absent ones."""
    if options.form == "gated":
        shapes: dict[str, tuple[int, ...]] = {"weight_ih": (3 * H, I), "weight_hh": (3 * H, H)}
        return {**shapes, "bias_ih": (3 * H,), "bias_hh": (3 * H,)} if bias else shapes
    gates, inputs = options.num_gates, options.num_inputs
    shapes = {"weight_ih": (inputs * H, I), "weight_hh": (gates * H, H)}
    if bias:
        shapes["bias_ih"] = ((inputs if options.embed_bias else gates) * H,)
    if options.layer_norm:
        shapes["ln_weight"] = shapes["ln_bias"] = (inputs * H,)
    if options.learn_lam:
        shapes["lam"] = ()
    return shapes


@torch.no_grad()
def init_parameters(weights: Weights, options: RumOptions) -> None:
    """Initialise the parameters.

    In the gated form they are a GRU's, drawn in the same order. In the paper's form each gate is orthogonal over input
    and state together, as in the original implementation.
    """
    weight_ih, weight_hh, bias = weights["weight_ih"], weights["weight_hh"], weights["bias_ih"]
    H, I = weight_hh.shape[1], weight_ih.shape[1]
    if options.form == "gated":
        for part in weights.values():
            if part is not None:
                part.uniform_(-(H**-0.5), H**-0.5)
        if bias is not None:
            bias[:H] += options.reset_bias_init
            bias[H : 2 * H] += options.update_bias_init
        return
    for gate in range(options.num_gates):
        rows = slice(gate * H, (gate + 1) * H)
        block = orthogonal(H, I + H, weight_ih)
        weight_ih[rows], weight_hh[rows] = options.gate_scale * block[:, :I], options.gate_scale * block[:, I:]
    weight_ih[-H:] = orthogonal(H, I, weight_ih)
    if options.embed_scale is not None:
        weight_ih[-H:] *= options.embed_scale * math.sqrt(max(H / I, 1))  # eps has this scale for unit-variance inputs
    if bias is not None:
        bias.zero_()
        bias[:H] = options.target_bias_init
        if options.update_gate:
            bias[H : 2 * H] = options.update_bias_init
        if options.embed_bias_init > 0 and bias.shape[0] == weight_ih.shape[0]:
            bias[-H:].normal_(0, options.embed_bias_init)
    if weights["ln_weight"] is not None:
        weights["ln_weight"].fill_(1)
        weights["ln_bias"].zero_()
    if weights["lam"] is not None:
        weights["lam"].fill_(options.lam)


def rum_initial_state(B: int, H: int, options: RumOptions, device: torch.device, dtype: torch.dtype) -> State:
    """Return zeros for h, and the identity for R in at least float32."""
    h = torch.zeros(B, H, device=device, dtype=dtype)
    if not options.keeps_rotation:
        return (h,)
    return h, torch.eye(H, device=device, dtype=working_dtype(dtype)).expand(B, H, H)


def project_rum(x: Tensor, weights: Weights, options: RumOptions) -> Tensor:
    """Return ``x W_ih^T + b`` for any leading dimensions."""
    return project(x, weights["weight_ih"], weights["bias_ih"], options)


def run_rum(
    x: Tensor,
    state: State,
    weights: Weights,
    options: RumOptions,
    lengths: Tensor | None,
    training: bool,
    backend: Backend,
    returned: tuple[int, ...] | None = None,
    outputs: bool = True,
    mask: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Project and scan ``x`` ``(T, B, I)`` -> outputs ``(T, B, H)`` and the last state.

    An empty state means zeros, and a state without R means the identity. Without gradients only the outputs grow with
    T: the native scan projects step by step, and other designs run a long sequence in parts.

    ``returned`` is not None if the results go to a user, who may write to them. The results then share no memory with
    each other or with the tensors of the backward, and the last state has the dimensions ``returned`` before B. Without
    ``outputs`` only the last state goes to the user.

    ``mask`` ``(B, H)`` multiplies the h that the matmul of every step reads.
    """
    whole_at_once = torch.is_grad_enabled() or mask is not None or x.shape[0] == 1
    steps = None if whole_at_once else steps_at_once(x, weights["weight_hh"].shape[1], options, training)
    if mask is None and (steps is None or native.projects(x, backend)):
        h0, R0 = (*state, None, None)[:2]
        bias, weight_hh, norm = weights["bias_ih"], weights["weight_hh"], (weights["ln_weight"], weights["ln_bias"])
        inputs = LayerInputs(
            x, weights["weight_ih"], bias, h0, R0, weight_hh, *norm, lengths, bias_hh=weights["bias_hh"]
        )
        plain = plain_scan(inputs, options, training, backend, returned, outputs)
        if plain is not None:
            output, h, R = plain
            return output, (h,) if R is None else (h, R)
    if not state:
        state = (x.new_zeros(x.shape[1], weights["weight_hh"].shape[1]),)
    if steps is None:
        xp = project_rum(x, weights, options)
        output, state = scan_rum(xp, state, weights, options, lengths, training, backend, mask)
    else:
        whole: Tensor | None = None
        for start in range(0, x.shape[0], steps):
            left = None if lengths is None else (lengths - start).clamp(min=0)
            xp = project_rum(x[start : start + steps], weights, options)
            output, state = scan_rum(xp, state, weights, options, left, training, backend)
            if whole is None:  # joining all parts at the end would need the outputs' memory twice
                whole = output.new_empty(x.shape[0], *output.shape[1:])
            whole[start : start + steps] = output
        assert whole is not None
        output = whole
    if returned is None:
        return output, state
    state = tuple((part.view(*returned, *part.shape) if returned else part).clone() for part in state)
    return output.clone() if output.requires_grad else output, state  # the backward reads the states


def options_for_scan(settings: RumOptions, hidden_size: int) -> RumOptions:
    """Return the options for the scans."""
    options = settings.for_scan(hidden_size)
    if settings.form == "paper":
        return options
    given: dict[str, Any] = {"head_size": settings.head_size, "rotated_units": settings.rotated_units(hidden_size)}
    modes = (GatedOptions(**given, zoneout=options.zoneout, training=training) for training in (False, True))
    return replace(options, gated=tuple(modes))


def steps_at_once(x: Tensor, hidden: int, options: RumOptions, training: bool) -> int | None:
    """Return the number of steps in a part of a long sequence without gradients; None to run it as a whole."""
    if torch.compiler.is_compiling() or x.shape[0] <= 2 * PART_STEPS:
        return None
    if x.dtype != working_dtype(x.dtype) or autocast_dtype(x.device.type) is not None:
        return None  # a scan carries its state in float32, which would be rounded between parts
    if options.zoneout > 0 and training:
        return None  # the masks are a single draw per sequence, which the second run of a checkpoint must repeat
    steps = max(PART_STEPS, PART_NUMBERS // max(x.shape[1] * hidden, 1) // PART_STEPS * PART_STEPS)
    return steps if x.shape[0] > 2 * steps else None


def scan_rum(
    xp: Tensor,
    state: State,
    weights: Weights,
    options: RumOptions,
    lengths: Tensor | None,
    training: bool,
    backend: Backend,
    mask: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Run one recurrence over projected inputs ``(T, B, ...)`` -> outputs and the last state."""
    if options.gated is not None:
        gated, given = options.gated[training], (xp, state[0], weights["weight_hh"], weights["bias_hh"], lengths)
        if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
            from torchrum.ops.gated_scan.scan_form import gated_scan_form

            output = gated_scan_form(*given, gated)
        else:
            output = gated_scan(*given, options=gated, mask=mask, backend=backend)
        return output, (output[-1],)
    R = state[1] if len(state) == 2 else None
    norm = weights["ln_weight"], weights["ln_bias"]
    inputs = ScanInputs(xp, state[0], R, weights["weight_hh"], *norm, lengths)
    output, R = rum_scan(inputs, options.with_training(training), lam=weights["lam"], mask=mask, backend=backend)
    return output, (output[-1],) if R is None else (output[-1], R)
