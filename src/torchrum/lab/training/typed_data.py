"""Data of a file against the types that a dataclass declares: the one place where what was read is checked."""

import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar

from torchrum.lab.training.errors import RunError

T = TypeVar("T")
UNFIT = (ValueError, TypeError, LookupError, ArithmeticError)
"""What values raise that have the right types and make no sense together."""


class Reader:
    """Builds dataclasses from plain data, and says file and field where the data are not what they must be.

    Args:
        source: the file, for errors.
        error: what to raise.
        finite: whether numbers that are not finite are refused.
        objects: whether an object with the fields of a dataclass stands for it, as in a file.
    """

    def __init__(
        self, source: object, error: type[Exception] = RunError, finite: bool = False, objects: bool = True
    ) -> None:
        self._source, self._error, self._finite, self._objects = source, error, finite, objects

    def build(self, kind: type[T], data: Any, where: str = "") -> T:
        """An instance of the dataclass ``kind``; fields without a default must be there, others may be missing."""
        if not isinstance(data, Mapping):
            raise self.wrong(where or "it", data, "an object")
        hints = _hints(typing.cast(Any, kind))
        known = {item.name: item for item in fields(kind) if item.init}  # type: ignore[arg-type]
        if unknown := sorted(str(name) for name in data.keys() - known.keys()):
            raise self.fail(f"{_join(where, unknown[0])!r:.80} is not a field of it; there are: {', '.join(known)}.")
        for name, item in known.items():
            if name not in data and item.default is MISSING and item.default_factory is MISSING:
                raise self.fail(f"the field {_join(where, name)} is missing.")
        values = {name: self.value(hints[name], value, _join(where, name)) for name, value in data.items()}
        try:
            return kind(**values)
        except UNFIT as error:  # the values do not fit each other
            raise self.fail(str(error)) from error

    def value(self, hint: Any, value: Any, where: str) -> Any:
        """``value`` as the type ``hint``; lists become tuples where those are declared."""
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return value
        if origin in (typing.Union, types.UnionType):
            if value is None and type(None) in inner:
                return None
            return self.value(next(item for item in inner if item is not type(None)), value, where)
        if origin is Literal:
            if not isinstance(value, str) or value not in inner:
                raise self.wrong(where, value, "one of " + ", ".join(map(repr, inner)))
            return value
        if origin in (list, tuple):
            return self._sequence(origin, inner, value, where)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            if not isinstance(value, Mapping) or not all(isinstance(key, inner[0]) for key in value):
                raise self.wrong(where, value, "an object" if self._objects else "a dict with text as keys")
            return {key: self.value(inner[1], item, _join(where, key)) for key, item in value.items()}
        if self._objects and is_dataclass(hint) and not isinstance(value, typing.cast(type, hint)):
            return self.build(typing.cast(type, hint), value, where)
        return self._plain(hint, value, where)

    def _sequence(self, origin: type, inner: tuple[Any, ...], value: Any, where: str) -> Any:
        fixed = origin is tuple and inner[1:] != (...,)
        if not isinstance(value, list | tuple):
            raise self.wrong(where, value, f"a list of {len(inner)}" if fixed else "a list")
        if not fixed:
            # curves have thousands of numbers: only where one is not plain they are looked at one by one
            if inner[0] is float and {*map(type, value)} <= {int, float} and all(-(2**63) < x < 2**63 for x in value):
                return origin(value)
            return origin(self.value(inner[0], item, f"{where}[{place}]") for place, item in enumerate(value))
        if len(value) != len(inner):
            raise self.wrong(where, value, f"a list of {len(inner)}")
        pairs = zip(inner, value, strict=True)
        return tuple(self.value(kind, item, f"{where}[{place}]") for place, (kind, item) in enumerate(pairs))

    def _plain(self, hint: type, value: Any, where: str) -> Any:
        plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        words = plain.get(hint, f"{'an' if hint.__name__[0] in 'AEIO' else 'a'} {hint.__name__}")
        # a whole number may stand for a float, and stays one: files are written as they were read
        if not isinstance(value, (int, float) if hint is float else hint) or (
            isinstance(value, bool) != (hint is bool)
        ):
            number = hint in (int, float) and callable(getattr(value, "item", None))  # of numpy, or a tensor
            raise self.wrong(where, value, f"{words} of Python's own; pass its .item()" if number else words)
        if isinstance(value, int) and abs(value) >= 2**63:
            raise self.wrong(where, value, f"{words} below 2**63")
        if isinstance(value, float) and self._finite and not math.isfinite(value):
            raise self.wrong(where, value, "a finite number")
        return value

    def wrong(self, where: str, value: Any, words: str) -> Exception:
        """The error for a value that is not what ``words`` say."""
        return self.fail(f"{where} is {shown(value)}, but it must be {words}.")

    def fail(self, text: str) -> Exception:
        """The error with this text and the file."""
        return self._error(f"{self._source}: {text}")


def check_fields(owner: str, instance: Any, error: type[Exception]) -> None:
    """Refuse a dataclass that was built in Python with a value of another type than its field declares.

    Lists become tuples where those are declared. To be called first in ``__post_init__``: what follows may compare.

    Args:
        owner: what to call it in an error.
        instance: the dataclass; it may be frozen.
        error: what to raise.
    """
    reader, hints = Reader(owner, error, objects=False), _hints(typing.cast(Any, type(instance)))
    for item in fields(instance):
        value = reader.value(hints[item.name], getattr(instance, item.name), item.name)
        object.__setattr__(instance, item.name, value)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def shown(value: Any) -> str:
    """A value in an error: on one line, and short."""
    if isinstance(value, int) and abs(value) > 10**60:
        return "a number of more than 60 digits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _join(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)
