"""Copying memory: Figure 2 of the paper, and the rivals it names."""

from typing import Any

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.tasks import Copying
from torchrum.training.config import ModelConfig, OptimizerConfig, Paper, TrainConfig

FIGURE = "Figure 2"
SOLVED = Paper(text="solved, loss near 0", where=FIGURE, value=0.0)
BASELINE = Paper(text="stays at the baseline", where=FIGURE, value=1.0)

DELAYS = (200, 500, 1000)

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
    "urnn": ("urnn", 250, {}, None, "uRNN, the first unitary recurrence"),
}


def copying(model: str, delay: int) -> TrainConfig:
    """The run of one model at one delay: RMSProp, learning rate 0.001, decay 0.9, batches of 128, as in the paper.

    The paper trains for "a few thousand" steps; here 10,000 are allowed to every model.
    """
    layer, hidden_size, options, paper, about = MODELS[model]
    return TrainConfig(
        name=f"copying-{model}-t{delay}",
        task=Copying(delay=delay),
        model=ModelConfig(layer=layer, hidden_size=hidden_size, options=options),
        optimizer=OptimizerConfig(name="rmsprop_tf", lr=1e-3, decay=0.9),
        batch_size=128,
        steps=10_000,
        eval_every=250,
        stop_at=0.002,
        paper=paper if delay in DELAYS else None,
        about=about,
    )


def sizes() -> list[tuple[str, int]]:
    """Every model and delay that has a recipe: the paper's delays, and one beyond them."""
    return [(model, delay) for model in MODELS for delay in DELAYS] + [("rum-lam1", 2000)]
