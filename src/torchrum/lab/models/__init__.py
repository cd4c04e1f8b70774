"""Build the model of a task: an input encoding, a recurrent layer and a read-out, one file per shape of problem."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeGuard

from torch import nn

from torchrum.lab.models.answering import BothWays, MemN2N, OneHotModel, StoryReader
from torchrum.lab.models.char_lm import CharModel
from torchrum.layers.registry import LAYERS, build_layer
from torchrum.ops._checks import check_choice, check_positive_int

if TYPE_CHECKING:
    from torchrum.lab.tasks import Babi, Task
    from torchrum.lab.training.config import ModelConfig

__all__ = ["CharModel", "MemN2N", "OneHotModel", "StoryReader", "build_model", "count_parameters"]

OPTIONS = {
    "models of text": (
        *("embedding_size", "input_dropout", "output_dropout"),
        *("locked_dropout", "weight_drop", "tied", "calibrated"),
    ),
    "readers of stories": (
        *("embedding_size", "input_dropout", "output_dropout"),
        *("original_embedding", "embedding_std"),
    ),
    "models of one-hot symbols": ("window",),
}
"""Fields of a ModelConfig that only some models have, by the kind of model."""
MODELS: dict[str, Callable[..., nn.Module]] = {"memn2n": MemN2N}
"""Models that are not recurrent layers, by the name that replaces the layer's."""
TORCH_LAYERS = ("lstm", "gru")  # torch's own layers do not take lengths


def build_model(config: "ModelConfig", task: "Task") -> nn.Module:
    """Build the model of a task: the layer that ``config`` names, between the task's symbols and its answers."""
    check_choice("model", "layer", config.layer, (*LAYERS, *MODELS))
    if config.layer in MODELS:
        return _memory_network(config, task)
    if _tells_stories(task) and config.embedding_size is not None:
        return _story_reader(config, task, config.embedding_size)
    if _tells_stories(task) and task.sentence_size is not None:
        raise ValueError(
            "build_model: a sentence needs an embedding of its words; set model.embedding_size, for example to 64."
        )
    if config.options.get("bidirectional"):
        raise ValueError(
            "build_model: model.bidirectional=True, but only readers of stories (babi with model.embedding_size) read "
            "in both directions; leave it out."
        )
    kind = "models of text" if task.carries_state else "models of one-hot symbols"
    _refuse_others(config, type(task).__name__, kind)
    size = (task.input_size if config.embedding_size is None else config.embedding_size) * config.window
    batch_first = not task.carries_state
    layer = build_layer(
        config.layer, size, config.hidden_size, config.num_layers, batch_first=batch_first, **config.options
    )
    if task.carries_state:
        return CharModel(layer, task.input_size, **{name: getattr(config, name) for name in OPTIONS[kind]})
    return OneHotModel(layer, task.input_size, task.num_classes, task.answers, config.window)


def count_parameters(model: nn.Module) -> int:
    """Count the trainable numbers of a model."""
    return sum(part.numel() for part in model.parameters() if part.requires_grad)


def _tells_stories(task: "Task") -> "TypeGuard[Babi]":
    return hasattr(task, "sentence_size")


def _refuse_others(config: "ModelConfig", owner: str, kind: str = "") -> None:
    """Refuse options of other kinds of models than ``kind``."""
    for other, names in OPTIONS.items():
        for name in names:
            value = getattr(config, name)
            if value and (name, value) != ("window", 1) and name not in OPTIONS.get(kind, ()):
                raise ValueError(f"model.{name}={value} is for {other}; {owner} has none, leave it out.")


def _memory_network(config: "ModelConfig", task: "Task") -> nn.Module:
    if not _tells_stories(task) or task.sentence_size is None:
        raise ValueError(
            f"build_model: {config.layer} reads stories sentence by sentence; set task.reading to sentences."
        )
    if task.question != "last":
        raise ValueError(f"build_model: {config.layer} needs the question last; set task.question to last.")
    _refuse_others(config, config.layer)
    options = {"memory_size": 50, **config.options}
    check_positive_int(config.layer, memory_size=options["memory_size"])
    options["memory_size"] = min(options["memory_size"], task.memory_size)
    return MODELS[config.layer](
        task.input_size, config.hidden_size, task.sentence_size, hops=config.num_layers, **options
    )


def _story_reader(config: "ModelConfig", task: "Babi", embedding_size: int) -> nn.Module:
    kind = "readers of stories"
    _refuse_others(config, type(task).__name__, kind)
    options, H = dict(config.options), config.hidden_size
    if config.layer in TORCH_LAYERS and options.pop("bidirectional", False):
        dropout = options.pop("dropout", 0.0)
        inputs = [embedding_size, *[2 * H] * (config.num_layers - 1)]
        pairs = [tuple(build_layer(config.layer, size, H, **options) for _ in range(2)) for size in inputs]
        layer: nn.Module = BothWays(pairs, dropout)
    else:
        layer = build_layer(config.layer, embedding_size, H, config.num_layers, **options)
    chosen = {name: getattr(config, name) for name in OPTIONS[kind]}
    return StoryReader(layer, task.input_size, task.num_classes, sentence_size=task.sentence_size, **chosen)
