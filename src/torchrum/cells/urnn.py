"""uRNN: a unitary recurrent matrix of cheap factors, or any unitary matrix."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State
from torchrum.cells.init import glorot_
from torchrum.cells.unitary import UnitaryMap, check_even, modrelu_complex, real_form, skew_exponential, widen
from torchrum.ops._checks import check_finite, check_flags, check_positive_int


class FourierUnitary(UnitaryMap):
    """W = D3 R2 F^-1 D2 Pi R1 F D1 on ``size`` complex units held as ``[re | im]``.

    D are diagonals of phases, R reflections I - 2 v v^* / |v|^2, Pi a fixed random permutation, F Fourier's transform.
    """

    permutation: Tensor

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.size = size
        self.phases = nn.Parameter(torch.empty(3, size, device=device, dtype=dtype))  # D1, D2, D3
        self.reflections = nn.Parameter(torch.empty(2, 2, size, device=device, dtype=dtype))  # R1, R2; re, im
        self.register_buffer("permutation", torch.randperm(size, device=device))  # random, so it is saved
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.phases, -math.pi, math.pi)
        bound = math.sqrt(6 / (2 + 2 * self.size))  # a reflection ignores the length of v, but not how fast v turns
        nn.init.uniform_(self.reflections, -bound, bound)

    def matrix(self) -> Tensor:
        phases = widen(self.phases)
        D1, D2, D3 = torch.polar(torch.ones_like(phases), phases)
        v1, v2 = (torch.complex(re, im) for re, im in widen(self.reflections))
        z = torch.diag(D1)  # row n is what has become of basis vector n
        z = torch.fft.fft(z, norm="ortho")
        z = reflect(z, v1)
        z = z.index_select(1, self.permutation) * D2
        z = torch.fft.ifft(z, norm="ortho")
        z = reflect(z, v2) * D3
        return real_form(z.T)

    def extra_repr(self) -> str:
        return f"{self.size}"


class FullUnitary(UnitaryMap):
    """W = exp(A) on ``size`` complex units held as ``[re | im]``, A any skew-Hermitian matrix.

    Every unitary matrix is such an exponential, so that ``size`` squared free numbers reach them all. Wisdom et al.
    (2016) move W itself along its gradient by a Cayley transform; here an ordinary optimizer moves A.
    """

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.size = size
        self.free = nn.Parameter(torch.empty(size, size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A so that the angles of W cover the circle: a semicircle law of radius pi."""
        nn.init.normal_(self.free, std=math.pi / math.sqrt(8 * self.size))

    def matrix(self) -> Tensor:
        free = widen(self.free)
        lower, upper = free.tril(-1), free.triu(1)
        A = torch.complex(lower - lower.mT, upper + upper.mT + free.diagonal().diag())
        return skew_exponential(real_form(A)).to(free.dtype)

    def extra_repr(self) -> str:
        return f"{self.size}"


def reflect(z: Tensor, v: Tensor) -> Tensor:
    """Reflect the rows of ``z`` ``(B, N)`` along ``v`` ``(N,)``; v = 0 reflects nothing."""
    square = (v.real.square() + v.imag.square()).sum()
    return z - (2 / square.clamp_min(torch.finfo(square.dtype).tiny)) * (z @ v.conj()).unsqueeze(-1) * v


class URNNCell(Cell):
    """Unitary evolution RNN (Arjovsky et al., 2016), also of full capacity (Wisdom et al., 2016).

    h' = modReLU(W h + V x, b), W from :class:`FourierUnitary` or :class:`FullUnitary`, and a trained h_0.

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)``, H/2 complex units as ``[re | im]`` -> output h' ``(B, H)``.

    Args:
        input_size, hidden_size: I, H; H must be even.
        modrelu_bias: start of b; None draws it uniform in +-0.01, as the original implementation.
        full_capacity: W is any unitary matrix, H^2 / 4 free numbers instead of 7 H / 2.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        modrelu_bias: float | None = None,
        full_capacity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("URNNCell", input_size=input_size, hidden_size=hidden_size)
        check_finite("URNNCell", modrelu_bias=modrelu_bias or 0.0)
        check_flags("URNNCell", full_capacity=full_capacity)
        check_even("URNNCell", hidden_size)
        self.modrelu_bias = modrelu_bias
        unitary = FullUnitary if full_capacity else FourierUnitary
        self.unitary = unitary(hidden_size // 2, device=device, dtype=dtype)
        self.weight_ih = nn.Parameter(torch.empty(hidden_size, input_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size // 2, device=device, dtype=dtype))
        self.h_0 = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights; h_0 has length about 1."""
        self.unitary.reset_parameters()
        glorot_(self.weight_ih)
        if self.modrelu_bias is None:
            nn.init.uniform_(self.bias, -0.01, 0.01)
        else:
            nn.init.constant_(self.bias, self.modrelu_bias)
        bound = math.sqrt(3 / self.hidden_size)
        nn.init.uniform_(self.h_0, -bound, bound)

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return (self.h_0.to(device=device, dtype=dtype).expand(batch_size, -1),)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (h,) = state
        h = modrelu_complex(self.unitary(h) + x, self.bias)
        return h, (h,)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, modrelu_bias={self.modrelu_bias}"
