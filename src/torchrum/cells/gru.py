"""The GRU in both of its readings: reset before the recurrent matrix (TensorFlow) and after it (torch)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State
from torchrum.cells.init import INITS, glorot_, orthogonal_
from torchrum.ops._checks import check_choice, check_finite, check_flags, check_positive_int


class GRUCell(Cell):
    """Gated recurrent unit (Cho et al., 2014); u keeps the old state.

    r, u = sigmoid(W x + U h + b);   h~ = tanh(W_c x + U_c (r * h) + b_c);   h' = u * h + (1 - u) * h~
    With ``reset_after``:            h~ = tanh(W_c x + b_c + r * (U_c h + b_hc)), as in torch and cuDNN.

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)`` -> output h' ``(B, H)``, state ``(h',)``.

    Args:
        input_size, hidden_size: I, H.
        reset_after: reset U_c h instead of h.
        gate_bias: start of the biases of r and u.
        init: ``"glorot"``, or ``"orthogonal"``: semi-orthogonal over [x; h], one matrix for the gates, one for h~.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        reset_after: bool = False,
        gate_bias: float = 1.0,
        init: str = "glorot",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("GRUCell", input_size=input_size, hidden_size=hidden_size)
        check_finite("GRUCell", gate_bias=gate_bias)
        check_flags("GRUCell", reset_after=reset_after)
        check_choice("GRUCell", "init", init, INITS)
        self.reset_after = reset_after
        self.gate_bias = gate_bias
        self.init = init

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.weight_ih = empty(3 * hidden_size, input_size)  # rows: r, u, candidate
        self.weight_hh = empty(2 * hidden_size, hidden_size)  # rows: r, u
        self.weight_hc = empty(hidden_size, hidden_size)
        self.bias = empty(3 * hidden_size)
        if reset_after:
            self.bias_hc = empty(hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew; gate biases start at ``gate_bias``, the others at 0."""
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
        x_gates, x_c = x.split((2 * self.hidden_size, self.hidden_size), -1)
        r, u = torch.sigmoid(x_gates + F.linear(h, self.weight_hh)).chunk(2, -1)
        if self.reset_after:
            candidate = torch.tanh(x_c + r * F.linear(h, self.weight_hc, self.bias_hc))
        else:
            candidate = torch.tanh(x_c + F.linear(r * h, self.weight_hc))
        h = u * h + (1 - u) * candidate
        return h, (h,)

    def extra_repr(self) -> str:
        words = f"{self.input_size}, {self.hidden_size}, reset_after={self.reset_after}"
        return f"{words}, gate_bias={self.gate_bias}, init={self.init!r}"
