"""The run folder: its files, what a run ran on, how they are read back, and the lock that gives it to one process.

    config.json         the TrainConfig, written before the first step
    environment.json    versions, commit and hardware
    metrics.jsonl       one JSON object per line, appended as the run goes
    checkpoints/        see checkpoint.py
    result.json         why the run stopped, final and best scores, seconds
    curve.png           loss and metric over the steps

A line of metrics.jsonl has ``kind`` ("train": means since the last such line; "validation": the fixed set), ``step``,
``loss``, the task's metrics, and ``seconds`` of training so far; "train" lines also have ``lr``. Where
the model has a RUM, a line of kind "weights" follows each "validation": how far the diagonals of its recurrent matrices
stand out.
"""

import functools
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from torchrum.lab.training.config import TrainConfig, differences, first_of, from_json
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.files import Reader, parse_json, read_json, write_atomic


@dataclass
class Progress:
    """State of the training loop; all of it is in the checkpoint."""

    step: int = 0
    """Steps done."""
    since_log: int = 0
    """Steps in the sums that are not logged yet."""
    best: float | None = None
    """Best value of the task's metric on the validation set."""
    best_step: int = 0
    """Step of the best value."""
    reached: int = 0
    """Validations in a row that reached stop_at."""
    waited: int = 0
    """Validations since the best one, or since the rate last fell on a plateau."""
    drops: int = 0
    """Number of times that the rate fell."""
    seconds: float = 0.0
    """Time spent in training, over all resumptions."""

    def wait(self, improved: bool, patience: int) -> None:
        """Count a validation of a schedule that falls on a plateau."""
        self.waited = 0 if improved else self.waited + 1
        if self.waited >= patience:
            self.waited, self.drops = 0, self.drops + 1


@dataclass(frozen=True)
class Result:
    """Outcome of a run."""

    folder: Path
    """The run folder."""
    stopped: str
    """Why: "finished", "goal" (stop_at was reached), the name of a signal or, in a sweep, "diverged"."""
    step: int
    """Steps done."""
    scores: dict[str, float]
    """Loss and metrics of the last validation."""
    best: float | None
    """Best value of the task's metric."""
    best_step: int
    """Step of the best value."""
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
"""Fields of a line of metrics.jsonl that are no scores."""


def _read_content(path: Path) -> bytes:
    try:
        return path.read_bytes()
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
        numbers = [value for name, value in record.items() if name != "kind"]
        least = {"kind", "step", "seconds", *(("loss",) if record["kind"] in ("train", "validation") else ())}
        if not (least <= record.keys() and type(record["step"]) is int and {*map(type, numbers)} <= {int, float}):
            raise ValueError("it needs a kind, a step, seconds and, for training and validation, a loss; all numbers")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(f"{where}, is damaged: {error}. Restore it from a backup.") from error
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
    """Length and hash of ``metrics.jsonl`` when a checkpoint was written."""

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
    """``metrics.jsonl`` open for appending; lines after the checkpoint are dropped first, and written again.

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
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115

    def append(self, record: dict[str, Any]) -> None:
        """Write one line and hand it to the operating system."""
        self._check_place()
        line = (json.dumps(record) + "\n").encode()
        self._file.write(line)
        self._file.flush()
        self._hash.update(line)
        self._bytes += len(line)

    def mark(self) -> Mark:
        """Return length and hash of the file."""
        return Mark(bytes=self._bytes, sha256=self._hash.hexdigest())

    def sync(self) -> None:
        """Put every line on the disk; a checkpoint must be neither newer than its metrics nor in another folder."""
        self._check_place()
        os.fsync(self._file.fileno())

    def _check_place(self) -> None:
        """Write the file again if it was deleted; a RunError if it or its folder was replaced."""
        folder = self._path.parent
        if not (folder.exists() and os.path.samestat(os.stat(folder), self._folder)):
            raise RunError(
                f"{folder} was moved, replaced or deleted during the run, which stops here. A moved folder has every "
                "line and checkpoint so far; resume it with --resume."
            )
        if not self._path.exists():
            self._file.seek(0)
            content = self._file.read()  # a deleted file has its lines as long as it is open
            self._file.close()
            write_atomic(self._path, content)
            self._file = open(self._path, "a+b")  # noqa: SIM115
            warnings.warn(f"{self._path} was deleted during the run; it was written again.", stacklevel=4)
        elif not os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
            raise RunError(f"{self._path} was replaced by another program during the run, which stops here.")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_config(run: Path | str) -> TrainConfig:
    """The config of a run folder."""
    path = Path(run) / CONFIG
    return from_json(read_json(path), path, RunError)


LOCK = ".lock"
"""The file in the folder that is locked; it holds the process id of the holder, and goes with it."""


class FolderLock:
    """The right to write into a folder, until ``release`` or the end of the process.

    Args:
        folder: what to lock; it is made if it is not there, with its parents, and what was made goes when the lock is
            released, if nothing was written there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / LOCK, timeout=0)
        self._made: list[Path] = []  # the innermost first

    def acquire(self) -> bool:
        """Take the lock; False if another process has it."""
        self._made = [place for place in (self.folder, *self.folder.parents) if not place.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            return False
        with suppress(OSError):  # Windows lets nobody write to it
            (self.folder / LOCK).write_text(f"{os.getpid()}\n")
        return True

    def release(self) -> None:
        """Give the lock up, and remove its file and the folders that were made for it and are empty."""
        with suppress(OSError):  # the disk is gone: the kernel gives up the lock in any case
            if (self.folder / LOCK).read_text() == f"{os.getpid()}\n":  # the folder may be that of another run by now
                (self.folder / LOCK).unlink()
        self._lock.release()
        with suppress(OSError):  # not empty
            for place in self._made:
                place.rmdir()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


def holds_files(folder: Path) -> bool:
    """Whether there is anything in a folder besides a lock."""
    return folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir()))


