"""Character-level Penn Treebank: the paper's table, the baseline models it names, and further models."""

from dataclasses import dataclass, field, replace
from typing import Any

from torchrum.cells.rum import RELU_OPTIONS, TANH_OPTIONS
from torchrum.lab.tasks import CharLM
from torchrum.lab.training.config import ModelConfig, OptimizerConfig, Paper, TrainConfig

TABLE = "Table 3"
EPOCH = 265  # ``CharLM().segments``, the steps of 128 lanes in segments of 150

RUM: dict[str, Any] = {**RELU_OPTIONS, "layer_norm": True, "ln_order": "authors", "zoneout": 0.1}
"""Options of every RUM of the table: the published models normalise the update gate after its sigmoid."""
RUM_2000: dict[str, Any] = {"layer": "rum", "hidden_size": 2000, "embedding_size": 128, "options": {**RUM, "eta": 1.0}}
LSTM: dict[str, Any] = {"layer": "ln_lstm", "hidden_size": 1000}
FAST_SLOW: dict[str, Any] = {"cell_dropout": 0.35, "zoneout": 0.1, "zoneout_cell": 0.5}
DROPOUT = {"input_dropout": 0.35, "output_dropout": 0.35}


def _fast_slow(hidden_size: int, **options: Any) -> dict[str, Any]:
    """Arguments of ``ModelConfig`` for a Fast-Slow model."""
    return {"layer": "fs", "hidden_size": hidden_size, "embedding_size": 128, "options": {**FAST_SLOW, **options}}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the table: its model and how it is trained."""

    about: str
    """One line about it."""
    model: dict[str, Any]
    """Arguments of ``ModelConfig``."""
    bpc: float | None = None
    """The paper's bits per character."""
    epochs: int = 100
    drops: dict[int, float] = field(default_factory=dict)
    """Factors of the learning rate by the epoch from which they hold."""


MODELS: dict[str, Published] = {
    "zoneout-lstm": Published(
        about="LSTM of 1000 units with zoneout, one-hot input",
        model=LSTM
        | {"options": {"layer_norm": False, "zoneout": 0.05, "zoneout_cell": 0.5, "init": "block_orthogonal"}},
        bpc=1.27,
    ),
    "ln-lstm": Published(
        about="LSTM of 1000 units with layer norm, zoneout and dropout",
        model={**LSTM, **DROPOUT, "embedding_size": 128, "options": {"zoneout": 0.1, "zoneout_cell": 0.5}},
    ),
    "rum-2000": Published(
        about="RUM of 2000 units, eta 1, without dropout as its authors ran it", model=RUM_2000, bpc=1.28
    ),
    "rum-2000-dropout": Published(
        about="the same with the dropout of 0.35 that the paper prints", model={**RUM_2000, **DROPOUT}, bpc=1.28
    ),
    "rum-2x1500": Published(
        about="two layers of RUM, 1500 units each, eta 0.3",
        model={**RUM_2000, "hidden_size": 1500, "num_layers": 2, "options": {**RUM, "eta": 0.3}},
        bpc=1.26,
    ),
    "fs-lstm-2": Published(
        about="Fast-Slow LSTM, two fast cells of 700 units, slow 400",
        model=_fast_slow(700, slow_size=400, num_fast=2),
        bpc=1.190,
        epochs=200,
        drops={180: 0.1},
    ),
    "fs-lstm-4": Published(
        about="Fast-Slow LSTM, four fast cells of 500 units, slow 400",
        model=_fast_slow(500, slow_size=400, num_fast=4),
        bpc=1.193,
        epochs=200,
        drops={180: 0.1},
    ),
    "fs-rum-2": Published(
        about="Fast-Slow RUM: two fast LSTMs of 700, slow RUM of 1000",
        model=_fast_slow(700, slow="rum", slow_size=1000, eta=1.0, ln_order="authors"),
        bpc=1.189,
        epochs=360,
        drops={180: 0.05, 240: 0.005},
    ),
}
"""The rows of the table that have one setting in print."""
TUNED = ("zoneout-lstm", "ln-lstm", "rum-2000", "rum-2x1500", "fs-lstm-2", "fs-lstm-4", "fs-rum-2")
"""Models that also have a recipe of ``char_ptb_tuned``."""
TANH = {
    "rum-2000": "RUM of 2000 units",
    "rum-2x1500": "two layers of RUM, 1500 units each",
    "fs-rum-2": "Fast-Slow RUM: two fast LSTMs of 700, slow RUM of 1000",
}
"""Models that also have a recipe of ``char_ptb_tanh``, with a description."""
CONSTANT = ("fs-lstm-2", "fs-rum-2")
"""Models that also have a recipe of ``char_ptb_constant``."""
HOW = "cosine schedule, weight decay, averaged weights, fitted temperature"
"""Training of the tuned models."""


