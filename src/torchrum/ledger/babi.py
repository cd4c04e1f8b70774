"""The tables of bAbI: a row for each task, a column for each model."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchrum.data.babi import NAMES, TASKS
from torchrum.ledger.labels import model_label
from torchrum.ledger.schema import Entry
from torchrum.ledger.table import line, span
from torchrum.ledger.texts import plain
from torchrum.recipes import RECIPES
from torchrum.recipes.babi import PAPER, SMALL_DATA
from torchrum.tasks.babi import SOLVED, Babi

Scores = Mapping[int, Mapping[int, float]]  # seed -> task -> accuracy


@dataclass(frozen=True)
class Column:
    """The test accuracy of one model in one setting."""

    name: str
    """The recipe, or the set of them."""
    title: str
    scores: Scores
    """By seed and task."""
    paper: bool = False
    """Whether the paper's column is to stand before it."""

    def mean(self, task: int) -> float | None:
        """The mean over the seeds that have a task."""
        values = [found[task] for found in self.scores.values() if task in found]
        return sum(values) / len(values) if values else None

    def average(self) -> str:
        """The mean over the tasks, and its range over the seeds that have them all."""
        whole = [sum(found.values()) / len(found) for found in self.scores.values() if len(found) == len(TASKS)]
        if whole:
            ends = span(whole, "{:.1%}")
            mean = f"{sum(whole) / len(whole):.1%}"
            return percent(mean if mean == ends else f"{mean} ({ends})")
        known = [value for task in TASKS if (value := self.mean(task)) is not None]
        return percent(f"{sum(known) / len(known):.1%} of {len(known)} tasks") if known else ""

    def solved(self) -> str:
        """How many tasks have a mean of at least 95 %."""
        return str(sum((value or 0) >= SOLVED for value in map(self.mean, TASKS)))

    def seeds(self) -> str:
        """Distinct seeds."""
        counts = [sum(task in found for found in self.scores.values()) for task in TASKS]
        return span([count for count in counts if count] or [0], "{}")


def percent(text: str) -> str:
    """Percentages without their sign: the heading has it."""
    return text.replace("%", "")


def babi_tables(entries: Iterable[Entry]) -> str:
    """The Markdown tables of the ledger: one model per task, then one model for all."""
    own = [entry for entry in entries if entry.task == "babi" and entry.test]
    single = [entry for entry in own if _task(entry).task is not None]
    joint = [entry for entry in own if _task(entry).task is None]
    parts = []
    for title, group in (("one model per task", single), ("one model for all tasks", joint)):
        if group:
            parts.append(f"**bAbI, {title}** (test accuracy in %)\n\n{babi_table(columns(group))}")
            parts += [f"{plain(note)}\n" for note in dict.fromkeys(entry.note for entry in group if entry.note)]
    return "\n".join(parts) or "No run of babi is in the ledger yet.\n"


def _task(entry: Entry) -> Babi:
    task = entry.config().task
    assert isinstance(task, Babi)
    return task


def columns(entries: Sequence[Entry]) -> list[Column]:
    """A column for each setting, in the order of the recipes; seeds of one setting share it."""
    order = {name: number for number, name in enumerate(RECIPES)}
    found: dict[tuple[str, ...], dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    titles: dict[tuple[str, ...], str] = {}
    for entry in sorted(entries, key=lambda entry: (order[entry.recipe], entry.overrides, entry.seed)):
        config, task = entry.config(), _task(entry).task
        name = entry.recipe if task is None else entry.recipe.rpartition("-qa")[0]
        setting = (name, *entry.overrides)
        titles[setting] = ", ".join([f"{model_label(config.model)} `{name}`", *map(plain, entry.overrides)])
        each = {task: entry.test["accuracy"]} if task else {number: entry.test[f"task{number:02d}"] for number in TASKS}
        found[setting][entry.seed] |= each
    return [Column(key[0], titles[key], scores, paper=len(key) == 1) for key, scores in found.items()]


def paper_column(name: str) -> tuple[float, ...]:
    """The paper's accuracies for a set of recipes, in percent; empty if it has none."""
    return PAPER.get(name.removeprefix("babi-"), ())


def paper_mean(family: str) -> str:
    """The paper's mean over the tasks for a set of recipes; empty if it has none."""
    values = paper_column(family)
    return f"{sum(values) / len(values):.1f} % on average" if values else ""


def family_headlines(entries: Iterable[Entry], brief: bool = False) -> dict[str, str]:
    """Our mean over the tasks for each set of recipes, with its own settings; ``brief`` without range and seeds."""
    single = [entry for entry in entries if "-qa" in entry.recipe and entry.test and not entry.overrides]
    if brief:
        return {column.name: f"{column.average().partition(' (')[0]} %" for column in columns(single)}
    return {column.name: f"test accuracy {column.average()} %, seeds: {column.seeds()}" for column in columns(single)}


def babi_table(columns: Sequence[Column], tasks: Sequence[int] = TASKS) -> str:
    """A Markdown table: a row for each of some tasks, then the mean, the tasks solved and the seeds."""
    header, rows = ["task"], [[f"{task} {NAMES[task - 1].replace('-', ' ')}"] for task in tasks]
    ends = [["mean"], ["solved (>= 95 %)"], ["seeds"]]
    for column in columns:
        if column.paper and paper_column(column.name):
            values = [paper_column(column.name)[task - 1] for task in tasks]
            header.append("paper, 1k" if column.name.removeprefix("babi-") in SMALL_DATA else "paper")
            paper = [f"{value:g}" for value in values]
            totals = [f"{sum(values) / len(values):.1f}", str(sum(value >= 100 * SOLVED for value in values)), ""]
            for row, cell in zip((*rows, *ends), (*paper, *totals), strict=True):
                row.append(cell)
        header.append(column.title)
        means = [column.mean(task) for task in tasks]
        ours = [percent(f"{value:.1%}") if value is not None else "" for value in means]
        for row, cell in zip((*rows, *ends), (*ours, column.average(), column.solved(), column.seeds()), strict=True):
            row.append(cell)
    return "\n".join(line(cells) for cells in (header, ["---"] * len(header), *rows, *ends)) + "\n"
