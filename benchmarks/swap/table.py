"""From the results of the jobs to a table: each model beside ``nn.GRU``, and who is ahead where."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .tasks import TASKS

Row = Mapping[str, Any]
REFERENCE = "gru"


def read_results(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; a line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def add_result(path: Path, row: Row) -> None:
    """Add a row to a file of JSON lines, on a line of its own even where the last one was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        end = file.seek(0, 2)
        file.seek(max(end - 1, 0))
        torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")


def scores_of(rows: Iterable[Row], task: str, model: str) -> list[float]:
    """Scores of one model on one task, one per seed that did not diverge."""
    return [row["score"] for row in rows if row["task"] == task and row["model"] == model and row["score"] is not None]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def standing(task: str, ours: list[float], reference: list[float]) -> str:
    """``ahead`` of the reference's best seed, ``behind`` its worst one, or ``level`` between the two."""
    sign = 1 if TASKS[task].goal == "max" else -1
    value, known = sign * mean(ours), [sign * score for score in reference]
    return "ahead" if value > max(known) else "behind" if value < min(known) else "level"


def diverged(rows: Iterable[Row], model: str) -> int:
    """Runs of a model whose loss or gradient was not finite."""
    return sum(row["model"] == model and row["score"] is None for row in rows)


def shown(task: str, values: list[float]) -> str:
    """The mean over the seeds and half the distance between the best and the worst, in the task's unit."""
    if not values:
        return "-"
    factor, digits = (100, 1) if TASKS[task].measure == "accuracy" else (1, 3)
    half = (max(values) - min(values)) / 2
    return f"{factor * mean(values):.{digits}f} ± {factor * half:.{digits}f}"


MARKS = {"ahead": " +", "behind": " −", "level": ""}


def cell(rows: list[Row], task: str, model: str) -> str:
    """One score, with + where it is ahead of the reference and − where it is behind."""
    ours, reference = scores_of(rows, task, model), scores_of(rows, task, REFERENCE)
    mark = MARKS[standing(task, ours, reference)] if ours and reference and model != REFERENCE else ""
    return shown(task, ours) + mark


def summary(rows: list[Row]) -> str:
    """A Markdown table: one line per model, one column per task, and how often each is ahead and behind."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    lines = [
        "| model | " + " | ".join(tasks) + " | ahead | behind | diverged |",
        "| --- |" + " ---: |" * (len(tasks) + 3),
    ]
    for model in models:
        standings = [
            standing(task, ours, reference)
            for task in tasks
            if (ours := scores_of(rows, task, model)) and (reference := scores_of(rows, task, REFERENCE))
        ]
        counts = ["", ""] if model == REFERENCE else [str(standings.count(word)) for word in ("ahead", "behind")]
        cells = [cell(rows, task, model) for task in tasks]
        lines.append(f"| {model} | " + " | ".join([*cells, *counts, str(diverged(rows, model))]) + " |")
    return "\n".join(lines)
