"""One answer for a whole sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.models.tagging import init_readout, width


class AnsweringModel(nn.Module):
    """One-hot input, a recurrent layer, and a linear read-out at the last step.

    Args:
        layer: a one-directional recurrent layer with ``batch_first=True`` and ``input_size=num_inputs``.
        num_inputs: symbols that may stand in the input, I.
        num_outputs: classes to choose from, V.
    """

    def __init__(self, layer: nn.Module, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.layer = layer
        self.readout = nn.Linear(width(layer), num_outputs)
        init_readout(self.readout, num_inputs + num_outputs)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Score every class after the last step.

        Args:
            x: symbols, ``(B, T)`` int64.
            lengths: real steps of each sequence, ``(B,)`` int64 on x's device, where shorter ones are padded at
                the end; None takes all T steps.

        Returns:
            Logits, ``(B, V)``.
        """
        output, _ = self.layer(F.one_hot(x, self.num_inputs).to(self.readout.weight.dtype))  # (B, T, H)
        if lengths is None:
            return self.readout(output[:, -1])
        # a step never sees what follows it, so the state at the last real step is right without packing,
        # and packing would copy the lengths to the host
        last = output[torch.arange(len(x), device=x.device), lengths - 1]
        return self.readout(last)
