"""The run folder: what is written there, and how it is read back.

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

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torchrum.lab.training.errors import RunError
from torchrum.lab.training.files import parse_json, read_bytes, read_json, write_atomic
from torchrum.lab.training.run_state import Result
from torchrum.lab.training.typed_data import Reader

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
        self._file: BinaryIO = open(path, "ab" if path.exists() else "xb")  # noqa: SIM115

    def append(self, record: dict[str, Any]) -> None:
        """Write one line and hand it to the operating system."""
        line = (json.dumps(record) + "\n").encode()
        self._file.write(line)
        self._file.flush()
        self._hash.update(line)
        self._bytes += len(line)

    def mark(self) -> Mark:
        """How far the file is."""
        return Mark(bytes=self._bytes, sha256=self._hash.hexdigest())

    def sync(self) -> None:
        """Put every line on the disk; a checkpoint must not be newer than its metrics."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
