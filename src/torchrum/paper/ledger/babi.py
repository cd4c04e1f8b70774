"""The tables of bAbI: a row for each task, a column for each model."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from torchrum.lab.data.babi import NAMES, TASKS
from torchrum.lab.recipes import RECIPES
from torchrum.lab.recipes.babi import PAPER, SMALL_DATA, TABLE
from torchrum.lab.tables import Table, span
from torchrum.lab.tasks.babi import SOLVED, Babi
from torchrum.lab.training.config import Paper
from torchrum.paper.ledger.entries import SAME, Entry
from torchrum.paper.ledger.runs import model_label

REGENERATED = "training text is partly regenerated"
"""Part of the note of runs on text that is not the official one."""

Scores = Mapping[int, Mapping[int, float]]  # seed -> task -> accuracy


@dataclass(frozen=True)
class Column:
    """The test accuracy of one model in one setting."""

    name: str
    """Name of the recipe, or of the set of recipes."""
    title: str
    scores: Scores
    """Test accuracy by seed and task."""
    paper: bool = False
    """Whether the paper's column precedes it."""
    label: str = ""
    """The model, for a figure or a sentence."""
    entries: Sequence[Entry] = ()
    """Runs, in the order of their seeds."""

    @property
    def joint(self) -> bool:
        """Whether one model learnt all tasks."""
        return bool(self.entries) and _task(self.entries[0]).task is None

    @property
    def validation(self) -> float:
        """Best validation accuracy, the mean over the runs."""
        return fmean(max(entry.curve["accuracy"]) for entry in self.entries)

    def whole(self) -> list[float]:
        """Compute the mean over the 20 tasks for each seed that has all of them."""
        return [fmean(found.values()) for found in self.scores.values() if len(found) == len(TASKS)]

    def of_task(self, task: int) -> list[float]:
        """Return the scores in a task, one for each seed that has it."""
        return [found[task] for found in self.scores.values() if task in found]

    def average(self, sign: str = "") -> str:
        """Format the mean over the tasks in percent, and its range over the seeds that have all of them."""
        if whole := self.whole():
            mean, ends = percent(fmean(whole)), span([100 * value for value in whole], "{:.1f}")
            return mean + sign + (f" ({ends})" if mean != ends else "")
        known = [fmean(values) for task in TASKS if (values := self.of_task(task))]
        return f"{percent(fmean(known))}{sign} of {len(known)} task{'s' * (len(known) > 1)}" if known else ""

    def best(self) -> str:
        """Format the mean over the tasks, each with its best seed on validation; empty if there is one seed."""
        chosen: dict[int, Entry] = {}
        for entry in self.entries:
            for task in _scores(entry):
                if task not in chosen or max(entry.curve["accuracy"]) > max(chosen[task].curve["accuracy"]):
                    chosen[task] = entry  # the first of equal ones
        if len(self.scores) < 2 or len(chosen) < len(TASKS):
            return ""
        return percent(fmean(_scores(entry)[task] for task, entry in chosen.items()))

    def minutes(self) -> dict[str, str]:
        """Format the mean training time of the seeds that have all tasks, by hardware."""
        times: dict[str, list[float]] = defaultdict(list)
        for seed, found in self.scores.items():
            runs = [entry for entry in self.entries if entry.seed == seed]
            if runs and len(found) == len(TASKS):
                place = " and ".join(sorted({entry.hardware for entry in runs}))
                times[place].append(sum(entry.wall_seconds for entry in runs) / 60)
        return {place: f"{fmean(found):.1f}" for place, found in times.items()}

    def cells(self, tasks: Sequence[int], usual: str) -> list[str]:
        """Format the cells of a table: tasks, mean, best seed, tasks solved, seeds, minutes (on ``usual`` hardware)."""
        means = {task: fmean(values) for task in TASKS if (values := self.of_task(task))}
        ours = [percent(means[task]) if task in means else "" for task in tasks]
        solved = str(sum(value >= SOLVED for value in means.values()))
        seeds = span([len(self.of_task(task)) for task in means] or [0], "{}")
        times = sorted(self.minutes().items(), key=lambda item: item[0] != usual)
        minutes = ", ".join(time if place == usual else f"{time} ({place})" for place, time in times)
        return [*ours, self.average(), self.best(), solved, seeds, minutes]


def percent(share: float) -> str:
    """Format a share in percent, without the sign: the heading has it."""
    return f"{100 * share:.1f}"


def setting_words(change: str) -> str:
    """Describe a changed setting in words that fit a narrow heading: ``optimizer.clip=1.0`` is ``clip 1.0``."""
    name, _, value = change.partition("=")
    name = name.rpartition(".")[2].replace("_", " ")
    return name if value == "true" else f"no {name}" if value in ("", "false") else f"{name} {value}"


