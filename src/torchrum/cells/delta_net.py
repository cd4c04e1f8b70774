"""DeltaNet: a linear recurrence that writes by the delta rule, scanned in chunks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State
from torchrum.cells.unitary import widen
from torchrum.ops._checks import check_flags, check_positive_int

CHUNK = 64
"""Steps that one triangular system solves at once."""


class DeltaNetCell(Cell):
    """Linear transformer with the delta rule (Schlag et al., 2021), scanned as by Yang et al. (2024), with one head.

    q = unit(silu(W_q x));  k = unit(silu(W_k x));  v = silu(W_v x);  beta = sigmoid(w_beta x)
    S' = S + beta (v - S k) k^T;   output S' q

    Nothing but S depends on the past, so a chunk of steps is a few matmuls and one triangular system.

    Shapes: x ``(B, I)``, state ``(S,)`` of ``(B, H, H)`` -> output ``(B, H)``, state ``(S',)``. Between calls S
    has the dtype of x; within a scan it is float32 at least.

    Args:
        input_size, hidden_size: I, H.
        bias: add a trained bias to the projections; the published model has none.
        device, dtype: of the parameters.
    """

    state_names = ("S",)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("DeltaNetCell", input_size=input_size, hidden_size=hidden_size)
        check_flags("DeltaNetCell", bias=bias)
        rows = 3 * hidden_size + 1  # q, k, v, beta
        self.weight_ih = nn.Parameter(torch.empty(rows, input_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight_ih, -(self.input_size**-0.5), self.input_size**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return (torch.zeros(batch_size, self.hidden_size, self.hidden_size, device=device, dtype=dtype),)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih, self.bias)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        q, k, v, beta = self._parts(x)
        S, dtype = widen(state[0]), state[0].dtype
        written = beta * (v - torch.einsum("bij,bj->bi", S, k))
        S = S + written.unsqueeze(-1) * k.unsqueeze(-2)
        return torch.einsum("bij,bj->bi", S, q).to(dtype), (S.to(dtype),)

    def scan(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        xp = self.project(x)
        q, k, v, beta = (part.transpose(0, 1) for part in self._parts(xp))  # (B, T, H), beta (B, T, 1)
        if lengths is not None:  # no step past the length writes
            beta = beta * (torch.arange(x.shape[0], device=x.device) < lengths.unsqueeze(1)).unsqueeze(-1)
        S = widen(state[0])
        outputs = []
        for Q, K, V, b in zip(*(part.split(CHUNK, 1) for part in (q, k, v, beta)), strict=True):
            # a step writes w = b (v - S k), where S has the writes of the steps before it: (I + A) W = b (V - K S^T)
            A = (b * (K @ K.mT)).tril(-1)
            W = torch.linalg.solve_triangular(widen(A), widen(b * (V - K @ S.mT)), upper=False, unitriangular=True)
            outputs.append(Q @ S.mT + (Q @ K.mT).tril() @ W)
            S = S + W.mT @ K
        return torch.cat(outputs, 1).transpose(0, 1).to(xp.dtype), (S.to(state[0].dtype),)

    def _parts(self, xp: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, beta = widen(xp).split([self.hidden_size] * 3 + [1], -1)
        q, k = F.normalize(F.silu(q), dim=-1), F.normalize(F.silu(k), dim=-1)
        return q, k, F.silu(v), torch.sigmoid(beta)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias is not None}"
