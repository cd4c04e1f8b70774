"""The paper's numbers beside ours, with a verdict by one stated rule."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from torchrum.lab.recipes import FAMILIES, RECIPES, is_preset, paper_preset
from torchrum.lab.tasks import Recall
from torchrum.lab.training.config import Paper, TrainConfig
from torchrum.paper.ledger.babi import REGENERATED, paper_family, sentence
from torchrum.paper.ledger.runs import (
    METRIC_NAMES,
    Row,
    changed_settings,
    final_loss,
    model_label,
    score_names,
    table_rows,
)
from torchrum.paper.ledger.schema import Entry
from torchrum.paper.table import Table, spread

Word = Literal["reproduced", "better", "not reproduced", "not comparable", "not run"]

TOLERANCE = {"accuracy": 0.01, "bpc": 0.01}
"""How far a score may be from the paper's and still count as the same: one point of accuracy, 0.01 bits."""
SOLVED, STUCK = 0.01, 0.9
"""Copying: solved at or below this share of the memoryless loss, stuck at or above that one."""
ABOVE_PLATEAU = 0.05
"""Recall: accuracy above the plateau of a bag of values from which on a model has begun to learn."""

RULE = (
    "Our number is the mean over the seeds of the setting with the lowest final validation loss of each recipe: the "
    "test score where it was recorded, else the last validation. Where the paper's setting has a recipe of its own, "
    "and in a set of tasks, recipes are judged as they are, without overrides. It is reproduced within "
    f"{100 * TOLERANCE['accuracy']:g} point of accuracy or {TOLERANCE['bpc']:g} bits per character of the printed "
    "number, better beyond that, and not reproduced short of it. bAbI is judged task by task and by its mean over the "
    "20 tasks. "
    f"Copying is solved at {SOLVED:.0%} of the memoryless loss or less, and a model stays at the baseline at "
    f"{STUCK:.0%} of it or more. A model of which the paper says that it does not learn recall has not "
    f"learnt it up to {100 * ABOVE_PLATEAU:g} points above the plateau of a bag of values. Numbers that the paper "
    "quotes from work on less data are not comparable."
)


@dataclass(frozen=True)
class Verdict:
    """One printed number, what came out here, and whether the two agree."""

    recipe: str
    config: TrainConfig
    paper: Paper
    row: Row
    """The runs that stand for us, one per seed; empty where there are none."""
    source: str
    """Which score: "test" or "validation"."""
    values: list[float]
    """It, for each seed."""
    word: Word

    @property
    def model(self) -> str:
        return model_label(self.config.model)

    @property
    def family(self) -> str | None:
        """The set of recipes that this one is a member of."""
        return _family(self.recipe)

    @property
    def ours(self) -> str:
        """Our number, mean and range over the seeds."""
        return spread(self.values, self._key)

    @property
    def difference(self) -> str:
        """Ours less the paper's, where the paper prints a number."""
        if not self.values or self.paper.value is None or self._key == "ratio" or self.word == "not comparable":
            return ""
        value = fmean(self.values) - self.paper.value
        return f"{100 * value:+.2f} points" if self._key == "accuracy" else f"{value:+.4f}"

    @property
    def settings(self) -> str:
        """What differs from the recipe, in words; empty where nothing does."""
        return ", ".join(changed_settings(self.row[0])) if self.row else ""

    @property
    def _key(self) -> str:
        return self.config.task.metric


def verdicts(entries: Iterable[Entry], task: str | None = None) -> list[Verdict]:
    """A verdict on every number of the paper that has a recipe, in the order of the recipes."""
    entries = list(entries)
    rows: dict[str, list[Row]] = {}
    for name in dict.fromkeys(entry.task for entry in entries):
        for row in table_rows(entries, name):
            if not row[0].own_problem:
                continue
            if not changed_settings(row[0]) or not _as_it_is(row[0].recipe):
                rows.setdefault(row[0].recipe, []).append(row)
    found = []
    for recipe, build in RECIPES.items():
        if task in (None, recipe.partition("-")[0]) and (config := build()).paper is not None:
            found.append(_verdict(recipe, config, config.paper, rows.get(recipe, [])))
    return list(_with_means(found))


def _family(recipe: str) -> str | None:
    name = recipe.rpartition("-qa")[0]
    return name if name in FAMILIES else None


