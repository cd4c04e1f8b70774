"""What is exchanged: the recurrent layer, by a name; everything around it stays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrum import RUM
from torchrum.cells.rum import PAPER_OPTIONS

from .tasks import SwapTask

Layer = Callable[[int, int], nn.Module]


def rum(**options: Any) -> Layer:
    """RUM with these options, and some that only this suite has.

    ``embed_gain`` scales the embedding that the layer starts from, ``unit=True`` by what gives inputs of unit variance
    an embedding of unit variance; ``gate_start`` is where layer norm's own bias of the update gate starts, and
    ``eta="sqrt"`` means the root of the hidden size: a state whose units have a mean square of 1.
    """
    gain, unit = options.pop("embed_gain", 1.0), options.pop("unit", False)
    gate_start = options.pop("gate_start", 0.0)

    def build(inputs: int, hidden: int) -> nn.Module:
        wanted = {name: hidden**0.5 if value == "sqrt" else value for name, value in options.items()}
        layer = RUM(inputs, hidden, **wanted)
        with torch.no_grad():
            layer.weight_ih_l0[-hidden:] *= gain * (max(hidden / inputs, 1) ** 0.5 if unit else 1)
            if gate_start:
                layer.ln_bias_l0[hidden : 2 * hidden] = gate_start
        return layer

    return build


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
UNIT = {"unit": True, "embed_bias_init": 1.0}
TARGET0 = {"target_bias_init": 0.0}

VARIANTS: dict[str, dict[str, Any]] = {
    "lam0-relu": PAPER,
    "lam0-tanh": TANH,
    "lam0-tanh-unit": {**TANH, **UNIT},
    "lam0-eta-unit": {**PAPER, **UNIT, "eta": "sqrt"},
    "lam0-ln": {**PAPER, "layer_norm": True},
    "lam1-relu": {**PAPER, "lam": 1},
    "lam1-tanh-unit": {**TANH, **UNIT, "lam": 1},
    "lam1-eta-unit": {**PAPER, **UNIT, "eta": "sqrt", "lam": 1},
    "lam0-tanh-unit-target0": {**TANH, **UNIT, **TARGET0},
    "lam0-eta-unit-target0": {**PAPER, **UNIT, **TARGET0, "eta": "sqrt"},
    "lam0-tanh-eta-unit": {**TANH, **UNIT, "eta": "sqrt"},
    "lam0-tanh-unit-gain2": {**TANH, **UNIT, "embed_gain": 2.0},
    "lam0-ln-unit": {**PAPER, **UNIT, "layer_norm": True},
    "lam1-tanh": {**TANH, "lam": 1},
    "lam1-tanh-unit-target0": {**TANH, **UNIT, **TARGET0, "lam": 1},
    "lam1-eta-unit-target0": {**PAPER, **UNIT, **TARGET0, "eta": "sqrt", "lam": 1},
    "lam0-eta-unit-update0": {**PAPER, **UNIT, "eta": "sqrt", "update_bias_init": 0.0},
    "lam0-tanh-unit-update0": {**TANH, **UNIT, "update_bias_init": 0.0},
    "lam0-ln-gate1": {**PAPER, "layer_norm": True, "gate_start": 1.0},
    "lam1-ln": {**PAPER, "layer_norm": True, "lam": 1},
}
"""Options of RUM to compare, the most informative first."""

MODELS: dict[str, Model] = {
    "gru": Model("nn.GRU as it comes", nn.GRU),
    "lstm": Model("nn.LSTM as it comes", nn.LSTM),
    **{name: Model(f"RUM, {options}", rum(**options)) for name, options in VARIANTS.items()},
}
