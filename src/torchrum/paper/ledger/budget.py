"""The models of a task at a matched step budget, whatever each run was given."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torchrum.paper.ledger.cells import span, table_lines, with_best
from torchrum.paper.ledger.curves import best, reached_goal, seen
from torchrum.paper.ledger.labels import model_label
from torchrum.paper.ledger.schema import Entry
from torchrum.paper.ledger.table import place, score_names, setting, table_rows

Setting = tuple[str, ...]
"""What is tuned and matters up to the budget; empty for the setting of the paper."""

LABELLED = ("model.lam", "model.eta")
"""Fields that make another model of it, with a label of its own."""


@dataclass(frozen=True)
class Standing:
    """Runs of one setting, one per seed, as they stood after ``steps``; those that ended sooner, at their end."""

    runs: list[Entry]
    steps: int

    @property
    def ends(self) -> list[int]:
        """Where each run was by then."""
        return [min(run.steps, self.steps) for run in self.runs]

    @property
    def loss(self) -> float:
        return sum(values := self.values("loss")) / len(values)

    def values(self, key: str) -> list[float]:
        """The last validation of each run by then."""
        return [seen(run, key, self.steps)[-1] for run in self.runs]

    def cell(self, key: str) -> str:
        shown = with_best(self.values(key), [best(run, key, self.steps) for run in self.runs], key)
        seeds = f"; {len(self.runs)} seeds" if len(self.runs) > 1 else ""
        return shown + seeds + (f"; after {span(self.ends, '{:,}')}" if min(self.ends) < self.steps else "")


@dataclass(frozen=True)
class Comparison:
    """What every model was given at every size T that several were run at, and how it stood after budget / T steps."""

    task: str
    budget: int
    sizes: list[int]
    tried: dict[str, dict[int, dict[Setting, Standing]]]
    """By model and size: every setting and how it stood."""

    def shown(self, model: str, size: int) -> tuple[Setting, Standing] | None:
        """The setting that stands for a model: the most seeds, then the lowest loss at the budget."""
        found = self.tried[model].get(size)
        return min(found.items(), key=lambda item: (-len(item[1].runs), item[1].loss)) if found else None

    def score(self) -> tuple[str, str]:
        """What the score is called, and where an entry holds it."""
        first = next(iter(next(iter(self.tried.values())).values()))
        return next(iter(score_names(next(iter(first.values())).runs[0]).items()))


def compare(entries: Iterable[Entry], task: str, budget: int) -> Comparison:
    """Sort the runs of a task by model, size and setting; sizes with a single model are left out.

    Runs that differ only in what comes after the budget are of one setting, and of several such with one seed the
    longest counts: they are one trajectory.
    """
    groups: dict[tuple[str, int, Setting], list[Entry]] = defaultdict(list)
    for row in table_rows(entries, task):
        size, changes = place(row)
        if size and not changes and budget >= size:
            groups[model_label(row[0].config().model), size, setting_by(row[0], budget // size)] += row
    tried: dict[str, dict[int, dict[Setting, Standing]]] = defaultdict(lambda: defaultdict(dict))
    for (model, size, found), runs in groups.items():
        if standing := standing_at(runs, budget // size):
            tried[model][size][found] = standing
    sizes = sorted({size for found in tried.values() for size in found})
    sizes = [size for size in sizes if sum(size in found for found in tried.values()) > 1]
    tried = {model: found for model, found in tried.items() if any(size in found for size in sizes)}
    return Comparison(task, budget, sizes, tried)


def budget_table(comparison: Comparison) -> str:
    """A Markdown table, one line per model and one column per size T: its score after ``budget / T`` steps.

    A cell has the last validation by then, its mean and range over the seeds, and beside it the mean of each seed's
    best validation by then. Where runs ended sooner, it says when. The last column counts the settings that were tried
    at each size.
    """
    budget, sizes = comparison.budget, comparison.sizes
    if not sizes:
        return f"No two models of {comparison.task} were run for {budget:,} / T steps.\n"
    name, key = comparison.score()
    header = ["model", *(f"{name}, T = {size} ({budget // size:,} steps)" for size in sizes), "settings tried"]
    rows = []
    for model, found in comparison.tried.items():
        shown = [comparison.shown(model, size) for size in sizes]
        counts = ", ".join(str(len(found.get(size, ()))) for size in sizes)
        rows.append([model, *("" if item is None else item[1].cell(key) for item in shown), counts])
    return "\n".join([*table_lines(header, rows), ""])


def standing_at(runs: Iterable[Entry], steps: int) -> Standing | None:
    """Of runs that were cut before ``steps`` only those count that got furthest, if none got there; one per seed."""
    runs = [run for run in runs if run.curve["step"][0] <= steps]
    there = [run for run in runs if run.steps >= steps or reached_goal(run)]
    furthest = max((run.steps for run in runs), default=0)
    by_seed: dict[int, Entry] = {}
    for run in there or [run for run in runs if run.steps == furthest]:
        if run.seed not in by_seed or run.steps > by_seed[run.seed].steps:
            by_seed[run.seed] = run
    return Standing(list(by_seed.values()), steps) if by_seed else None


def setting_by(entry: Entry, steps: int) -> Setting:
    """What a run was tuned to, as far as it matters up to ``steps``."""
    kept = []
    for text in setting(entry):
        field, _, value = text.partition("=")
        if field == "optimizer.schedule" and ":" in value:
            begun = [part for part in value.split(",") if int(part.partition(":")[0]) < steps]
            text = f"{field}={','.join(begun)}" if begun else ""
        if text and field not in LABELLED:
            kept.append(text)
    return tuple(kept)
