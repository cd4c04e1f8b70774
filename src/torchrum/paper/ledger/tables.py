"""The tables of the ledger, and the markers that ask for them in a Markdown file.

<!-- torchrum:table copying -->                  every run
<!-- torchrum:table babi best -->                the best setting of each model
<!-- torchrum:table copying best 10000 -->       the best setting of each model within these steps, and beyond
<!-- torchrum:table copying within 2000000 -->   every model after 2,000,000 / T steps, with notes
<!-- torchrum:table copying paper -->            the paper's numbers beside ours, with verdicts
"""

import itertools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from torchrum.lab.recipes import FAMILIES, PAPER_ONLY, RECIPES, is_preset, paper_preset
from torchrum.lab.tables import Table, code, markdown_tables, span, spread, with_best, write_marked
from torchrum.lab.tasks import Recall
from torchrum.lab.training.config import Paper, TrainConfig
from torchrum.paper.ledger.babi import REGENERATED, babi_tables, paper_family, sentence
from torchrum.paper.ledger.entries import Entry, LedgerError, without_own_data
from torchrum.paper.ledger.runs import (
    METRIC_NAMES,
    Row,
    best,
    best_settings,
    changed_settings,
    compare,
    comparison_tables,
    final_loss,
    model_and_place,
    model_label,
    place,
    score_names,
    setting,
    settings_tried,
    table_rows,
)

TITLES = {"char": "character language modelling"}
"""Task to its title, if that is not its name."""


def write_tables(path: Path, entries: Sequence[Entry]) -> bool:
    """Update the tables between the markers of a file; return whether it changed."""
    return write_marked(path, "table", "copying", lambda words: f"\n{asked_table(words, entries)}\n")


def asked_table(words: str, entries: Sequence[Entry]) -> str:
    """Make the Markdown table that the words of a marker ask for."""
    task, *rest = words.split()
    missing = f"No run of {task} is in the ledger yet.\n"
    match rest:
        case []:
            tables = task_tables(entries, task)
        case ["paper"]:
            tables = [verdict_table(verdicts(entries, task))]
        case ["best"]:
            tables = task_tables(entries, task, sys.maxsize)
        case ["best", number] if number.isdecimal():
            tables = task_tables(entries, task, int(number))
        case ["within", number] if number.isdecimal():
            tables = comparison_tables(compare(entries, task, int(number)))
            missing = f"No two models of {task} were run for {int(number):,} / T steps.\n"
        case _:
            raise LedgerError(
                f"there is no table {words!r}; write <!-- torchrum:table TASK -->, or after TASK one of: best, best "
                "STEPS, within BUDGET, paper."
            )
    return markdown_tables(tables) or missing


def task_tables(entries: Iterable[Entry], task: str, budget: int | None = None) -> list[Table]:
    """Make the tables of one task, one for each size.

    Seeds of one setting share a row: the mean and, where there are several, the range of the last validation.

    Args:
        entries: the ledger.
        task: its name.
        budget: show only the setting of each model with the best final loss within this many steps and, if it ran
            longer, the best one beyond.
    """
    if task == "babi":
        return babi_tables(entries, best=budget is not None)
    rows = table_rows(entries, task)
    tried = settings_tried(rows) if budget is not None else {}
    if budget is not None:
        within, beyond = ([row for row in rows if (_steps(row) > budget) is over] for over in (False, True))
        chosen = {id(row) for row in (*best_settings(within), *best_settings(beyond))}
        rows = [row for row in rows if id(row) in chosen]
    return [_size_table(task, list(rows), tried) for _, rows in itertools.groupby(rows, place)]


def _steps(row: Row) -> int:
    return max(entry.steps for entry in row)


