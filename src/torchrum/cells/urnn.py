"""uRNN: a unitary recurrent matrix made of phases, reflections, a permutation and Fourier transforms."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State
from torchrum.cells.unitary import UnitaryMap, check_even, modrelu_complex, real_form, widen
from torchrum.ops._checks import check_finite, check_positive_int


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
        nn.init.uniform_(self.reflections, -1, 1)

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


def reflect(z: Tensor, v: Tensor) -> Tensor:
    """Reflect the rows of ``z`` ``(B, N)`` along ``v`` ``(N,)``; v = 0 reflects nothing."""
    square = (v.real.square() + v.imag.square()).sum()
    return z - (2 / square.clamp_min(torch.finfo(square.dtype).tiny)) * (z @ v.conj()).unsqueeze(-1) * v


class URNNCell(Cell):
    """Unitary evolution RNN (Arjovsky et al., 2016).

    h' = modReLU(W h + V x, b), W from :class:`FourierUnitary`, and a trained h_0.

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)``, H/2 complex units as ``[re | im]`` -> output h' ``(B, H)``.

    Args:
        input_size, hidden_size: I, H; H must be even.
        modrelu_bias: start of b.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        modrelu_bias: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("URNNCell", input_size=input_size, hidden_size=hidden_size)
        check_finite("URNNCell", modrelu_bias=modrelu_bias)
        check_even("URNNCell", hidden_size)
        self.modrelu_bias = modrelu_bias
        self.unitary = FourierUnitary(hidden_size // 2, device=device, dtype=dtype)
        self.weight_ih = nn.Parameter(torch.empty(hidden_size, input_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size // 2, device=device, dtype=dtype))
        self.h_0 = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew; h_0 has length about 1."""
        self.unitary.reset_parameters()
        units = self.hidden_size // 2
        bound = math.sqrt(6 / (self.input_size + units))
        nn.init.uniform_(self.weight_ih, -bound, bound)
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
