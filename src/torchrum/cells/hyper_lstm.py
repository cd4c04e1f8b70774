"""HyperLSTM: an LSTM whose weights a smaller LSTM rescales at every step."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import State
from torchrum.cells.gathered import GatherableCell, Linear
from torchrum.cells.init import orthogonal_
from torchrum.cells.lstm import LSTMCell
from torchrum.ops._checks import (
    check_choice,
    check_finite,
    check_flags,
    check_not_negative,
    check_positive_int,
    check_probability,
)
from torchrum.ops.lstm_scan import norm_gates

READS = ("new", "previous")


class HyperLSTMCell(GatherableCell):
    """HyperLSTM (Ha et al., 2016) for the gates y = i, g, f, o.

    q', c_q' = LSTM([x; h], q, c_q);   u = q' or q
    d_h^y = D_h^y (E_h^y u + e_h^y);   d_x^y = D_x^y (E_x^y u + e_x^y);   d_b^y = D_b^y E_b^y u
    y = d_h^y * U^y h + d_x^y * W^y x + d_b^y + b^y, then LN if ``layer_norm``
    c' = c * sigmoid(f + forget_bias) + sigmoid(i) * drop(tanh(g));   h' = sigmoid(o) * tanh(LN(c'))

    At the start d_h = d_x = 0.1 and d_b = 0 whatever the input: E_h, E_x and D_b are 0.

    Shapes: x ``(B, I)`` -> output h' ``(B, H)``; state ``h, c`` ``(B, H)`` and ``q, c_q`` ``(B, hyper_size)``.

    Args:
        input_size, hidden_size: I, H.
        hyper_size: hidden size of the small LSTM.
        embedding_size: numbers that each of the twelve E reduces u to.
        layer_norm: in both LSTMs, on each gate and on the cell state that h' is made from.
        ln_eps: added to the variance in layer norm.
        forget_bias: added to f in every step, in both LSTMs; not trained.
        hyper_output: u is the small LSTM's ``"new"`` output, as in the original implementation, or the ``"previous"``
            one, as in the paper.
        recurrent_dropout: chance, from 0 to 1, that a unit of tanh(g) is zeroed, drawn afresh in each step.
        device, dtype: of the parameters.
    """

    state_names = ("h", "c", "q", "c_q")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        hyper_size: int = 128,
        embedding_size: int = 4,
        layer_norm: bool = True,
        ln_eps: float = 1e-3,
        forget_bias: float = 1.0,
        hyper_output: str = "new",
        recurrent_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("HyperLSTMCell", input_size=input_size, hidden_size=hidden_size)
        check_positive_int("HyperLSTMCell", hyper_size=hyper_size, embedding_size=embedding_size)
        check_finite("HyperLSTMCell", forget_bias=forget_bias)
        check_not_negative("HyperLSTMCell", ln_eps=ln_eps)
        check_flags("HyperLSTMCell", layer_norm=layer_norm)
        check_choice("HyperLSTMCell", "hyper_output", hyper_output, READS)
        check_probability("HyperLSTMCell", recurrent_dropout=recurrent_dropout)
        self.hyper_size = hyper_size
        self.embedding_size = embedding_size
        self.layer_norm = layer_norm
        self.ln_eps = ln_eps
        self.forget_bias = forget_bias
        self.hyper_output = hyper_output
        self.recurrent_dropout = recurrent_dropout

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.hyper = LSTMCell(  # its weights for x stand apart, so that project does them for all steps
            hidden_size,
            hyper_size,
            layer_norm=layer_norm,
            ln_eps=ln_eps,
            forget_bias=forget_bias,
            init="orthogonal",
            device=device,
            dtype=dtype,
        )
        self.hyper_weight_ih = empty(4 * hyper_size, input_size)
        self.weight_ih = empty(4 * hidden_size, input_size)  # rows: i, g, f, o
        self.weight_hh = empty(4 * hidden_size, hidden_size)
        self.bias = empty(4 * hidden_size)
        self.embed_weight = empty(12 * embedding_size, hyper_size)  # E; rows: h, x, b, each i, g, f, o
        self.embed_bias = empty(8 * embedding_size)  # e; there is none for b
        self.scale_weight = empty(12, embedding_size, hidden_size)  # D, transposed
        if layer_norm:
            self.ln_weight = empty(4 * hidden_size)
            self.ln_bias = empty(4 * hidden_size)
            self.ln_weight_c = empty(hidden_size)
            self.ln_bias_c = empty(hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights anew: W and U orthogonal in each gate, the small LSTM's orthogonal, E and D as published."""
        self.hyper.reset_parameters()
        orthogonal_(self.hyper_weight_ih, self.hyper.weight_ih)  # one matrix on [x; h]
        for weight in (self.weight_ih, self.weight_hh):
            for gate in weight.chunk(4):
                orthogonal_(gate)
        nn.init.zeros_(self.bias)
        scaling = 8 * self.embedding_size  # rows that lead to d_h and d_x
        self.embed_weight[:scaling] = 0
        nn.init.normal_(self.embed_weight[scaling:], std=0.01)
        nn.init.ones_(self.embed_bias)
        self.scale_weight[:8] = 0.1 / self.embedding_size
        self.scale_weight[8:] = 0
        if self.layer_norm:
            for gain, shift in ((self.ln_weight, self.ln_bias), (self.ln_weight_c, self.ln_bias_c)):
                nn.init.ones_(gain)
                nn.init.zeros_(shift)

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        zeros = torch.zeros(batch_size, self.hidden_size, device=device, dtype=dtype)
        return (zeros, zeros.clone(), *self.hyper.initial_state(batch_size, device=device, dtype=dtype))

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.cat((self.weight_ih, self.hyper_weight_ih)))  # (..., 4H + 4 hyper_size)

    def step_weights(self) -> list[tuple[Tensor, Tensor | None]]:
        hyper = self.hyper
        return [(hyper.weight_ih, hyper.bias), (self.embed_weight, self._embed_bias()), (self.weight_hh, None)]

    def step_with(self, x: Tensor, state: State, linear: Linear) -> tuple[Tensor, State]:
        h, c, q, c_q = state
        H = self.hidden_size
        x, x_hyper = x.split((4 * H, 4 * self.hyper_size), -1)
        read = q
        q, (q, c_q) = self.hyper.step(x_hyper + linear(h, self.hyper.weight_ih, self.hyper.bias), (q, c_q))
        d_h, d_x, d_b = self.scales(q if self.hyper_output == "new" else read, linear)

        gates = d_h * linear(h, self.weight_hh, None) + d_x * x + (d_b + self.bias)
        gates = gates.unflatten(-1, (4, H))  # (B, 4, H)
        if self.layer_norm:
            gates = norm_gates(gates, self.ln_weight, self.ln_bias, self.ln_eps)
        i, g, f, o = gates.unbind(-2)
        candidate = torch.tanh(g)
        if self.recurrent_dropout > 0:
            candidate = F.dropout(candidate, self.recurrent_dropout, self.training)
        c = c * torch.sigmoid(f + self.forget_bias) + torch.sigmoid(i) * candidate
        seen = c
        if self.layer_norm:
            seen = F.layer_norm(c, (H,), self.ln_weight_c, self.ln_bias_c, self.ln_eps)
        h = torch.sigmoid(o) * torch.tanh(seen)
        return h, (h, c, q, c_q)

    def _embed_bias(self) -> Tensor:
        return F.pad(self.embed_bias, (0, 4 * self.embedding_size))

    def scales(self, u: Tensor, linear: Linear = F.linear) -> tuple[Tensor, Tensor, Tensor]:
        """d_h, d_x and d_b, each ``(B, 4H)``, from ``u`` ``(B, hyper_size)``."""
        z = linear(u, self.embed_weight, self._embed_bias())
        z = z.unflatten(-1, (12, self.embedding_size))  # (B, 12, embedding)
        d = torch.matmul(z.transpose(0, 1), self.scale_weight).transpose(0, 1)  # (B, 12, H)
        d_h, d_x, d_b = d.flatten(1).chunk(3, -1)
        return d_h, d_x, d_b

    def extra_repr(self) -> str:
        words = f"{self.input_size}, {self.hidden_size}, hyper_size={self.hyper_size}"
        sizes = f"embedding_size={self.embedding_size}, layer_norm={self.layer_norm}"
        return f"{words}, {sizes}, hyper_output={self.hyper_output!r}, recurrent_dropout={self.recurrent_dropout}"
