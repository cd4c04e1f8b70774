"""expRNN: a free orthogonal recurrent matrix, by torch's parametrizations."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from torchrum.cells.base import Cell, State
from torchrum.cells.unitary import modrelu
from torchrum.ops._checks import check_choice, check_positive_int

MAPS = ("matrix_exp", "cayley", "householder", "taylor")
INITS = ("henaff", "cayley", "haar")


class OrthogonalCell(Cell):
    """RNN with an orthogonal recurrent matrix that training keeps orthogonal (Lezcano-Casado & Martinez-Rubio, 2019).

    h' = modReLU(Q h + V x, b),   Q = Q_0 exp(A),   A skew-symmetric and free, 0 at the start

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)`` -> output h' ``(B, H)``, state ``(h',)``.

    As with every parametrised module of torch, save it by ``state_dict``: pickle refuses it, ``deepcopy`` works.

    Args:
        input_size, hidden_size: I, H.
        orthogonal_map: how A becomes a rotation. ``"matrix_exp"``, ``"cayley"`` and ``"householder"`` are those of
            :func:`torch.nn.utils.parametrizations.orthogonal`; they synchronise with the host, so a CUDA graph cannot
            hold them. ``"taylor"`` is the exponential by a fixed number of matmuls, for graphs and 16-bit dtypes.
        init: Q_0. ``"henaff"``: plane rotations by angles uniform in (-pi, pi); ``"cayley"``: in (0, pi/2), after
            Helfrich et al.; ``"haar"``: uniform over all orthogonal matrices.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        orthogonal_map: str = "matrix_exp",
        init: str = "henaff",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("OrthogonalCell", input_size=input_size, hidden_size=hidden_size)
        check_choice("OrthogonalCell", "orthogonal_map", orthogonal_map, MAPS)
        check_choice("OrthogonalCell", "init", init, INITS)
        self.orthogonal_map = orthogonal_map
        self.init = init
        self.weight_ih = nn.Parameter(torch.empty(hidden_size, input_size, device=device))
        self.weight_hh = nn.Parameter(torch.eye(hidden_size, device=device))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device))
        if orthogonal_map == "taylor":
            parametrize.register_parametrization(self, "weight_hh", TaylorExponential(self.weight_hh))
        else:
            parametrizations.orthogonal(self, "weight_hh", orthogonal_map)
        self.reset_parameters()
        if dtype is not None:
            self.to(dtype)  # only now: torch finds Q_0 by a decomposition that 16-bit dtypes lack
            if dtype == torch.float64:
                self.reset_parameters()  # Q_0 orthogonal to double precision

    def reset_parameters(self) -> None:
        """Draw Q_0, V and b anew; needs float32 or float64 parameters."""
        size = self.hidden_size
        with torch.no_grad():
            if self.init == "haar":
                start = nn.init.orthogonal_(torch.empty_like(self.weight_hh))
            else:
                low, high = (-math.pi, math.pi) if self.init == "henaff" else (0, math.pi / 2)
                angles = torch.empty(size // 2, dtype=self.bias.dtype, device=self.bias.device).uniform_(low, high)
                start = plane_rotations(angles, size)
            self.weight_hh = start  # type: ignore[assignment]  # the parametrization takes it as Q_0
            bound = math.sqrt(6 / (self.input_size + size))
            nn.init.uniform_(self.weight_ih, -bound, bound)
            nn.init.uniform_(self.bias, -0.01, 0.01)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (h,) = state
        h = modrelu(F.linear(h, self.weight_hh) + x, self.bias)
        return h, (h,)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, orthogonal_map={self.orthogonal_map!r}, init={self.init!r}"


class TaylorExponential(nn.Module):
    """Q = Q_0 exp(A) with A from the strict lower triangle of a free matrix, without a branch on its values.

    exp(A) = exp(A / 2^6)^(2^6), the inner one by 18 terms: exact to rounding while the norm of A is below 64. It is
    computed in float64, because each squaring doubles the rounding error.
    """

    SQUARINGS = 6
    TERMS = 18
    base: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("base", weight.detach().clone())

    def forward(self, free: Tensor) -> Tensor:
        wide = free.double().tril(-1)
        A = (wide - wide.mT) / 2**self.SQUARINGS
        identity = torch.eye(A.shape[0], dtype=A.dtype, device=A.device)
        with torch.autocast(A.device.type, enabled=False):
            result = identity
            for term in range(self.TERMS, 0, -1):
                result = identity + (A @ result) / term
            for _ in range(self.SQUARINGS):
                result = result @ result
            return (self.base.to(A.dtype) @ result).to(free.dtype)

    @torch.no_grad()
    def right_inverse(self, Q: Tensor) -> Tensor:
        self.base = Q.clone()
        return torch.zeros_like(Q)


def plane_rotations(angles: Tensor, size: int) -> Tensor:
    """``(size, size)``: unit 2k turns with unit 2k+1 by ``angles[k]``; a last unit without partner stays."""
    blocks = [torch.stack((a.cos(), -a.sin(), a.sin(), a.cos())).view(2, 2) for a in angles]
    return torch.block_diag(*blocks, *[torch.ones(1, 1).to(angles)] * (size % 2))
