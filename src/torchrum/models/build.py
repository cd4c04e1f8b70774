"""From a description and a task to a model."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from torchrum.layers.registry import build_layer
from torchrum.models.answering import AnsweringModel
from torchrum.models.char_lm import CharModel
from torchrum.models.tagging import TaggingModel


class LayerChoice(Protocol):
    """What is asked of a model's description; ``ModelConfig`` is one."""

    @property
    def layer(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def embedding_size(self) -> int | None: ...
    @property
    def input_dropout(self) -> float: ...
    @property
    def output_dropout(self) -> float: ...
    @property
    def locked_dropout(self) -> bool: ...
    @property
    def weight_drop(self) -> float: ...
    @property
    def tied(self) -> bool: ...


TEXT_ONLY = ("embedding_size", "input_dropout", "output_dropout", "locked_dropout", "weight_drop", "tied")
"""Fields of a description that only models of text have."""


class Problem(Protocol):
    """What is asked of a task; every ``Task`` is one."""

    @property
    def answers(self) -> str: ...
    @property
    def input_size(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def carries_state(self) -> bool: ...


def build_model(config: LayerChoice, task: Problem) -> nn.Module:
    """Build the model of a task: the layer that ``config`` names, between the task's symbols and its answers."""
    further = {name: getattr(config, name) for name in TEXT_ONLY}
    size = task.input_size if config.embedding_size is None else config.embedding_size
    layer = build_layer(
        config.layer,
        size,
        config.hidden_size,
        config.num_layers,
        batch_first=not task.carries_state,
        **config.options,
    )
    if task.carries_state:
        return CharModel(layer, task.input_size, **further)
    for name, value in further.items():
        if value:
            raise ValueError(
                f"model.{name}={value} is for models of text; {type(task).__name__} has none, leave it out."
            )
    kind = {"steps": TaggingModel, "last": AnsweringModel}[task.answers]
    return kind(layer, task.input_size, task.num_classes)
