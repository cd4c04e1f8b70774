"""LSTMs for character models: HyperLSTM, scaled by a smaller LSTM; HM-LSTM, whose levels detect boundaries; NASCell."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import GatherableCell, Linear, State
from torchrum.cells.init import glorot_, new_parameter, orthogonal_
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

    Initially d_h = d_x = 0.1 and d_b = 0 for every input, since E_h, E_x and D_b are 0.

    Shapes: x ``(B, I)`` -> output h' ``(B, H)``; state ``h, c`` ``(B, H)`` and ``q, c_q`` ``(B, hyper_size)``.

    Args:
        input_size, hidden_size: I, H.
        hyper_size: hidden size of the small LSTM.
        embedding_size: size of u after each of the twelve E.
        layer_norm: in both LSTMs, normalise each gate, and the cell state from which h' is computed.
        ln_eps: added to the variance in layer norm.
        forget_bias: added to f in every step, in both LSTMs; not trained.
        hyper_output: u is the small LSTM's ``"new"`` output, as in the original implementation, or its ``"previous"``
            output, as in the paper.
        recurrent_dropout: probability that a unit of tanh(g) is zeroed, drawn in each step.
        device, dtype: device and dtype of the parameters.
    """

    state_names = ("h", "c", "q", "c_q")
    shown = ("hyper_size", "embedding_size", "layer_norm", "hyper_output", "recurrent_dropout")

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
        empty = new_parameter(device, dtype)
        self.hyper = LSTMCell(  # its weights for x are separate, so that ``project`` applies them for all steps
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
        self.embed_bias = empty(8 * embedding_size)  # e, for h and x only
        self.scale_weight = empty(12, embedding_size, hidden_size)  # D, transposed
        if layer_norm:
            self.ln_weight = empty(4 * hidden_size)
            self.ln_bias = empty(4 * hidden_size)
            self.ln_weight_c = empty(hidden_size)
            self.ln_bias_c = empty(hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the weights: W, U and the small LSTM's orthogonal in each gate, E and D as published."""
        self.hyper.reset_parameters()
        orthogonal_(self.hyper_weight_ih, self.hyper.weight_ih)  # a single matrix on [x; h]
        for weight in (self.weight_ih, self.weight_hh):
            for gate in weight.chunk(4):
                orthogonal_(gate)
        nn.init.zeros_(self.bias)
        scaling = 8 * self.embedding_size  # rows for d_h and d_x
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
        """Compute d_h, d_x and d_b, each ``(B, 4H)``, from ``u`` ``(B, hyper_size)``."""
        z = linear(u, self.embed_weight, self._embed_bias())
        z = z.unflatten(-1, (12, self.embedding_size))  # (B, 12, embedding)
        d = torch.matmul(z.transpose(0, 1), self.scale_weight).transpose(0, 1)  # (B, 12, H)
        d_h, d_x, d_b = d.flatten(1).chunk(3, -1)
        return d_h, d_x, d_b


BOUNDARIES = ("step", "soft")


class HMLSTMCell(GatherableCell):
    """Hierarchical multiscale LSTM (Chung et al., 2017) with its output module.

    For the levels l = 1..L from the bottom up, with h^0 = x, z^0 = 1 and no z^L:
    f, i, o, g, v = U^l h^l + z^l V^l h^{l+1} + z'^{l-1} W^l h'^{l-1} + b^l, the four gates each through LN
    c' = sigmoid(f) c + sigmoid(i) tanh(g)   where z^l = 0 and z'^{l-1} = 1   (update)
       = c                                   where z^l = 0 and z'^{l-1} = 0   (copy)
       = sigmoid(i) tanh(g)                  where z^l = 1                    (flush)
    h' = h on copy, else sigmoid(o) tanh(LN(c'))
    z'^l = 1 where v > 0, else 0; its gradient is that of clamp((slope v + 1) / 2, 0, 1)
    output: gate_l = sigmoid(w_l . [h'^1; ..; h'^L]);   y = relu(sum_l gate_l O_l h'^l)

    Primes denote new values; ``forget_bias`` is added to f. The three cases are computed as sums of products with z, so
    that z receives the gradient of the choice.

    Shapes: x ``(B, I)`` -> output y ``(B, H)``; state ``h, c`` ``(B, L, level_size)`` and ``z`` ``(B, L - 1)``.

    Args:
        input_size, hidden_size: I, H; H is the size of the output embedding y.
        level_size: units per level; None means H.
        num_levels: L.
        layer_norm: normalise each gate, and the cell state from which h' is computed.
        ln_eps: added to the variance in layer norm.
        forget_bias: added to f in every step; not trained.
        boundary: ``"step"`` for z as above, or ``"soft"`` for the clamp itself, which makes the gradients exact.
        slope_per_step: increase of the slope per training step, by ``at_step``, up to ``max_slope``; the paper's 0.04
            per epoch is 0.04 / (updates per epoch).
        max_slope: largest slope; it starts at 1.
        device, dtype: device and dtype of the parameters.
    """

    state_names = ("h", "c", "z")
    slope: Tensor
    shown = ("level_size", "num_levels", "layer_norm", "boundary", "slope_per_step")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        level_size: int | None = None,
        num_levels: int = 3,
        layer_norm: bool = True,
        ln_eps: float = 1e-3,
        forget_bias: float = 1.0,
        boundary: str = "step",
        slope_per_step: float = 0.0,
        max_slope: float = 5.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("HMLSTMCell", num_levels=num_levels)
        if level_size is not None:
            check_positive_int("HMLSTMCell", level_size=level_size)
        check_finite("HMLSTMCell", forget_bias=forget_bias, slope_per_step=slope_per_step, max_slope=max_slope)
        check_not_negative("HMLSTMCell", ln_eps=ln_eps)
        check_flags("HMLSTMCell", layer_norm=layer_norm)
        check_choice("HMLSTMCell", "boundary", boundary, BOUNDARIES)
        if num_levels < 2:
            raise ValueError(f"HMLSTMCell: num_levels={num_levels} has no boundary to find; it must be 2 or more.")
        if slope_per_step < 0 or max_slope < 1:
            raise ValueError(
                f"HMLSTMCell: slope_per_step={slope_per_step}, max_slope={max_slope}; the slope rises from 1, "
                "so they must be at least 0 and at least 1."
            )
        n = hidden_size if level_size is None else level_size
        self.level_size = n
        self.num_levels = num_levels
        self.layer_norm = layer_norm
        self.ln_eps = ln_eps
        self.forget_bias = forget_bias
        self.boundary = boundary
        self.slope_per_step = slope_per_step
        self.max_slope = max_slope
        empty = new_parameter(device, dtype)
        rows = [4 * n + 1] * (num_levels - 1) + [4 * n]  # f, i, o, g, and v below the top
        reads = [2] + [3] * (num_levels - 2) + [2]  # own level, the one above, the one below; x is separate
        self.weight_ih = empty(rows[0], input_size)
        self.weight_hh = nn.ParameterList(empty(r, k * n) for r, k in zip(rows, reads, strict=True))
        self.bias = nn.ParameterList(empty(r) for r in rows)
        if layer_norm:
            self.ln_weight = empty(num_levels, 4 * n)
            self.ln_bias = empty(num_levels, 4 * n)
            self.ln_weight_c = empty(num_levels, n)
            self.ln_bias_c = empty(num_levels, n)
        self.gate_weight = empty(num_levels, num_levels * n)
        self.output_weight = empty(hidden_size, num_levels * n)
        self.register_buffer("slope", torch.ones((), device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the weights, every matrix orthogonal; biases start at 0, gains at 1."""
        orthogonal_(self.weight_ih)
        n = self.level_size
        for weight in self.weight_hh:
            for block in weight.split(n, 1):
                orthogonal_(block)
        for block in self.output_weight.split(n, 1):
            orthogonal_(block)
        orthogonal_(self.gate_weight)
        for bias in self.bias:
            nn.init.zeros_(bias)
        if self.layer_norm:
            for gain, shift in ((self.ln_weight, self.ln_bias), (self.ln_weight_c, self.ln_bias_c)):
                nn.init.ones_(gain)
                nn.init.zeros_(shift)

    def at_step(self, step: int) -> None:
        if self.slope_per_step > 0:
            self.slope.fill_(min(self.max_slope, 1 + self.slope_per_step * step))

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        h = torch.zeros(batch_size, self.num_levels, self.level_size, device=device, dtype=dtype)
        return h, h.clone(), h.new_zeros(batch_size, self.num_levels - 1)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih)  # (..., 4n + 1)

    def step_weights(self) -> list[tuple[Tensor, Tensor | None]]:
        levels: list[tuple[Tensor, Tensor | None]] = list(zip(self.weight_hh, self.bias, strict=True))
        return [*levels, (self.gate_weight, None), (self.output_weight, None)]

    def step_with(self, x: Tensor, state: State, linear: Linear) -> tuple[Tensor, State]:
        h, c, z = state
        n, top = self.level_size, self.num_levels - 1
        old_h, old_c = h.unbind(1), c.unbind(1)
        old_z = F.pad(z, (0, 1)).split(1, 1)  # (B, 1) each; the top level never flushes
        new_h: list[Tensor] = []
        new_c: list[Tensor] = []
        new_z: list[Tensor] = []
        below = torch.ones_like(old_z[0])
        for level in range(self.num_levels):
            reads = [old_h[level]]
            if level < top:
                reads.append(old_z[level] * old_h[level + 1])
            if level > 0:
                reads.append(below * new_h[-1])
            s = linear(torch.cat(reads, -1), self.weight_hh[level], self.bias[level])
            s = s + x if level == 0 else s
            shown, cell = self._update(level, s[:, : 4 * n], old_h[level], old_c[level], old_z[level], below)
            new_h.append(shown)
            new_c.append(cell)
            if level < top:
                below = self._boundary(s[:, 4 * n :])
                new_z.append(below)
        h = torch.stack(new_h, 1)
        return self._output(h, linear), (h, torch.stack(new_c, 1), torch.cat(new_z, 1))

    def _update(
        self, level: int, gates: Tensor, h: Tensor, c: Tensor, flush: Tensor, below: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute h', c' of a level: gates ``(B, 4n)``, h, c ``(B, n)``, flush z^l and below z'^{l-1} ``(B, 1)``."""
        n = self.level_size
        gates = gates.unflatten(-1, (4, n))
        if self.layer_norm:
            gates = norm_gates(gates, self.ln_weight[level], self.ln_bias[level], self.ln_eps)
        f, i, o, g = gates.unbind(-2)
        added = torch.sigmoid(i) * torch.tanh(g)
        copy, update = (1 - flush) * (1 - below), (1 - flush) * below
        c = flush * added + update * (torch.sigmoid(f + self.forget_bias) * c + added) + copy * c
        seen = c
        if self.layer_norm:
            seen = F.layer_norm(c, (n,), self.ln_weight_c[level], self.ln_bias_c[level], self.ln_eps)
        return copy * h + (1 - copy) * torch.sigmoid(o) * torch.tanh(seen), c

    def _boundary(self, v: Tensor) -> Tensor:
        soft = torch.clamp((self.slope * v + 1) / 2, 0, 1)
        if self.boundary == "soft":
            return soft
        # exactly 0 or 1: soft is at most 1/2 where the step is 0 and at least 1/2 where it is 1, so both sums are exact
        return soft + ((v > 0).to(v.dtype) - soft).detach()

    def _output(self, h: Tensor, linear: Linear) -> Tensor:
        gates = torch.sigmoid(linear(h.flatten(1), self.gate_weight, None))  # (B, L)
        return F.relu(linear((gates.unsqueeze(-1) * h).flatten(1), self.output_weight, None))


class NASCell(GatherableCell):
    """The cell of Zoph & Le (2017), as in TensorFlow Addons.

    a = W x, r = U (h * mask) + b, each split into eight blocks
    l0 = sigmoid(a0 + r0), l1 = relu(a1 + r1), l2 = sigmoid(a2 + r2), l3 = relu(a3 * r3)
    l4 = tanh(a4 + r4), l5 = sigmoid(a5 + r5), l6 = tanh(a6 + r6), l7 = sigmoid(a7 + r7)
    k0 = tanh(l0 * l1), k1 = tanh(l2 + l3), k2 = tanh(l4 * l5), k3 = sigmoid(l6 + l7)
    c' = tanh(k0 + c) * k1;   h' = tanh(c' * tanh(k2 + k3))

    Shapes: x ``(B, I)``, state ``(h, c)`` of ``(B, H)`` -> output h' ``(B, H)``, state ``(h', c')``.

    Args:
        input_size, hidden_size: I, H.
        bias: add b, which the released cell does not have.
        state_dropout: probability that a unit of h is hidden from U, with one mask for all steps of a sequence.
        device, dtype: device and dtype of the parameters.
    """

    state_names = ("h", "c")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        state_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_flags("NASCell", bias=bias)
        check_probability("NASCell", state_dropout=state_dropout)
        self.state_dropout = state_dropout
        self.weight_ih = nn.Parameter(torch.empty(8 * hidden_size, input_size, device=device, dtype=dtype))
        self.weight_hh = nn.Parameter(torch.empty(8 * hidden_size, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(8 * hidden_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights, each Glorot-uniform; the bias starts at 0."""
        glorot_(self.weight_ih)
        glorot_(self.weight_hh)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih)  # (..., 8H)

    def step_weights(self) -> list[tuple[Tensor, Tensor | None]]:
        return [(self.weight_hh, self.bias)]

    def step_with(self, x: Tensor, state: State, linear: Linear) -> tuple[Tensor, State]:
        h, c = state
        H = self.hidden_size
        x, mask = self.split_mask(x)
        r = linear(h if mask is None else h * mask, self.weight_hh, self.bias)
        z0, z1, z2, _, z4, z5, z6, z7 = (x + r).chunk(8, -1)
        z3 = x[:, 3 * H : 4 * H] * r[:, 3 * H : 4 * H]  # the only leaf that multiplies
        k0 = torch.tanh(torch.sigmoid(z0) * F.relu(z1))
        k1 = torch.tanh(torch.sigmoid(z2) + F.relu(z3))
        k2 = torch.tanh(torch.tanh(z4) * torch.sigmoid(z5))
        k3 = torch.sigmoid(torch.tanh(z6) + torch.sigmoid(z7))
        c = torch.tanh(k0 + c) * k1
        h = torch.tanh(c * torch.tanh(k2 + k3))
        return h, (h, c)

    def extra_repr(self) -> str:
        return (
            f"{self.input_size}, {self.hidden_size}, bias={self.bias is not None}, state_dropout={self.state_dropout}"
        )
