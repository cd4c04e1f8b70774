"""The RUM layer, with nn.GRU's constructor, calls and parameter names."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.rum import (
    PARAMETERS,
    Weights,
    check_dtype,
    init_parameters,
    misfit,
    options_for_scan,
    parameter_shapes,
    pickled,
    rum_initial_state,
    run_rum,
    unpickled,
)
from torchrum.layers.recurrent import Hidden, Recurrent, State
from torchrum.ops._checks import MismatchError
from torchrum.ops._dispatch import Backend, Choice
from torchrum.ops.gated_scan import gated_scan_choice
from torchrum.ops.kernels.linear import working_dtype
from torchrum.ops.kernels.machine import autocast_dtype
from torchrum.ops.rum_scan import rum_scan_choice
from torchrum.ops.rum_scan.options import DEFAULTS, Activation, Eta, Form, LNOrder, RumOptions, documents_options


@documents_options
class RUM(Recurrent, nn.RNNBase):
    """A multi-layer Rotational Unit of Memory, a drop-in replacement for :class:`torch.nn.GRU`.

    It is called like a GRU: ``output, h_n = rum(input, hx=None)``. ``input`` is ``(T, B, I)``, ``(B, T, I)`` with
    ``batch_first``, ``(T, I)`` without a batch, or a ``PackedSequence``. ``lengths=`` ``(B,)`` is another way to pass
    sequences of unequal length, and ``reset=`` ``(T, B)`` restarts rows at given steps. ``output`` holds the last
    layer's states, ``(T, B, num_directions * H)``, and ``hx`` and ``h_n`` are ``(num_layers * num_directions, B, H)``.

    By default the layer has the weights of a GRU, with the same names, and it can load the ``state_dict`` of an
    ``nn.GRU`` of the same sizes. Half of its units are a GRU's, and the others also take the rotated state; see
    :class:`torchrum.RUMCell` for the equations. ``form="paper"`` gives the layer of the paper.

    If ``lam`` is not 0, the form is the paper's and the state is the pair ``(h, R)``, passed and returned like an
    LSTM's pair. R is ``(num_layers * num_directions, B, H, H)`` and orthogonal. ``R=None`` in ``hx`` means the
    identity; so does a zero matrix in a row of the batch.

    Args:
        input_size: number of input features I.
        hidden_size: number of hidden units H.
        num_layers: number of layers, each of which reads the outputs of the previous one. Default: ``1``.
        bias: if False, the layer has no biases. Default: ``True``.
        batch_first: if True, input and output are ``(B, T, ...)`` instead of ``(T, B, ...)``. Default: ``False``.
        dropout: probability of dropout on the outputs of each layer except the last. Default: ``0.0``.
        bidirectional: if True, read each sequence in both directions. Default: ``False``.
        device: device of the parameters. Default: ``None``, torch's default device.
        dtype: dtype of the parameters. Default: ``None``, torch's default dtype.
        {options}

    Parameters of layer k (with the suffix ``_reverse`` for the other direction), where I is the layer's own input size,
    ``num_directions * H`` for k > 0:

    - in the gated form ``weight_ih_l{k}`` ``(3H, I)``, ``weight_hh_l{k}`` ``(3H, H)``, ``bias_ih_l{k}`` and
      ``bias_hh_l{k}`` ``(3H,)``, all in blocks r, u, n as in :class:`torch.nn.GRU`;
    - in the paper's form ``weight_ih_l{k}`` ``(3H, I)`` in blocks tau, u, eps; ``weight_hh_l{k}`` ``(2H, H)``, tau, u;
      ``bias_ih_l{k}`` ``(3H,)``; ``ln_weight_l{k}`` and ``ln_bias_l{k}`` ``(3H,)``, tau, u, candidate, with layer norm;
      ``lam_l{k}`` if it is learnable. Without the update gate there are no blocks u.

    Example:
        >>> import torch
        >>> from torchrum import RUM
        >>> rum = RUM(10, 20, num_layers=2)
        >>> output, h_n = rum(torch.randn(5, 3, 10))
        >>> output.shape, h_n.shape
        (torch.Size([5, 3, 20]), torch.Size([2, 3, 20]))
        >>> output, (h_n, R_n) = RUM(10, 20, lam=1)(torch.randn(5, 3, 10))
        >>> R_n.shape
        torch.Size([1, 3, 20, 20])
    """

    # an nn.RNNBase for code that checks the type, but without RNNBase's own list of weights
    _apply = nn.Module._apply
    _replicate_for_data_parallel = nn.Module._replicate_for_data_parallel
    takes_lead = True
    least_left_out = 1 / 8
    mode = "RUM"
    """The kind of layer, "GRU" in nn.GRU."""
    proj_size = 0
    """0 as in nn.GRU: there is no projection."""
    weight_ih_l0: nn.Parameter

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
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
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        check_dtype("RUM", dtype)
        self.settings = RumOptions.given("RUM", locals())
        self.options = options_for_scan(self.settings, hidden_size)
        self.backend: Backend = backend
        self.state_names = ("h", "R") if self.options.keeps_rotation else ("h",)
        # full names and shapes of the parameters of each recurrence, by name
        self._forms: list[dict[str, tuple[str, tuple[int, ...]]]] = []
        for index, suffix in enumerate(self._suffixes()):
            features = self.layer_input_size(index // self.num_directions)
            shapes = parameter_shapes(features, hidden_size, self.settings, bias)
            self._forms.append({name: (name + suffix, shape) for name, shape in shapes.items()})
            for name, shape in shapes.items():
                parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                self.register_parameter(name + suffix, parameter)
        self._all_weights = [[full for full, _ in form.values()] for form in self._forms]
        self._flat_weights_names = [name for names in self._all_weights for name in names]
        self.reset_parameters()

    def _suffixes(self) -> list[str]:
        ends = ("", "_reverse") if self.bidirectional else ("",)
        return [f"_l{layer}{end}" for layer in range(self.num_layers) for end in ends]

    def _weights(self, index: int, x: Tensor | None = None) -> Weights:
        """Return the parameters of a recurrence; with the input ``x``, check that kernels can read them beside it."""
        weights: dict[str, Tensor | None] = dict.fromkeys(PARAMETERS)
        own, on_cpu = self._parameters, x is not None and x.is_cpu
        for name, (full, shape) in self._forms[index].items():
            found = own.get(full)  # nn.Module's attribute lookup takes as long as a small step
            if found is None:
                found = getattr(self, full)
            weights[name] = found
            if x is None or found is None:  # a bias may have been removed
                continue
            beside = found.is_cpu if on_cpu else found.device == x.device  # comparing devices takes longer
            if not beside or found.shape != shape:
                raise misfit(self._get_name(), full, found, shape, x.device)
        return weights

    @property
    def _flat_weights(self) -> list[nn.Parameter | None]:  # type: ignore[override]  # assigning it would change nothing
        return [getattr(self, name) for name in self._flat_weights_names]

    def __setattr__(self, attr: str, value: Any) -> None:
        nn.Module.__setattr__(self, attr, value)

    def reset_parameters(self) -> None:
        """Initialise the weights and biases according to the constructor's arguments."""
        for index in range(len(self._suffixes())):
            init_parameters(self._weights(index), self.settings)

    def _any_weight(self, input: Tensor) -> Tensor:
        found = self._parameters.get("weight_ih_l0")
        return self.weight_ih_l0 if found is None else found

    def initial_state(self, index: int, batch_size: int, like: Tensor) -> State:
        return rum_initial_state(batch_size, self.hidden_size, self.options, like.device, like.dtype)

    def _starts(self, count: int, x: Tensor) -> list[State]:
        return [()] * count  # the scan starts from zeros and the identity if no state is given

    def _state_shapes(self, x: Tensor) -> tuple[tuple[int, ...], ...]:
        B, H = x.shape[1], self.hidden_size
        return ((B, H), (B, H, H))[: len(self.state_names)]

    def scan(
        self, index: int, x: Tensor, state: State, lengths: Tensor | None, lead: tuple[int, ...] = ()
    ) -> tuple[Tensor, State]:
        weights = self._weights(index, x)
        if self._forms[index]["weight_hh"][1][1] != self.hidden_size:
            raise MismatchError(f"RUM: hidden_size was changed to {self.hidden_size}; make a new RUM of that size.")
        returned = lead if index == self.num_layers - 1 and not self.bidirectional else None
        mask = None
        if self.training and self.settings.state_dropout > 0:
            ones = x.new_ones(x.shape[1], self.hidden_size, dtype=working_dtype(x.dtype))
            mask = F.dropout(ones, self.settings.state_dropout)
        output, end = run_rum(
            x, state, weights, self.options, lengths, self.training, self.backend, returned, mask=mask
        )
        usual = state[0].dtype if state else x.dtype
        if output.dtype is not usual and x.device.type == "cpu":  # under autocast, where nn.GRU keeps the state's dtype
            output, end = output.to(usual), (end[0].to(usual), *end[1:])
        return output, end

    @property
    def _masks(self) -> bool:
        return self.training and self.settings.state_dropout > 0

    def _write_state(self, states: list[State]) -> Hidden:
        if len(states) > 1:
            return super()._write_state(states)
        (parts,) = states  # copies for the user, already in the shape of h_n unless after a reset
        if parts[0].dim() != 3:
            parts = tuple(part.unsqueeze(0) for part in parts)
        return parts[0] if len(parts) == 1 else parts

    def explain_backend(self, input: Tensor) -> Choice:
        """Return the backend that runs such an input, and the reason.

        Example:
            >>> RUM(10, 20).explain_backend(torch.randn(5, 3, 10)).reason
            'fused cannot run: the input is on cpu...'
        """
        dtype = autocast_dtype(input.device.type) or input.dtype
        # a tensor like the scan's input, without its memory
        projected = input.new_empty(1, dtype=dtype).expand(
            *input.shape[:-1], self.options.num_inputs * self.hidden_size
        )
        if self.options.gated is not None:
            gated = self.options.gated[self.training]
            return gated_scan_choice(projected, gated, masked=self._masks, backend=self.backend)
        learnable = "lam_l0" in self._parameters
        return rum_scan_choice(
            projected, self.options, learnable_lam=learnable, masked=self._masks, backend=self.backend
        )

    def __getstate__(self) -> dict[str, Any]:
        return pickled(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, unpickled(state))

    def extra_repr(self) -> str:
        return super().extra_repr() + self.settings.describe(self._weights(0)["lam"])
