"""One answer for a whole sequence."""

import torch
from torch import Tensor

from torchrum.lab.models.tagging import OneHotModel


class AnsweringModel(OneHotModel):
    """A read-out at the last step of a one-directional layer; what it is built of stands at :class:`OneHotModel`."""

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
