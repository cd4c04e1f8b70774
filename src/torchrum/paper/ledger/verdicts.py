"""The paper's numbers beside ours, with a verdict by one stated rule."""

from collections.abc import Iterable
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
    values: list[float]
    """Their scores."""
    tested: bool
    """Whether these are test scores, not the last validation."""
    word: Word

    @property
    def model(self) -> str:
        return model_label(self.config.model)

    @property
    def family(self) -> str | None:
        """The set of recipes that this one is a member of."""
        return _family(self.recipe)

    @property
    def source(self) -> str:
        """Which score: "test" or "validation"."""
        return "" if not self.row else "test" if self.tested else "validation"

    @property
    def ours(self) -> str:
        """Our number, mean and range over the seeds."""
        return spread(self.values, self.config.task.metric)

    @property
    def difference(self) -> str:
        """Ours less the paper's, where the paper prints a number."""
        metric = self.config.task.metric
        if not self.values or self.paper.value is None or metric == "ratio" or self.word == "not comparable":
            return ""
        value = fmean(self.values) - self.paper.value
        return f"{100 * value:+.2f} points" if metric == "accuracy" else f"{value:+.4f}"

    @property
    def settings(self) -> str:
        """What differs from the recipe, in words; empty where nothing does."""
        return ", ".join(changed_settings(self.row[0])) if self.row else ""


def verdicts(entries: Iterable[Entry], task: str | None = None) -> list[Verdict]:
    """A verdict on every number of the paper that has a recipe, in the order of the recipes.

    Before the members of a set comes the verdict on their mean, over the seeds that have every task.
    """
    entries = list(entries)
    rows: dict[str, list[Row]] = {}
    for name in dict.fromkeys(entry.task for entry in entries):
        for row in table_rows(entries, name):
            recipe = row[0].recipe
            # of the paper's preset, of its tuned form and of a task of a set only runs without overrides count
            strict = is_preset(recipe) or paper_preset(recipe, RECIPES) != recipe or _family(recipe) is not None
            if row[0].own_problem and not (strict and changed_settings(row[0])):
                rows.setdefault(recipe, []).append(row)
    found = []
    for recipe, build in RECIPES.items():
        if task in (None, recipe.partition("-")[0]) and (config := build()).paper is not None:
            row = sorted(min(rows.get(recipe, []), key=final_loss, default=[]), key=lambda entry: entry.seed)
            tested = all(config.task.metric in entry.test for entry in row)
            values = [(entry.test if tested else entry.final)[config.task.metric] for entry in row]
            found.append(_verdict(recipe, config, config.paper, row, values, tested))
    for family in dict.fromkeys(item.family for item in found if item.family is not None):
        members = [item for item in found if item.family == family]
        by_seed = [dict(zip((entry.seed for entry in item.row), item.values, strict=True)) for item in members]
        seeds = sorted(set.intersection(*map(set, by_seed)))
        values = [fmean(scores[seed] for scores in by_seed) for seed in seeds]
        row = [entry for entry in members[0].row if entry.seed in seeds]
        config, tested = members[0].config, all(item.tested for item in members)
        found.insert(found.index(members[0]), _verdict(family, config, paper_family(family), row, values, tested))
    return found


def _verdict(recipe: str, config: TrainConfig, paper: Paper, row: Row, values: list[float], tested: bool) -> Verdict:
    word = judge(paper, config, fmean(values)) if values else "not run"
    return Verdict(recipe, config, paper, row, values, tested, word)


def _family(recipe: str) -> str | None:
    name = recipe.rpartition("-qa")[0]
    return name if name in FAMILIES else None


def condensed(found: Iterable[Verdict]) -> list[Verdict]:
    """Verdicts without the members of a set of which none was run or none is comparable: its mean says as much."""
    kept = list(found)
    compared = {item.family for item in kept if item.word not in ("not run", "not comparable")}
    return [item for item in kept if item.family is None or item.family in compared]


def verdict_table(found: Iterable[Verdict]) -> Table:
    """Make a table of verdicts; a set of which nothing can be compared is one row, an empty column is left out."""
    items = condensed(found)
    metrics = {item.config.task.metric for item in items}
    unit = f", {METRIC_NAMES[metrics.pop()]}" if len(metrics) == 1 else ""
    columns: dict[str, list[str]] = {
        "recipe": [f"`{item.recipe}`" for item in items],
        "model": [item.model for item in items],
        "the paper": [item.paper.text + ("" if item.family else f" ({item.paper.where})") for item in items],
        f"ours{unit}": [item.ours for item in items],
        "set": [item.source for item in items],
        "seeds": [str(len(item.row) or "") for item in items],
        "difference": [item.difference for item in items],
        "verdict": [item.word for item in items],
        "settings changed": [item.settings for item in items],
    }
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    texts = (part for item in items for entry in item.row for part in entry.note.split("; "))
    notes = [sentence(part) for part in dict.fromkeys(texts) if REGENERATED in part]
    return Table(list(columns), list(zip(*columns.values(), strict=True)), notes=notes)


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
