"""Cells whose unitary or orthogonal matrix has cheap factors: uRNN, EUNN and GORU; modReLU and complex numbers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State, UnitaryMap
from torchrum.cells.init import glorot_, new_parameter, widen
from torchrum.ops._checks import check_choice, check_finite, check_flags, check_not_negative, check_positive_int


def real_form(matrix: Tensor) -> Tensor:
    """Return the real ``(2N, 2N)`` matrix on ``[re | im]`` for a complex ``(N, N)`` matrix on ``re + i im``."""
    re, im = matrix.real, matrix.imag
    return torch.cat((torch.cat((re, -im), 1), torch.cat((im, re), 1)), 0)


SQUARINGS, TERMS = 6, 18


def skew_exponential(A: Tensor) -> Tensor:
    """Compute exp(A) of a skew-symmetric ``(N, N)`` matrix in float64, without branches on its values.

    exp(A) = exp(A / 2^6)^(2^6), with 18 terms for the inner exponential, is accurate to rounding if the norm of A is
    below 64. float64 is needed because each squaring doubles the rounding error. Unlike torch.matrix_exp, it can run in
    a CUDA graph.
    """
    A = A.double() / 2**SQUARINGS
    result = identity = torch.eye(A.shape[0], dtype=A.dtype, device=A.device)
    with torch.autocast(A.device.type, enabled=False):
        for term in range(TERMS, 0, -1):
            result = identity + (A @ result) / term
        for _ in range(SQUARINGS):
            result = result @ result
    return result


def modrelu(z: Tensor, bias: Tensor) -> Tensor:
    """Return ``relu(|z| + bias) z / |z|`` for real z ``(B, N)``; 0 stays 0."""
    return torch.sign(z) * F.relu(z.abs() + bias.to(z.dtype))


def modrelu_complex(z: Tensor, bias: Tensor) -> Tensor:
    """Return ``relu(|z| + bias) z / |z|`` for complex z, as ``[re | im]`` ``(B, 2N)``, and bias ``(N,)``; 0 stays 0."""
    wide = widen(z)
    re, im = wide.chunk(2, -1)
    square = re * re + im * im
    zero = square == 0
    norm = torch.where(zero, 1, square).sqrt()  # the gradient of sqrt at 0 is infinite
    scale = torch.where(zero, 0, F.relu(norm + bias) / norm)
    return torch.cat((scale * re, scale * im), -1).to(z.dtype)


def check_even(where: str, hidden_size: int) -> None:
    """Raise if ``hidden_size`` is odd, since complex units are pairs of real numbers."""
    if hidden_size % 2:
        raise ValueError(
            f"{where}: hidden_size={hidden_size} is odd; complex units take two numbers each, so it must be even."
        )


class FourierUnitary(UnitaryMap):
    """The matrix W = D3 R2 F^-1 D2 Pi R1 F D1 on ``size`` complex units, as ``[re | im]``.

    D are diagonals of phases, R reflections I - 2 v v^* / |v|^2, Pi is a fixed random permutation and F the Fourier
    transform.
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
        bound = math.sqrt(6 / (2 + 2 * self.size))  # |v| does not affect the reflection, only how fast v changes
        nn.init.uniform_(self.reflections, -bound, bound)

    def matrix(self) -> Tensor:
        phases = widen(self.phases)
        D1, D2, D3 = torch.polar(torch.ones_like(phases), phases)
        v1, v2 = (torch.complex(re, im) for re, im in widen(self.reflections))
        z = torch.diag(D1)  # row n is the image of basis vector n
        z = torch.fft.fft(z, norm="ortho")
        z = reflect(z, v1)
        z = z.index_select(1, self.permutation) * D2
        z = torch.fft.ifft(z, norm="ortho")
        z = reflect(z, v2) * D3
        return real_form(z.T)

    def extra_repr(self) -> str:
        return f"{self.size}"


