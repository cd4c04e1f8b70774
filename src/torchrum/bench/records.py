"""The results of one run of the benchmark, on disk after every case."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .measure import Times
from .work import Shape


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
    """What the test suite ran and found on the same machine, see ``summarise_tests``."""

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
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(part, self.path)


def read_report(path: Path) -> Report:
    """Read what ``Report.write`` wrote."""
    content = json.loads(path.read_text())
    rows = []
    for row in content["rows"]:
        row.pop("us_per_step")
        if "contestant" in row:  # words of earlier files
            row["implementation"] = row.pop("contestant")
            row["case"] = row["case"].replace("-rivals", "-baselines")
        times = None if row["times"] is None else Times(**row["times"])
        rows.append(Row(**{**row, "shape": Shape(**row["shape"]), "times": times}))
    targets = []
    for target in content["targets"]:
        target.pop("reached")
        targets.append(Target(**target))
    return Report(content["suite"], content["environment"], rows, targets, path, content.get("tests"))
