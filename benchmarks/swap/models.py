"""What is exchanged: the recurrent layer, by a name; everything around it stays."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchrum import RUM
from torchrum.cells.rum import PAPER_OPTIONS

from .tasks import SwapTask

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


PAPER = {**PAPER_OPTIONS}
TANH = {**PAPER, "activation": "tanh"}
ZEROS = {"target_bias_init": 0.0, "update_bias_init": 0.0, "embed_bias_init": 1.0, "embed_scale": 1.0}
TARGET0 = {**ZEROS, "update_bias_init": 1.0}
ETA = {"eta": "sqrt"}
GAIN2, GAIN3 = {"embed_scale": 2.0}, {"embed_scale": 3.0}

VARIANTS: dict[str, dict[str, Any]] = {
    "lam0-relu": PAPER,
    "lam0-tanh": {**TANH, **ZEROS},
    "lam0-tanh-gain2": {**TANH, **ZEROS, **GAIN2},
    "lam0-tanh-gain3": {**TANH, **ZEROS, **GAIN3},
    "lam0-eta": {**PAPER, **ZEROS, **ETA},
    "lam0-eta-gain2": {**PAPER, **ZEROS, **ETA, **GAIN2},
    "lam0-eta-gain3": {**PAPER, **ZEROS, **ETA, **GAIN3},
    "lam0-tanh-eta": {**TANH, **ZEROS, **ETA},
    "lam0-tanh-eta-gain2": {**TANH, **ZEROS, **ETA, **GAIN2},
    "lam0-tanh-gain2-update1": {**TANH, **TARGET0, **GAIN2},
    "lam0-eta-gain2-update1": {**PAPER, **TARGET0, **ETA, **GAIN2},
    "lam0-tanh-eta-gain3": {**TANH, **ZEROS, **ETA, **GAIN3},
    "lam1-relu": {**PAPER, "lam": 1},
    "lam1-tanh": {**TANH, **ZEROS, "lam": 1},
    "lam1-tanh-gain2": {**TANH, **ZEROS, **GAIN2, "lam": 1},
    "lam1-eta-gain2": {**PAPER, **ZEROS, **ETA, **GAIN2, "lam": 1},
    "lam1-eta-gain3": {**PAPER, **ZEROS, **ETA, **GAIN3, "lam": 1},
    "lam1-tanh-eta-gain2": {**TANH, **ZEROS, **ETA, **GAIN2, "lam": 1},
}
"""Options of RUM to compare, the most informative first; lam 1 takes about twice as long as lam 0.

``relu`` is the paper's start; the others start with an embedding of unit variance, or more, and gates at zero.
"""

MODELS: dict[str, Model] = {
    "gru": Model("nn.GRU as it comes", nn.GRU),
    "lstm": Model("nn.LSTM as it comes", nn.LSTM),
    **{name: Model(f"RUM, {options}", rum(**options)) for name, options in VARIANTS.items()},
}
