"""What models are called in tables."""

import pytest

from torchrum.lab.training.config import ModelConfig
from torchrum.layers.registry import LAYERS
from torchrum.paper.ledger.runs import NAMES, model_label


@pytest.mark.parametrize(
    "layer, num_layers, options, expected",
    [
        ("rum", 1, {}, "RUM λ=0"),
        ("rum", 2, {"lam": 1, "eta": 0.3}, "2 × RUM λ=1, η=0.3"),
        ("rum", 1, {"eta": "sqrt"}, "RUM λ=0, η=√H"),
        ("fs", 1, {}, "FS-LSTM-2"),
        ("fs", 1, {"slow": "rum", "num_fast": 4}, "FS-RUM-4"),
        ("fs", 1, {"slow": "rum-tanh"}, "FS-RUM-2 (tanh)"),
        ("fs", 1, {"slow": "rum-tanh", "slow_size": None}, "FS-RUM-2 (tanh)"),
        ("fs", 1, {"slow": "rum-tanh", "slow_size": 1}, "FS-RUM-2 slim"),
        ("ln_lstm", 1, {}, "LN-LSTM"),
        ("ln_lstm", 1, {"zoneout": 0.05}, "LN-LSTM"),
        ("ln_lstm", 1, {"layer_norm": False, "zoneout": 0.05}, "Zoneout LSTM"),
        ("ln_lstm", 1, {"layer_norm": False}, "LSTM (TensorFlow)"),
        ("hyper_lstm", 2, {}, "2 × HyperLSTM"),
        ("unheard_of", 1, {}, "unheard_of"),
    ],
)
def test_label(layer, num_layers, options, expected):
    assert model_label(ModelConfig(layer=layer, hidden_size=4, num_layers=num_layers, options=options)) == expected


def test_every_layer_has_a_name_in_print():
    assert set(LAYERS) - set(NAMES) == {"rum", "fs"}  # they have variants
    assert set(NAMES) <= {*LAYERS, "memn2n"}  # which is a model without a layer
