"""bAbI question answering: the paper's table, one model per task, and one model for all 20 tasks."""

from typing import Any

from torchrum.cells.rum import RELU_OPTIONS, TANH_OPTIONS
from torchrum.lab.tasks import Babi
from torchrum.lab.training.config import ModelConfig, OptimizerConfig, Paper, TrainConfig

TABLE = "bAbI table of the appendix"

PAPER: dict[str, tuple[float, ...]] = {
    "rum": (79.7, 39.4, 46.6, 100, 96.8, 84.7, 89.1, 74, 84, 75.7,
            90.6, 95, 91.5, 43.9, 58.8, 47.1, 60.3, 98.5, 10.2, 98),
    "lstm": (50, 20, 20, 61, 70, 48, 49, 45, 64, 44, 72, 74, 94, 27, 21, 23, 51, 52, 8, 91),
    "goru": (46, 40, 34, 63, 87, 54, 78, 75, 63, 45, 69, 70, 93, 38, 55, 44, 60, 91, 9, 98),
    "memn2n": (100, 92, 60, 97, 87, 94, 83, 90, 87, 85, 99, 99, 99, 98, 100, 99, 49, 89, 17, 100),
}  # fmt: skip
"""Test accuracy in percent on tasks 1 to 20. Those of LSTM and MemN2N are others', at 1,000 questions."""
SMALL_DATA = ("lstm", "memn2n")

EPOCHS = 20
"""Passes over the training questions in the paper's setting."""
BATCH, JOINT_BATCH = 32, 128
EPOCH, JOINT_EPOCH = 282, 1407
"""Steps per epoch: ``steps_per_epoch`` of one task and of all 20."""

# name: layer, options of the layer, one line about it
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "rum": ("rum", RELU_OPTIONS, "RUM, lam 0"),
    "rum-tanh": ("rum", TANH_OPTIONS, "RUM, lam 0, with tanh and states of a fixed norm"),
    "lstm": ("lstm", {}, "LSTM"),
    "gru": ("gru", {}, "GRU"),
    "goru": ("goru", {}, "GORU, gated and orthogonal"),
}


def _reader(
    layer: str, hidden_size: int, *, num_layers: int = 1, dropout: float = 0.0, **options: Any
) -> dict[str, Any]:
    """Arguments of ``ModelConfig`` for a reader of the joint vocabulary, with dropout wherever it has one."""
    if layer == "rum":
        options = {**RELU_OPTIONS, **options}
    if dropout and num_layers > 1:
        options["dropout"] = dropout
    return {
        "layer": layer,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "embedding_size": 128,
        "original_embedding": True,
        "input_dropout": dropout,
        "output_dropout": dropout,
        "options": options,
    }


BOTH: dict[str, Any] = {"layer": "rum", "hidden_size": 256, "bidirectional": True}
DEEP: dict[str, Any] = {**BOTH, "num_layers": 2, "dropout": 0.1}
LAM1: dict[str, Any] = {"hidden_size": 128, "lam": 1}

HARD = (17, 17, 19, 19)
"""Tasks that are learnt last, shown three times in each epoch of the deep models."""
HARD_STEPS, HARD_EPOCH = 42_000, 1680

SENTENCES: dict[str, Any] = {"reading": "sentences"}
TWICE: dict[str, Any] = {"question": "twice"}
OFTEN: dict[str, Any] = {**TWICE, "extra": HARD}

# name: arguments of the reader or of ModelConfig, arguments of Babi, one line about it
JOINT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rum": (BOTH, {}, "RUM, lam 0, both directions"),
    "rum-lam1": ({**BOTH, **LAM1}, {}, "RUM, lam 1, both directions"),
    "rum-oneway": ({"layer": "rum", "hidden_size": 512}, {}, "RUM, lam 0, one direction"),
    "rum-sentences": (BOTH, SENTENCES, "RUM, lam 0, both directions, a sentence per step"),
    "rum-sentences-deep": (DEEP, SENTENCES, "RUM, lam 0, two layers, both directions, by sentence"),
    "rum-lam1-sentences": ({**BOTH, **LAM1}, SENTENCES, "RUM, lam 1, both directions, a sentence per step"),
    "rum-deep": (DEEP, OFTEN, "RUM, lam 0, two layers, both directions, question first and last"),
    "rum-lam1-deep": ({**DEEP, **LAM1}, TWICE, "RUM, lam 1, two layers, both directions, question first and last"),
    "rum-aug16": (BOTH, {"augment16": True}, "as babi-joint-rum, task 16 augmented in training"),
    "rum-deep-aug16": (DEEP, {**OFTEN, "augment16": True}, "as babi-joint-rum-deep, task 16 augmented"),
    "gru-deep": ({**DEEP, "layer": "gru"}, OFTEN, "GRU in the setting of babi-joint-rum-deep"),
    "lstm-deep": ({**DEEP, "layer": "lstm"}, OFTEN, "LSTM in the setting of babi-joint-rum-deep"),
    "rum-gated-deep": ({**DEEP, "layer": "rum-gated"}, OFTEN, "gated RUM in the setting of babi-joint-rum-deep"),
    "lstm": ({"layer": "lstm", "hidden_size": 512}, {}, "LSTM"),
    "gru": ({"layer": "gru", "hidden_size": 512}, {}, "GRU"),
    "memn2n": (
        {"layer": "memn2n", "num_layers": 3, "options": {"linear_steps": 4 * JOINT_EPOCH, "relu": True}},
        SENTENCES,
        "MemN2N, with attention",
    ),
    "memn2n-deep": (
        {"layer": "memn2n", "num_layers": 3, "options": {"linear_steps": 4 * HARD_EPOCH, "relu": True}},
        {**SENTENCES, "extra": HARD},
        "MemN2N, with attention, with the examples and steps of babi-joint-rum-deep",
    ),
}
"""Every model of all 20 tasks that has a recipe."""


