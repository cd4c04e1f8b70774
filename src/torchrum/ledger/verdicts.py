"""The paper's numbers beside ours, with a verdict by one stated rule."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from torchrum.ledger.labels import model_label
from torchrum.ledger.schema import Entry
from torchrum.ledger.table import SAME, Row, is_recipe, line, score_names, spread, table_rows
from torchrum.recipes import RECIPES
from torchrum.recipes.presets import is_preset, paper_preset
from torchrum.tasks import Recall
from torchrum.training.config import Paper, TrainConfig

Word = Literal["reproduced", "better", "not reproduced", "not comparable", "not run"]

TOLERANCE = {"accuracy": 0.01, "bpc": 0.01}
"""How far a score may be from the paper's and still count as the same: one point of accuracy, 0.01 bits."""
QUESTIONS = {"babi": 1000}
"""Examples of a test set so small that chance alone makes more than a point: there two standard errors count."""
SOLVED, STUCK = 0.01, 0.9
"""Copying: solved at or below this share of the memoryless loss, stuck at or above that one."""
ABOVE_PLATEAU = 0.05
"""Recall: accuracy above the plateau of a bag of values from which on a model has begun to learn."""

RULE = (
    "Our number is the mean over the seeds of the setting with the lowest final validation loss of each recipe: the "
    "test score where it was recorded, else the last validation. Where the paper's setting has a recipe of its own, "
    "both recipes are judged as they are, without overrides. It is reproduced within "
    f"{TOLERANCE['accuracy']:.0%} of accuracy (bAbI, with 1,000 test questions per task: two standard errors where "
    f"that is more) or {TOLERANCE['bpc']:g} bits per character of the printed number, better beyond that, and not "
    f"reproduced short of it. Copying is solved at {SOLVED:.0%} of the memoryless loss or less, and a model stays at "
    f"the baseline at {STUCK:.0%} of it or more. A model of which the paper says that it does not learn recall has not "
    f"learnt it up to {ABOVE_PLATEAU:.0%} above the plateau of a bag of values. Numbers that the paper quotes from "
    "work on less data are not comparable."
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
        changed = [text for text in self.row[0].overrides if text.partition("=")[0] not in SAME] if self.row else []
        return ", ".join(changed)

    @property
    def _key(self) -> str:
        return self.config.task.metric


def verdicts(entries: Iterable[Entry], task: str | None = None) -> list[Verdict]:
    """A verdict on every number of the paper that has a recipe, in the order of the recipes."""
    entries = list(entries)
    rows: dict[str, list[Row]] = {}
    for name in dict.fromkeys(entry.task for entry in entries):
        for row in table_rows(entries, name):
            if any(text.startswith("task.") for text in row[0].overrides):
                continue  # another problem than the paper's
            if is_recipe(row[0]) or not (is_preset(recipe := row[0].recipe) or paper_preset(recipe, RECIPES) != recipe):
                rows.setdefault(row[0].recipe, []).append(row)
    found = []
    for recipe, build in RECIPES.items():
        if task in (None, recipe.partition("-")[0]) and (config := build()).paper is not None:
            found.append(_verdict(recipe, config, config.paper, rows.get(recipe, [])))
    return found


def verdict_table(found: Iterable[Verdict]) -> str:
    """Verdicts as a Markdown table."""
    header = ("recipe", "model", "the paper", "ours", "seeds", "difference", "verdict", "settings changed")
    lines = [line(header), line(["---"] * len(header))]
    for item in found:
        ours = f"{item.ours} ({item.source})" if item.row else ""
        seeds = str(len(item.row)) if item.row else ""
        where = f"{item.paper.text} ({item.paper.where})"
        cells = (f"`{item.recipe}`", item.model, where, ours, seeds, item.difference, item.word, item.settings)
        lines.append(line(cells))
    return "\n".join([*lines, ""])


def one_per_seed(row: Row) -> Row:
    """Of several runs of one seed the longest: they are one trajectory."""
    longest = {entry.seed: entry for entry in sorted(row, key=lambda entry: entry.steps)}
    return [longest[seed] for seed in sorted(longest)]


def _verdict(recipe: str, config: TrainConfig, paper: Paper, rows: list[Row]) -> Verdict:
    if not rows:
        return Verdict(recipe, config, paper, [], "", [], "not run")
    row = one_per_seed(min(rows, key=lambda row: fmean(entry.final["loss"] for entry in row)))
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
    if abs(gain) <= tolerance(paper.value, config) + 1e-9:
        return "reproduced"
    return "better" if gain > 0 else "not reproduced"


def tolerance(printed: float, config: TrainConfig) -> float:
    """How far our score may be from a printed one."""
    least = TOLERANCE[config.task.metric]
    questions = QUESTIONS.get(config.name.partition("-")[0])
    return least if questions is None else max(least, 2 * math.sqrt(printed * (1 - printed) / questions))
