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
from torchrum.paper.ledger.record import SAME
from torchrum.paper.ledger.runs import model_label
from torchrum.paper.ledger.schema import Entry
from torchrum.paper.table import Table, span

REGENERATED = "training text is partly regenerated"
"""Part of the note of runs on text that is not the official one."""

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
    """Whether the paper's column comes before it."""
    label: str = ""
    """The model, for a figure or a sentence."""
    joint: bool = False
    """Whether one model learnt all tasks."""
    validation: float = 0.0
    """Best validation accuracy, the mean over its runs."""
    chosen: Mapping[int, float] = field(default_factory=dict)
    """Score of the seed that was best on validation, by task."""
    seconds: Mapping[int, float] = field(default_factory=dict)
    """Training time of all tasks together, by seed."""
    steps: Sequence[int] = ()
    """Steps of its runs."""
    hardware: Mapping[int, str] = field(default_factory=dict)
    """Hardware of its runs, by seed."""

    def whole(self) -> list[float]:
        """Mean over the 20 tasks, for each seed that has them all."""
        return [fmean(found.values()) for found in self.scores.values() if len(found) == len(TASKS)]

    def mean(self, task: int) -> float | None:
        """Mean over the seeds that have a task."""
        values = [found[task] for found in self.scores.values() if task in found]
        return sum(values) / len(values) if values else None

    def average(self) -> str:
        """Format the mean over the tasks, and its range over the seeds that have them all."""
        if whole := self.whole():
            ends = span(whole, "{:.1%}")
            mean = f"{fmean(whole):.1%}"
            return percent(mean if mean == ends else f"{mean} ({ends})")
        known = [value for task in TASKS if (value := self.mean(task)) is not None]
        count = "1 task" if len(known) == 1 else f"{len(known)} tasks"
        return percent(f"{sum(known) / len(known):.1%} of {count}") if known else ""

    def best(self) -> str:
        """Format the mean over the tasks, each with the seed that was best on validation; empty without a choice."""
        if len(self.scores) < 2 or len(self.chosen) < len(TASKS):
            return ""
        return percent(f"{fmean(self.chosen.values()):.1%}")

    def solved(self) -> str:
        """Number of tasks with a mean of at least 95%."""
        return str(sum((value or 0) >= SOLVED for value in map(self.mean, TASKS)))

    def seeds(self) -> str:
        """Number of distinct seeds."""
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
    """Drop the percent signs: the heading has one."""
    return text.replace("%", "")


def signed(column: "Column") -> str:
    """Format the average of a column with its sign: ``76.7% (75.7 to 77.5)``, or ``97.2% of 2 tasks``."""
    mean, space, rest = column.average().partition(" ")
    return f"{mean}%{space}{rest}"


def setting_words(change: str) -> str:
    """Describe a changed setting in words that fit a narrow heading: ``optimizer.clip=1.0`` is ``clip 1.0``."""
    name, _, value = change.partition("=")
    name = name.rpartition(".")[2].replace("_", " ")
    return name if value == "true" else f"no {name}" if value in ("", "false") else f"{name} {value}"


def babi_tables(entries: Iterable[Entry], best: bool = False) -> list[Table]:
    """Make the tables of the ledger: one model per task, then one model for all.

    With ``best`` each recipe, or set of them, has one column, which says of how many settings it is the best.
    """
    own = [entry for entry in entries if entry.task == "babi" and entry.test]
    single = [entry for entry in own if _task(entry).task is not None]
    joint = [entry for entry in own if _task(entry).task is None]
    tables = []
    for title, group in (("one model per task", single), ("one model for all tasks", joint)):
        if group:
            table = babi_table(_chosen(group) if best else columns(group))
            title = f"**bAbI, {title}** (test accuracy in %)"
            tables.append(replace(table, title=title, notes=_notes(group)))
    return tables


def _chosen(entries: Sequence[Entry]) -> list[Column]:
    tried = Counter(column.name for column in columns(_unchanged_tasks(entries)))
    return [
        replace(column, title=f"{column.title} (best of {tried[column.name]} settings)", paper=True)
        if tried[column.name] > 1
        else column
        for column in best_columns(entries)
    ]


def _settings(entry: Entry) -> tuple[str, ...]:
    """Overrides of a run that change what it learns."""
    return tuple(text for text in entry.overrides if text.partition("=")[0] not in SAME or text.startswith("steps="))


def _notes(entries: Sequence[Entry]) -> list[str]:
    """Gather the notes of the runs of a table; name the recipes where a note is not about all of them."""
    every = {_name(entry): None for entry in entries}
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for entry in entries:
        for note in filter(None, entry.note.split("; ")):
            found[note][_name(entry)] = None
    lines = []
    for note, names in found.items():
        where = "" if names == every else f"{', '.join(f'`{name}`' for name in names)}: "
        lines.append(where + sentence(note))
    return lines


def sentence(note: str) -> str:
    """Begin a note with a capital letter and end it with a full stop."""
    return note[0].upper() + note[1:] + ("" if note.endswith(".") else ".")


