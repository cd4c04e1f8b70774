"""Associative recall: the table and the figure of the paper, and the rivals it names."""

from typing import Any

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.tasks import Recall
from torchrum.training.config import ModelConfig, OptimizerConfig, Paper, TrainConfig

TABLE = "Table 1"

LENGTHS = (30, 50)

# name: layer, options of the layer, the paper's validation accuracy in percent at each length, one line about it
MODELS: dict[str, tuple[str, dict[str, Any], dict[int, float], str]] = {
    "rum-lam1": ("rum", {**PAPER_OPTIONS, "lam": 1}, {30: 100, 50: 100}, "RUM with associative memory, lam 1"),
    "rum": ("rum", PAPER_OPTIONS, {}, "RUM, lam 0"),
    "lstm": ("lstm", {}, {30: 25.6, 50: 20.5}, "LSTM"),
    "gru": ("gru", {}, {}, "GRU"),
    "fast-weights": ("fast_weights", {}, {30: 100, 50: 20.8}, "fast weights with layer norm"),
    "goru": ("goru", {}, {}, "GORU, gated and orthogonal"),
    "ntm": ("ntm", {}, {}, "Neural Turing Machine"),
}

IN_WORDS = {
    ("rum", 50): Paper(text="does not learn", where="Appendix B, figure"),
    ("ntm", 50): Paper(text="fails", where="Section 4.2"),
}

PAPER_ONLY = {30: {"WeiNet (Zhang and Zhou, 2017)": "100 %"}, 50: {"WeiNet (Zhang and Zhou, 2017)": "100 %"}}
"""Rivals whose equations could not be had: their printed numbers stand in the table, with no run of ours."""


def recall(model: str, length: int) -> TrainConfig:
    """The run of one model at one length: 50 units, batches of 128 and at most 100,000 steps, for every model.

    The paper names RMSProp, its code uses Adam; Adam leaves the plateau sooner. ``optimizer.name=rmsprop_tf`` takes the
    other one. Beyond the paper's lengths the examples are fresh: the paper's 100,000 are learnt by heart before recall.
    """
    layer, options, accuracies, about = MODELS[model]
    return TrainConfig(
        name=f"recall-{model}-t{length}",
        task=Recall(length=length) if length in LENGTHS else Recall(length=length, train_size=None),
        model=ModelConfig(layer=layer, hidden_size=50, options=options),
        optimizer=OptimizerConfig(name="adam", lr=1e-3),
        batch_size=128,
        steps=100_000,
        eval_every=1000,
        checkpoint_every=1000,
        stop_at=0.9995,
        paper=_paper(model, accuracies.get(length), length),
        about=about,
    )


def _paper(model: str, accuracy: float | None, length: int) -> Paper | None:
    if accuracy is not None:
        return Paper(text=f"{accuracy:g} %", where=TABLE, value=accuracy / 100)
    return IN_WORDS.get((model, length))


def sizes() -> list[tuple[str, int]]:
    """Every model and length that has a recipe: the paper's lengths, and one beyond them."""
    return [(model, length) for model in MODELS for length in LENGTHS] + [("rum-lam1", 100)]
