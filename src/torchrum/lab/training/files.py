"""Write files atomically, read files of a run folder safely, and convert their data to the types of a dataclass.

Not msgspec: whole numbers in float fields must stay whole in recorded configs, and training machines may be unable to
install packages.
"""

import errno
import functools
import json
import math
import os
import stat
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from torchrum.lab.training.errors import ConfigError, RunError

T = TypeVar("T")
UNFIT = (ValueError, TypeError, LookupError, ArithmeticError)
"""Exceptions for values of the right types that do not fit each other."""
PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
MAX_BYTES = 2**24
"""Largest JSON file that is read; the largest that is written has a hundredth of it."""


def sync_folder(folder: Path) -> None:
    """Put the names in ``folder`` on the disk: a rename is safe from a power failure only after this."""
    if os.name == "nt":  # which has no such call
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that does not exist yet, and put its content on the disk. A link of that name is not followed."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes) -> None:
    """Write a whole file or nothing: a reader, or a crash, never sees a part of it.

    A link of that name is replaced, not followed. A pipe or a device is refused, since a file would take its place.
    """
    if not path.name or (path.is_dir() and not path.is_symlink()):  # no name: the current folder
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if os.path.lexists(path) and not (path.is_symlink() or path.is_file() or path.is_dir()):
        raise RunError(f"{path} cannot be written: it is not a plain file.")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        write_synced(temporary, content)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if error.filename is not None:
            error.filename, error.filename2 = str(path), None  # the user does not know the temporary file
        raise


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode())


def read_bytes(path: Path) -> bytes:
    """Read a plain file of at most ``MAX_BYTES``; a pipe or a device, which might never end, is refused."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise RunError(f"{path} cannot be read: it is not a plain file.")
        if found.st_size > MAX_BYTES:
            size = f"{found.st_size:,} bytes, more than the {MAX_BYTES:,} allowed"
            raise RunError(f"{path} cannot be read: it has {size}.")
        return file.read()


def read_text(path: Path) -> str:
    """Read a plain file of UTF-8 text; any other one is a RunError."""
    try:
        return read_bytes(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RunError(f"{path} cannot be read: {reason}.") from error


def read_json(path: Path) -> Any:
    """Read a JSON file of a run folder; a missing or damaged one is a RunError."""
    try:
        return parse_json(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(_why_no_run(path)) from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise RunError(f"{path} cannot be read: {error}.") from error


def first_run_inside(folder: Path, config: str) -> Path | None:
    """Find a run folder below ``folder``, which may hold runs of several seeds, settings or tasks."""
    below = (path for depth in ("*", "*/*") for path in sorted(folder.glob(f"{depth}/{config}")))
    return next((path.parent for path in below), None)


def _why_no_run(path: Path) -> str:
    """Reason why the folder of ``path``, a file that every run has, is not a run folder."""
    folder = path.parent
    if not folder.is_dir():
        return f"{folder} is not a run folder: it {'is a file' if folder.exists() else 'does not exist'}."
    inside = first_run_inside(folder, path.name)
    hint = f" It contains runs; name one of them, such as {inside}." if inside else ""
    return f"{folder} is not a run folder: it has no {path.name}.{hint}"


def parse_json(content: bytes | str) -> Any:
    """Parse JSON that is not nested too deep; raise ValueError for other content."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("objects are nested too deep") from None


