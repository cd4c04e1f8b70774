"""An exponential moving average of the weights."""

import copy

import torch
from torch import Tensor, nn


class Average:
    """A copy of a model whose weights follow those of ``model``.

    ``average = d * average + (1 - d) * weight`` after each step t, with ``d = min(decay, (1 + t) / (10 + t))``: else
    the random start would weigh for ``1 / (1 - decay)`` steps. So it reaches back over a ninth of the steps at most.
    Buffers follow too, those of integers as they are.

    Args:
        model: what is trained, in its place.
        decay: the share that is kept at each step, above 0 and below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._decay = decay
        source, target = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, self.model))
        self._pairs = [(target[name], weight) for name, weight in source.items()]

    @torch.no_grad()
    def update(self, step: Tensor) -> None:
        """Follow the weights after the step that came behind ``step`` (a scalar on the device) finished ones."""
        share = 1 - torch.clamp((1 + step) / (10 + step), max=self._decay)
        for average, weight in self._pairs:
            if average.is_floating_point():
                average.lerp_(weight, share.to(average.dtype))
            else:
                average.copy_(weight)