class FullUnitary(UnitaryMap):
    """The matrix W = exp(A) on ``size`` complex units, as ``[re | im]``, with any skew-Hermitian A.

    Every unitary matrix is such an exponential, so ``size`` squared free parameters cover all of them. Wisdom et al.
    (2016) update W itself along its gradient by a Cayley transform; here an ordinary optimizer updates A.
    """

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.size = size
        self.free = nn.Parameter(torch.empty(size, size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise A so that the angles of W cover the circle, with a semicircle law of radius pi."""
        nn.init.normal_(self.free, std=math.pi / math.sqrt(8 * self.size))

    def matrix(self) -> Tensor:
        free = widen(self.free)
        lower, upper = free.tril(-1), free.triu(1)
        A = torch.complex(lower - lower.mT, upper + upper.mT + free.diagonal().diag())
        return skew_exponential(real_form(A)).to(free.dtype)

    def extra_repr(self) -> str:
        return f"{self.size}"


def reflect(z: Tensor, v: Tensor) -> Tensor:
    """Reflect the rows of ``z`` ``(B, N)`` along ``v`` ``(N,)``; v = 0 leaves them unchanged."""
    square = (v.real.square() + v.imag.square()).sum()
    return z - (2 / square.clamp_min(torch.finfo(square.dtype).tiny)) * (z @ v.conj()).unsqueeze(-1) * v


class URNNCell(Cell):
    """Unitary evolution RNN (Arjovsky et al., 2016), optionally of full capacity (Wisdom et al., 2016).

    h' = modReLU(W h + V x, b), with W from :class:`FourierUnitary` or :class:`FullUnitary`, and a trained h_0.

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)``, H/2 complex units as ``[re | im]`` -> output h' ``(B, H)``.

    Args:
        input_size, hidden_size: I, H; H must be even.
        modrelu_bias: initial value of b; None draws it uniformly in +-0.01, as in the original implementation.
        full_capacity: W is any unitary matrix, with H^2 / 4 free parameters instead of 7 H / 2.
        device, dtype: device and dtype of the parameters.
    """

    shown = ("modrelu_bias",)

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
        """Initialise the parameters; h_0 has length about 1."""
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


STYLES = ("tunable", "fft")


class Rotations(UnitaryMap):
    """The matrix of ``capacity`` layers of rotations in disjoint pairs of the N units (Jing et al., 2017).

    real:     (h_i, h_j) -> (cos h_i + sin h_j, -sin h_i + cos h_j)
    complex:  the same, the second one times exp(i phi); after the last layer unit n is multiplied by exp(i omega_n)

    A unit without a partner is unchanged, so the map is orthogonal for every N, even and odd.

    Args:
        size: N; the matrix is ``(N, N)``, or ``(2N, 2N)`` on ``[re | im]`` if complex.
        capacity: number of layers; None means 2, or a full butterfly of ceil(log2 N) layers with ``style="fft"``.
        style: ``"tunable"`` pairs neighbours, from unit 0 in even layers and from unit 1 in odd ones;
            ``"fft"`` pairs units whose indices differ in one bit, another bit in each layer.
        complex_valued: unitary instead of orthogonal.
        angle_bound: angles are initialised uniformly in +-angle_bound.
        device, dtype: device and dtype of the parameters.
    """

    partner: Tensor
    slot: Tensor
    side: Tensor

    def __init__(
        self,
        size: int,
        *,
        capacity: int | None = None,
        style: str = "tunable",
        complex_valued: bool = False,
        angle_bound: float = math.pi,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive_int("Rotations", size=size)
        check_flags("Rotations", complex_valued=complex_valued)
        check_choice("Rotations", "style", style, STYLES)
        check_not_negative("Rotations", angle_bound=angle_bound)
        if capacity is None:
            capacity = 2 if style == "tunable" else max(1, (size - 1).bit_length())
        check_positive_int("Rotations", capacity=capacity)
        self.size = size
        self.capacity = capacity
        self.style = style
        self.complex_valued = complex_valued
        self.angle_bound = angle_bound

        pairs = [(layer, *pair) for layer in range(capacity) for pair in layer_pairs(size, layer, style)]
        partner = torch.arange(size).repeat(capacity, 1)  # (L, N); itself without a partner
        slot = torch.full((capacity, size), len(pairs))  # index of its angle; the one past the end is 0
        side = torch.zeros(capacity, size)  # +1 for the first of a pair, -1 for the second
        for number, (layer, first, second) in enumerate(pairs):
            partner[layer, first], partner[layer, second] = second, first
            slot[layer, first] = slot[layer, second] = number
            side[layer, first], side[layer, second] = 1, -1
        for name, table in (("partner", partner), ("slot", slot), ("side", side)):
            self.register_buffer(name, table.to(device), persistent=False)

        self.theta = nn.Parameter(torch.empty(len(pairs), device=device, dtype=dtype))
        if complex_valued:
            self.phi = nn.Parameter(torch.empty(len(pairs), device=device, dtype=dtype))
            self.omega = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for angles in self.parameters():
            nn.init.uniform_(angles, -self.angle_bound, self.angle_bound)

    def matrix(self) -> Tensor:
        theta = widen(F.pad(self.theta, (0, 1)))  # the angle past the end is 0
        side = self.side.to(theta.dtype)
        theta = theta.index_select(0, self.slot.flatten()).view_as(side)  # (L, N)
        own, other = torch.cos(theta), side * torch.sin(theta)
        basis = torch.eye(self.size, device=theta.device, dtype=theta.dtype)
        if not self.complex_valued:
            return self._turn(basis, own, other).T
        phi = widen(F.pad(self.phi, (0, 1))).index_select(0, self.slot.flatten()).view_as(side)
        phi = phi * (side < 0)  # only the second of a pair has a phase
        phase = torch.polar(torch.ones_like(phi), phi)
        omega = widen(self.omega)
        turned = self._turn(basis.to(phase.dtype), own * phase, other * phase)
        return real_form((turned * torch.polar(torch.ones_like(omega), omega)).T)

    def _turn(self, h: Tensor, own: Tensor, other: Tensor) -> Tensor:
        for layer in range(self.capacity):
            h = own[layer] * h + other[layer] * h.index_select(1, self.partner[layer])
        return h

    def extra_repr(self) -> str:
        return f"{self.size}, capacity={self.capacity}, style={self.style!r}, complex_valued={self.complex_valued}"


def layer_pairs(size: int, layer: int, style: str) -> list[tuple[int, int]]:
    """Return the pairs of units that layer number ``layer`` rotates."""
    if style == "tunable":
        return [(i, i + 1) for i in range(layer % 2, size - 1, 2)]
    bit = 1 << layer % max(1, (size - 1).bit_length())
    return [(i, i | bit) for i in range(size) if not i & bit and i | bit < size]


class EUNNCell(Cell):
    """RNN with a unitary recurrent matrix made of rotations (Jing et al., 2017).

    h' = modReLU(Q h + V x, b), with Q from :class:`Rotations`.

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)`` -> output h' ``(B, H)``, state ``(h',)``.

    Args:
        input_size, hidden_size: I, H; complex units take two of the H numbers, as ``[re | im]``.
        capacity, style, complex_valued, angle_bound: as in :class:`Rotations`.
        modrelu_bias: initial value of b. (The original implementation has -0.01 with V in +-0.01, where one-hot inputs
            leave every unit at 0.)
        device, dtype: device and dtype of the parameters.
    """

    shown = ("modrelu_bias",)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        capacity: int | None = None,
        style: str = "tunable",
        complex_valued: bool = False,
        angle_bound: float = math.pi,
        modrelu_bias: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_finite("EUNNCell", modrelu_bias=modrelu_bias)
        if complex_valued:
            check_even("EUNNCell", hidden_size)
        units = hidden_size // 2 if complex_valued else hidden_size
        self.complex_valued = complex_valued
        self.modrelu_bias = modrelu_bias
        self.rotations = Rotations(
            units,
            capacity=capacity,
            style=style,
            complex_valued=complex_valued,
            angle_bound=angle_bound,
            device=device,
            dtype=dtype,
        )
        self.weight_ih = nn.Parameter(torch.empty(hidden_size, input_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(units, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.rotations.reset_parameters()
        glorot_(self.weight_ih)
        nn.init.constant_(self.bias, self.modrelu_bias)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (h,) = state
        activation = modrelu_complex if self.complex_valued else modrelu
        h = activation(self.rotations(h) + x, self.bias)
        return h, (h,)


class GORUCell(Cell):
    """Gated orthogonal recurrent unit (Jing et al., 2019).

    r, g = sigmoid(U x + W h + b);   c = modReLU(r * (Q h) + U_c x, b_c);   h' = g * h + (1 - g) * c
    with Q orthogonal, from :class:`~torchrum.cells.unitary.Rotations`.

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)`` -> output h' ``(B, H)``, state ``(h',)``.

    Args:
        input_size, hidden_size: I, H.
        capacity, style, angle_bound: as in :class:`~torchrum.cells.unitary.Rotations`.
        reset_bias, modrelu_bias: initial values of the bias of r and of b_c.
        update_bias: initial value of the bias of g; None draws it uniformly in +-sqrt(3 / H), as in the original
            implementation.
        device, dtype: device and dtype of the parameters.
    """

    shown = ("reset_bias", "update_bias", "modrelu_bias")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        capacity: int | None = None,
        style: str = "tunable",
        angle_bound: float = math.pi,
        reset_bias: float = 2.0,
        update_bias: float | None = 0.0,
        modrelu_bias: float = 0.01,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_finite("GORUCell", reset_bias=reset_bias, update_bias=update_bias or 0.0, modrelu_bias=modrelu_bias)
        self.reset_bias = reset_bias
        self.update_bias = update_bias
        self.modrelu_bias = modrelu_bias
        empty = new_parameter(device, dtype)
        self.rotations = Rotations(
            hidden_size, capacity=capacity, style=style, angle_bound=angle_bound, device=device, dtype=dtype
        )
        self.weight_ih = empty(3 * hidden_size, input_size)  # rows: r, g, candidate
        self.weight_hh = empty(2 * hidden_size, hidden_size)  # rows: r, g
        self.bias = empty(2 * hidden_size)  # r, g
        self.bias_c = empty(hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters: angles within ``angle_bound``, the other weights near 0."""
        self.rotations.reset_parameters()
        for weight in (self.weight_ih, self.weight_hh):
            nn.init.uniform_(weight, -0.01, 0.01)
        nn.init.constant_(self.bias[: self.hidden_size], self.reset_bias)
        if self.update_bias is None:
            bound = math.sqrt(3 / self.hidden_size)
            nn.init.uniform_(self.bias[self.hidden_size :], -bound, bound)
        else:
            nn.init.constant_(self.bias[self.hidden_size :], self.update_bias)
        nn.init.constant_(self.bias_c, self.modrelu_bias)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih, F.pad(self.bias, (0, self.hidden_size)))  # b_c is applied in modReLU

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (h,) = state
        x_gates, x_c = x.split((2 * self.hidden_size, self.hidden_size), -1)
        r, g = torch.sigmoid(x_gates + F.linear(h, self.weight_hh)).chunk(2, -1)
        c = modrelu(r * self.rotations(h) + x_c, self.bias_c)
        h = g * h + (1 - g) * c
        return h, (h,)