class Reader:
    """Build dataclasses from plain data; errors name the file and the field.

    Args:
        source: the file, for errors.
        error: what to raise.
        finite: whether numbers that are not finite are refused.
        objects: whether a mapping is converted to a dataclass, as for data from a file.
    """

    def __init__(
        self, source: object, error: type[Exception] = RunError, finite: bool = False, objects: bool = True
    ) -> None:
        self._source, self._error, self._finite, self._objects = source, error, finite, objects

    def build(self, kind: type[T], data: Any, where: str = "") -> T:
        """Build the dataclass ``kind``; only fields with a default may be missing."""
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
        """Convert ``value`` to the type ``hint``; lists become tuples where declared."""
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any or (value is None and type(None) in inner):
            return value
        if origin in (typing.Union, types.UnionType):
            return self.value(_first(inner), value, where)
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
        # a whole number is allowed for a float, and stays whole: files are written as they were read
        if not isinstance(value, (int, float) if hint is float else hint) or isinstance(value, bool) != (hint is bool):
            article = "an" if hint.__name__[0] in "AEIO" else "a"
            raise self.wrong(where, value, PLAIN.get(hint, f"{article} {hint.__name__}"))
        if isinstance(value, float) and self._finite and not math.isfinite(value):
            raise self.wrong(where, value, "a finite number")
        return value

    def _sequence(self, origin: type, inner: tuple[Any, ...], value: Any, where: str) -> Any:
        fixed = origin is tuple and inner[1:] != (...,)
        if not isinstance(value, list | tuple) or (fixed and len(value) != len(inner)):
            raise self.wrong(where, value, f"a list of {len(inner)}" if fixed else "a list")
        if not fixed and inner[0] is float and {*map(type, value)} <= {int, float}:
            return origin(value)  # curves have thousands of numbers
        kinds = inner if fixed else inner[:1] * len(value)
        pairs = zip(kinds, value, strict=True)
        return origin(self.value(kind, item, f"{where}[{place}]") for place, (kind, item) in enumerate(pairs))

    def wrong(self, where: str, value: Any, words: str) -> Exception:
        """Build the error for a value that is not ``words``."""
        return self.fail(f"{where} is {value!r:.60}, but it must be {words}.")

    def fail(self, text: str) -> Exception:
        """Build the error with this text and the file."""
        return self._error(f"{self._source}: {text}")


def check_fields(owner: str, instance: Any) -> None:
    """Refuse a dataclass that was built in Python with a value of another type than its field declares.

    Lists become tuples where declared. Call it first in ``__post_init__``, before values are compared.

    Args:
        owner: its name in an error.
        instance: the dataclass; it may be frozen.
    """
    reader, hints = Reader(owner, ConfigError, objects=False), _hints(typing.cast(Any, type(instance)))
    for item in fields(instance):
        value = reader.value(hints[item.name], getattr(instance, item.name), item.name)
        object.__setattr__(instance, item.name, value)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _first(inner: tuple[Any, ...]) -> Any:
    """The first type of a union that is not None."""
    return next(item for item in inner if item is not type(None))


def _join(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


def guess(text: str) -> Any:
    """Read a value whose type is not declared: a number, true, false, none, a JSON list, else text."""
    words = {"none": None, "null": None, "True": True, "False": False}
    try:
        return words[text] if text in words else json.loads(text)
    except ValueError:
        return text


def convert(key: str, text: str, hint: Any) -> Any:
    """Read ``text`` as the type that a field declares."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        none = type(None) in inner and text.lower() in ("none", "null", "")
        return None if none else convert(key, text, _first(inner))
    if origin is tuple:
        parts = [part for part in text.strip("()[] ").split(",") if part.strip()]
        if inner[1:] != (...,) and len(parts) != len(inner):
            raise ConfigError(f"{key} is {text!r}, but it must be {len(inner)} values with commas between them.")
        return tuple(convert(key, part.strip(), inner[0]) for part in parts)
    if hint is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ConfigError(f"{key} is {text!r}, but it must be true or false.")
        return text.lower() in ("true", "1", "yes")
    if hint in (int, float):
        try:
            number = float(text)
            if hint is int and number != int(number):
                raise ValueError
            return hint(text.replace("_", "")) if text.strip("+-").replace("_", "").isdigit() else hint(number)
        except (ValueError, OverflowError):
            raise ConfigError(f"{key} is {text!r}, but it must be {PLAIN[hint]}.") from None
    if origin is Literal and text not in inner:
        raise ConfigError(f"{key} is {text!r}, but it must be one of {', '.join(map(repr, inner))}.")
    if hint is not str and origin is not Literal:
        raise ConfigError(f"{key} cannot be set by text; set it in Python.")
    return text