def lock_folder(folder: Path) -> FolderLock:
    """Lock a folder, whatever is in it; a RunError names the process that has it."""
    lock = FolderLock(folder)
    if not lock.acquire():
        text = ""
        with suppress(OSError):  # its holder has just removed it
            text = (folder / LOCK).read_text(errors="replace").strip()
        holder = f"process {text}" if text.isdecimal() else "another process"
        raise RunError(f"{folder} is in use by {holder}; wait for it to end, or choose another --out.")
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
    lock = lock_free_folder(folder) if rename and not resume else lock_folder(folder)
    try:
        if not resume and holds_run(lock.folder):
            raise RunError(
                f"{folder} holds a run already; resume it with fit(folder, resume=True) or "
                f"torchrum train --resume {folder}, or choose another folder."
            )
        if resume and (changed := differences(read_config(folder), config)):
            raise ConfigError(f"a resumed run cannot change {first_of(changed)}. Start a new run for that.")
    except Exception:
        lock.release()
        raise
    return lock


PACKAGE = Path(__file__).resolve().parents[2]
HASH = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """``environment.json``."""

    python: str
    system: str
    versions: dict[str, str | None]
    """Versions of the packages that compute; None for one that is not installed."""
    commit: str | None
    """Commit of torchrum's own repository; None outside a checkout of it."""
    uncommitted_changes: bool | None
    processor: str
    threads: int
    device: str
    accelerator: str | None
    cuda: str | None
    processes: int
    command: list[str]
    data: str | None = None
    """Note on unusual data, see ``Task.provenance``."""
    parameters: int | None = None
    """Trainable numbers of the model; None in folders of earlier versions."""
    resumed: list[dict[str, Any]] = field(default_factory=list)
    """The step of each resumption, and what was different then."""


def read_environment(run: Path) -> Environment:
    """``environment.json`` of a run folder."""
    return Reader(run / ENVIRONMENT).build(Environment, read_json(run / ENVIRONMENT))


def environment(device: Any, processes: int, data: str = "") -> Environment:
    """The environment of this process.

    Args:
        device: the torch device that computes.
        processes: how many share the batch.
        data: what is unusual about the data.
    """
    import torch

    commit, name = own_commit(), Path(sys.argv[0]).name
    program = ["python", "-m", "torchrum"] if name == "__main__.py" else [name]
    packages = ("torchrum", "torch", "triton", "lightning-fabric", "safetensors", "numpy")
    return Environment(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        versions={name: _version(name) for name in packages} | {"torch": str(torch.__version__)},
        commit=None if commit is None else commit[0],
        uncommitted_changes=None if commit is None else commit[1],
        processor=_processor(),
        threads=torch.get_num_threads(),
        device=str(device.type),
        accelerator=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        cuda=torch.version.cuda if device.type == "cuda" else None,
        processes=processes,
        command=[*program, *map(without_folders, sys.argv[1:])],
        data=data,
    )


def without_folders(argument: str) -> str:
    """An argument of a command whose absolute paths are shortened to their last name; that of a user goes too."""
    return re.sub(r"(^|=|,)((?:~|/|[A-Za-z]:[\\/])[^,]*)", lambda found: found[1] + _shortened(found[2]), argument)


def _shortened(path: str) -> str:
    *folders, name = [part for part in re.split(r"[\\/]", path) if part] or [""]
    at_home = (path.startswith("~") and not folders) or Path(path) == Path.home()
    of_user = at_home or folders[-1:] in (["home"], ["Users"])
    return "..." if of_user else f".../{name}"


@functools.cache
def own_commit(package: Path = PACKAGE) -> tuple[str, bool] | None:
    """The commit of torchrum's own repository, and whether files of the package differ; None where it cannot tell.

    The package must stand in ``src/torchrum`` of the repository and be tracked by it: a project that contains the
    virtual environment, or a copy of the package, has a commit of its own that says nothing about torchrum.
    """
    found = (_git(["rev-parse", "--show-toplevel", "HEAD"], package) or "").splitlines()
    tracked = _git(["ls-files", "--error-unmatch", "--", "__init__.py"], package) is not None
    if not tracked or Path(found[0]).resolve() / "src" / "torchrum" != package.resolve():
        return None
    return found[1], bool(_git(["status", "--porcelain", "--", "."], package))


def given_commit(text: str) -> str:
    """Check a commit from ``--commit``: a hash, or HEAD for that of torchrum's own checkout."""
    if text == "HEAD":
        commit = own_commit()
        if commit is None:
            raise ConfigError("--commit HEAD: torchrum is not running from a checkout of its own; pass the hash.")
        return commit[0] + ("+changes" if commit[1] else "")
    if not HASH.fullmatch(text.lower()):
        raise ConfigError(f"--commit is {text!r}, but it must be a hash of 7 to 40 hexadecimal digits, or HEAD.")
    return text.lower()


def _git(arguments: Iterable[str], folder: Path) -> str | None:
    # a git hook, for one, sets variables that would lead to another repository
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=variables)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
