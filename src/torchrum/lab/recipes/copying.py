"""Copying memory: Figure 2 of the paper, and the baseline models it names."""

from typing import Any, Literal

from torchrum.cells.rum import RELU_OPTIONS
from torchrum.lab.tasks import Copying
from torchrum.lab.training.config import ModelConfig, OptimizerConfig, Paper, TrainConfig

FIGURE = "Figure 2"
SOLVED: dict[str, Any] = {"text": "solved, loss near 0", "where": FIGURE, "value": 0.0}
BASELINE: dict[str, Any] = {"text": "stays at the baseline", "where": FIGURE, "value": 1.0}

Precision = Literal["32-true", "bf16-mixed"]

DELAYS = (200, 500, 1000)

GORU_FFT = {"style": "fft", "update_bias": None, "modrelu_bias": 0.011}
EXPRNN = {"orthogonal_map": "taylor", "input_init": "kaiming"}

# name: layer, hidden size, options of the layer, the paper's result, one line about it
MODELS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any] | None, str]] = {
    "rum": ("rum", 250, RELU_OPTIONS, SOLVED, "RUM, lam 0, no time normalization"),
    "rum-eta": ("rum", 250, {**RELU_OPTIONS, "eta": 1.0}, SOLVED, "RUM, lam 0, eta 1: slower and steadier"),
    "rum-lam1": ("rum", 100, {**RELU_OPTIONS, "lam": 1}, SOLVED, "RUM with associative memory, lam 1"),
    "rum-lam1-eta": ("rum", 100, {**RELU_OPTIONS, "lam": 1, "eta": 1.0}, SOLVED, "RUM, lam 1, eta 1"),
    "lstm": ("lstm", 250, {}, BASELINE, "LSTM"),
    "gru": ("gru", 250, {}, BASELINE, "GRU"),
    "eunn": ("eunn", 250, {}, None, "EUNN, a unitary recurrence of capacity 2"),
    "goru": ("goru", 250, {}, {"text": "solves it", "where": "Section 4.1"}, "GORU, gated and orthogonal"),
    "exprnn": ("exprnn", 250, {}, None, "an orthogonal recurrence by the matrix exponential"),
    "goru-fft": ("goru", 128, GORU_FFT, None, "GORU as in its authors' copying script: FFT style, 128 units"),
    "exprnn-two-rates": ("exprnn", 190, EXPRNN, None, "expRNN as in its authors' copying script: two rates, 190 units"),
    "urnn": ("urnn", 256, {}, None, "uRNN, the first unitary recurrence"),
    "full-urnn": ("full_urnn", 256, {}, None, "uRNN of full capacity: any unitary recurrence"),
    "soft-orthogonal": ("soft_orthogonal", 128, {}, None, "a recurrence with singular values near 1"),
}

ADAM: dict[str, Any] = {"name": "adam", "lr": 4e-3, "clip": 0.1, "schedule": "8000:0.3,9400:0.1"}
RMSPROP: dict[str, Any] = {"name": "rmsprop_tf", "lr": 1e-3, "decay": 0.9}
LAM1: dict[str, Any] = {**RMSPROP, "lr": 4e-3}
OWN_OPTIMIZER: dict[str, dict[str, Any]] = {
    "exprnn-two-rates": {"name": "rmsprop", "lr": 2e-4, "decay": 0.99, "groups": "weight_hh:0.1"},
}
"""The published optimizer of a baseline model, where the paper's is not used."""

# options of the layer beside its own, optimizer, precision
TUNED: dict[tuple[str, int], tuple[dict[str, Any], dict[str, Any], Precision]] = {
    ("rum", 200): ({}, ADAM, "bf16-mixed"),
    ("rum", 500): ({}, ADAM, "bf16-mixed"),
    ("rum-eta", 200): ({}, ADAM, "bf16-mixed"),
    ("rum-eta", 500): ({}, ADAM, "bf16-mixed"),
    ("rum", 1000): ({}, {**ADAM, "lr": 3e-3, "schedule": "7200:0.3,8400:0.1"}, "bf16-mixed"),
    ("rum-eta", 1000): ({}, {**ADAM, "schedule": "7200:0.3,8400:0.1"}, "bf16-mixed"),
    ("rum-lam1-eta", 200): ({}, {**LAM1, "schedule": "4000:0.3"}, "32-true"),
    ("rum-lam1-eta", 500): ({}, {**LAM1, "schedule": "6000:0.3"}, "32-true"),
    ("rum-lam1-eta", 1000): ({}, {**LAM1, "schedule": "6000:0.3"}, "32-true"),
    ("rum-lam1-eta", 2000): ({}, {**LAM1, "schedule": "8700:0.3"}, "32-true"),
    ("goru", 200): ({"angle_bound": 0.3, "update_bias": 2.0}, {**ADAM, "schedule": "constant"}, "32-true"),
}
"""The best setting found within 10,000 steps, by model and delay, where one was looked for."""


def copying(name: str, model: str, delay: int, tuned: bool) -> TrainConfig:
    """The run of one model at one delay, with batches of 128.

    As in the paper that is RMSProp, learning rate 0.001, decay 0.9, or ``tuned`` as it learns best. The paper trains
    for "a few thousand" steps; here 10,000 are allowed to every model.
    """
    layer, hidden_size, options, paper, about = MODELS[model]
    more, optimizer, precision = TUNED[model, delay] if tuned else ({}, OWN_OPTIMIZER.get(model, RMSPROP), "32-true")
    return TrainConfig(
        name=name,
        task=Copying(delay=delay),
        model=ModelConfig(layer=layer, hidden_size=hidden_size, options={**options, **more}),
        optimizer=OptimizerConfig(**optimizer),
        precision=precision,
        batch_size=128,
        steps=10_000,
        eval_every=250,
        stop_at=0.002,
        paper=Paper(**paper) if paper and delay in DELAYS else None,
        about=about + (", the paper's optimizer" if (model, delay) in TUNED and not tuned else ""),
    )