def _as_it_is(recipe: str) -> bool:
    """Whether only runs without overrides count: of the paper's preset, of its tuned form, of a task of a set."""
    return is_preset(recipe) or paper_preset(recipe, RECIPES) != recipe or _family(recipe) is not None


def condensed(found: Iterable[Verdict]) -> list[Verdict]:
    """Verdicts without the members of a set of which none was run or none is comparable: its mean says as much."""
    kept = list(found)
    told = {item.family for item in kept if item.word not in ("not run", "not comparable")}
    return [item for item in kept if item.family is None or item.family in told]


def verdict_table(found: Iterable[Verdict]) -> Table:
    """Make a table of verdicts; a set of which nothing can be compared is one row, an empty column is left out."""
    items = condensed(found)
    metrics = {item.config.task.metric for item in items}
    unit = f", {METRIC_NAMES[metrics.pop()]}" if len(metrics) == 1 else ""
    ours = (f"ours{unit}", "set", "seeds", "difference")
    header = ("recipe", "model", "the paper", *ours, "verdict", "settings changed")
    rows = [_cells(item) for item in items]
    kept = [number for number, cells in enumerate(zip(*rows, strict=True)) if any(cells)]
    titles, *shown = ([cells[number] for number in kept] for cells in (header, *rows))
    texts = (part for item in items for entry in item.row for part in entry.note.split("; "))
    return Table(titles, shown, notes=[sentence(part) for part in dict.fromkeys(texts) if REGENERATED in part])


def _cells(item: Verdict) -> list[str]:
    where = item.paper.text if item.family else f"{item.paper.text} ({item.paper.where})"
    seeds = str(len(item.row)) if item.row else ""
    ours = [item.ours, item.source, seeds, item.difference]
    return [f"`{item.recipe}`", item.model, where, *ours, item.word, item.settings]


def _with_means(found: Sequence[Verdict]) -> Iterator[Verdict]:
    """Before the members of each set the verdict on their mean."""
    told: set[str] = set()
    for item in found:
        if item.family is not None and item.family not in told:
            told.add(item.family)
            yield _mean(item.family, [other for other in found if other.family == item.family])
        yield item


def _mean(family: str, members: Sequence[Verdict]) -> Verdict:
    """Our mean over the tasks of a set beside the paper's: of the seeds that have every task."""
    by_seed = [
        dict(zip((entry.seed for entry in item.row), zip(item.row, item.values, strict=True), strict=True))
        for item in members
    ]
    seeds = sorted(set.intersection(*(set(each) for each in by_seed)))
    values = [fmean(each[seed][1] for each in by_seed) for seed in seeds]
    config, paper = members[0].config, paper_family(family)
    word = judge(paper, config, fmean(values)) if values else "not run"
    source = "test" if all(item.source == "test" for item in members) else "validation"
    row = [by_seed[0][seed][0] for seed in seeds]
    return Verdict(family, config, paper, row, source if values else "", values, word)


def _verdict(recipe: str, config: TrainConfig, paper: Paper, rows: list[Row]) -> Verdict:
    if not rows:
        return Verdict(recipe, config, paper, [], "", [], "not run")
    row = sorted(min(rows, key=final_loss), key=lambda entry: entry.seed)
    key = next(iter(score_names(row[0]).values()))
    tested = all(key in entry.test for entry in row)
    values = [(entry.test if tested else entry.final)[key] for entry in row]
    word = judge(paper, config, fmean(values))
    return Verdict(recipe, config, paper, row, "test" if tested else "validation", values, word)


def judge(paper: Paper, config: TrainConfig, value: float) -> Word:
    """Compare one score with what the paper says, by ``RULE``."""
    metric = config.task.metric
    if "(1k)" in paper.text:
        return "not comparable"
    if metric == "ratio":
        if paper.value == 1:
            return "reproduced" if value >= STUCK else "better"
        return "reproduced" if value <= SOLVED else "not reproduced"
    if paper.value is None:
        assert isinstance(config.task, Recall), "words are judged for copying and recall only"
        return "reproduced" if value < config.task.baseline_accuracy() + ABOVE_PLATEAU else "better"
    gain = value - paper.value if config.task.goal == "max" else paper.value - value
    if abs(gain) <= TOLERANCE[metric] + 1e-9:
        return "reproduced"
    return "better" if gain > 0 else "not reproduced"
