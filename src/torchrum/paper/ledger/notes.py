"""What a reader should know about a comparison of models, read off the ledger."""

import math
from collections.abc import Callable, Iterable, Iterator

from torchrum.lab.recipes import RECIPES
from torchrum.lab.training.config import rate_factors
from torchrum.paper.ledger.budget import Comparison, Standing, budget_table, compare
from torchrum.paper.ledger.cells import span, spread
from torchrum.paper.ledger.curves import FALLING, overfits, still_learning
from torchrum.paper.ledger.schema import Entry

AUTHORS_RATES = {"exprnn": ("the orthogonal matrix", 2e-5)}
"""Layer to what its authors train at a rate of its own, and that rate (Lezcano & Martinez-Rubio, 2019)."""


def comparison_section(entries: Iterable[Entry], task: str, budget: int) -> str:
    """The table of the models at a matched step budget, and what to know about it, in Markdown."""
    comparison = compare(entries, task, budget)
    text = budget_table(comparison)
    return "\n".join([text, *notes(comparison), ""]) if comparison.sizes else text


def notes(comparison: Comparison) -> list[str]:
    """The notes below the table of a comparison, one line of Markdown each."""
    lines = [
        "A cell is the validation at the budget, mean and range over the seeds; best is the mean of each seed's best "
        f"validation by then. Settings tried are those that differ by then, at {_sizes(comparison.sizes)}; the one "
        "shown has the most seeds and, of those, the lowest loss at the budget.",
        *_settings(comparison),
        *_rates(comparison),
    ]
    if learning := _where(comparison, still_learning):
        lines.append(
            f"Still learning at that point (median validation loss of the last quarter {1 - FALLING:.0%} or more below "
            f"that of the quarter before): {learning}."
        )
    if memorising := _where(comparison, overfits):
        lines.append(
            "Validation loss above that of the best model without memory, training loss lower, so overfitting and not "
            f"recalling: {memorising}."
        )
    return [f"- {text}" for text in lines]


def _settings(comparison: Comparison) -> Iterator[str]:
    """Which models were tuned, and how those did without."""
    tuned: dict[str, list[int]] = {}
    own: dict[str, list[int]] = {}
    for model, size, setting, _ in _cells(comparison):
        (tuned if setting else own).setdefault(model, []).append(size)
    if tuned:
        yield f"Tuned, so shown with another setting than the paper's: {_places(comparison, tuned)}."
    if own:
        yield f"Shown untuned, with the paper's setting where it names one: {_places(comparison, own)}."
    for model, sizes in tuned.items():
        tried = comparison.tried[model]
        results = [f"{_result(comparison, tried[size][()])} at T = {size}" for size in sizes if () in tried[size]]
        missing = [size for size in sizes if () not in tried[size]]
        if missing:
            results.append(f"not run at {_sizes(missing)}")
        yield f"{model} untuned: {'; '.join(results)}."


def _result(comparison: Comparison, standing: Standing) -> str:
    _, key = comparison.score()
    planned = RECIPES[standing.runs[0].recipe]().steps
    short = f" after {span(standing.ends, '{:,}')} of {planned:,} steps" if max(standing.ends) < standing.steps else ""
    return spread(standing.values(key), key) + short


def _rates(comparison: Comparison) -> Iterator[str]:
    told = set()
    for model, _, _, standing in _cells(comparison):
        config = standing.runs[0].config()
        if config.model.layer in AUTHORS_RATES and model not in told:
            told.add(model)
            what, rate = AUTHORS_RATES[config.model.layer]
            own = config.optimizer.lr * rate_factors(config.optimizer.groups).get("weight_hh", 1.0)
            if not math.isclose(own, rate):
                yield f"{model} trains {what} at {own:g}, {own / rate:g} times its authors' {rate:g}."


def _where(comparison: Comparison, holds: Callable[[Entry, int], bool]) -> str:
    """Models and sizes where something holds for most of the seeds shown."""
    found: dict[str, list[int]] = {}
    for model, size, _, standing in _cells(comparison):
        if 2 * sum(holds(run, standing.steps) for run in standing.runs) > len(standing.runs):
            found.setdefault(model, []).append(size)
    return _places(comparison, found)


def _cells(comparison: Comparison) -> Iterator[tuple[str, int, tuple[str, ...], Standing]]:
    for model in comparison.tried:
        for size in comparison.sizes:
            if shown := comparison.shown(model, size):
                yield model, size, *shown


def _places(comparison: Comparison, found: dict[str, list[int]]) -> str:
    """Models, with their sizes where it is not at all that they were run at."""
    parts = []
    for model, sizes in found.items():
        everywhere = sizes == [size for size in comparison.sizes if size in comparison.tried[model]]
        parts.append(model if everywhere else f"{model} ({_sizes(sizes)})")
    return "; ".join(parts)


def _sizes(sizes: Iterable[int]) -> str:
    return "T = " + ", ".join(map(str, sizes))