def babi(model: str, task: int) -> TrainConfig:
    """The run of one model on one task, in the paper's setting, the same for every model.

    256 units, an embedding of 64, Adam with 0.001, batches of 32 and 20 epochs, no regularisation. Unlike the paper's
    code, training questions are shuffled, the embedding starts with a deviation of 2, the answer is read at the last
    word, the weights are averaged over the last hundred steps or so, and the checkpoint that was best on validation
    counts, of equal ones the earliest.
    """
    layer, options, about = MODELS[model]
    return TrainConfig(
        name=f"babi-{model}-qa{task}",
        task=Babi(task=task),
        model=ModelConfig(layer=layer, hidden_size=256, embedding_size=64, embedding_std=2.0, options=options),
        optimizer=OptimizerConfig(name="adam", lr=1e-3),
        average=0.99,
        batch_size=BATCH,
        steps=EPOCHS * EPOCH,
        log_every=EPOCH // 3,
        eval_every=EPOCH,
        checkpoint_every=EPOCHS * EPOCH,
        paper=_paper(model, task),
        about=f"bAbI task {task}: {about}",
    )


def babi_memn2n(task: int) -> TrainConfig:
    """MemN2N on one task: 3 hops, width 100 and ReLU, position and temporal encoding, linear start, random noise.

    The authors train with plain SGD for 100 epochs after 20 of linear start; here Adam falls to zero over 100, and the
    linear start is the first 10.
    """
    return TrainConfig(
        name=f"babi-memn2n-qa{task}",
        task=Babi(task=task, reading="sentences"),
        model=ModelConfig(
            layer="memn2n", hidden_size=100, num_layers=3, options={"linear_steps": 10 * EPOCH, "relu": True}
        ),
        optimizer=OptimizerConfig(name="adam", lr=5e-3, clip=1.0, schedule="cosine"),
        batch_size=BATCH,
        steps=100 * EPOCH,
        log_every=EPOCH,
        eval_every=2 * EPOCH,
        checkpoint_every=100 * EPOCH,
        paper=_paper("memn2n", task),
        about=f"bAbI task {task}: MemN2N, with attention",
    )


def babi_joint(model: str) -> TrainConfig:
    """One model for all 20 tasks: an embedding of 128, batches of 128, Adam falling to zero over 40 epochs.

    Those that see the hard tasks more often are given 25 of their longer epochs, and 16-bit matmuls if they are
    recurrent. MemN2N sums scores over all sentences before it has a softmax, which needs float32.
    """
    settings, of_task, about = JOINT[model]
    task = Babi(**of_task)
    steps = HARD_STEPS if task.extra else 40 * JOINT_EPOCH
    return TrainConfig(
        name=f"babi-joint-{model}",
        task=task,
        model=ModelConfig(**(settings if settings["layer"] == "memn2n" else _reader(**settings))),
        optimizer=OptimizerConfig(name="adam", lr=1e-3, clip=1.0, warmup=500, schedule="cosine"),
        batch_size=JOINT_BATCH,
        steps=steps,
        log_every=JOINT_EPOCH // 3,
        eval_every=JOINT_EPOCH,
        checkpoint_every=steps,
        precision="bf16-mixed" if task.extra and settings["layer"] != "memn2n" else "32-true",
        about=f"all bAbI tasks: {about}",
    )


def _paper(model: str, task: int) -> Paper | None:
    if model not in PAPER:
        return None
    accuracy = PAPER[model][task - 1]
    text = f"{accuracy:g}%" + (" (1k)" if model in SMALL_DATA else "")
    return Paper(text=text, where=TABLE, value=accuracy / 100)