def _size_table(task: str, rows: Sequence[Row], tried: Mapping[tuple[object, ...], int]) -> Table:
    size, changes = place(rows[0])
    names = [METRIC_NAMES.get(name, name) for name in score_names(rows[0][0])]
    tested = _test_names(rows)
    shown = (*names, *map(_test_title, tested))
    header = ("model", "settings", "parameters", "steps", "seeds", *shown, "paper", "command")
    cells = [_cells(row, tested, tried.get(model_and_place(row), 1)) for row in rows]
    paper_only = {} if changes else PAPER_ONLY.get(task, {}).get(size, {})
    cells += [[name, *[""] * (len(header) - 3), text, "not run"] for name, text in paper_only.items()]
    title = ", ".join([TITLES.get(task, task), *([f"T = {size}"] if size else []), *changes])
    baseline = rows[0][0].config().task.baseline()
    return Table(
        header,
        cells,
        title=f"**{title}** (validation; loss of the baseline {baseline:.4f})",
        notes=sorted(
            {f"{entry.recipe}, seed {entry.seed}: {note}" for row in rows for entry in row for note in _notes(entry)}
        ),
    )


def _notes(entry: Entry) -> list[str]:
    dynamic = f"dynamic evaluation with {entry.dynamic}" if entry.dynamic else ""
    return [note for note in (entry.note, dynamic) if note]


def _test_names(rows: Sequence[Row]) -> list[str]:
    """Choose the test scores to show: the task's metric, or its several forms where it has them, as ``bpc_ptb``."""
    metric = next(iter(score_names(rows[0][0]).values()))
    found = {name for row in rows for entry in row for name in entry.test}
    forms = [name for name in found if name.removeprefix("dynamic_").startswith(f"{metric}_")]
    return sorted(forms or found & {metric}) + sorted(found & {f"uncalibrated_{metric}"})


def _test_title(name: str) -> str:
    """Title the column of a test score; the metric is followed by the convention in which symbols are counted."""
    if name.startswith("uncalibrated_"):
        return "test, temperature 1"
    rest = name.removeprefix("dynamic_")
    metric, _, convention = rest.partition("_")
    kind = "test" if rest == name else "dynamic test"
    return f"{kind}, {convention}" if convention else f"{kind} {METRIC_NAMES.get(metric, metric)}"


def _cells(row: Row, tested: Sequence[str], tried: int) -> list[str]:
    entry, config = row[0], row[0].config()
    shown = ("model.hidden_size", "model.lam", "model.eta", "optimizer.name", "optimizer.lr", "steps")
    settings = [f"H {config.model.hidden_size}", f"{config.optimizer.name} {config.optimizer.lr:g}"]
    changed = without_own_data(config, setting(entry))
    settings += [text for text in changed if text.partition("=")[0] not in shown]
    return [
        model_label(config.model),
        ", ".join(settings) + (f" (best of {tried} settings)" if tried > 1 else ""),
        f"{entry.parameters:,}",
        span([item.steps for item in row], "{:,}")
        + "".join(f" (diverged at {item.diverged:,})" for item in row if item.diverged),
        str(len(row)),
        *(
            with_best([item.final[name] for item in row], [best(item, name) for item in row], name)
            for name in score_names(entry).values()
        ),
        *(spread([item.test[name] for item in row if name in item.test], name) for name in tested),
        config.paper.text if config.paper and not place(row)[1] else "",
        code(_command(row)),
    ]


def _command(row: Row) -> str:
    command = re.sub(r" --seed \d+", "", row[0].command)
    seeds = sorted(entry.seed for entry in row)
    first = f" --seed {seeds[0]}" if seeds[0] else ""
    if len(row) == 1:
        return command + first
    consecutive = seeds == list(range(seeds[0], seeds[0] + len(seeds)))
    return f"{command}{first} --seeds {len(seeds)}" if consecutive else command


def runs_table(entries: Sequence[Entry]) -> Table:
    """Make a table with a line for every run."""
    header = ("recipe", "model", "changes", "seed", "validation", "test", "steps", "seconds", "hardware", "commit")
    rows = []
    for entry in entries:
        name, key = next(iter(score_names(entry).items()))
        cells = (
            entry.recipe,
            model_label(entry.config().model),
            ", ".join(without_own_data(entry.config(), entry.overrides)),
            str(entry.seed),
            f"{name} {spread([entry.final[key]], key)}",
            f"{name} {spread([entry.test[key]], key)}" if key in entry.test else "",
            f"{entry.steps:,}",
            f"{entry.wall_seconds:,.0f}",
            entry.hardware,
            entry.commit[:10],
            code(entry.command),
        )
        rows.append(cells)
    return Table((*header, "command"), rows)