def char_ptb(model: str) -> TrainConfig:
    """A row of the table: Adam at 0.002, 128 lanes, segments of 150, the rate falling at the printed epochs.

    The authors limit the gradient of the loss summed over a segment to a norm of 1: of the mean, to 1/150. The
    checkpoint with the best validation is what counts.
    """
    row = MODELS[model]
    schedule = ",".join(f"{epoch * EPOCH}:{factor:g}" for epoch, factor in row.drops.items()) or "constant"
    return TrainConfig(
        name=f"char-ptb-{model}",
        task=CharLM(),
        model=ModelConfig(**row.model),
        optimizer=OptimizerConfig(name="adam", lr=2e-3, clip=1 / 150, schedule=schedule),
        batch_size=128,
        steps=row.epochs * EPOCH,
        precision="bf16-mixed",
        log_every=EPOCH,
        eval_every=(5 if row.epochs > 100 else 2) * EPOCH,  # each that improves writes a checkpoint of over 100 MB
        checkpoint_every=10 * EPOCH,
        paper=_paper(row.bpc),
        about=row.about,
    )


def char_ptb_cosine() -> TrainConfig:
    """FS-RUM-2 with a learning rate that falls as a cosine: as many epochs as the paper, a better schedule."""
    config = char_ptb("fs-rum-2")
    return replace(
        config,
        name="char-ptb-fs-rum-2-cosine",
        optimizer=replace(config.optimizer, schedule="cosine"),
        about="Fast-Slow RUM with a cosine schedule",
    )


def char_ptb_tuned(model: str) -> TrainConfig:
    """A row of the table as well as it can be trained in minutes, in one setting for all.

    The rate falls as a cosine, matrices decay, the weights are averaged, and the temperature of the softmax is fitted
    to the validation part. The two layers of RUM have the dropout that the paper prints.
    """
    config = char_ptb(model)
    choice = replace(config.model, calibrated=True)
    if model == "rum-2x1500":
        choice = replace(choice, input_dropout=0.35, output_dropout=0.35, options={**choice.options, "dropout": 0.35})
    return replace(
        config,
        name=f"char-ptb-{model}-tuned",
        model=choice,
        optimizer=replace(config.optimizer, schedule="cosine", weight_decay=0.05),
        steps=(240 if config.model.layer == "fs" else 100) * EPOCH,
        average=0.999,
        about=f"{config.about}: {HOW}",
    )


def char_ptb_tanh(model: str) -> TrainConfig:
    """A RUM of the table, tuned, with the library's options but for eta: about a third of sqrt(H), in a slow cell less.

    Behind a layer norm the units of a candidate are about one in size, those of a state with ``eta=1`` one in sqrt(H):
    their mix is nearly all candidate, and a large state remembers little. With sqrt(H) it learns as fast, but validated
    worse in trials of 512 units, where a quarter to a half of it was best, and of a slow cell, where 1 to 3 was.
    """
    config = char_ptb_tuned(model)
    own = {"slow": "rum-tanh", "eta": 4.0} if config.model.layer == "fs" else {**TANH_OPTIONS, "eta": 12.0}
    options = {**config.model.options, **own}
    return replace(
        config,
        name=f"char-ptb-{model}-tanh",
        model=replace(config.model, options=options),
        about=f"{TANH[model]}, with tanh and states of norm {options['eta']:g}: {HOW}",
    )


