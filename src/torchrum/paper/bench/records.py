"""The results of one run of the benchmark, on disk after every case."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchrum.lab.training.errors import RunError
from torchrum.lab.training.files import MAX_BYTES, parse_json, read_bytes, write_atomic
from torchrum.lab.training.typed_data import Reader
from torchrum.paper.bench.measure import Times
from torchrum.paper.bench.work import Shape


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
    """Of the RUM."""
    times: Times | None = None
    """Milliseconds."""
    peak_bytes: int | None = None
    """Memory that the pass needs at its peak."""
    first_call_seconds: float | None = None
    """Of a shape not seen before: compilation, capture and one call."""
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
    """Of a CPU's rows, where they differ from the environment's."""
    precision: str | None = None
    """Of float32 matmuls on a GPU: high is TF32, highest FP32 (TF32 off)."""
    backend: str | None = None
    """The backend of ours that ran."""
    design: str | None = None
    """Of the fused backend: ``stepwise`` (a matmul and a row kernel per step), ``persistent`` or ``one launch``."""
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
    tests: dict[str, Any] | None = None
    """What the test suite ran and found on the same machine, see ``benchmarks/judge.py``."""

    def add(self, *rows: Row) -> None:
        """Keep rows, and write the file anew: a run that is cut short leaves what it had."""
        self.rows += rows
        self.write()

    def has(self, case: str, implementation: str, mode: str) -> bool:
        """Whether there is a row with these names, measured or failed."""
        return any((row.case, row.implementation, row.mode) == (case, implementation, mode) for row in self.rows)

    def find(self, case: str, implementation: str, mode: str = "forward_backward") -> Row | None:
        """The row with these names, if it was measured."""
        for row in self.rows:
            if (row.case, row.implementation, row.mode) == (case, implementation, mode) and row.times is not None:
                return row
        return None

    def ratio(self, case: str, implementation: str, baseline: str, mode: str = "forward_backward") -> float | None:
        """Time of ``implementation`` over that of ``baseline``."""
        ours, theirs = self.find(case, implementation, mode), self.find(case, baseline, mode)
        if ours is None or theirs is None or ours.times is None or theirs.times is None:
            return None
        return ours.times.median / theirs.times.median

    def write(self) -> None:
        if self.path is None:
            return
        content = {
            "suite": self.suite,
            "environment": self.environment,
            "tests": self.tests,
            "targets": [{**asdict(target), "reached": target.reached} for target in self.targets],
            "rows": [{**asdict(row), "us_per_step": row.us_per_step} for row in self.rows],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, (json.dumps(content, indent=1) + "\n").encode())


def read_report(path: Path) -> Report:
    """Read what ``Report.write`` wrote; damage is named by file and field."""
    reader = Reader(path)
    try:
        content = reader.value(dict[str, Any], parse_json(read_bytes(path, MAX_BYTES)), "it")
    except ValueError as error:
        raise RunError(f"{path} cannot be read: {error}.") from error
    rows = [
        reader.build(Row, _today(row), f"rows[{place}]")
        for place, row in enumerate(reader.value(list[dict[str, Any]], content.get("rows"), "rows"))
    ]
    targets = [
        reader.build(Target, {name: value for name, value in target.items() if name != "reached"}, f"targets[{place}]")
        for place, target in enumerate(reader.value(list[dict[str, Any]], content.get("targets"), "targets"))
    ]
    suite = reader.value(str, content.get("suite"), "suite")
    environment = reader.value(dict[str, Any], content.get("environment"), "environment")
    tests = reader.value(dict[str, Any] | None, content.get("tests"), "tests")
    return Report(suite, environment, rows, targets, path, tests)


def _today(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the words of today."""
    row = {name: value for name, value in row.items() if name != "us_per_step"}
    if "contestant" in row:
        row["implementation"] = row.pop("contestant")
        row["case"] = str(row.get("case")).replace("-rivals", "-baselines")
    return row
