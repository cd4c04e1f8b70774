"""EUNN: an orthogonal or unitary matrix as layers of rotations of pairs of units, and the RNN with it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State
from torchrum.cells.init import glorot_
from torchrum.cells.unitary import UnitaryMap, check_even, modrelu, modrelu_complex, real_form, widen
from torchrum.ops._checks import check_choice, check_finite, check_flags, check_not_negative, check_positive_int

STYLES = ("tunable", "fft")


class Rotations(UnitaryMap):
    """``capacity`` layers, each turning disjoint pairs of the N units (Jing et al., 2017).

    real:     (h_i, h_j) -> (cos h_i + sin h_j, -sin h_i + cos h_j)
    complex:  the same, the second one times exp(i phi); after the last layer unit n is multiplied by exp(i omega_n)

    A unit without a partner passes unchanged, so that the map is orthogonal for every N, even and odd.

    Args:
        size: N; the matrix is ``(N, N)``, or ``(2N, 2N)`` on ``[re | im]`` if complex.
        capacity: layers; None means 2, or a full butterfly of ceil(log2 N) with ``style="fft"``.
        style: ``"tunable"`` pairs neighbours, from unit 0 in even layers and from unit 1 in odd ones;
            ``"fft"`` pairs units whose numbers differ in one bit, another bit in each layer.
        complex_valued: unitary instead of orthogonal.
        angle_bound: angles start uniform in +- this.
        device, dtype: of the parameters.
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
        slot = torch.full((capacity, size), len(pairs))  # which angle turns it; the one past the end is no turn
        side = torch.zeros(capacity, size)  # +1 first of its pair, -1 second
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
        phi = phi * (side < 0)  # only the second of a pair is phased
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
    """The pairs of units that layer number ``layer`` turns."""
    if style == "tunable":
        return [(i, i + 1) for i in range(layer % 2, size - 1, 2)]
    bit = 1 << layer % max(1, (size - 1).bit_length())
    return [(i, i | bit) for i in range(size) if not i & bit and i | bit < size]


class EUNNCell(Cell):
    """RNN with a unitary recurrent matrix made of rotations (Jing et al., 2017).

    h' = modReLU(Q h + V x, b), Q from :class:`Rotations`.

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)`` -> output h' ``(B, H)``, state ``(h',)``.

    Args:
        input_size, hidden_size: I, H; complex units take two of the H numbers, as ``[re | im]``.
        capacity, style, complex_valued, angle_bound: as in :class:`Rotations`.
        modrelu_bias: start of b. (The original implementation has -0.01 with V in +-0.01, where one-hot inputs leave
            every unit at 0.)
        device, dtype: of the parameters.
    """

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
        check_positive_int("EUNNCell", input_size=input_size, hidden_size=hidden_size)
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

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, modrelu_bias={self.modrelu_bias}"
