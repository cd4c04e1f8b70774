"""NASCell: the recurrent cell that architecture search found on Penn Treebank."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import State
from torchrum.cells.gathered import GatherableCell, Linear
from torchrum.cells.init import glorot_, sequence_mask
from torchrum.ops._checks import check_flags, check_positive_int, check_probability


class NASCell(GatherableCell):
    """The cell of Zoph & Le (2017), as TensorFlow Addons has it.

    a = W x, r = U (h * mask) + b, each split into eight blocks
    l0 = sigmoid(a0 + r0), l1 = relu(a1 + r1), l2 = sigmoid(a2 + r2), l3 = relu(a3 * r3)
    l4 = tanh(a4 + r4), l5 = sigmoid(a5 + r5), l6 = tanh(a6 + r6), l7 = sigmoid(a7 + r7)
    k0 = tanh(l0 * l1), k1 = tanh(l2 + l3), k2 = tanh(l4 * l5), k3 = sigmoid(l6 + l7)
    c' = tanh(k0 + c) * k1;   h' = tanh(c' * tanh(k2 + k3))

    Shapes: x ``(B, I)``, state ``(h, c)`` of ``(B, H)`` -> output h' ``(B, H)``, state ``(h', c')``.

    Args:
        input_size, hidden_size: I, H.
        bias: add b; the released cell has none.
        state_dropout: chance, from 0 to 1, that a unit of h is hidden from U, one mask for all steps of a sequence.
        device, dtype: of the parameters.
    """

    state_names = ("h", "c")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        state_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("NASCell", input_size=input_size, hidden_size=hidden_size)
        check_flags("NASCell", bias=bias)
        check_probability("NASCell", state_dropout=state_dropout)
        self.state_dropout = state_dropout
        self.weight_ih = nn.Parameter(torch.empty(8 * hidden_size, input_size, device=device, dtype=dtype))
        self.weight_hh = nn.Parameter(torch.empty(8 * hidden_size, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(8 * hidden_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, Glorot-uniform each; the bias starts at 0."""
        glorot_(self.weight_ih)
        glorot_(self.weight_hh)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def _masked(self) -> bool:
        return self.training and self.state_dropout > 0

    def project(self, x: Tensor) -> Tensor:
        projected = F.linear(x, self.weight_ih)  # (..., 8H)
        if not self._masked:
            return projected
        return torch.cat((projected, sequence_mask(x, self.hidden_size, self.state_dropout)), -1)

    def step_weights(self) -> list[tuple[Tensor, Tensor | None]]:
        return [(self.weight_hh, self.bias)]

    def step_with(self, x: Tensor, state: State, linear: Linear) -> tuple[Tensor, State]:
        h, c = state
        H = self.hidden_size
        read = h
        if self._masked:
            x, mask = x.split((8 * H, H), -1)
            read = h * mask
        r = linear(read, self.weight_hh, self.bias)
        z0, z1, z2, _, z4, z5, z6, z7 = (x + r).chunk(8, -1)
        z3 = x[:, 3 * H : 4 * H] * r[:, 3 * H : 4 * H]  # the one leaf that multiplies
        k0 = torch.tanh(torch.sigmoid(z0) * F.relu(z1))
        k1 = torch.tanh(torch.sigmoid(z2) + F.relu(z3))
        k2 = torch.tanh(torch.tanh(z4) * torch.sigmoid(z5))
        k3 = torch.sigmoid(torch.tanh(z6) + torch.sigmoid(z7))
        c = torch.tanh(k0 + c) * k1
        h = torch.tanh(c * torch.tanh(k2 + k3))
        return h, (h, c)

    def extra_repr(self) -> str:
        return (
            f"{self.input_size}, {self.hidden_size}, bias={self.bias is not None}, state_dropout={self.state_dropout}"
        )
