"""A config as plain data and back, and what two configs have in common."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.tasks.base import Task
from torchrum.training.config import ModelConfig, OptimizerConfig, Paper, TrainConfig
from torchrum.training.errors import ConfigError
from torchrum.training.overrides import field_names, unknown_name

T = TypeVar("T")

FORMAT = 2
"""Version of the layout; in the first one the options of RUM that a config left out were the paper's."""

_LENGTH = ("steps", "log_every", "eval_every", "checkpoint_every", "stop_at", "stop_after")
_PLACE = ("device", "devices", "nodes", "graph", "compile", "logger")
CHANGEABLE = frozenset((*_LENGTH, *_PLACE, "paper", "about"))
"""Fields that a resumed run may change; any other one would make it a different run."""


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The config as plain data; ``from_json`` is its inverse."""
    return {"format": FORMAT, **_plain(config)}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        plain = {name: _plain(getattr(value, name)) for name in field_names(value)}
        return {"type": task_name(type(value)), **plain} if isinstance(value, Task) else plain
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def task_name(kind: type[Task]) -> str:
    """What a file calls a class of tasks: ``module:class``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def from_json(data: Mapping[str, Any]) -> TrainConfig:
    """Rebuild a config from ``to_json``'s data; unknown fields and foreign classes are refused."""
    try:
        parts = {name: value for name, value in upgraded(data).items() if name != "format"}
        parts["task"] = _build(_task_class(parts["task"]["type"]), {**parts["task"], "type": None})
        parts["model"] = _build(ModelConfig, parts["model"])
        parts["optimizer"] = _build(OptimizerConfig, parts["optimizer"])
        parts["paper"] = None if parts.get("paper") is None else _build(Paper, parts["paper"])
        return _build(TrainConfig, parts)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"this is not the config of a run: {error!r}") from error


def upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    """A config as plain data of any version, in the layout of today."""
    found = data.get("format", 1)
    if found > FORMAT:
        raise ConfigError(f"the config has format {found}, written by a newer torchrum; this one reads up to {FORMAT}.")
    if found == FORMAT or data["model"]["layer"] != "rum":
        return {**data, "format": FORMAT}
    options = {**PAPER_OPTIONS, **data["model"]["options"]}
    return {**data, "format": FORMAT, "model": {**data["model"], "options": options}}


def _build(cls: type[T], values: Mapping[str, Any]) -> T:
    known = field_names(cls)
    given = {name: value for name, value in values.items() if not (name == "type" and value is None)}
    for name in given:
        if name not in known:
            raise unknown_name(f"field of {cls.__name__}", name, known)
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _task_class(path: str) -> type[Task]:
    """The task of this name among those that are loaded: a file must not choose what is imported."""
    kinds = Task.__subclasses__()
    for kind in kinds:  # grows as it is walked
        kinds += kind.__subclasses__()
    found = {task_name(kind): kind for kind in kinds}
    if path not in found:
        raise ConfigError(
            f"the task {path} is not part of torchrum; name its recipe too: torchrum train MODULE:FUNCTION --resume RUN"
        )
    return found[path]


def identity(config: TrainConfig) -> dict[str, Any]:
    """The fields that make the run what it is, as plain data; configs that agree in them may share a checkpoint."""
    return _identity(to_json(config), config.task)


def _identity(plain: Mapping[str, Any], task: Task) -> dict[str, Any]:
    kept = {name: value for name, value in plain.items() if name not in CHANGEABLE and name != "name"}
    return _without_local(kept, task)


def _without_local(plain: Mapping[str, Any], task: Task) -> dict[str, Any]:
    inner = plain.get("task")
    if not isinstance(inner, Mapping):
        return dict(plain)
    return {**plain, "task": {name: value for name, value in inner.items() if name not in task.local}}


def saved_differences(saved: Mapping[str, Any], config: TrainConfig, whole: bool = False) -> list[str]:
    """Where a config differs from the plain one of a checkpoint: in ``identity`` or, with ``whole``, in all it has."""
    saved = upgraded(saved)
    if not whole:
        return differences(_identity(saved, config.task), identity(config))
    now = {name: value for name, value in to_json(config).items() if name in saved}
    return differences(_without_local(saved, config.task), _without_local(now, config.task))


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Where two plain trees differ, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old and new[key])]  # what an older version lacked is off
        return [line for key in keys for line in differences(old.get(key), new.get(key), f"{prefix}.{key}".strip("."))]
    return [] if old == new else [f"{prefix} {old!r} -> {new!r}"]
