"""GORU: gates around an orthogonal recurrent matrix."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State
from torchrum.cells.eunn import Rotations
from torchrum.cells.unitary import modrelu
from torchrum.ops._checks import check_finite, check_positive_int


class GORUCell(Cell):
    """Gated orthogonal recurrent unit (Jing et al., 2019).

    r, g = sigmoid(U x + W h + b);   c = modReLU(r * (Q h) + U_c x, b_c);   h' = g * h + (1 - g) * c
    with Q orthogonal, from :class:`~torchrum.cells.eunn.Rotations`.

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)`` -> output h' ``(B, H)``, state ``(h',)``.

    Args:
        input_size, hidden_size: I, H.
        capacity, style, angle_bound: as in :class:`~torchrum.cells.eunn.Rotations`.
        reset_bias, modrelu_bias: start of the bias of r, and of b_c.
        update_bias: start of the bias of g; None draws it uniform in +-sqrt(3 / H), as the original implementation.
        device, dtype: of the parameters.
    """

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
        check_positive_int("GORUCell", input_size=input_size, hidden_size=hidden_size)
        check_finite("GORUCell", reset_bias=reset_bias, update_bias=update_bias or 0.0, modrelu_bias=modrelu_bias)
        self.reset_bias = reset_bias
        self.update_bias = update_bias
        self.modrelu_bias = modrelu_bias

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.rotations = Rotations(
            hidden_size, capacity=capacity, style=style, angle_bound=angle_bound, device=device, dtype=dtype
        )
        self.weight_ih = empty(3 * hidden_size, input_size)  # rows: r, g, candidate
        self.weight_hh = empty(2 * hidden_size, hidden_size)  # rows: r, g
        self.bias = empty(2 * hidden_size)  # r, g
        self.bias_c = empty(hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights: angles within ``angle_bound``, the other weights near 0."""
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
        return F.linear(x, self.weight_ih, F.pad(self.bias, (0, self.hidden_size)))  # b_c acts inside modReLU

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (h,) = state
        x_gates, x_c = x.split((2 * self.hidden_size, self.hidden_size), -1)
        r, g = torch.sigmoid(x_gates + F.linear(h, self.weight_hh)).chunk(2, -1)
        c = modrelu(r * self.rotations(h) + x_c, self.bias_c)
        h = g * h + (1 - g) * c
        return h, (h,)

    def extra_repr(self) -> str:
        biases = f"reset_bias={self.reset_bias}, update_bias={self.update_bias}, modrelu_bias={self.modrelu_bias}"
        return f"{self.input_size}, {self.hidden_size}, {biases}"
