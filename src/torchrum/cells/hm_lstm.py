"""HM-LSTM: LSTM levels that find their own boundaries, each updating only where the level below ends a piece."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import State
from torchrum.cells.gathered import GatherableCell, Linear
from torchrum.cells.init import orthogonal_
from torchrum.ops._checks import check_choice, check_finite, check_flags, check_not_negative, check_positive_int
from torchrum.ops.lstm_scan import norm_gates

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

    Primes are new values; f has ``forget_bias`` added. The three cases are sums of products with z, so that z gets
    the gradient of the choice itself.

    Shapes: x ``(B, I)`` -> output y ``(B, H)``; state ``h, c`` ``(B, L, level_size)`` and ``z`` ``(B, L - 1)``.

    Args:
        input_size, hidden_size: I, H; H is the size of the output embedding y.
        level_size: units per level; None means H.
        num_levels: L.
        layer_norm: normalise each gate and the cell state that h' is made from.
        ln_eps: added to the variance in layer norm.
        forget_bias: added to f in every step; not trained.
        boundary: z as above, ``"step"``, or ``"soft"``, the clamp itself: a smooth cell with true gradients.
        slope_per_step: how much ``at_step`` raises the slope per training step, up to ``max_slope``; the paper's 0.04
            per epoch is 0.04 / (updates per epoch).
        max_slope: where the slope stops; it starts at 1.
        device, dtype: of the parameters.
    """

    state_names = ("h", "c", "z")
    slope: Tensor

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
        check_positive_int("HMLSTMCell", input_size=input_size, hidden_size=hidden_size, num_levels=num_levels)
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

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        rows = [4 * n + 1] * (num_levels - 1) + [4 * n]  # f, i, o, g, and v below the top
        reads = [2] + [3] * (num_levels - 2) + [2]  # own level, the one above, the one below; x is apart
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
        """Draw the weights anew, every matrix orthogonal; biases start at 0, gains at 1."""
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
        """h', c' of a level: gates ``(B, 4n)``, h, c ``(B, n)``; flush is z^l and below z'^{l-1}, both ``(B, 1)``."""
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
        # exactly 0 or 1: soft is at most 1/2 where the step is 0, at least 1/2 where it is 1, and both sums are exact
        return soft + ((v > 0).to(v.dtype) - soft).detach()

    def _output(self, h: Tensor, linear: Linear) -> Tensor:
        gates = torch.sigmoid(linear(h.flatten(1), self.gate_weight, None))  # (B, L)
        return F.relu(linear((gates.unsqueeze(-1) * h).flatten(1), self.output_weight, None))

    def extra_repr(self) -> str:
        words = f"{self.input_size}, {self.hidden_size}, level_size={self.level_size}, num_levels={self.num_levels}"
        return (
            f"{words}, layer_norm={self.layer_norm}, boundary={self.boundary!r}, slope_per_step={self.slope_per_step}"
        )