def _name(entry: Entry) -> str:
    """Name of the recipe, or of the set that it belongs to."""
    return entry.recipe if _task(entry).task is None else entry.recipe.rpartition("-qa")[0]


def _task(entry: Entry) -> Babi:
    task = entry.config().task
    assert isinstance(task, Babi)
    return task


def columns(entries: Sequence[Entry]) -> list[Column]:
    """Make a column for each setting, in the order of the recipes; the seeds of one setting share it."""
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
        ", ".join([f"{label} `{name}`", *map(setting_words, changed)]),
        scores,
        paper=paper,
        label=label,
        joint=joint,
        validation=fmean(map(_validation, entries)),
        chosen=chosen,
        seconds=seconds,
        steps=[entry.steps for entry in entries],
        hardware={seed: " and ".join(sorted(found)) for seed, found in places.items()},
    )


def _validation(entry: Entry) -> float:
    return max(entry.curve["accuracy"])


def best_columns(entries: Iterable[Entry]) -> list[Column]:
    """Choose the setting of each recipe or set with the most tasks, then seeds, then the best validation accuracy.

    Only tested runs of the recipes' own problem count. Equal labels get the name of their recipe.
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
    """Return the paper's accuracies for a set of recipes, in percent; empty if it has none."""
    return PAPER.get(name.removeprefix("babi-"), ())


def paper_mean(family: str) -> str:
    """Format the paper's mean over the tasks for a set of recipes; empty if it has none."""
    values = paper_column(family)
    return f"{fmean(values):.1f}% on average" if values else ""


def paper_family(family: str) -> Paper:
    """Return the paper's mean over the tasks for a set of recipes that it has."""
    small = " (1k)" if family.removeprefix("babi-") in SMALL_DATA else ""
    return Paper(text=paper_mean(family) + small, where=TABLE, value=fmean(paper_column(family)) / 100)


def family_headlines(entries: Iterable[Entry], brief: bool = False) -> dict[str, str]:
    """Format our mean over the tasks for each set of recipes as it is; ``brief`` without range and seeds."""
    single = [entry for entry in entries if "-qa" in entry.recipe and entry.test and not _settings(entry)]
    if brief:
        return {column.name: signed(column).partition(" (")[0] for column in columns(single)}
    return {column.name: f"test accuracy {signed(column)}, seeds: {column.seeds()}" for column in columns(single)}


def babi_table(columns: Sequence[Column], tasks: Sequence[int] = TASKS) -> Table:
    """Make a table with a row for each of some tasks, then, in bold, the means, the tasks solved, seeds and cost."""
    header, rows = ["task"], [[f"{task} {NAMES[task - 1].replace('-', ' ')}"] for task in tasks]
    ends = [["**mean**"], ["**mean, best seed by validation**"], ["**solved (95% or more)**"], ["**seeds**"]]
    places = Counter(place for column in columns for place in column.minutes())
    usual = max(places, key=places.__getitem__, default="")
    ends.append([f"**minutes of training per seed{usual and f' ({usual})'}**"])

    def add(title: str, cells: Sequence[str]) -> None:
        header.append(title)
        for row, cell in zip((*rows, *ends), cells, strict=True):
            row.append(cell)

    for column in columns:
        if column.paper and paper_column(column.name):
            values = [paper_column(column.name)[task - 1] for task in tasks]
            solved = str(sum(value >= 100 * SOLVED for value in values))
            title = "paper, 1k" if column.name.removeprefix("babi-") in SMALL_DATA else "paper"
            add(title, [*(f"{value:g}" for value in values), f"{fmean(values):.1f}", "", solved, "", ""])
        means = [column.mean(task) for task in tasks]
        ours = [percent(f"{value:.1%}") if value is not None else "" for value in means]
        times = sorted(column.minutes().items(), key=lambda item: item[0] != usual)
        minutes = ", ".join(time if place == usual else f"{time} ({place})" for place, time in times)
        add(column.title, [*ours, column.average(), column.best(), column.solved(), column.seeds(), minutes])
    return Table(header, [*rows, *(cells for cells in ends if any(cells[1:]))])


def trained_table(family: str, tasks: Iterable[int], scores: Scores, provenance: Iterable[str]) -> Table:
    """Make the table of a set of recipes that has just been trained, with the paper's column beside it.

    Args:
        family: name of the set.
        tasks: those that were trained.
        scores: test accuracy by seed and task; a run that diverged has none.
        provenance: what is unusual about the data.
    """
    seeds = f"seed{'s' * (len(scores) > 1)} {', '.join(map(str, sorted(scores)))}"
    rule = "the checkpoint that was best on validation, of equal ones the earliest"
    notes = [f"Test accuracy in % of {rule}; {seeds}.", *map(sentence, sorted(set(provenance) - {""}))]
    return replace(babi_table([Column(family, family, scores, paper=True)], sorted(set(tasks))), notes=notes)
