"""The run folder: its files, how they are read back, and the lock that gives it to one process.

    config.json         the TrainConfig, written before the first step
    environment.json    versions, commit and hardware
    metrics.jsonl       one JSON object per line, appended as the run goes
    checkpoints/        see checkpoint.py
    result.json         the last word: why it stopped, final and best scores, seconds
    curve.png           loss and metric over the steps

A line of metrics.jsonl has ``kind`` ("train": means since the last such line; "validation": the fixed set), ``step``,
``loss``, the task's metrics, and ``seconds`` of training so far; "train" lines also have ``lr``. Where
the model has a RUM, a line of kind "weights" follows each "validation": how far the diagonals of its recurrent matrices
stand out.
"""

import errno
import hashlib
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torchrum.lab.training.config import TrainConfig, first_of, from_json, run_differences
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.files import parse_json, read_bytes, read_json, write_atomic
from torchrum.lab.training.typed_data import Reader


@dataclass
class Progress:
    """What the loop itself remembers; all of it is in the checkpoint."""

    step: int = 0
    """Steps done."""
    since_log: int = 0
    """Steps in the sums that are not logged yet."""
    best: float | None = None
    """Best value of the task's metric on the validation set."""
    best_step: int = 0
    """Where it was reached."""
    reached: int = 0
    """Validations in a row that reached stop_at."""
    waited: int = 0
    """Validations since the best one, or since the rate last fell on a plateau."""
    drops: int = 0
    """How often it fell."""
    seconds: float = 0.0
    """Time spent in training, over all resumptions."""

    def wait(self, improved: bool, patience: int) -> None:
        """Count a validation of a schedule that falls on a plateau."""
        self.waited = 0 if improved else self.waited + 1
        if self.waited >= patience:
            self.waited, self.drops = 0, self.drops + 1


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    """Where everything about it is written."""
    stopped: str
    """Why: "finished", "goal" (stop_at was reached), the name of a signal or, in a sweep, "diverged"."""
    step: int
    """Steps done."""
    scores: dict[str, float]
    """Loss and metrics of the last validation."""
    best: float | None
    """Best value of the task's metric."""
    best_step: int
    """Where it was reached."""
    seconds: float
    """Time spent in training."""

    def __post_init__(self) -> None:
        if self.stopped not in ("finished", "goal", "diverged", *signal.Signals.__members__):
            raise ValueError(f"stopped is {self.stopped!r:.60}; it must be finished, goal, diverged or a signal.")

    @property
    def exit_code(self) -> int:
        """0, or 128 plus the number of the signal, as shells expect, or 1 for a run that diverged."""
        if self.stopped.startswith("SIG"):
            return 128 + signal.Signals[self.stopped].value
        return int(self.stopped == "diverged")


CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.jsonl"
RESULT = "result.json"
NO_SCORES = frozenset(("kind", "step", "seconds", "lr"))
"""What a line of metrics.jsonl has besides scores."""
MAX_METRICS = 2**30
"""Bytes; ten million lines."""


def _read_content(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_METRICS)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error


def holds_run(folder: Path) -> bool:
    """Whether a run was started in ``folder``."""
    return any((folder / name).exists() for name in (CONFIG, METRICS, "checkpoints"))


