"""The Recurrent Highway Network: several highway layers inside each time step."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import GatherableCell, Linear, State
from torchrum.cells.init import new_parameter
from torchrum.ops._checks import check_finite, check_not_negative, check_positive_int, check_probability


class RHNCell(GatherableCell):
    """Recurrent Highway Network (Zilly et al., 2017) with the carry gate coupled to the transform gate.

    s_0 = h;  for l = 1..depth:
        g = tanh([l = 1] W_g (x * mask_x) + U_g^l (s_{l-1} * mask_s) + b_g^l)
        t = sigmoid([l = 1] W_t (x * mask_x) + U_t^l (s_{l-1} * mask_s) + b_t^l)
        s_l = g * t + s_{l-1} * (1 - t)
    h' = s_depth; the carried s is never dropped.

    Shapes: x ``(B, I)``, state ``(h,)`` with h ``(B, H)`` -> output h' ``(B, H)``, state ``(h',)``.

    Args:
        input_size, hidden_size: I, H.
        depth: number of highway layers per time step.
        transform_bias: initial value of b_t; a deeper cell needs a lower one: -4 fits depth 10 on characters.
        init_range: weights and b_g are initialised uniformly from -init_range to init_range.
        input_dropout, state_dropout: dropout probabilities of mask_x and mask_s; one mask for all steps and layers of a
            sequence.
        device, dtype: device and dtype of the parameters.
    """

    shown = ("depth", "transform_bias", "input_dropout", "state_dropout")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        depth: int = 10,
        transform_bias: float = -4.0,
        init_range: float = 0.04,
        input_dropout: float = 0.0,
        state_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("RHNCell", depth=depth)
        check_finite("RHNCell", transform_bias=transform_bias)
        check_not_negative("RHNCell", init_range=init_range)
        check_probability("RHNCell", input_dropout=input_dropout, state_dropout=state_dropout)
        self.depth = depth
        self.transform_bias = transform_bias
        self.init_range = init_range
        self.input_dropout = input_dropout
        self.state_dropout = state_dropout
        empty = new_parameter(device, dtype)
        self.weight_ih = empty(2 * hidden_size, input_size)  # rows: g, t
        # one parameter per highway layer: with slices of a single one, each slice's gradient would have its full size
        self.weight_hh = nn.ParameterList(empty(2 * hidden_size, hidden_size) for _ in range(depth))
        self.bias = nn.ParameterList(empty(2 * hidden_size) for _ in range(depth))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the weights and biases; the biases of t start at ``transform_bias``."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -self.init_range, self.init_range)
        for bias in self.bias:
            bias[self.hidden_size :] = self.transform_bias

    def project(self, x: Tensor) -> Tensor:
        if self.training and self.input_dropout > 0:
            x = x * F.dropout(x.new_ones(x.shape[-2:]), self.input_dropout)
        return F.linear(x, self.weight_ih)  # (..., 2H)

    def step_weights(self) -> list[tuple[Tensor, Tensor | None]]:
        return list(zip(self.weight_hh, self.bias, strict=True))

    def step_with(self, x: Tensor, state: State, linear: Linear) -> tuple[Tensor, State]:
        (s,) = state
        x, mask = self.split_mask(x)
        for layer, (weight, bias) in enumerate(zip(self.weight_hh, self.bias, strict=True)):
            z = linear(s if mask is None else s * mask, weight, bias)
            g, t = (x + z if layer == 0 else z).chunk(2, -1)
            t = torch.sigmoid(t)
            s = torch.tanh(g) * t + s * (1 - t)
        return s, (s,)
