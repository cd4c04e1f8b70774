"""The models of a task after equal work, whatever each run was given."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torchrum.ledger.labels import model_label
from torchrum.ledger.schema import Entry
from torchrum.ledger.table import line, place, score_names, span, spread, table_rows

SAME = ("steps", "compile")
"""Fields that change nothing of what a run has learnt by a given step."""


@dataclass
class Standing:
    """Runs of one setting at their best validation by then."""

    scores: list[dict[str, float]]
    steps: list[int]
    """Where each run was by then: at the budget, or at its own end."""

    @property
    def loss(self) -> float:
        return sum(score["loss"] for score in self.scores) / len(self.scores)

    def cell(self, key: str, budget: int) -> str:
        shown = spread([score[key] for score in self.scores], key)
        runs = f", {len(self.scores)} runs" if len(self.scores) > 1 else ""
        return shown + runs + (f" after {span(self.steps, '{:,}')}" if min(self.steps) < budget else "")


def budget_table(entries: Iterable[Entry], task: str, budget: int) -> str:
    """A Markdown table, a line for each model and a column for each size T: its score after ``budget / T`` steps.

    The score is the best validation by then, its mean and range over the runs of one setting. Runs that differ only in
    what comes later are of one setting; that with the most runs counts, and of several such the one with the lowest
    loss. Where runs ended sooner, the table says when. Sizes with a single model are left out.
    """
    rows = table_rows(entries, task)
    groups: dict[tuple[str, int, tuple[str, ...]], list[Entry]] = defaultdict(list)
    for row in rows:
        size, changes = place(row)
        if size and not changes and budget >= size:
            setting = _setting_by(row[0], budget // size)
            groups[model_label(row[0].config().model), size, setting] += row
    found: dict[str, dict[int, Standing]] = defaultdict(dict)
    for (model, size, _), runs in groups.items():
        standing = standing_at(runs, budget // size)
        if standing is not None and (size not in found[model] or _rank(standing) < _rank(found[model][size])):
            found[model][size] = standing
    sizes = sorted({size for best in found.values() for size in best})
    sizes = [size for size in sizes if sum(size in best for best in found.values()) > 1]
    models = {model: best for model, best in found.items() if any(size in best for size in sizes)}
    if not models:
        return f"No two models of {task} were run for {budget:,} / T steps.\n"
    name, key = next(iter(score_names(rows[0][0]).items()))
    header = ["model", *(f"{name}, T = {size} ({budget // size:,} steps)" for size in sizes)]
    lines = [line(header), line(["---"] * len(header))]
    for model, best in models.items():
        lines.append(line([model, *(best[size].cell(key, budget // size) if size in best else "" for size in sizes)]))
    return "\n".join([*lines, ""])


def standing_at(runs: list[Entry], steps: int) -> Standing | None:
    """Of runs that were cut before ``steps`` only those count that got furthest, if none got there."""
    there = [run for run in runs if run.steps >= steps or _reached_goal(run)]
    furthest = max(run.steps for run in runs)
    scores, ends = [], []
    for run in there or [run for run in runs if run.steps == furthest]:
        points = [dict(zip(run.curve, values, strict=True)) for values in zip(*run.curve.values(), strict=True)]
        points = [point for point in points if point["step"] <= steps]
        if points:
            scores.append(min(points, key=lambda point: point["loss"]))
            ends.append(min(run.steps, steps))
    return Standing(scores, ends) if scores else None


def _setting_by(entry: Entry, steps: int) -> tuple[str, ...]:
    """The overrides that matter up to ``steps``."""
    kept = []
    for text in entry.overrides:
        field, _, value = text.partition("=")
        if field == "optimizer.schedule" and ":" in value:
            begun = [part for part in value.split(",") if int(part.partition(":")[0]) < steps]
            text = f"{field}={','.join(begun)}" if begun else ""
        if text and field not in SAME:
            kept.append(text)
    return tuple(kept)


def _rank(standing: Standing) -> tuple[int, float]:
    return -len(standing.scores), standing.loss


def _reached_goal(entry: Entry) -> bool:
    config = entry.config()
    if config.stop_at is None:
        return False
    score = entry.final[config.task.metric]
    return score <= config.stop_at if config.task.goal == "min" else score >= config.stop_at
