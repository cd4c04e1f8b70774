"""The models of a task after equal work, whatever each run was given."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from torchrum.ledger.labels import model_label
from torchrum.ledger.schema import Entry
from torchrum.ledger.table import Row, line, place, score_names, span, spread, table_rows


def budget_table(entries: Iterable[Entry], task: str, budget: int) -> str:
    """A Markdown table, a line for each model and a column for each size T: its score after ``budget / T`` steps.

    The score is that of the last validation by then; of several settings the lowest loss counts. If it came sooner,
    the table says when. Sizes with a single model are left out.
    """
    found: dict[str, dict[int, dict[str, list[float]]]] = defaultdict(dict)
    rows = table_rows(entries, task)
    for row in rows:
        size, changes = place(row)
        if not size or changes or budget < size:
            continue
        scores = scores_at(row, budget // size)
        best = found[model_label(row[0].config().model)]
        if scores and (size not in best or _mean(scores["loss"]) < _mean(best[size]["loss"])):
            best[size] = scores
    sizes = sorted({size for best in found.values() for size in best})
    sizes = [size for size in sizes if sum(size in best for best in found.values()) > 1]
    models = {model: best for model, best in found.items() if any(size in best for size in sizes)}
    if not models:
        return f"No two models of {task} were run for {budget:,} / T steps.\n"
    name, key = next(iter(score_names(rows[0][0]).items()))
    header = ["model", *(f"{name}, T = {size} ({budget // size:,} steps)" for size in sizes)]
    lines = [line(header), line(["---"] * len(header))]
    for model, best in models.items():
        cells = [_cell(best[size], key, budget // size) if size in best else "" for size in sizes]
        lines.append(line([model, *cells]))
    return "\n".join([*lines, ""])


def scores_at(row: Row, steps: int) -> dict[str, list[float]]:
    """Scores of every seed at its last validation within ``steps``; empty if one of them had none by then."""
    found: dict[str, list[float]] = defaultdict(list)
    for entry in row:
        within = sum(step <= steps for step in entry.curve["step"])
        if not within:
            return {}
        for name, values in entry.curve.items():
            found[name].append(values[within - 1])
    return found


def _cell(scores: dict[str, list[float]], key: str, steps: int) -> str:
    sooner = f" after {span(scores['step'], '{:,.0f}')}" if min(scores["step"]) < steps else ""
    return spread(scores[key], key) + sooner


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
