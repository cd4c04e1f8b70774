"""A config as plain data and back, and what two configs have in common."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.lab.tasks.base import Task
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.overrides import field_names
from torchrum.lab.training.typed_data import Reader, shown

FORMAT = 4
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


def from_json(data: Any, source: object = "the config", error: type[Exception] = ConfigError) -> TrainConfig:
    """Rebuild a config from ``to_json``'s data; unknown fields, wrong types and foreign classes are refused.

    Args:
        data: what a file held.
        source: that file, for errors.
        error: what to raise.
    """
    reader = Reader(source, error)
    if not isinstance(data, Mapping):
        raise reader.wrong("it", data, "an object")
    task = reader.value(dict[str, Any], data.get("task"), "task")
    try:
        kind, parts = _task_class(task.pop("type", None)), upgraded(data)
    except ConfigError as failure:
        raise reader.fail(str(failure)) from failure
    del parts["format"]
    return reader.build(TrainConfig, {**parts, "task": reader.build(kind, task, "task")})


def upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    """A config as plain data of any version, in the layout of today."""
    found, model = data.get("format", 1), data.get("model")
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= FORMAT:
        raise ConfigError(f"the format is {shown(found)}, written by a newer torchrum; this one reads up to {FORMAT}.")
    if found < FORMAT and isinstance(model, Mapping) and model.get("layer") == "rum":
        options = model.get("options")
        if isinstance(options, Mapping):
            return {**data, "format": FORMAT, "model": {**model, "options": {**PAPER_OPTIONS, **options}}}
    return {**data, "format": FORMAT}


def _task_class(path: object) -> type[Task]:
    """The task of this name among those that are loaded: a file must not choose what is imported."""
    kinds = Task.__subclasses__()
    for kind in kinds:  # grows as it is walked
        kinds += kind.__subclasses__()
    found = {task_name(kind): kind for kind in kinds}
    if not isinstance(path, str) or path not in found:
        raise ConfigError(
            f"the task {shown(path)} is not part of torchrum; name its recipe too: torchrum train MODULE:FUNCTION "
            "--resume RUN, or --recipe MODULE:FUNCTION with eval, figure and report. Such a run cannot be "
            "recorded in the ledger."
        )
    return found[path]


def identity(config: TrainConfig) -> dict[str, Any]:
    """The fields that make the run what it is, as plain data; configs that agree in them may share a checkpoint."""
    return _identity(to_json(config), config.task)


def _identity(plain: Mapping[str, Any], task: Task) -> dict[str, Any]:
    kept = {name: value for name, value in plain.items() if name not in CHANGEABLE}
    return _without_local(kept, task)


def _without_local(plain: Mapping[str, Any], task: Task) -> dict[str, Any]:
    inner = plain.get("task")
    if not isinstance(inner, Mapping):
        return dict(plain)
    return {**plain, "task": {name: value for name, value in inner.items() if name not in task.local}}


def run_differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Where two configs differ in ``identity``, in words; nothing if they describe the same run."""
    return differences(identity(old), identity(new))


def saved_differences(saved: Mapping[str, Any], config: TrainConfig, whole: bool = False) -> list[str]:
    """Where a config differs from the plain one of a checkpoint: in ``identity`` or, with ``whole``, in all it has."""
    saved = upgraded(saved)
    if not whole:
        now = {name: value for name, value in identity(config).items() if name != "name" or name in saved}
        return differences(_identity(saved, config.task), now)
    now = {name: value for name, value in to_json(config).items() if name in saved}
    return differences(_without_local(saved, config.task), _without_local(now, config.task))


def first_of(changed: list[str]) -> str:
    """The first of ``differences`` and how many more there are: another text, for one, differs in all that it says."""
    more = len(changed) - 1
    return changed[0] + (f" and {more} more field{'s' if more > 1 else ''}" if more else "")


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Where two plain trees differ, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old and new[key])]  # what an older version lacked is off
        gone = [f"{prefix}.{key} is missing".strip(".") for key in old if key not in new]  # None, too, was said
        shared = [key for key in keys if key in new]
        return gone + [
            line for key in shared for line in differences(old.get(key), new[key], f"{prefix}.{key}".strip("."))
        ]
    return [] if old == new else [f"{prefix} {old!r} -> {new!r}"]
