"""From a description and a task to a model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn

from torchrum.lab.models.char_lm import CharModel
from torchrum.lab.models.memn2n import MemN2N
from torchrum.lab.models.one_hot import AnsweringModel, TaggingModel
from torchrum.lab.models.story import BothWays, StoryReader
from torchrum.layers.registry import LAYERS, build_layer
from torchrum.ops._checks import check_choice, check_positive_int


class LayerChoice(Protocol):
    """What is asked of a model's description; ``ModelConfig`` is one."""

    @property
    def layer(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def embedding_size(self) -> int | None: ...
    @property
    def original_embedding(self) -> bool: ...
    @property
    def embedding_std(self) -> float | None: ...
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
    @property
    def calibrated(self) -> bool: ...


TEXT_ONLY = (
    "embedding_size",
    "input_dropout",
    "output_dropout",
    "locked_dropout",
    "weight_drop",
    "tied",
    "calibrated",
)
"""Fields of a description that only models of text have."""
STORY_TOO = ("embedding_size", "input_dropout", "output_dropout")
"""Those of them that a reader of stories has as well."""
STORY_ONLY = ("original_embedding", "embedding_std")
"""Those that only a reader of stories has."""
MODELS: dict[str, Callable[..., nn.Module]] = {"memn2n": MemN2N}
"""Models that are no recurrent layer, by the name that stands in the layer's place."""
TORCH_LAYERS = ("lstm", "gru")  # torch's own layers, which take no lengths


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


@runtime_checkable
class StoryProblem(Protocol):
    """What is asked of a task of stories and questions, beside the rest."""

    @property
    def input_size(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def sentence_size(self) -> int | None: ...
    @property
    def ends_with_question(self) -> bool: ...
    @property
    def memory_size(self) -> int: ...


def build_model(config: LayerChoice, task: Problem) -> nn.Module:
    """Build the model of a task: the layer that ``config`` names, between the task's symbols and its answers."""
    check_choice("model", "layer", config.layer, (*LAYERS, *MODELS))
    if config.layer in MODELS:
        return _whole_model(config, task)
    if isinstance(task, StoryProblem) and config.embedding_size is not None:
        return _story_reader(config, task, config.embedding_size)
    if isinstance(task, StoryProblem) and task.sentence_size is not None:
        raise ValueError(
            "build_model: a sentence needs an embedding of its words; set model.embedding_size, for example to 64."
        )
    if config.options.get("bidirectional"):
        raise ValueError(
            "build_model: model.bidirectional=True, but only readers of stories (babi with model.embedding_size) read "
            "in both directions; leave it out."
        )
    _refuse(config, task, STORY_ONLY)
    further = {name: getattr(config, name) for name in TEXT_ONLY}
    size = task.input_size if config.embedding_size is None else config.embedding_size
    layer = build_layer(
        config.layer,
        size * config.window,
        config.hidden_size,
        config.num_layers,
        batch_first=not task.carries_state,
        **config.options,
    )
    if task.carries_state:
        _refuse_window(config, task)
        return CharModel(layer, task.input_size, **further)
    _refuse(config, task, TEXT_ONLY)
    kind = {"steps": TaggingModel, "last": AnsweringModel}[task.answers]
    return kind(layer, task.input_size, task.num_classes, config.window)


def _refuse(config: LayerChoice, task: object, names: Iterable[str]) -> None:
    for name in names:
        if value := getattr(config, name):
            owner = "readers of stories" if name in STORY_ONLY else "models of text"
            raise ValueError(f"model.{name}={value} is for {owner}; {type(task).__name__} has none, leave it out.")


def _refuse_window(config: LayerChoice, task: object) -> None:
    if config.window > 1:
        raise ValueError(
            f"model.window={config.window} is for models of one-hot symbols; {type(task).__name__} has none, "
            "leave it out."
        )


def _whole_model(config: LayerChoice, task: Problem) -> nn.Module:
    _refuse_window(config, task)
    if not isinstance(task, StoryProblem) or task.sentence_size is None:
        raise ValueError(
            f"build_model: {config.layer} reads stories sentence by sentence; set task.reading to sentences."
        )
    if not task.ends_with_question:
        raise ValueError(f"build_model: {config.layer} needs the question last; set task.question=last, task.blanks=0.")
    for name in (*TEXT_ONLY, *STORY_ONLY):
        if value := getattr(config, name):
            off = "false" if value is True else "none" if name in ("embedding_size", "embedding_std") else "0"
            raise ValueError(f"build_model: {config.layer} has no {name}; set model.{name} from {value} to {off}.")
    options = {"memory_size": 50, **config.options}
    check_positive_int(config.layer, memory_size=options["memory_size"])
    options["memory_size"] = min(options["memory_size"], task.memory_size)
    return MODELS[config.layer](
        task.input_size, config.hidden_size, task.sentence_size, hops=config.num_layers, **options
    )


def _story_reader(config: LayerChoice, task: StoryProblem, embedding_size: int) -> nn.Module:
    _refuse_window(config, task)
    _refuse(config, task, (name for name in TEXT_ONLY if name not in STORY_TOO))
    options = dict(config.options)
    if config.layer in TORCH_LAYERS and options.pop("bidirectional", False):
        dropout, H = options.pop("dropout", 0.0), config.hidden_size
        inputs = [embedding_size, *[2 * H] * (config.num_layers - 1)]
        pairs = [tuple(build_layer(config.layer, size, H, **options) for _ in range(2)) for size in inputs]
        layer: nn.Module = BothWays(pairs, dropout)
    else:
        layer = build_layer(config.layer, embedding_size, config.hidden_size, config.num_layers, **options)
    return StoryReader(
        layer,
        task.input_size,
        task.num_classes,
        embedding_size,
        task.sentence_size,
        config.input_dropout,
        config.output_dropout,
        config.original_embedding,
        config.embedding_std,
    )
