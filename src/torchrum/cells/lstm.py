"""The LSTM with layer norm and zoneout, and the GRU with its reset gate before or after the recurrent matrix."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State
from torchrum.cells.init import INITS, block_orthogonal_, glorot_, new_parameter, orthogonal_
from torchrum.ops._checks import (
    check_choice,
    check_finite,
    check_flags,
    check_not_negative,
    check_probability,
)
from torchrum.ops._dispatch import Backend, Choice
from torchrum.ops.kernels.machine import autocast_dtype
from torchrum.ops.lstm_scan import (
    CellWeights,
    LstmInputs,
    LstmOptions,
    LstmStepWeights,
    lstm_scan,
    lstm_scan_choice,
    lstm_step,
    zoneout_masks,
)


class LSTMCell(Cell):
    """Long short-term memory (Hochreiter & Schmidhuber, 1997) as in the Fast-Slow RNN (Mujika et al., 2017).

    i, j, f, o = W x + U h + b, each through LN if ``layer_norm``
    c' = c * sigmoid(f + forget_bias) + sigmoid(i) * tanh(j);   h' = tanh(LN(c')) * sigmoid(o)
    then zoneout keeps the old value of some units of h and c; c' itself is stored without LN.

    With ``rotational`` it is the rotational LSTM: a RUM's candidate with an LSTM's gates. W then has the blocks i, tau,
    f, o, eps and U the blocks i, tau, f, o; eps has no LN, and::

        c' = c * sigmoid(f + forget_bias) + sigmoid(i) * tanh(LN(eps + Rotation(eps, tau) h))

    Zoneout of c does not affect the rotated h.

    Shapes: x ``(B, I)``, state ``(h, c)`` of ``(B, H)`` -> output h' ``(B, H)``, state ``(h', c')``.

    Args:
        input_size: I; 0 for a cell without input, whose steps read ``(B, 0)``.
        hidden_size: H.
        layer_norm: normalise each gate, and the cell state from which h' is computed.
        ln_eps: added to the variance in layer norm.
        forget_bias: added to f in every step; not trained.
        rotational: use the rotated h in the candidate.
        zoneout, zoneout_cell: probability that a unit of h (of c) keeps its old value.
        state_dropout: probability that a unit of h is hidden from U, with one mask for all steps of a call.
        init: ``"glorot"``, as in TensorFlow; ``"orthogonal"``, W and U each semi-orthogonal over all rows; or
            ``"block_orthogonal"``, W and U tiled with square orthogonal blocks, as in the Zoneout LSTM.
        device, dtype: device and dtype of the parameters.
        backend: backend of ``scan``: "auto", "fused" to insist on the kernels, or "torch" or "reference" for the plain
            loop.
    """

    state_names = ("h", "c")
    may_read_nothing = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        layer_norm: bool = False,
        ln_eps: float = 1e-3,
        forget_bias: float = 1.0,
        rotational: bool = False,
        zoneout: float = 0.0,
        zoneout_cell: float = 0.0,
        state_dropout: float = 0.0,
        init: str = "glorot",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_probability("LSTMCell", zoneout=zoneout, zoneout_cell=zoneout_cell, state_dropout=state_dropout)
        check_finite("LSTMCell", forget_bias=forget_bias)
        check_not_negative("LSTMCell", ln_eps=ln_eps)
        check_flags("LSTMCell", layer_norm=layer_norm, rotational=rotational)
        check_choice("LSTMCell", "init", init, INITS)
        check_choice("LSTMCell", "backend", backend, ("auto", "fused", "torch", "reference"))
        self.options = LstmOptions(
            layer_norm=layer_norm,
            ln_eps=ln_eps,
            forget_bias=forget_bias,
            rotational=rotational,
            zoneout=zoneout,
            zoneout_cell=zoneout_cell,
        )
        self.state_dropout = state_dropout
        self.init = init
        self.backend: Backend = backend
        empty = new_parameter(device, dtype)
        blocks = self.options.blocks
        self.weight_ih = empty(blocks * hidden_size, input_size)  # rows: i, j, f, o; i, tau, f, o, eps
        self.weight_hh = empty(4 * hidden_size, hidden_size)
        self.bias = empty(blocks * hidden_size)
        if layer_norm:
            self.ln_weight = empty(4 * hidden_size)  # i, j or tau, f, o
            self.ln_bias = empty(4 * hidden_size)
            self.ln_weight_c = empty(hidden_size)
            self.ln_bias_c = empty(hidden_size)
            if rotational:
                self.ln_weight_j = empty(hidden_size)
                self.ln_bias_j = empty(hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights; biases start at 0, gains at 1."""
        if self.init == "glorot":
            glorot_(self.weight_ih, self.weight_hh)
        else:
            fill = orthogonal_ if self.init == "orthogonal" else block_orthogonal_
            for weight in (self.weight_ih, self.weight_hh):
                fill(weight)
        nn.init.zeros_(self.bias)
        if self.options.layer_norm:
            for gain, shift in zip(*self._norms(), strict=True):
                nn.init.ones_(gain)
                nn.init.zeros_(shift)

    def _norms(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return layer norm's gains and shifts, for the gates, for c and, if rotational, for the candidate."""
        gains, shifts = [self.ln_weight, self.ln_weight_c], [self.ln_bias, self.ln_bias_c]
        if self.options.rotational:
            gains.append(self.ln_weight_j)
            shifts.append(self.ln_bias_j)
        return gains, shifts

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih, self.bias)  # (..., 4H), or 5H if rotational

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        h, c = state
        x, mask = self.split_mask(x)
        weights, options = self._step_weights(x.dtype), self.scan_options()
        h, c = lstm_step(x, h, c, weights, zoneout_masks(None, 0, h, options), options, mask)
        return h, (h, c)

    def scan(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        if self.explain_backend(x).backend != "fused":
            return super().scan(x, state, lengths)  # by steps, which may be compiled
        h, c = state
        weights = self.scan_weights()
        norms = (weights.ln_weight, weights.ln_bias)
        xp = self.project(x)
        inputs = LstmInputs(xp, h, c, weights.weight_hh, *norms, lengths, mask=self.draw_mask(xp))
        output, h, c = lstm_scan(inputs, self.scan_options(), backend="fused")
        return output, (h, c)

    def explain_backend(self, x: Tensor) -> Choice:
        """Return the backend that ``scan`` takes for ``x`` ``(T, B, I)``, and the reason."""
        xp = projected_like(x, self.options.blocks * self.hidden_size)
        return lstm_scan_choice(xp, self.options, backend=self.backend)

    def scan_options(self) -> LstmOptions:
        """Return the cell's hyper-parameters for the kernels."""
        return self.options.with_training(self.training)

    def scan_weights(self) -> CellWeights:
        """Return the cell's parameters for the kernels; layer norm's blocks are i, j, f, o, c, rotated candidate."""
        gains = shifts = None
        if self.options.layer_norm:
            gains, shifts = (torch.cat(tuple(parts)) for parts in self._norms())
        return CellWeights(self.weight_ih, self.weight_hh, self.bias, gains, shifts)

    def _step_weights(self, dtype: torch.dtype) -> LstmStepWeights:
        """Return the parameters of a step, whose matmul runs in ``dtype``, the lower precision under autocast."""
        weight_hh: Tensor = self.weight_hh
        if weight_hh.dtype != dtype:
            weight_hh = weight_hh.to(dtype)
        if not self.options.layer_norm:
            return LstmStepWeights(weight_hh)
        pairs = zip(*self._norms(), strict=True)
        return LstmStepWeights(weight_hh, *(part for pair in pairs for part in pair))

    def extra_repr(self) -> str:
        options = vars(self.options).items()
        hidden = ("ln_eps", "training", *([] if self.options.rotational else ["rotational"]))
        words = [f"{name}={value}" for name, value in options if name not in hidden]
        words += [f"state_dropout={self.state_dropout}"] if self.state_dropout else []
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *words, f"init={self.init!r}"])


def projected_like(x: Tensor, width: int) -> Tensor:
    """Return an empty tensor with the device and dtype that a projection of ``x`` has, even under autocast."""
    return x.new_empty((0, 0, width), dtype=autocast_dtype(x.device.type) or x.dtype)


class GRUCell(Cell):
    """Gated recurrent unit (Cho et al., 2014); u keeps the old state.

    r, u = sigmoid(W x + U h + b);   h~ = tanh(W_c x + U_c (r * h) + b_c);   h' = u * h + (1 - u) * h~
    With ``reset_after``:            h~ = tanh(W_c x + b_c + r * (U_c h + b_hc)), as in torch and cuDNN.

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)`` -> output h' ``(B, H)``, state ``(h',)``.

    Args:
        input_size, hidden_size: I, H.
        reset_after: apply the reset gate to U_c h instead of h.
        gate_bias: initial value of the biases of r and u.
        state_dropout: probability that a unit of h is hidden from U and U_c, with one mask for all steps of a call.
        init: ``"glorot"``, or ``"orthogonal"``: semi-orthogonal over [x; h], one matrix for the gates, one for h~.
        device, dtype: device and dtype of the parameters.
    """

    shown = ("reset_after", "gate_bias", "state_dropout", "init")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        reset_after: bool = False,
        gate_bias: float = 1.0,
        state_dropout: float = 0.0,
        init: str = "glorot",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_finite("GRUCell", gate_bias=gate_bias)
        check_probability("GRUCell", state_dropout=state_dropout)
        check_flags("GRUCell", reset_after=reset_after)
        check_choice("GRUCell", "init", init, INITS)
        self.reset_after = reset_after
        self.gate_bias = gate_bias
        self.state_dropout = state_dropout
        self.init = init
        empty = new_parameter(device, dtype)
        self.weight_ih = empty(3 * hidden_size, input_size)  # rows: r, u, candidate
        self.weight_hh = empty(2 * hidden_size, hidden_size)  # rows: r, u
        self.weight_hc = empty(hidden_size, hidden_size)
        self.bias = empty(3 * hidden_size)
        if reset_after:
            self.bias_hc = empty(hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights; gate biases start at ``gate_bias``, the others at 0."""
        H = self.hidden_size
        start = orthogonal_ if self.init == "orthogonal" else glorot_
        start(self.weight_ih[: 2 * H], self.weight_hh)  # two kernels, each over [x; h]
        start(self.weight_ih[2 * H :], self.weight_hc)
        nn.init.constant_(self.bias[: 2 * H], self.gate_bias)
        nn.init.zeros_(self.bias[2 * H :])
        if self.reset_after:
            nn.init.zeros_(self.bias_hc)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih, self.bias)  # (..., 3H)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (h,) = state
        x, mask = self.split_mask(x)
        seen = h if mask is None else h * mask
        x_gates, x_c = x.split((2 * self.hidden_size, self.hidden_size), -1)
        r, u = torch.sigmoid(x_gates + F.linear(seen, self.weight_hh)).chunk(2, -1)
        if self.reset_after:
            candidate = torch.tanh(x_c + r * F.linear(seen, self.weight_hc, self.bias_hc))
        else:
            candidate = torch.tanh(x_c + F.linear(r * seen, self.weight_hc))
        h = u * h + (1 - u) * candidate
        return h, (h,)
