"""From the results of the jobs to a table: each model beside ``nn.GRU``, and who is ahead where."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swap.tasks import TASKS

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


def shown(task: str, values: list[float]) -> str:
    """The mean over the seeds and, of several, half the distance between best and worst, in the task's unit."""
    if not values:
        return "-"
    factor, digits = (100, 1) if TASKS[task].measure == "accuracy" else (1, 3)
    half = (max(values) - min(values)) / 2
    spread = f" ± {factor * half:.{digits}f}" if len(values) > 1 else ""
    return f"{factor * mean(values):.{digits}f}{spread}"


MARKS = {"ahead": " +", "behind": " −", "level": ""}


def cell(rows: Sequence[Row], task: str, model: str) -> str:
    """One score, with + where it is ahead of the reference and − where it is behind."""
    ours, reference = scores_of(rows, task, model), scores_of(rows, task, REFERENCE)
    mark = MARKS[standing(task, ours, reference)] if ours and reference and model != REFERENCE else ""
    return shown(task, ours) + mark


def counts(rows: Sequence[Row], model: str) -> list[str]:
    """On how many tasks a model is ahead and behind, and how many of its runs diverged."""
    lost = str(sum(row["model"] == model and row["score"] is None for row in rows))
    if model == REFERENCE:
        return ["", "", lost]
    standings = [
        standing(task, ours, reference)
        for task in TASKS
        if (ours := scores_of(rows, task, model)) and (reference := scores_of(rows, task, REFERENCE))
    ]
    return [str(standings.count("ahead")), str(standings.count("behind")), lost]


def markdown(head: list[str], body: Iterable[list[str]], words: int = 1) -> str:
    """A Markdown table whose first columns are ``words``."""
    lines = [head, [*["---"] * words, *["---:"] * (len(head) - words)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summary(rows: Sequence[Row]) -> str:
    """One line per model, one column per task, and how often each model is ahead and behind."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    body = ([model, *(cell(rows, task, model) for task in tasks), *counts(rows, model)] for model in models)
    return markdown(["model", *tasks, "ahead", "behind", "diverged"], body)


UNITS = {"accuracy": "accuracy, %", "bits": "bits per character", "error": "error / variance"}


def by_task(rows: Sequence[Row], models: list[str]) -> str:
    """One line per task, one column for each of these models."""
    body = [
        [f"{name}: {task.about}", UNITS[task.measure], *(cell(rows, name, model) for model in models)]
        for name, task in TASKS.items()
    ]
    last = ["**ahead / behind / diverged**", "", *(" / ".join(filter(None, counts(rows, model))) for model in models)]
    return markdown(["task", "measure", *models], [*body, last], words=2)


def norms(rows: Sequence[Row], models: list[str]) -> str:
    """Of each model the largest norm of a state and of a gradient on any task, and the growth with carried state."""

    def found(model: str) -> list[str]:
        own = [row for row in rows if row["model"] == model]
        carried = [row["h_norm_train"] for row in own if row["task"] == "carried"]
        largest = max(norm for row in own for norm in (*row["h_norms"], row["h_norm_train"]))
        values = (max(carried, default=None), largest, max(row["grad_max"] for row in own))
        return ["-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in values]

    head = ["model", "norm of h after 800 carried chunks", "largest norm of h", "largest gradient before clipping"]
    known = {row["model"] for row in rows}
    return markdown(head, ([model, *found(model)] for model in models if model in known))


MARKED = re.compile(r"(<!-- swap:(tasks|norms) (\S+) -->\n)(.*?)(<!-- /swap -->)", re.DOTALL)


def fill(text: str, rows: Sequence[Row]) -> str:
    """``text`` with every table between its markers made anew: ``<!-- swap:tasks gru,rum -->``."""

    def filled(match: re.Match[str]) -> str:
        table = {"tasks": by_task, "norms": norms}[match[2]](rows, match[3].split(","))
        return f"{match[1]}\n{table}\n\n{match[5]}"

    return MARKED.sub(filled, text)
