"""What is exchanged: the recurrent layer, by a name; everything around it stays."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from swap.tasks import SwapTask
from torchrum import RUM
from torchrum.cells.rum import PAPER_OPTIONS, TANH_OPTIONS

Layer = Callable[[int, int], nn.Module]


def rum(**options: Any) -> Layer:
    """RUM with these options."""
    return lambda inputs, hidden: RUM(inputs, hidden, **options)


class SwapModel(nn.Module):
    """An embedding where the inputs are symbols, the layer, and a linear readout of its outputs."""

    def __init__(self, task: SwapTask, layer: Layer) -> None:
        super().__init__()
        inputs = task.inputs if task.symbols is None else 32
        self.embed = nn.Identity() if task.symbols is None else nn.Embedding(task.symbols, inputs)
        self.layer = layer(inputs, task.hidden_size)
        self.readout = nn.Linear(task.hidden_size, task.outputs)
        self.every_step = task.every_step

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any, Tensor]:
        """Answers ``(T, B, outputs)`` or ``(B, outputs)``, the state, and the layer's outputs ``(T, B, H)``."""
        output, state = self.layer(self.embed(x), state)
        return self.readout(output if self.every_step else output[-1]), state, output


class Model(NamedTuple):
    """A layer that takes ``nn.GRU``'s place."""

    about: str
    layer: Layer


TANH: dict[str, Any] = {"form": "paper", **TANH_OPTIONS}

VARIANTS: dict[str, dict[str, Any]] = {
    "rum-gated": {},
    "rum": TANH,
    "rum-lam1": {**TANH, "lam": 1},
    "rum-paper": PAPER_OPTIONS,
    "rum-paper-lam1": {**PAPER_OPTIONS, "lam": 1},
    "rum-relu": {**TANH, "activation": "relu"},
    "rum-no-eta": {**TANH, "eta": None},
    "rum-update0": {**TANH, "update_bias_init": 0.0},
    "rum-gates1": {**TANH, "gate_scale": 1.0},
    "rum-embed1": {**TANH, "embed_scale": 1.0},
    "rum-target1": {**TANH, "target_bias_init": 1.0},
    "rum-lam1-relu": {**TANH, "lam": 1, "activation": "relu"},
}
"""Options of RUM to compare, the most informative first: the default form, the paper's form with ``TANH_OPTIONS`` and
with the paper's, and ``TANH_OPTIONS`` but for one.

lam 1 takes about twice as long as lam 0.
"""

MODELS: dict[str, Model] = {
    "gru": Model("nn.GRU as it comes", nn.GRU),
    "lstm": Model("nn.LSTM as it comes", nn.LSTM),
    **{name: Model(f"RUM, {options}", rum(**options)) for name, options in VARIANTS.items()},
}
