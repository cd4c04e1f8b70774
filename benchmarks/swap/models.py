"""What is exchanged: the recurrent layer, by a name; everything around it stays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrum import RUM

from .tasks import SwapTask

Layer = Callable[[int, int], nn.Module]


def rum(**options: Any) -> Layer:
    """RUM with these options, and some that only this suite has.

    ``embed_gain`` and ``recurrent_gain`` scale what the weights start from, ``gate_start`` is where layer norm's own
    bias of the update gate starts, ``embed_spread`` the norm of the embedding's random bias, and ``eta="sqrt"`` means
    the root of the hidden size.
    """
    embed, recurrent = options.pop("embed_gain", 1.0), options.pop("recurrent_gain", 1.0)
    gate_start, embed_spread = options.pop("gate_start", 0.0), options.pop("embed_spread", 0.0)

    def build(inputs: int, hidden: int) -> nn.Module:
        wanted = {name: hidden**0.5 if value == "sqrt" else value for name, value in options.items()}
        layer = RUM(inputs, hidden, **wanted)
        with torch.no_grad():
            layer.weight_ih_l0[-hidden:] *= embed
            layer.weight_hh_l0 *= recurrent
            layer.bias_ih_l0[-hidden:].normal_(0, embed_spread / hidden**0.5)
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


VARIANTS: dict[str, dict[str, Any]] = {
    "lam0-tanh": {"activation": "tanh"},
    "lam1-tanh": {"activation": "tanh", "lam": 1},
    "lam0-tanh-spread": {"activation": "tanh", "embed_spread": 1.0},
    "lam1-tanh-spread": {"activation": "tanh", "embed_spread": 1.0, "lam": 1},
    "lam0-ln": {"activation": "relu", "layer_norm": True},
    "lam0-relu": {"activation": "relu"},
    "lam1-relu": {"activation": "relu", "lam": 1},
    "lam0-tanh-spread-target0": {"activation": "tanh", "embed_spread": 1.0, "target_bias_init": 0.0},
    "lam1-tanh-spread-target0": {"activation": "tanh", "embed_spread": 1.0, "target_bias_init": 0.0, "lam": 1},
    "lam0-tanh-target0": {"activation": "tanh", "target_bias_init": 0.0},
    "lam0-eta-spread": {"activation": "relu", "eta": "sqrt", "embed_spread": 1.0},
    "lam0-tanh-embed2": {"activation": "tanh", "embed_gain": 2.0},
    "lam0-tanh-update0": {"activation": "tanh", "update_bias_init": 0.0},
    "lam1-eta-spread": {"activation": "relu", "eta": "sqrt", "embed_spread": 1.0, "lam": 1},
    "lam1-ln": {"activation": "relu", "layer_norm": True, "lam": 1},
    "lam0-ln-gate1": {"activation": "relu", "layer_norm": True, "gate_start": 1.0},
}
"""Options of RUM to compare, the most informative first."""

MODELS: dict[str, Model] = {
    "gru": Model("nn.GRU as it comes", nn.GRU),
    "lstm": Model("nn.LSTM as it comes", nn.LSTM),
    **{name: Model(f"RUM, {options}", rum(**options)) for name, options in VARIANTS.items()},
}