Word = Literal["reproduced", "better", "not reproduced", "not comparable", "not run"]

TOLERANCE = {"accuracy": 0.01, "bpc": 0.01}
"""Largest difference from the paper's score that counts as the same: one point of accuracy, 0.01 bits."""
SOLVED, STUCK = 0.01, 0.9
"""Shares of the memoryless loss: copying is solved at or below the first, stuck at or above the second."""
ABOVE_PLATEAU = 0.05
"""Accuracy above the plateau of a bag of values at which a model has begun to learn recall."""

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
    """One printed number, our result, and whether the two agree."""

    recipe: str
    config: TrainConfig
    paper: Paper
    row: Row
    """Our runs, one per seed; empty if there are none."""
    values: list[float]
    """Scores of these runs."""
    tested: bool
    """Whether they are test scores, not the last validation."""
    word: Word

    @property
    def model(self) -> str:
        return model_label(self.config.model)

    @property
    def family(self) -> str | None:
        """Set of recipes that this recipe belongs to."""
        return _family(self.recipe)

    @property
    def source(self) -> str:
        """Kind of score: "test" or "validation"; empty without runs."""
        return "" if not self.row else "test" if self.tested else "validation"

    @property
    def ours(self) -> str:
        """Our number, formatted: mean and range over the seeds."""
        return spread(self.values, self.config.task.metric)

    @property
    def difference(self) -> str:
        """Our number less the paper's, formatted; empty if the paper prints none."""
        metric = self.config.task.metric
        if not self.values or self.paper.value is None or metric == "ratio" or self.word == "not comparable":
            return ""
        value = fmean(self.values) - self.paper.value
        return f"{100 * value:+.2f} points" if metric == "accuracy" else f"{value:+.4f}"

    @property
    def settings(self) -> str:
        """Differences from the recipe, formatted."""
        return ", ".join(changed_settings(self.row[0])) if self.row else ""


def verdicts(entries: Iterable[Entry], task: str | None = None) -> list[Verdict]:
    """Judge every number of the paper that has a recipe, in the order of the recipes.

    The verdict on the mean of a set, over the seeds that have every task, precedes those on its members.
    """
    entries = list(entries)
    rows: dict[str, list[Row]] = {}
    for name in dict.fromkeys(entry.task for entry in entries):
        for row in table_rows(entries, name):
            recipe = row[0].recipe
            # of the paper's preset, of its tuned form and of a task of a set only runs without overrides count
            strict = is_preset(recipe) or paper_preset(recipe) != recipe or _family(recipe) is not None
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
        config, tested, paper = members[0].config, all(item.tested for item in members), paper_family(family)
        assert paper is not None, "only recipes with a number of the paper are judged"
        found.insert(found.index(members[0]), _verdict(family, config, paper, row, values, tested))
    return found


def _verdict(recipe: str, config: TrainConfig, paper: Paper, row: Row, values: list[float], tested: bool) -> Verdict:
    word = judge(paper, config, fmean(values)) if values else "not run"
    return Verdict(recipe, config, paper, row, values, tested, word)


def _family(recipe: str) -> str | None:
    name = recipe.rpartition("-qa")[0]
    return name if name in FAMILIES else None


def condensed(found: Iterable[Verdict]) -> list[Verdict]:
    """Leave out the members of a set if none was run or none is comparable; the verdict on their mean remains."""
    kept = list(found)
    compared = {item.family for item in kept if item.word not in ("not run", "not comparable")}
    return [item for item in kept if item.family is None or item.family in compared]


def verdict_table(found: Iterable[Verdict]) -> Table:
    """Make a table of verdicts; a set without comparable members is one row, an empty column is left out."""
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
    """Compare one score with the paper's result, by ``RULE``."""
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
