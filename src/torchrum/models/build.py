"""From a description and a task to a model."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from torchrum.layers.registry import build_layer
from torchrum.models.answering import AnsweringModel
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


class Problem(Protocol):
    """What is asked of a task; every ``Task`` is one."""

    @property
    def answers(self) -> str: ...
    @property
    def input_size(self) -> int: ...
    @property
    def num_classes(self) -> int: ...


def build_model(config: LayerChoice, task: Problem) -> nn.Module:
    """Build the model of a task: the layer that ``config`` names, between the task's symbols and its answers."""
    layer = build_layer(
        config.layer, task.input_size, config.hidden_size, config.num_layers, batch_first=True, **config.options
    )
    kind = {"steps": TaggingModel, "last": AnsweringModel}[task.answers]
    return kind(layer, task.input_size, task.num_classes)
