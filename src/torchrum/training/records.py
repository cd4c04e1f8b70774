"""The run folder: what is written there, and how it is read back.

    config.json         the TrainConfig, written before the first step
    environment.json    versions, commit and hardware
    metrics.jsonl       one JSON object a line, appended as the run goes
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torchrum.training.errors import RunError
from torchrum.training.files import read_bytes, read_json, write_atomic

CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.jsonl"
RESULT = "result.json"
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
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise RunError(f"{path}, line {number}, is damaged: {error}. Mend the line or delete it.") from error
    return [record for record in records if kind is None or record["kind"] == kind]


def last_scores(folder: Path) -> dict[str, float]:
    """Loss and metrics of the last validation; empty before the first."""
    lines = read_metrics(folder, "validation")
    return (
        {name: value for name, value in lines[-1].items() if name not in ("kind", "step", "seconds")} if lines else {}
    )


def read_result(folder: Path | str) -> dict[str, Any] | None:
    """``result.json``, or None while the run has not ended."""
    path = Path(folder) / RESULT
    return read_json(path) if path.exists() else None


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
            "Copy it back from elsewhere, or start a new run."
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
