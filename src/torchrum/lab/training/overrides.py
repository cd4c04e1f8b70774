"""Change fields of a config by text, with the types that the dataclasses declare."""

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

from torchrum.lab.training.config import ModelConfig, TrainConfig, field_names, flat, to_json, without
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.files import convert, guess
from torchrum.ops._checks import nearest

ALIKE = 0.5
"""Similarity from which the name of a field is proposed for a misspelt one."""
T = TypeVar("T")
Changes = list[tuple[list[str], str]]  # each: the path of a field, and the text


def dotted_names(owner: Any, prefix: str = "") -> list[str]:
    """List the fields that text can set; fields of inner dataclasses have dotted names."""
    names = []
    for name in field_names(owner):
        value = getattr(owner, name)
        names += dotted_names(value, f"{prefix}{name}.") if is_dataclass(value) else [prefix + name]
    return names


def unknown_name(kind: str, name: str, known: Iterable[str], listing: str = "") -> ConfigError:
    """Build the unknown-name error, with the nearest known name or a list of all.

    Args:
        kind, name: kind of name, and the name that was given.
        known: existing names, dotted for groups.
        listing: where to find all names, if they do not fit on a line.
    """
    known = sorted(known)
    group, _, last = name.lower().rpartition(".")  # all names are in small letters
    groups = {other.rpartition(".")[0] for other in known}
    near = next((other for other in known if other.rpartition(".")[2] == last), None)
    if near is None and group in groups:  # a shared group would make any two names look alike
        beside = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == group}
        near = beside.get(nearest(last, beside, ALIKE) or "")
    elif near is None:
        near = nearest(name.lower(), known, ALIKE)
    advice = f"did you mean {near!r}?" if near else listing or f"there are: {', '.join(known) or 'none'}."
    return ConfigError(f"no {kind} {name!r}; {advice}")


def override(config: TrainConfig, assignments: Iterable[str]) -> TrainConfig:
    """Change fields by text: ``override(config, ["steps=1000", "task.delay=200", "model.lam=1"])``.

    All fields change at once, so fields that depend on each other can be given in any order. If a field is assigned
    twice, the last assignment counts. An unknown field of the model is an option of the layer; choosing another layer
    drops the options of the previous one.
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"override: config is {config!r:.60}, but it must be a TrainConfig; load_recipe makes one.")
    if isinstance(assignments, str):
        raise ConfigError(f"override: assignments is {assignments!r}; pass a list, such as ['steps=1000'].")
    return assign(config, assignments)


def assign(owner: T, assignments: Iterable[str], prefix: str = "") -> T:
    """Change the fields of any dataclass by text; ``prefix`` goes before their names in errors."""
    changes: Changes = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{assignment!r} is not an assignment; write it as field=value.")
        changes.append((key.strip().split("."), text.strip()))
    return _assign(owner, changes, prefix)


def _assign(owner: T, changes: Changes, prefix: str) -> T:
    """Change a dataclass; ``prefix`` is its own name in keys, such as ``model.``."""
    values: dict[str, Any] = {}
    inner: dict[str, Changes] = {}
    options: dict[str, str] = {}
    for path, text in changes:
        name, rest, key = path[0], path[1:], prefix + ".".join(path)
        if isinstance(owner, ModelConfig) and (name == "options" or (name not in field_names(owner) and not rest)):
            options[".".join(rest or path)] = text
        elif name not in field_names(owner):
            raise unknown_name("field", key, dotted_names(owner, prefix))
        elif rest:
            inner.setdefault(name, []).append((rest, text))
        elif is_dataclass(current := getattr(owner, name)):
            names = ", ".join(f"{key}.{known}" for known in field_names(current))
            raise ConfigError(f"{key!r} is a group; set one of its fields: {names}.")
        else:
            values[name] = convert(key, text, typing.get_type_hints(type(owner))[name])
    for name, parts in inner.items():
        current = getattr(owner, name)
        if not is_dataclass(current):
            key = f"{prefix}{name}.{'.'.join(parts[0][0])}"
            raise ConfigError(f"{key!r} cannot be set: {name} is {current!r} and has no fields.")
        values[name] = _assign(current, parts, f"{prefix}{name}.")
    if isinstance(owner, ModelConfig) and values.get("layer", owner.layer) != owner.layer:
        values["options"] = {}  # those of the other layer
    try:
        changed = replace(owner, **values)  # type: ignore[type-var]
    except ValueError as error:  # a task refuses a value
        raise ConfigError(str(error)) from error
    if isinstance(changed, ModelConfig) and options:
        changed = replace(changed, options=_read_options(changed, options, prefix))
    return changed


def _read_options(model: ModelConfig, changes: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """Apply changes to the options of the layer, which the same call may have chosen."""
    values, known = dict(model.options), layer_options(model.layer)
    for name, text in changes.items():
        key, found = prefix + name, guess(text)
        if name == "options":
            raise ConfigError(f"{key!r} is a group; set an option of the layer by its name, such as model.lam.")
        if known is not None and name not in known:
            raise unknown_name("field", key, [prefix + option for option in (*known, *field_names(model))])
        hint = None if known is None else known[name]
        if hint in (bool, int, float):  # any text would count as true
            value = convert(key, text, hint)
            # a whole number stays one, as recorded runs have it
            found = found if hint is float and found == value else value
        values[name] = found
    return values


def layer_options(layer: str) -> dict[str, Any] | None:
    """Names and types of the options of a registered layer; None if they are unknown."""
    from torchrum.lab.models import MODELS
    from torchrum.layers.registry import LAYERS

    known: dict[str, Callable[..., Any]] = {**LAYERS, **MODELS}
    if layer not in known:
        raise unknown_name("layer", layer, known)
    parameters = inspect.signature(known[layer]).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    fixed = {"self", "input_size", "hidden_size", "num_layers", "batch_first", "device", "dtype"}
    fixed |= {"num_inputs", "sentence_size", "hops"}  # what a whole model is given by its task, or by num_layers
    return {name: parameter.annotation for name, parameter in parameters.items() if name not in fixed}


def declared_type(config: TrainConfig, key: str) -> Any:
    """Type of a field or of an option of the layer, the first of a union; None if unknown."""
    owner, path = config, key.split(".")
    while len(path) > 1 and is_dataclass(owner) and path[0] in field_names(owner):
        owner = getattr(owner, path.pop(0))
    if is_dataclass(owner) and path[0] in field_names(owner):
        hint = typing.get_type_hints(type(owner))[path[0]]
    else:
        hint = (layer_options(config.model.layer) or {}).get(path[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(inner for inner in typing.get_args(hint) if inner is not type(None))
    return hint


NOT_COMPARED = frozenset(
    ("name", "seed", "paper", "about", "device", "devices", "nodes", "logger", "log_every", "checkpoint_every")
)
"""Fields that do not change the numbers of a run, or that identify it."""


def assignments(old: TrainConfig, new: TrainConfig) -> list[str]:
    """List the assignments that turn ``old`` into ``new``, leaving out fields that change no number."""
    if old.model.layer != new.model.layer:  # then override drops the options of the layer before
        old = replace(old, model=replace(old.model, options={}))
    before, now = (flat(without(NOT_COMPARED, to_json(config), new.task)) for config in (old, new))
    changed = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    # an option is set by its own name, unless one has the name of a field beside it
    clash = (old.model.options.keys() | new.model.options.keys()) & {*field_names(new.model)}
    shown = "model.options." if clash else "model."
    return [f"{name.replace('model.options.', shown, 1)}={_as_text(now.get(name))}" for name in changed]


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_as_text, value)) if isinstance(value, list) else str(value)
