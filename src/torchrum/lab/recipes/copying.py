"""Copying memory: Figure 2 of the paper, and the baseline models it names."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.lab.recipes.presets import PRESET
from torchrum.lab.tasks import Copying
from torchrum.lab.training.config import ModelConfig, OptimizerConfig, Paper, TrainConfig

FIGURE = "Figure 2"
SOLVED = Paper(text="solved, loss near 0", where=FIGURE, value=0.0)
BASELINE = Paper(text="stays at the baseline", where=FIGURE, value=1.0)

Precision = Literal["32-true", "bf16-mixed"]

DELAYS = (200, 500, 1000)

GORU_FFT = {"style": "fft", "update_bias": None, "modrelu_bias": 0.011}
EXPRNN = {"orthogonal_map": "taylor", "input_init": "kaiming"}

# name: layer, hidden size, options of the layer, the paper's result, one line about it
MODELS: dict[str, tuple[str, int, dict[str, Any], Paper | None, str]] = {
    "rum": ("rum", 250, PAPER_OPTIONS, SOLVED, "RUM, lam 0, no time normalization"),
    "rum-eta": ("rum", 250, {**PAPER_OPTIONS, "eta": 1.0}, SOLVED, "RUM, lam 0, eta 1: slower and steadier"),
    "rum-lam1": ("rum", 100, {**PAPER_OPTIONS, "lam": 1}, SOLVED, "RUM with associative memory, lam 1"),
    "rum-lam1-eta": ("rum", 100, {**PAPER_OPTIONS, "lam": 1, "eta": 1.0}, SOLVED, "RUM, lam 1, eta 1"),
    "lstm": ("lstm", 250, {}, BASELINE, "LSTM"),
    "gru": ("gru", 250, {}, BASELINE, "GRU"),
    "eunn": ("eunn", 250, {}, None, "EUNN, a unitary recurrence of capacity 2"),
    "goru": ("goru", 250, {}, Paper(text="solves it", where="Section 4.1"), "GORU, gated and orthogonal"),
    "exprnn": ("exprnn", 250, {}, None, "an orthogonal recurrence by the matrix exponential"),
    "goru-fft": ("goru", 128, GORU_FFT, None, "GORU as in its authors' copying script: FFT style, 128 units"),
    "exprnn-two-rates": ("exprnn", 190, EXPRNN, None, "expRNN as in its authors' copying script: two rates, 190 units"),
    "urnn": ("urnn", 256, {}, None, "uRNN, the first unitary recurrence"),
    "full-urnn": ("full_urnn", 256, {}, None, "uRNN of full capacity: any unitary recurrence"),
    "soft-orthogonal": ("soft_orthogonal", 128, {}, None, "a recurrence with singular values near 1"),
}


ADAM = OptimizerConfig(name="adam", lr=4e-3, clip=0.1, schedule="8000:0.3,9400:0.1")
RMSPROP = OptimizerConfig(name="rmsprop_tf", lr=1e-3, decay=0.9)
OWN_OPTIMIZER = {
    "exprnn-two-rates": OptimizerConfig(name="rmsprop", lr=2e-4, decay=0.99, groups="weight_hh:0.1"),
}
"""The published optimizer of a baseline model, where the paper's is not used."""

# options of the layer beside its own, optimizer, precision
TUNED: dict[tuple[str, int], tuple[dict[str, Any], OptimizerConfig, Precision]] = {
    **{(model, delay): ({}, ADAM, "bf16-mixed") for model in ("rum", "rum-eta") for delay in (200, 500)},
    ("rum", 1000): ({}, replace(ADAM, lr=3e-3, schedule="7200:0.3,8400:0.1"), "bf16-mixed"),
    ("rum-eta", 1000): ({}, replace(ADAM, schedule="7200:0.3,8400:0.1"), "bf16-mixed"),
    ("rum-lam1-eta", 200): ({}, replace(RMSPROP, lr=4e-3, schedule="4000:0.3"), "32-true"),
    ("rum-lam1-eta", 500): ({}, replace(RMSPROP, lr=4e-3, schedule="6000:0.3"), "32-true"),
    ("rum-lam1-eta", 1000): ({}, replace(RMSPROP, lr=4e-3, schedule="6000:0.3"), "32-true"),
    ("rum-lam1-eta", 2000): ({}, replace(RMSPROP, lr=4e-3, schedule="8700:0.3"), "32-true"),
    ("goru", 200): ({"angle_bound": 0.3, "update_bias": 2.0}, replace(ADAM, schedule="constant"), "32-true"),
}
"""The best setting found within 10,000 steps, by model and delay, where one was looked for."""


def copying(model: str, delay: int, tuned: bool) -> TrainConfig:
    """The run of one model at one delay, with batches of 128.

    As in the paper that is RMSProp, learning rate 0.001, decay 0.9, or ``tuned`` as it learns best. The paper trains
    for "a few thousand" steps; here 10,000 are allowed to every model.
    """
    layer, hidden_size, options, paper, about = MODELS[model]
    more, optimizer, precision = TUNED[model, delay] if tuned else ({}, OWN_OPTIMIZER.get(model, RMSPROP), "32-true")
    preset = (model, delay) in TUNED and not tuned
    return TrainConfig(
        name=f"copying-{model}{PRESET if preset else ''}-t{delay}",
        task=Copying(delay=delay),
        model=ModelConfig(layer=layer, hidden_size=hidden_size, options={**options, **more}),
        optimizer=optimizer,
        precision=precision,
        batch_size=128,
        steps=10_000,
        eval_every=250,
        stop_at=0.002,
        paper=paper if delay in DELAYS else None,
        about=about + (", the paper's optimizer" if preset else ""),
    )


def recipes() -> dict[str, Callable[[], TrainConfig]]:
    """Every model at the paper's delays, tuned where it was, and so as in the paper; one delay beyond them, tuned."""
    runs = [(model, delay, tuned) for model in MODELS for delay in DELAYS for tuned in (True, False)]
    runs = [run for run in [*runs, ("rum-lam1-eta", 2000, True)] if run[:2] in TUNED or not run[2]]
    return {recipe().name: recipe for recipe in (functools.partial(copying, *run) for run in runs)}
