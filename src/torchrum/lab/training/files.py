"""Write files atomically, and read files of a run folder safely."""

import errno
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrum.lab.training.errors import RunError

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


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Read a plain file of at most ``most`` bytes; a pipe or a device, which might never end, is refused."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise RunError(f"{path} cannot be read: it is not a plain file.")
        if most is not None and found.st_size > most:
            raise RunError(f"{path} cannot be read: it has {found.st_size:,} bytes, more than the {most:,} allowed.")
        return file.read()


def read_text(path: Path) -> str:
    """Read a plain file of UTF-8 text; any other one is a RunError."""
    try:
        return read_bytes(path, MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RunError(f"{path} cannot be read: {reason}.") from error


def read_json(path: Path) -> Any:
    """Read a JSON file of a run folder; a missing or damaged one is a RunError."""
    try:
        return parse_json(read_bytes(path, MAX_BYTES))
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