def read_metrics(folder: Path | str, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``, of one ``kind`` or of all; a last line cut short by a crash is left out."""
    path = Path(folder) / METRICS
    lines = _read_content(path).split(b"\n")[:-1]
    records = (_record(line, f"{path}, line {number}") for number, line in enumerate(lines, 1))
    return [record for record in records if kind is None or record["kind"] == kind]


def _record(line: bytes, where: str) -> dict[str, Any]:
    """A line of ``metrics.jsonl``, checked: its kind, its step, and numbers."""
    try:
        record = parse_json(line)
    except ValueError as error:
        raise RunError(f"{where}, is damaged: {error}. Restore it from a backup.") from error
    reader = Reader(where)
    if not isinstance(record, dict):
        raise reader.wrong("it", record, "an object")
    for name, hint in (("kind", str), ("step", int), ("seconds", float)):
        if name not in record:
            raise reader.fail(f"the field {name} is missing.")
        reader.value(hint, record[name], name)
    for name, value in record.items():
        if name != "kind" and type(value) is not float:  # the usual case costs nothing
            reader.value(float, value, name)
    if record["step"] < 0 or ("loss" not in record and record["kind"] in ("train", "validation")):
        raise reader.fail("it needs a step of at least 0 and, for training and validation, a loss.")
    return record


def shared_scores(lines: Sequence[dict[str, Any]]) -> list[str]:
    """The scores that all of some lines have, in the order of the first."""
    return [key for key in lines[0] if key not in NO_SCORES and all(key in line for line in lines)]


def last_validation(folder: Path) -> tuple[int, dict[str, float]]:
    """Step, loss and metrics of the last validation; 0 and nothing before the first."""
    lines = read_metrics(folder, "validation")
    if not lines:
        return 0, {}
    return lines[-1]["step"], {name: value for name, value in lines[-1].items() if name not in NO_SCORES}


def read_result(folder: Path) -> Result | None:
    """``result.json``, or None while the run has not ended."""
    path = folder / RESULT
    if not path.exists():
        return None
    reader = Reader(path)
    data = reader.value(dict[str, Any], read_json(path), "it")
    return reader.build(Result, {**data, "folder": folder})


@dataclass(frozen=True, kw_only=True)
class Mark:
    """How far ``metrics.jsonl`` was when a checkpoint was written."""

    bytes: int
    """Its size."""
    sha256: str
    """Its hash up to there."""


def check_metrics(folder: Path, mark: Mark, ended: bool = False) -> None:
    """Refuse metrics of which lines before ``mark`` are missing or changed or, after the end of the run, were added."""
    path = folder / METRICS
    content = _read_content(path)
    if hashlib.sha256(content[: mark.bytes]).hexdigest() != mark.sha256 or (ended and len(content) != mark.bytes):
        raise RunError(
            f"{path} is not as the run wrote it: lines are missing, changed or added. "
            "Restore it from a backup, or start a new run."
        )


class MetricsFile:
    """``metrics.jsonl`` open for appending; what was written after the checkpoint is dropped first, to be written anew.

    Args:
        folder: the run folder.
        step: steps done before.
        mark: how far the file was at the checkpoint; None for a new run, and for checkpoints from before.
    """

    def __init__(self, folder: Path, step: int = 0, mark: Mark | None = None) -> None:
        path = folder / METRICS
        kept = b""
        if path.exists():
            lines = (json.dumps(record) + "\n" for record in read_metrics(folder) if record["step"] <= step)
            kept = "".join(lines).encode() if mark is None else _read_content(path)[: mark.bytes]
            write_atomic(path, kept)
        self._hash, self._bytes = hashlib.sha256(kept), len(kept)
        self._path, self._folder = path, os.stat(folder)
        self._file: BinaryIO = open(path, "a+b" if path.exists() else "x+b")  # noqa: SIM115

    def append(self, record: dict[str, Any]) -> None:
        """Write one line and hand it to the operating system."""
        self._check_place()
        line = (json.dumps(record) + "\n").encode()
        self._file.write(line)
        self._file.flush()
        self._hash.update(line)
        self._bytes += len(line)

    def _check_place(self) -> None:
        """Write the file again if it was deleted or replaced; a RunError if the folder was, or if lines were."""
        folder, path = _stat(self._path.parent), _stat(self._path)
        if folder is None or not os.path.samestat(folder, self._folder):
            raise RunError(
                f"{self._path.parent} was moved, replaced or deleted during the run, which stops here. "
                "The moved folder has every line and checkpoint so far; resume it with --resume."
            )
        opened = os.fstat(self._file.fileno())
        if opened.st_size != self._bytes:
            raise RunError(f"{self._path} was changed by another program during the run. Restore it from a backup.")
        if path is not None and os.path.samestat(path, opened):
            return
        self._file.seek(0)
        content = self._file.read()  # a deleted file has its lines as long as it is open
        self._file.close()
        if path is not None:
            os.replace(self._path, self._path.with_name(f"{METRICS}.other"))
        write_atomic(self._path, content)
        self._file = open(self._path, "a+b")  # noqa: SIM115
        kept = "" if path is None else f"; the file in its place is now {METRICS}.other"
        warnings.warn(f"{self._path} was deleted or replaced during the run; it was restored{kept}.", stacklevel=4)

    def mark(self) -> Mark:
        """How far the file is."""
        return Mark(bytes=self._bytes, sha256=self._hash.hexdigest())

    def sync(self) -> None:
        """Put every line on the disk; a checkpoint must be neither newer than its metrics nor in another folder."""
        self._check_place()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_config(run: Path | str) -> TrainConfig:
    """The config of a run folder."""
    path = Path(run) / CONFIG
    return from_json(read_json(path), path, RunError)


if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"
"""The file in the folder that is locked; it holds the process id of the holder, and goes with it."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems without locks answer; a run there goes unprotected."""
_ATTEMPTS = 100
"""How often to make a folder whose parents other processes remove; a parent that cannot be there ends in an error."""
_BEYOND = 2**20  # Windows locks bytes, and nobody can read them: one that is not there leaves the process id readable

_held: set[int] = set()


def _close_in_child() -> None:
    for handle in _held:
        os.close(handle)  # the lock stays with the parent, and does not outlive it in a forked child
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class FolderLock:
    """The right to write into a folder, until ``release`` or the end of the process.

    Args:
        folder: what to lock; it is made if it is not there, with its parents, and what was made goes when the lock is
            released, if nothing was written there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / LOCK
        self._made: list[Path] = []  # the innermost last
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Take the lock; False if another process has it."""
        try:
            handle = self._take()
        except OSError:
            self._remove_made()
            raise
        if handle is None:
            return False
        self._handle = handle
        _held.add(handle)
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        return True

    def _take(self) -> int | None:
        """A handle of the locked file, or None if another process has it."""
        while True:
            self._make_folder()
            try:
                handle = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            except FileNotFoundError:  # its last holder has just removed the folder
                continue
            if not _lock(handle):
                os.close(handle)
                return None
            if self._is_there(handle):
                return handle
            os.close(handle)  # its last holder has removed the file; the lock is worth nothing

    def _make_folder(self) -> None:
        """Make the folder and its parents where they are missing, and note which were made here."""
        for attempt in range(_ATTEMPTS):
            missing = [place for place in (self.folder, *self.folder.parents) if not place.exists()]
            try:
                for place in reversed(missing):
                    place.mkdir()
                    self._made.append(place)
                return
            except FileExistsError:
                if not place.is_dir():  # a link to nowhere; a folder that another process has just made will do
                    raise
            except FileNotFoundError:  # another process has just removed a parent that it had made
                if attempt == _ATTEMPTS - 1:
                    raise

    def _is_there(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the lock up, and remove its file and the folders that were made for it and are empty."""
        if self._handle is None:
            return
        with suppress(OSError):  # the disk is gone: the kernel gives up the lock in any case
            if self._is_there(self._handle):  # the folder may have been replaced by that of another run
                self._path.unlink()
        self._remove_made()
        _held.discard(self._handle)
        os.close(self._handle)
        self._handle = None

    def _remove_made(self) -> None:
        with suppress(OSError):  # not empty
            while self._made:
                self._made.pop().rmdir()

    def in_use(self) -> RunError:
        """The error for a folder that another process has; it says which one, if that can be told."""
        try:
            with open(self._path, "rb") as file:
                text = file.read(20).decode("ascii", "replace").strip()
        except OSError:
            text = ""
        holder = f"process {text}" if re.fullmatch(r"\d+", text) else "another process"
        return RunError(f"{self.folder} is in use by {holder}; wait for it to end, or choose another --out.")

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


def _lock(handle: int) -> bool:
    try:
        if sys.platform == "win32":
            os.lseek(handle, _BEYOND, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            os.lseek(handle, 0, os.SEEK_SET)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True


def holds_files(folder: Path) -> bool:
    """Whether there is anything in a folder besides a lock."""
    return folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir()))


def lock_folder(folder: Path) -> FolderLock:
    """Lock a folder, whatever is in it; a RunError names the process that has it."""
    lock = FolderLock(folder)
    if not lock.acquire():
        raise lock.in_use()
    return lock


def lock_free_folder(folder: Path) -> FolderLock:
    """Lock ``folder`` or, if it is in use or not empty, the first of ``folder-2``, ``folder-3``, ... that is free."""
    count, candidate = 1, folder
    while True:
        lock = FolderLock(candidate)
        if not holds_files(candidate) and lock.acquire():
            if not holds_files(candidate):  # another process may have come and gone
                return lock
            lock.release()
        count += 1
        candidate = folder.with_name(f"{folder.name}-{count}")


def claim_run(folder: Path, config: TrainConfig, resume: bool, rename: bool) -> FolderLock:
    """Lock the folder of a run: a new one, or with ``resume`` one that holds the run of ``config``.

    Args:
        folder: where the run is to be.
        config: what is to be trained there.
        resume: whether a run is there.
        rename: whether a new run takes the next free name, as ``folder-2``, where ``folder`` is taken.
    """
    if resume:
        _check_same(folder, config)  # before the lock is made: a folder that holds no run stays as it is
        lock = lock_folder(folder)
    elif rename:
        lock = lock_free_folder(folder)
    else:
        _check_new(folder)
        lock = lock_folder(folder)
    try:  # once more: another process may have come and gone before the lock was taken
        if resume:
            _check_same(folder, config)
        else:
            _check_new(lock.folder)
    except Exception:
        lock.release()
        raise
    return lock


def _check_new(folder: Path) -> None:
    if holds_run(folder):
        raise RunError(
            f"{folder} holds a run already; resume it with fit(folder, resume=True) or "
            f"torchrum train --resume {folder}, or choose another folder."
        )


def _check_same(folder: Path, config: TrainConfig) -> None:
    changed = run_differences(read_config(folder), config)
    if changed:
        raise ConfigError(f"a resumed run cannot change {first_of(changed)}. Start a new run for that.")
