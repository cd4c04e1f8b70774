"""Fast weights: an RNN with a decaying matrix of its own recent states."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State
from torchrum.cells.unitary import widen
from torchrum.ops._checks import check_finite, check_flags, check_not_negative, check_positive_int

ENCODER_SIZES = (50, 100)
"""Widths of the two layers between a symbol and the recurrent layer (Ba et al., 2016)."""


class FastWeightsCell(Cell):
    """RNN with fast weights and layer norm (Ba et al., 2016), FW-LN in the recall table.

    A' = decay A + rate h h^T;   z = W h + C x
    h_0 = relu(LN(z));   h_{s+1} = relu(LN(z + A' h_s)), S inner steps;   h' = h_S

    Shapes: x ``(B, I)``, state ``(h, A)`` of ``(B, H)``, ``(B, H, H)`` -> output h' ``(B, H)``, state ``(h', A')``.
    A is float32 for 16-bit dtypes: its decay is below their rounding.

    The trained part is one linear map of [x; h], H(I + H) numbers, and 2H of layer norm; A is not trained. The recall
    table of the RUM paper counts an affine map twice, 2H(I + H + 1): 8,700 for I=36, H=50, where this cell has 4,400.

    Args:
        input_size, hidden_size: I, H.
        inner_steps: S, at least 1.
        decay, rate: of A; lambda and eta in the paper.
        layer_norm: normalise within the inner steps; the recall task needs it.
        start_norm: with ``layer_norm``, normalise h_0 too.
        encoder: pass x through two ReLU layers of 50 and 100 units before C, as the paper does for symbols. (Its
            hidden layer of 100 before the softmax belongs to the read-out, not to the cell.)
        bias: add a trained bias to z; the paper has none beside that of the layer norm.
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
        decay: float = 0.9,
        rate: float = 0.5,
        layer_norm: bool = True,
        start_norm: bool = True,
        encoder: bool = False,
        bias: bool = False,
        ln_eps: float = 1e-5,
        recurrent_scale: float = 0.05,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("FastWeightsCell", input_size=input_size, hidden_size=hidden_size, inner_steps=inner_steps)
        check_flags("FastWeightsCell", layer_norm=layer_norm, start_norm=start_norm, encoder=encoder, bias=bias)
        check_finite("FastWeightsCell", decay=decay, rate=rate, recurrent_scale=recurrent_scale)
        check_not_negative("FastWeightsCell", ln_eps=ln_eps)
        self.inner_steps = inner_steps
        self.decay = decay
        self.rate = rate
        self.layer_norm = layer_norm
        self.start_norm = start_norm
        self.ln_eps = ln_eps
        self.recurrent_scale = recurrent_scale

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        sizes = (input_size, *(ENCODER_SIZES if encoder else ()))
        self.encoder = nn.ModuleList(nn.Linear(*pair, device=device, dtype=dtype) for pair in pairwise(sizes))
        self.weight_ih = empty(hidden_size, sizes[-1])
        self.weight_hh = empty(hidden_size, hidden_size)
        self.bias = empty(hidden_size) if bias else None
        if layer_norm:
            self.ln_weight = empty(hidden_size)
            self.ln_bias = empty(hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for dense in self.encoder:
            dense.reset_parameters()  # type: ignore[operator]
        bound = self.weight_ih.shape[1] ** -0.5
        nn.init.uniform_(self.weight_ih, -bound, bound)
        nn.init.eye_(self.weight_hh).mul_(self.recurrent_scale)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.layer_norm:
            nn.init.ones_(self.ln_weight)
            nn.init.zeros_(self.ln_bias)

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        h = torch.zeros(batch_size, self.hidden_size, device=device, dtype=dtype)
        return h, widen(h).unsqueeze(-1).repeat(1, 1, self.hidden_size)

    def project(self, x: Tensor) -> Tensor:
        for dense in self.encoder:
            x = F.relu(dense(x))
        return F.linear(x, self.weight_ih, self.bias)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        h, A = state
        wide = h.to(A.dtype)
        A = self.decay * A + self.rate * wide.unsqueeze(-1) * wide.unsqueeze(-2)
        slow = x + F.linear(h, self.weight_hh)
        h = F.relu(self._normalize(slow) if self.start_norm else slow)
        for _ in range(self.inner_steps):
            h = slow + torch.bmm(A, h.to(A.dtype).unsqueeze(-1)).squeeze(-1).to(slow.dtype)
            h = F.relu(self._normalize(h))
        return h, (h, A)

    def _normalize(self, z: Tensor) -> Tensor:
        if not self.layer_norm:
            return z
        return F.layer_norm(z, (self.hidden_size,), self.ln_weight, self.ln_bias, self.ln_eps)

    def extra_repr(self) -> str:
        words = f"{self.input_size}, {self.hidden_size}, inner_steps={self.inner_steps}, decay={self.decay}"
        norms = f"layer_norm={self.layer_norm}, start_norm={self.start_norm}"
        return f"{words}, rate={self.rate}, {norms}, recurrent_scale={self.recurrent_scale}"
