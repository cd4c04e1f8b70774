"""The tables of bAbI: a row for each task, a column for each model."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from torchrum.lab.data.babi import NAMES, TASKS
from torchrum.lab.recipes import RECIPES
from torchrum.lab.recipes.babi import PAPER, SMALL_DATA, TABLE
from torchrum.lab.tasks.babi import SOLVED, Babi
from torchrum.lab.training.config import Paper
from torchrum.paper.ledger.cells import span, table_lines
from torchrum.paper.ledger.labels import model_label
from torchrum.paper.ledger.record import SAME
from torchrum.paper.ledger.schema import Entry
from torchrum.paper.ledger.texts import plain

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
    label: str = ""
    """The model, for a figure or a sentence."""
    joint: bool = False
    """Whether one model has learnt all tasks."""
    validation: float = 0.0
    """Best validation accuracy, the mean over its runs."""
    chosen: Mapping[int, float] = field(default_factory=dict)
    """By task, the score of the seed that was best on validation."""
    seconds: Mapping[int, float] = field(default_factory=dict)
    """Training time of all tasks together, by seed."""
    hardware: Mapping[int, str] = field(default_factory=dict)
    """What its runs were trained on, by seed."""

    def whole(self) -> list[float]:
        """The mean over the 20 tasks, of each seed that has them all."""
        return [fmean(found.values()) for found in self.scores.values() if len(found) == len(TASKS)]

    def mean(self, task: int) -> float | None:
        """The mean over the seeds that have a task."""
        values = [found[task] for found in self.scores.values() if task in found]
        return sum(values) / len(values) if values else None

    def average(self) -> str:
        """The mean over the tasks, and its range over the seeds that have them all."""
        if whole := self.whole():
            ends = span(whole, "{:.1%}")
            mean = f"{fmean(whole):.1%}"
            return percent(mean if mean == ends else f"{mean} ({ends})")
        known = [value for task in TASKS if (value := self.mean(task)) is not None]
        count = "1 task" if len(known) == 1 else f"{len(known)} tasks"
        return percent(f"{sum(known) / len(known):.1%} of {count}") if known else ""

    def best(self) -> str:
        """The mean over the tasks with the best seed of each, as validation has it; empty without a choice."""
        if len(self.scores) < 2 or len(self.chosen) < len(TASKS):
            return ""
        return percent(f"{fmean(self.chosen.values()):.1%}")

    def solved(self) -> str:
        """How many tasks have a mean of at least 95%."""
        return str(sum((value or 0) >= SOLVED for value in map(self.mean, TASKS)))

    def seeds(self) -> str:
        """Distinct seeds."""
        counts = [sum(task in found for found in self.scores.values()) for task in TASKS]
        return span([count for count in counts if count] or [0], "{}")

    def minutes(self) -> dict[str, str]:
        """Mean training time of the seeds that have all tasks, by hardware."""
        times: dict[str, list[float]] = defaultdict(list)
        for seed, seconds in self.seconds.items():
            if len(self.scores[seed]) == len(TASKS):
                times[self.hardware[seed]].append(seconds / 60)
        return {place: f"{fmean(found):.1f}" for place, found in times.items()}


def percent(text: str) -> str:
    """Percentages without their sign: the heading has it."""
    return text.replace("%", "")


def signed(column: "Column") -> str:
    """The average of a column with its sign: ``76.7% (75.7 to 77.5)``, or ``97.2% of 2 tasks``."""
    mean, space, rest = column.average().partition(" ")
    return f"{mean}%{space}{rest}"


def setting_words(change: str) -> str:
    """A changed setting in words, which break in a narrow heading: ``optimizer.clip=1.0`` is ``clip 1.0``."""
    name, _, value = change.partition("=")
    name = name.rpartition(".")[2].replace("_", " ")
    return name if value == "true" else f"no {name}" if value in ("", "false") else f"{name} {value}"


def babi_tables(entries: Iterable[Entry], best: bool = False) -> str:
    """The Markdown tables of the ledger: one model per task, then one model for all.

    With ``best`` each recipe, or set of them, has one column, which says of how many settings it is the best.
    """
    own = [entry for entry in entries if entry.task == "babi" and entry.test]
    single = [entry for entry in own if _task(entry).task is not None]
    joint = [entry for entry in own if _task(entry).task is None]
    parts = []
    for title, group in (("one model per task", single), ("one model for all tasks", joint)):
        if group:
            shown = _chosen(group) if best else columns(group)
            parts.append(f"**bAbI, {title}** (test accuracy in %)\n\n{babi_table(shown)}")
            parts += _notes(group)
    return "\n".join(parts) or "No run of babi is in the ledger yet.\n"


def _chosen(entries: Sequence[Entry]) -> list[Column]:
    tried = Counter(column.name for column in columns(_unchanged_tasks(entries)))
    return [
        replace(column, title=f"{column.title} (best of {tried[column.name]} settings)", paper=True)
        if tried[column.name] > 1
        else column
        for column in best_columns(entries)
    ]


def _settings(entry: Entry) -> tuple[str, ...]:
    """What a run has changed of its recipe, without what changes nothing of what it learns."""
    return tuple(text for text in entry.overrides if text.partition("=")[0] not in SAME or text.startswith("steps="))


def _notes(entries: Sequence[Entry]) -> list[str]:
    """What was noted about the runs of a table, and about which where it is not all, as a Markdown list."""
    every = {_name(entry): None for entry in entries}
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for entry in entries:
        for note in filter(None, entry.note.split("; ")):
            found[note][_name(entry)] = None
    lines = []
    for note, names in found.items():
        text = plain(note[0].upper() + note[1:])
        where = "" if names == every else f"{', '.join(f'`{name}`' for name in names)}: "
        lines.append(f"- {where}{text}" + ("" if text.endswith(".") else "."))
    return ["\n".join([*lines, ""])] if lines else []


def _name(entry: Entry) -> str:
    """The recipe, or the set that it is a task of."""
    return entry.recipe if _task(entry).task is None else entry.recipe.rpartition("-qa")[0]


def _task(entry: Entry) -> Babi:
    task = entry.config().task
    assert isinstance(task, Babi)
    return task


def columns(entries: Sequence[Entry]) -> list[Column]:
    """A column for each setting, in the order of the recipes; seeds of one setting share it, each counted once."""
    order = {name: number for number, name in enumerate(RECIPES)}
    groups: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: (order[entry.recipe], _settings(entry), entry.seed)):
        groups[_name(entry), *_settings(entry)].append(entry)
    found: list[Column] = []
    for (name, *changed), group in groups.items():
        first = group[0].own_problem and not any(column.paper and column.name == name for column in found)
        found.append(_column(name, changed, group, paper=first))
    return found


def _column(name: str, changed: Sequence[str], entries: Sequence[Entry], paper: bool) -> Column:
    scores: dict[int, dict[int, float]] = defaultdict(dict)
    seconds: dict[int, float] = defaultdict(float)
    places: dict[int, set[str]] = defaultdict(set)
    joint = _task(entries[0]).task is None
    highest: dict[int, float] = {}
    chosen: dict[int, float] = {}
    for entry in entries:  # in the order of their seeds
        task = _task(entry).task
        each = {task: entry.test["accuracy"]} if task else {number: entry.test[f"task{number:02d}"] for number in TASKS}
        scores[entry.seed] |= each
        for number, score in each.items():
            if _validation(entry) > highest.get(number, -1.0):  # of equal ones the first
                highest[number], chosen[number] = _validation(entry), score
        seconds[entry.seed] += entry.wall_seconds
        places[entry.seed].add(entry.hardware)
    label = model_label(entries[0].config().model)
    return Column(
        name,
        ", ".join([f"{label} `{name}`", *(plain(setting_words(text)) for text in changed)]),
        scores,
        paper=paper,
        label=label,
        joint=joint,
        validation=fmean(map(_validation, entries)),
        chosen=chosen,
        seconds=seconds,
        hardware={seed: " and ".join(sorted(found)) for seed, found in places.items()},
    )


def _validation(entry: Entry) -> float:
    return max(entry.curve["accuracy"])


def best_columns(entries: Iterable[Entry]) -> list[Column]:
    """Of each recipe or set the setting with the most tasks, then seeds, then the best validation accuracy.

    Only tested runs of the recipes' own problem count. Labels that would be the same are told apart by the recipe.
    """
    best: dict[str, Column] = {}
    for column in columns(_unchanged_tasks(entries)):
        kept = best.get(column.name)
        if kept is None or _rank(column) < _rank(kept):
            best[column.name] = column
    counts = Counter((column.label, column.joint) for column in best.values())
    return [
        replace(column, label=f"{column.label} ({column.name.removeprefix('babi-').removeprefix('joint-')})")
        if counts[column.label, column.joint] > 1
        else column
        for column in best.values()
    ]


def _unchanged_tasks(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.task == "babi" and entry.test and entry.own_problem]


def _rank(column: Column) -> tuple[int, int, float]:
    return -max(len(found) for found in column.scores.values()), -len(column.scores), -column.validation


def paper_column(name: str) -> tuple[float, ...]:
    """The paper's accuracies for a set of recipes, in percent; empty if it has none."""
    return PAPER.get(name.removeprefix("babi-"), ())


