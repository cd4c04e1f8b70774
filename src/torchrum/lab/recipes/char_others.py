"""Character-level Penn Treebank: the baseline models whose published training is out of reach, for a few epochs."""

from torchrum.lab.recipes.char_ptb import TABLE
from torchrum.lab.tasks import CharLM
from torchrum.lab.training.config import ModelConfig, OptimizerConfig, Paper, TrainConfig

# name: model, segment, lanes, learning rate, its schedule, clip, the published bits per character, what it is
OTHERS: dict[str, tuple[ModelConfig, int, int, float, str, float, float | None, str]] = {
    "hyper-lstm": (
        ModelConfig(
            layer="hyper_lstm",
            hidden_size=1000,
            num_layers=2,
            input_dropout=0.2,
            output_dropout=0.2,
            options={"embedding_size": 16, "recurrent_dropout": 0.2, "dropout": 0.2},
        ),
        100,
        128,
        1e-3,
        "constant",
        1.0,
        1.219,
        "two layers of HyperLSTM, 1000 units each",
    ),
    "nas": (
        ModelConfig(
            layer="nas",
            hidden_size=800,
            num_layers=2,
            embedding_size=128,
            input_dropout=0.5,
            output_dropout=0.5,
            locked_dropout=True,
            options={"state_dropout": 0.2, "dropout": 0.5},
        ),
        100,
        128,
        1e-3,
        "constant",
        1.0,
        1.214,
        "two layers of NASCell, 800 units each",
    ),
    "hm-lstm": (
        ModelConfig(
            layer="hm_lstm",
            hidden_size=512,
            embedding_size=128,
            options={"slope_per_step": 0.04 / CharLM(lanes=64, segment=100).segments},
        ),
        100,
        64,
        2e-3,
        "plateau/0.02/1",
        1.0,
        1.24,
        "hierarchical multiscale LSTM of three levels, 512 units each, slope annealing",
    ),
    "rhn": (
        ModelConfig(
            layer="rhn",
            hidden_size=830,
            output_dropout=0.4,
            locked_dropout=True,
            options={"input_dropout": 0.4, "state_dropout": 0.1},
        ),
        150,
        128,
        1e-3,
        "constant",
        1 / 150,
        None,
        "Recurrent Highway Network of depth 10, 830 units",
    ),
}
"""Rows of the table whose published training cannot be repeated in full: models and rates as far as they are known."""

SHORT = 20
"""Epochs of a run of ``OTHERS``: enough to see that the model learns, too few for its published number."""


def char_ptb_other(model: str) -> TrainConfig:
    """A baseline model of the table for ``SHORT`` epochs, with Adam, in float32.

    HM-LSTM's rate falls when validation stops improving, as its authors' does: at a constant one it diverged.
    """
    choice, segment, lanes, lr, schedule, clip, bpc, about = OTHERS[model]
    task = CharLM(lanes=lanes, segment=segment)
    return TrainConfig(
        name=f"char-ptb-{model}",
        task=task,
        model=choice,
        optimizer=OptimizerConfig(name="adam", lr=lr, schedule=schedule, clip=clip),
        batch_size=lanes,
        steps=SHORT * task.segments,
        log_every=task.segments,
        eval_every=2 * task.segments,
        checkpoint_every=10 * task.segments,
        paper=None if bpc is None else Paper(text=f"{bpc:g} BPC", where=TABLE, value=bpc),
        about=f"{about}; {SHORT} epochs",
    )