def char_ptb_awd() -> TrainConfig:
    """Three layers of RUM with AWD-LSTM's regularisation (Merity et al., 2018): DropConnect and locked dropout.

    The options of RUM are those of ``char_ptb_tanh``.
    """
    config = char_ptb("rum-2000")
    model = ModelConfig(
        layer="rum",
        hidden_size=1000,
        num_layers=3,
        embedding_size=200,
        input_dropout=0.1,
        output_dropout=0.1,
        locked_dropout=True,
        weight_drop=0.5,
        options={**TANH_OPTIONS, "eta": 12.0, "dropout": 0.25, "layer_norm": True, "ln_order": "authors"},
    )
    return replace(
        config,
        name="char-ptb-rum-awd",
        model=model,
        optimizer=replace(
            config.optimizer, clip=0.25, weight_decay=1.2e-6, schedule=f"{300 * EPOCH}:0.1,{400 * EPOCH}:0.01"
        ),
        steps=500 * EPOCH,
        eval_every=5 * EPOCH,
        paper=None,
        about="three layers of RUM, 1000 units each, regularised as AWD-LSTM",
    )


def char_ptb_slim() -> TrainConfig:
    """FS-RUM-2 with tanh and a slow cell about as small as FS-LSTM-2's, without noise in what it rotates.

    FS-LSTM-2 is ahead of FS-RUM-2, whose large slow cell overfits; larger fast cells overfit as well, and more dropout
    did not help. Noise in the slow cell did harm: see ``slow_dropout`` of ``fast_slow``. While a rate falls, a model
    that has seen its text a hundred times learns it by heart and gains little: here the rate stays as it is, and the
    average over the last ninth of the steps takes the place of its fall. The sizes are multiples of 64, so that nothing
    is padded.

    Other cells in this recipe are options of ``fast_slow``, and 60 epochs tell which is worth a full run:
    ``--steps 15900 --model.state_dropout 0.1``, for example, or with ``--model.slow rotational_lstm``, which needs
    ``--model.eta none --model.ln_order before``.
    """
    config = char_ptb_constant("fs-rum-2")
    options = {**config.model.options, "slow_size": 448, "eta": 3.0}
    return replace(
        config,
        name="char-ptb-fs-rum-2-slim",
        model=replace(config.model, hidden_size=704, options=options),
        about="Fast-Slow RUM with tanh: two fast LSTMs of 704, slow RUM of 448 without dropout and zoneout; "
        "constant rate, averaged weights, fitted temperature",
    )


def char_ptb_constant(model: str) -> TrainConfig:
    """A Fast-Slow model in the recipe of ``char_ptb_slim``, so that all of them compare at equal settings."""
    rum = model == "fs-rum-2"
    config = char_ptb_tanh(model) if rum else char_ptb_tuned(model)
    quiet = {"slow_dropout": 0.0, "slow_zoneout": 0.0} if rum else {}
    return replace(
        config,
        name=f"char-ptb-{model}-constant",
        model=replace(config.model, options={**config.model.options, "cell_dropout": 0.15, **quiet}),
        optimizer=replace(config.optimizer, lr=4e-3, schedule="constant"),
        steps=230 * EPOCH,
        average=0.9998,
        paper=None,
        about=f"{MODELS[model].about}, in the recipe of char-ptb-fs-rum-2-slim",
    )


