"""Fast weights: an RNN with a decaying matrix of its own recent states."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State
from torchrum.cells.unitary import widen
from torchrum.ops._checks import check_finite, check_flags, check_not_negative, check_positive_int


class FastWeightsCell(Cell):
    """RNN with fast weights and layer norm (Ba et al., 2016), FW-LN in the recall table.

    A' = decay A + rate h h^T
    h_0 = relu(W h + C x + b);   h_{s+1} = relu(LN(W h + C x + b + A' h_s)), S inner steps;   h' = h_S

    Shapes: x ``(B, I)``, state ``(h, A)`` of ``(B, H)``, ``(B, H, H)`` -> output h' ``(B, H)``, state ``(h', A')``.
    A is float32 for 16-bit dtypes: its decay is below their rounding.

    The trained part is one affine map of [x; h], H(I + H + 1) numbers, and 2H of layer norm; A is not trained. The
    recall table of the RUM paper counts that map twice, 2H(I + H + 1): 8,700 for I=36, H=50, where this cell has 4,450.

    Args:
        input_size, hidden_size: I, H.
        inner_steps: S, at least 1.
        decay, rate: of A; lambda and eta in the paper.
        layer_norm: normalise within the inner steps; the recall task needs it.
        ln_eps: added to the variance in layer norm.
        recurrent_scale: W starts as this multiple of the identity.
        device, dtype: of the parameters.
    """

    state_names = ("h", "A")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        inner_steps: int = 1,
        decay: float = 0.95,
        rate: float = 0.5,
        layer_norm: bool = True,
        ln_eps: float = 1e-5,
        recurrent_scale: float = 0.05,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("FastWeightsCell", input_size=input_size, hidden_size=hidden_size, inner_steps=inner_steps)
        check_flags("FastWeightsCell", layer_norm=layer_norm)
        check_finite("FastWeightsCell", decay=decay, rate=rate, recurrent_scale=recurrent_scale)
        check_not_negative("FastWeightsCell", ln_eps=ln_eps)
        self.inner_steps = inner_steps
        self.decay = decay
        self.rate = rate
        self.layer_norm = layer_norm
        self.ln_eps = ln_eps
        self.recurrent_scale = recurrent_scale

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.weight_ih = empty(hidden_size, input_size)
        self.weight_hh = empty(hidden_size, hidden_size)
        self.bias = empty(hidden_size)
        if layer_norm:
            self.ln_weight = empty(hidden_size)
            self.ln_bias = empty(hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        bound = self.input_size**-0.5
        nn.init.uniform_(self.weight_ih, -bound, bound)
        nn.init.eye_(self.weight_hh).mul_(self.recurrent_scale)
        nn.init.zeros_(self.bias)
        if self.layer_norm:
            nn.init.ones_(self.ln_weight)
            nn.init.zeros_(self.ln_bias)

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        h = torch.zeros(batch_size, self.hidden_size, device=device, dtype=dtype)
        return h, widen(h).unsqueeze(-1).repeat(1, 1, self.hidden_size)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih, self.bias)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        h, A = state
        wide = h.to(A.dtype)
        A = self.decay * A + self.rate * wide.unsqueeze(-1) * wide.unsqueeze(-2)
        slow = x + F.linear(h, self.weight_hh)
        h = F.relu(slow)
        for _ in range(self.inner_steps):
            h = slow + torch.bmm(A, h.to(A.dtype).unsqueeze(-1)).squeeze(-1).to(slow.dtype)
            if self.layer_norm:
                h = F.layer_norm(h, (self.hidden_size,), self.ln_weight, self.ln_bias, self.ln_eps)
            h = F.relu(h)
        return h, (h, A)

    def extra_repr(self) -> str:
        words = f"{self.input_size}, {self.hidden_size}, inner_steps={self.inner_steps}, decay={self.decay}"
        return f"{words}, rate={self.rate}, layer_norm={self.layer_norm}, recurrent_scale={self.recurrent_scale}"