def paper_mean(family: str) -> str:
    """The paper's mean over the tasks for a set of recipes; empty if it has none."""
    values = paper_column(family)
    return f"{fmean(values):.1f}% on average" if values else ""


def paper_family(family: str) -> Paper:
    """The paper's mean over the tasks for a set of recipes that it has."""
    small = " (1k)" if family.removeprefix("babi-") in SMALL_DATA else ""
    return Paper(text=paper_mean(family) + small, where=TABLE, value=fmean(paper_column(family)) / 100)


def family_headlines(entries: Iterable[Entry], brief: bool = False) -> dict[str, str]:
    """Our mean over the tasks for each set of recipes, with its own settings; ``brief`` without range and seeds."""
    single = [entry for entry in entries if "-qa" in entry.recipe and entry.test and not _settings(entry)]
    if brief:
        return {column.name: signed(column).partition(" (")[0] for column in columns(single)}
    return {column.name: f"test accuracy {signed(column)}, seeds: {column.seeds()}" for column in columns(single)}


def babi_table(columns: Sequence[Column], tasks: Sequence[int] = TASKS) -> str:
    """A Markdown table: a row for each of some tasks, then, in bold, the means, the tasks solved, seeds and cost."""
    header, rows = ["task"], [[f"{task} {NAMES[task - 1].replace('-', ' ')}"] for task in tasks]
    ends = [["**mean**"], ["**mean, best seed by validation**"], ["**solved (95% or more)**"], ["**seeds**"]]
    places = Counter(place for column in columns for place in column.minutes())
    usual = max(places, key=places.__getitem__, default="")
    costs = [f"**minutes of training per seed{usual and f' ({usual})'}**"]
    for column in columns:
        if column.paper and paper_column(column.name):
            values = [paper_column(column.name)[task - 1] for task in tasks]
            header.append("paper, 1k" if column.name.removeprefix("babi-") in SMALL_DATA else "paper")
            paper = [f"{value:g}" for value in values]
            totals = [f"{sum(values) / len(values):.1f}", "", str(sum(value >= 100 * SOLVED for value in values)), ""]
            for row, cell in zip((*rows, *ends, costs), (*paper, *totals, ""), strict=True):
                row.append(cell)
        header.append(column.title)
        means = [column.mean(task) for task in tasks]
        ours = [percent(f"{value:.1%}") if value is not None else "" for value in means]
        totals = [column.average(), column.best(), column.solved(), column.seeds()]
        times = sorted(column.minutes().items(), key=lambda item: item[0] != usual)
        totals.append(", ".join(time if place == usual else f"{time} ({place})" for place, time in times))
        for row, cell in zip((*rows, *ends, costs), (*ours, *totals), strict=True):
            row.append(cell)
    ends = [cells for cells in (*ends, costs) if any(cells[1:])]
    return "\n".join([*table_lines(header, [*rows, *ends]), ""])