def char_rum() -> TrainConfig:
    """A RUM that a laptop trains in minutes, on Penn Treebank or, with ``--data``, on a text of one's own.

    Its options are those of ``char_ptb_tanh``, with eta at a similar share of sqrt(H).
    """
    return TrainConfig(
        name="char-rum",
        task=CharLM(lanes=32, segment=100, validation_lanes=32, shown=200),
        model=ModelConfig(
            layer="rum",
            hidden_size=256,
            embedding_size=64,
            options={**TANH_OPTIONS, "eta": 7.0, "layer_norm": True, "ln_order": "authors"},
        ),
        optimizer=OptimizerConfig(name="adam", lr=2e-3, clip=0.05, warmup=50, schedule="cosine"),
        batch_size=32,
        steps=3000,
        log_every=50,
        eval_every=250,
        checkpoint_every=500,
        about="a small RUM on a text of your own: --data mybook.txt",
    )


HM_EPOCH = 797  # the same of 64 lanes in segments of 100


@dataclass(frozen=True, kw_only=True)
class Approximate(Published):
    """A row whose published training cannot be repeated in full: model and rates as far as they are known."""

    lanes: int = 128
    segment: int = 100
    lr: float = 1e-3
    schedule: str = "constant"
    clip: float = 1.0


OTHERS: dict[str, Approximate] = {
    "hyper-lstm": Approximate(
        about="two layers of HyperLSTM, 1000 units each",
        model={
            "layer": "hyper_lstm",
            "hidden_size": 1000,
            "num_layers": 2,
            "input_dropout": 0.2,
            "output_dropout": 0.2,
            "options": {"embedding_size": 16, "recurrent_dropout": 0.2, "dropout": 0.2},
        },
        bpc=1.219,
    ),
    "nas": Approximate(
        about="two layers of NASCell, 800 units each",
        model={
            "layer": "nas",
            "hidden_size": 800,
            "num_layers": 2,
            "embedding_size": 128,
            "input_dropout": 0.5,
            "output_dropout": 0.5,
            "locked_dropout": True,
            "options": {"state_dropout": 0.2, "dropout": 0.5},
        },
        bpc=1.214,
    ),
    "hm-lstm": Approximate(
        about="hierarchical multiscale LSTM of three levels, 512 units each, slope annealing",
        model={
            "layer": "hm_lstm",
            "hidden_size": 512,
            "embedding_size": 128,
            "options": {"slope_per_step": 0.04 / HM_EPOCH},
        },
        bpc=1.24,
        lanes=64,
        lr=2e-3,
        schedule="plateau/0.02/1",
    ),
    "rhn": Approximate(
        about="Recurrent Highway Network of depth 10, 830 units",
        model={
            "layer": "rhn",
            "hidden_size": 830,
            "output_dropout": 0.4,
            "locked_dropout": True,
            "options": {"input_dropout": 0.4, "state_dropout": 0.1},
        },
        segment=150,
        clip=1 / 150,
    ),
}

SHORT = 20
"""Epochs of a run of ``OTHERS``: enough to see that the model learns, too few for its published number."""


def char_ptb_other(model: str) -> TrainConfig:
    """A baseline model of the table for ``SHORT`` epochs, with Adam, in float32.

    HM-LSTM's rate falls when validation stops improving, as its authors' does: at a constant one it diverged.
    """
    row = OTHERS[model]
    task = CharLM(lanes=row.lanes, segment=row.segment)
    return TrainConfig(
        name=f"char-ptb-{model}",
        task=task,
        model=ModelConfig(**row.model),
        optimizer=OptimizerConfig(name="adam", lr=row.lr, schedule=row.schedule, clip=row.clip),
        batch_size=row.lanes,
        steps=SHORT * task.segments,
        log_every=task.segments,
        eval_every=2 * task.segments,
        checkpoint_every=10 * task.segments,
        paper=_paper(row.bpc),
        about=f"{row.about}; {SHORT} epochs",
    )


def _paper(bpc: float | None) -> Paper | None:
    return None if bpc is None else Paper(text=f"{bpc:g} BPC", where=TABLE, value=bpc)
