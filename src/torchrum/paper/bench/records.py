"""The results of one run of the benchmark, on disk after every case, and as a table on the screen."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torchrum.lab.tables import Table
from torchrum.lab.training.errors import RunError
from torchrum.lab.training.files import Reader, parse_json, read_bytes, write_atomic
from torchrum.paper.bench.layers import Shape
from torchrum.paper.bench.measure import Times

T = TypeVar("T")


@dataclass
class Row:
    """One implementation in one case."""

    case: str
    """Name of the case; what ``--cases`` matches."""
    implementation: str
    """authors, reference, torch, native, fused, gru, lstm, ...; ``fused graphed`` is captured in one CUDA graph."""
    mode: str
    """forward, forward_backward or training_step."""
    shape: Shape
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the RUM."""
    times: Times | None = None
    """Milliseconds."""
    peak_bytes: int | None = None
    """Peak memory of the pass."""
    first_call_seconds: float | None = None
    """Time of the first call of a shape: compilation, capture and the call."""
    error: float | None = None
    """Largest relative error of outputs and gradients against float64, in the row's precision."""
    error_ieee: float | None = None
    """The same with FP32 matmuls (TF32 off)."""
    error_apart: float | None = None
    """As ``error_ieee``, excluding the gradients of samples near the ReLU threshold."""
    error_smooth: float | None = None
    """The same in the row's precision, with tanh for ReLU, whose sign flips are no rounding."""
    num_parameters: int | None = None
    threads: int | None = None
    """Threads on a CPU, where they differ from the environment's."""
    precision: str | None = None
    """Precision of float32 matmuls on a GPU: high is TF32, highest FP32 (TF32 off)."""
    backend: str | None = None
    """The backend of ours that ran."""
    design: str | None = None
    """Design of the fused backend: ``stepwise`` (matmul and row kernel per step), ``persistent`` or ``one launch``."""
    failed: str | None = None
    """Why there is no number."""

    @property
    def us_per_step(self) -> float | None:
        return None if self.times is None else self.times.median * 1e3 / self.shape.T


@dataclass
class Target:
    """A number to reach."""

    name: str
    limit: float
    value: float | None
    """None where it could not be measured."""
    unit: str = ""
    at_least: bool = False
    """The value must reach the limit; otherwise it must stay below."""

    @property
    def reached(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass
class Report:
    """Everything a run measured, and where."""

    suite: str
    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    path: Path | None = None

    def add(self, *rows: Row) -> None:
        """Keep rows, and write the file again: a run that is cut short leaves what it had."""
        self.rows += rows
        self.write()

    def find(self, case: str, implementation: str, mode: str = "forward_backward") -> Row | None:
        """The row with these names, if it was measured."""
        names = case, implementation, mode
        return next((row for row in self.rows if (row.case, row.implementation, row.mode) == names and row.times), None)

    def ratio(self, case: str, implementation: str, baseline: str, mode: str = "forward_backward") -> float | None:
        """Time of ``implementation`` over that of ``baseline``."""
        ours, theirs = self.find(case, implementation, mode), self.find(case, baseline, mode)
        return ours.times.median / theirs.times.median if ours and theirs and ours.times and theirs.times else None

    def write(self) -> None:
        if self.path is None:
            return
        content = {
            "suite": self.suite,
            "environment": self.environment,
            "targets": [{**asdict(target), "reached": target.reached} for target in self.targets],
            "rows": [{**asdict(row), "us_per_step": row.us_per_step} for row in self.rows],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, (json.dumps(content, indent=1) + "\n").encode())


def read_report(path: Path) -> Report:
    """Read what ``Report.write`` wrote; damage is named by file and field."""
    reader = Reader(path)
    try:
        content = reader.value(dict[str, Any], parse_json(read_bytes(path)), "it")
    except ValueError as error:
        raise RunError(f"{path} cannot be read: {error}.") from error
    rows = _read_list(reader, Row, content, "rows", derived="us_per_step")
    targets = _read_list(reader, Target, content, "targets", derived="reached")
    suite = reader.value(str, content.get("suite"), "suite")
    environment = reader.value(dict[str, Any], content.get("environment"), "environment")
    return Report(suite, environment, rows, targets, path)


def _read_list(reader: Reader, kind: type[T], content: dict[str, Any], name: str, derived: str) -> list[T]:
    found = reader.value(list[dict[str, Any]], content.get(name), name)
    plain = [{key: value for key, value in item.items() if key != derived} for item in found]
    return [reader.build(kind, item, f"{name}[{place}]") for place, item in enumerate(plain)]


HEADER = "case,implementation,mode,ms,quartiles,CPU ms,us/step,vs original,/ GRU,MB,first s,design".split(",")
MODE_WORDS = {"forward": "fwd", "forward_backward": "fwd+bwd", "training_step": "train step"}


def text_table(report: Report) -> str:
    """Format the rows as aligned text and, below them, the targets; empty columns are left out."""
    rows = [_cells(report, row) for row in report.rows]
    used = [column for column in range(len(HEADER)) if column < 5 or any(cells[column] for cells in rows)]
    header, *shown = ([cells[column] for column in used] for cells in (HEADER, *rows))
    text = [Table(header, shown, right=range(3, len(used))).text()]
    text += [f"{row.case} {row.implementation} {row.mode}: {row.failed}" for row in report.rows if row.failed]
    text += [describe_target(target) for target in report.targets]
    return "\n".join(text)


def describe_target(target: Target) -> str:
    """Describe on one line whether a target is reached, with its number and limit."""
    measured, limit = target_words(target)
    return f"[{'reached' if target.reached else 'missed'}] {target.name}: {measured}, {limit}"


def target_words(target: Target) -> tuple[str, str]:
    """Format the measured number and the limit."""
    bound = "at least" if target.at_least else "at most"
    value = "not measured" if target.value is None else f"{target.value:.3g}{target.unit}"
    return value, f"{bound} {target.limit:g}{target.unit}"


def baseline_of(implementation: str) -> str:
    """The GRU that an implementation is compared with: the graphed one for what runs in a graph, ours included."""
    return "gru graphed" if implementation.endswith("graphed") or implementation == "fused" else "gru"


def _cells(report: Report, row: Row) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    times = row.times
    original = report.ratio(row.case, "authors", row.implementation, row.mode)
    gru = report.ratio(row.case, row.implementation, baseline_of(row.implementation), row.mode)
    return [
        row.case,
        row.implementation.replace("authors", "original"),
        MODE_WORDS.get(row.mode, row.mode),
        "failed" if row.failed else number(times.median if times else None, ".3f"),
        f"{times.low:.3f}-{times.high:.3f}" if times else "",
        number(times.cpu if times else None, ".1f"),
        number(row.us_per_step, ".2f"),
        "" if original is None else f"{original:.2f}x",
        number(gru, ".2f"),
        number(row.peak_bytes and row.peak_bytes / 1e6, ".1f"),
        number(row.first_call_seconds, ".1f"),
        row.design or "",
    ]
