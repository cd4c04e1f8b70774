"""RNNs with a full recurrent matrix that is orthogonal (expRNN) or nearly orthogonal (soft orthogonality)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from torchrum.cells.base import Cell, State, UnitaryMap
from torchrum.cells.init import glorot_, widen
from torchrum.cells.unitary import modrelu, skew_exponential
from torchrum.ops._checks import check_choice, check_not_negative

MAPS = ("matrix_exp", "cayley", "householder", "taylor")
INITS = ("henaff", "cayley", "haar")
INPUT_INITS = ("glorot", "kaiming")


class OrthogonalCell(Cell):
    """RNN with a recurrent matrix that stays orthogonal in training (Lezcano-Casado & Martinez-Rubio, 2019).

    h' = modReLU(Q h + V x, b),   Q = Q_0 exp(A),   A skew-symmetric and trained, initially 0

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)`` -> output h' ``(B, H)``, state ``(h',)``.

    The original implementation trains A at a tenth of the learning rate of the other parameters. A is the parameter
    ``parametrizations.weight_hh.original``, which can have its own parameter group.

    As with every parametrised module in torch, save it by ``state_dict``: it cannot be pickled, but ``deepcopy`` works.

    Args:
        input_size, hidden_size: I, H.
        orthogonal_map: map from A to a rotation. ``"matrix_exp"``, ``"cayley"`` and ``"householder"`` are those of
            :func:`torch.nn.utils.parametrizations.orthogonal`; they synchronise with the host, so they cannot run in a
            CUDA graph. ``"taylor"`` is the exponential by a fixed number of matmuls, for graphs and 16-bit dtypes.
        init: initial Q_0. ``"henaff"``: plane rotations by angles uniform in (-pi, pi); ``"cayley"``: in (0, pi/2),
            after Helfrich et al.; ``"haar"``: uniform over all orthogonal matrices.
        input_init: initial V. ``"glorot"``: uniform; ``"kaiming"``: normal with variance 2 / I, as in the original
            implementation.
        device, dtype: device and dtype of the parameters.
    """

    shown = ("orthogonal_map", "init")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        orthogonal_map: str = "matrix_exp",
        init: str = "henaff",
        input_init: str = "glorot",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_choice("OrthogonalCell", "orthogonal_map", orthogonal_map, MAPS)
        check_choice("OrthogonalCell", "init", init, INITS)
        check_choice("OrthogonalCell", "input_init", input_init, INPUT_INITS)
        self.orthogonal_map = orthogonal_map
        self.init = init
        self.input_init = input_init
        self.weight_ih = nn.Parameter(torch.empty(hidden_size, input_size, device=device))
        self.weight_hh = nn.Parameter(torch.eye(hidden_size, device=device))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device))
        if orthogonal_map == "taylor":
            parametrize.register_parametrization(self, "weight_hh", TaylorExponential(self.weight_hh))
        else:
            parametrizations.orthogonal(self, "weight_hh", orthogonal_map)
        self.reset_parameters()
        if dtype is not None:
            self.to(dtype)  # only now, since torch computes Q_0 by a decomposition that 16-bit dtypes do not have
            if dtype == torch.float64:
                self.reset_parameters()  # Q_0 orthogonal to double precision

    def reset_parameters(self) -> None:
        """Initialise Q_0, V and b; the parameters must be float32 or float64."""
        size = self.hidden_size
        with torch.no_grad():
            if self.init == "haar":
                start = nn.init.orthogonal_(torch.empty_like(self.weight_hh))
            else:
                low, high = (-math.pi, math.pi) if self.init == "henaff" else (0, math.pi / 2)
                angles = torch.empty(size // 2, dtype=self.bias.dtype, device=self.bias.device).uniform_(low, high)
                start = plane_rotations(angles, size)
            self.weight_hh = start  # type: ignore[assignment]  # the parametrization takes it as Q_0
            if self.input_init == "kaiming":
                nn.init.kaiming_normal_(self.weight_ih)
            else:
                glorot_(self.weight_ih)
            nn.init.uniform_(self.bias, -0.01, 0.01)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (h,) = state
        h = modrelu(F.linear(h, self.weight_hh) + x, self.bias)
        return h, (h,)


class TaylorExponential(nn.Module):
    """Q = Q_0 exp(A) with A from the strict lower triangle of a free matrix, by :func:`skew_exponential`."""

    base: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("base", weight.detach().clone())

    def forward(self, free: Tensor) -> Tensor:
        lower = free.double().tril(-1)
        turn = skew_exponential(lower - lower.mT)
        with torch.autocast(free.device.type, enabled=False):
            return (self.base.to(turn.dtype) @ turn).to(free.dtype)

    @torch.no_grad()
    def right_inverse(self, Q: Tensor) -> Tensor:
        self.base = Q.clone()
        return torch.zeros_like(Q)


class NearlyOrthogonal(UnitaryMap):
    """The matrix W = U diag(s) V with rotations U and V and every singular value s within 1 +- ``margin``.

    U and V are exponentials of skew-symmetric matrices, and s = 1 + margin (2 sigmoid(p) - 1). A single parameter
    ``(size, size)`` holds all of them: U below its diagonal, p on it, V above it.
    """

    def __init__(
        self, size: int, margin: float, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.size = size
        self.margin = margin
        self.free = nn.Parameter(torch.empty(size, size, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise U and V with angles over the whole circle; s starts at 1."""
        nn.init.normal_(self.free, std=math.pi / math.sqrt(4 * self.size))
        self.free.fill_diagonal_(0)

    def matrix(self) -> Tensor:
        free = widen(self.free)
        lower, upper = free.tril(-1), free.triu(1)
        scales = 1 + self.margin * (2 * torch.sigmoid(free.diagonal()) - 1)
        U, V = skew_exponential(lower - lower.mT), skew_exponential(upper - upper.mT)
        with torch.autocast(free.device.type, enabled=False):
            return ((U * scales) @ V).to(free.dtype)

    def extra_repr(self) -> str:
        return f"{self.size}, margin={self.margin}"


class SoftOrthogonalCell(Cell):
    """RNN whose recurrent matrix may deviate from orthogonality by a margin (Vorontsov et al., 2017).

    h' = modReLU(W h + C x, b),   W from :class:`NearlyOrthogonal`

    Vorontsov et al. keep U and V orthogonal by steps along a Cayley transform, and also try a penalty on |W^T W - I|^2
    instead of the margin; modReLU is that of the other orthogonal cells.

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)`` -> output h' ``(B, H)``, state ``(h',)``.

    Args:
        input_size, hidden_size: I, H.
        margin: largest distance of a singular value from 1; 0 keeps W orthogonal.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        margin: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_not_negative("SoftOrthogonalCell", margin=margin)
        self.recurrent = NearlyOrthogonal(hidden_size, margin, device=device, dtype=dtype)
        self.weight_ih = nn.Parameter(torch.empty(hidden_size, input_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.recurrent.reset_parameters()
        glorot_(self.weight_ih)
        nn.init.uniform_(self.bias, -0.01, 0.01)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (h,) = state
        h = modrelu(self.recurrent(h) + x, self.bias)
        return h, (h,)


def plane_rotations(angles: Tensor, size: int) -> Tensor:
    """Return the ``(size, size)`` rotation of units 2k and 2k+1 by ``angles[k]``; an odd last unit is unchanged."""
    blocks = [torch.stack((a.cos(), -a.sin(), a.sin(), a.cos())).view(2, 2) for a in angles]
    return torch.block_diag(*blocks, *[torch.ones(1, 1).to(angles)] * (size % 2))