def babi_tables(entries: Iterable[Entry], best: bool = False) -> list[Table]:
    """Make the tables of the ledger: one model per task, then one model for all.

    With ``best`` each recipe, or set of recipes, has one column, which names the number of settings tried.
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
    """List the overrides of a run that change what it learns."""
    return tuple(text for text in entry.overrides if text.partition("=")[0] not in SAME or text.startswith("steps="))


def _notes(entries: Sequence[Entry]) -> list[str]:
    """Gather the notes of the runs of a table; name the recipes if a note is not about all of them."""
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
    """Name the recipe, or the set that it belongs to."""
    return entry.recipe if _task(entry).task is None else entry.recipe.rpartition("-qa")[0]


def _task(entry: Entry) -> Babi:
    task = entry.config().task
    assert isinstance(task, Babi)
    return task


def columns(entries: Iterable[Entry]) -> list[Column]:
    """Make a column for each setting, in the order of the recipes; the seeds of one setting share it."""
    order = {name: number for number, name in enumerate(RECIPES)}
    groups: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: (order[entry.recipe], _settings(entry), entry.seed)):
        groups[_name(entry), *_settings(entry)].append(entry)
    found: list[Column] = []
    for (name, *changed), group in groups.items():
        scores: dict[int, dict[int, float]] = defaultdict(dict)
        for entry in group:
            scores[entry.seed] |= _scores(entry)
        label = model_label(group[0].config().model)
        title = ", ".join([f"{label} `{name}`", *map(setting_words, changed)])
        first = group[0].own_problem and not any(column.paper and column.name == name for column in found)
        found.append(Column(name, title, scores, first, label, group))
    return found


def _scores(entry: Entry) -> dict[int, float]:
    """Return the test accuracy of a run, by task."""
    task = _task(entry).task
    return {task: entry.test["accuracy"]} if task else {number: entry.test[f"task{number:02d}"] for number in TASKS}


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


def paper_family(family: str) -> Paper | None:
    """Return the paper's mean over the tasks for a set of recipes, if it has one."""
    if not (values := paper_column(family)):
        return None
    small = " (1k)" if family.removeprefix("babi-") in SMALL_DATA else ""
    return Paper(text=f"{fmean(values):.1f}% on average{small}", where=TABLE, value=fmean(values) / 100)


def family_headlines(entries: Iterable[Entry]) -> dict[str, str]:
    """Format our mean over the tasks for each set of recipes without overrides."""
    single = [entry for entry in entries if "-qa" in entry.recipe and entry.test and not _settings(entry)]
    return {column.name: column.average("%") for column in columns(single)}


def babi_table(columns: Sequence[Column], tasks: Sequence[int] = TASKS) -> Table:
    """Make a table with a row for each of some tasks, then, in bold, the means, the tasks solved, seeds and cost."""
    places = Counter(place for column in columns for place in column.minutes())
    usual = max(places, key=places.__getitem__, default="")
    ends = ["mean", "mean, best seed by validation", "solved (95% or more)", "seeds"]
    ends.append(f"minutes of training per seed{usual and f' ({usual})'}")
    rows = [[f"{task} {NAMES[task - 1].replace('-', ' ')}"] for task in tasks] + [[f"**{end}**"] for end in ends]
    header = ["task"]
    for column in columns:
        printed = paper_column(column.name) if column.paper else ()
        if printed:
            header.append("paper, 1k" if column.name.removeprefix("babi-") in SMALL_DATA else "paper")
            values = [printed[task - 1] for task in tasks]
            solved = sum(value >= 100 * SOLVED for value in values)
            cells = [*(f"{value:g}" for value in values), f"{fmean(values):.1f}", "", str(solved), "", ""]
            for row, cell in zip(rows, cells, strict=True):
                row.append(cell)
        header.append(column.title)
        for row, cell in zip(rows, column.cells(tasks, usual), strict=True):
            row.append(cell)
    return Table(header, [row for row in rows if any(row[1:])])


def trained_table(family: str, tasks: Iterable[int], scores: Scores, provenance: Iterable[str]) -> Table:
    """Make the table of a set of recipes that has just been trained, with the paper's column beside it.

    Args:
        family: name of the set.
        tasks: numbers of the trained tasks.
        scores: test accuracy by seed and task; a run that diverged has none.
        provenance: remarks on the data.
    """
    seeds = f"seed{'s' * (len(scores) > 1)} {', '.join(map(str, sorted(scores)))}"
    rule = "the checkpoint that was best on validation, of equal ones the earliest"
    notes = [f"Test accuracy in % of {rule}; {seeds}.", *map(sentence, sorted(set(provenance) - {""}))]
    return replace(babi_table([Column(family, family, scores, paper=True)], sorted(set(tasks))), notes=notes)
