"""Models of one-hot symbols: one answer at every step, or one at the end."""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.layers.window import InputWindow
from torchrum.ops._checks import ArgumentTypeError


def init_readout(readout: nn.Linear, fans: int) -> None:
    """Initialise a read-out as the original implementation does: bias 0.01, and Glorot's bound with its ``fans``.

    There, fan-in plus fan-out is the sum of the sizes of input and output, or of state and embedding. The read-out's
    own fans would make the first logits smaller than those of the published curves.
    """
    bound = math.sqrt(6 / fans)
    nn.init.uniform_(readout.weight, -bound, bound)
    nn.init.constant_(readout.bias, 0.01)


def width(layer: nn.Module) -> int:
    """Return the number of output features of a recurrent layer, in one direction."""
    size = getattr(layer, "hidden_size", None)
    if not isinstance(layer, nn.Module) or not isinstance(size, int):
        raise ArgumentTypeError(
            f"layer is of type {type(layer).__name__}; it must be a recurrent layer with a hidden_size, such as RUM."
        )
    return size


class OneHotModel(nn.Module, ABC):
    """One-hot input, a recurrent layer, and a linear read-out.

    Args:
        layer: a recurrent layer with ``batch_first=True`` and ``input_size=window * num_inputs``.
        num_inputs: symbols that may occur in the input, I.
        num_outputs: classes to choose from, V.
        window: symbols that the layer reads per step: the current one and those before it.
    """

    def __init__(self, layer: nn.Module, num_inputs: int, num_outputs: int, window: int = 1) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.window = InputWindow(num_inputs, window, batch_first=True) if window > 1 else None
        self.layer = layer
        self.readout = nn.Linear(width(layer), num_outputs)
        init_readout(self.readout, num_inputs + num_outputs)

    @abstractmethod
    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute logits for the symbols ``x`` ``(B, T)`` int64."""

    def run_layer(self, x: Tensor) -> Tensor:
        """Run the layer on ``x`` ``(B, T)`` int64; returns ``(B, T, H)``."""
        symbols = F.one_hot(x, self.num_inputs).to(self.readout.weight.dtype)
        output, _ = self.layer(symbols if self.window is None else self.window(symbols)[0])
        return output


class TaggingModel(OneHotModel):
    """A read-out at every step; its arguments are those of :class:`OneHotModel`."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Score every class at every step.

        Args:
            x: symbols, ``(B, T)`` int64.
            lengths: must be None; every model is called with the same arguments.

        Returns:
            Logits, ``(B, T, V)``.
        """
        if lengths is not None:
            raise ValueError(
                "TaggingModel: lengths is given, but every step is answered; mask the padding in the loss."
            )
        return self.readout(self.run_layer(x))


class AnsweringModel(OneHotModel):
    """A read-out at the last step of a one-directional layer; its arguments are those of :class:`OneHotModel`."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Score every class after the last step.

        Args:
            x: symbols, ``(B, T)`` int64.
            lengths: real steps of each sequence, ``(B,)`` int64 on x's device, where shorter ones are padded at
                the end; None takes all T steps.

        Returns:
            Logits, ``(B, V)``.
        """
        output = self.run_layer(x)  # (B, T, H)
        if lengths is None:
            return self.readout(output[:, -1])
        # a step never sees what follows it, so the state at the last real step is right without packing,
        # and packing would copy the lengths to the host
        last = output[torch.arange(len(x), device=x.device), lengths - 1]
        return self.readout(last)
