"""Tables of the ledger in Markdown."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from torchrum.lab.recipes import PAPER_ONLY, RECIPES, paper_preset
from torchrum.paper.ledger.babi import babi_tables, family_headlines
from torchrum.paper.ledger.cells import span, spread, table_lines, with_best
from torchrum.paper.ledger.curves import best
from torchrum.paper.ledger.labels import model_label
from torchrum.paper.ledger.record import SAME, changes, without_own_data
from torchrum.paper.ledger.schema import Entry, read_ledger
from torchrum.paper.ledger.texts import code, plain

Row = list[Entry]

TITLES = {"char": "character language modelling"}
"""What a table calls its task, where that is not its name."""
METRIC_NAMES = {"ratio": "loss / baseline", "accuracy": "accuracy", "bpc": "bits per character"}
"""What a table calls a task's metric."""


def table(entries: Iterable[Entry], task: str, budget: int | None = None) -> str:
    """The Markdown tables of one task, one for each size of it.

    Seeds of one setting share a row: the mean and, where there are several, the range of the last validation.

    Args:
        entries: the ledger.
        task: its name.
        budget: show of each model only the setting with the best final loss within this many steps and, where it ran
            longer, the best one beyond; it says of how many settings.
    """
    if task == "babi":
        return babi_tables(entries, best=budget is not None)
    rows = table_rows(entries, task)
    tried = settings_tried(rows) if budget is not None else {}
    if budget is not None:
        within, beyond = ([row for row in rows if (_steps(row) > budget) is over] for over in (False, True))
        chosen = {id(row) for row in (*best_settings(within), *best_settings(beyond))}
        rows = [row for row in rows if id(row) in chosen]
    parts = [_size_table(task, list(rows), tried) for _, rows in groupby(rows, place)]
    return "\n".join(parts) or f"No run of {task} is in the ledger yet.\n"


def table_rows(entries: Iterable[Entry], task: str) -> list[Row]:
    """Entries of one task, seeds of one setting together: by size, then in the order of the recipes."""
    groups: dict[tuple[str, ...], Row] = defaultdict(list)
    for entry in entries:
        if entry.task == task:
            groups[entry.recipe, *entry.overrides].append(entry)
    order = {name: number for number, name in enumerate(RECIPES)}
    return sorted(groups.values(), key=lambda row: (*place(row), order[row[0].recipe], row[0].overrides))


def best_settings(rows: Iterable[Row]) -> list[Row]:
    """Of several settings of one model on one problem, the one with the best final loss."""
    lowest: dict[tuple[object, ...], Row] = {}
    for row in rows:
        which = model_and_place(row)
        if which not in lowest or _loss(row) < _loss(lowest[which]):
            lowest[which] = row
    return list(lowest.values())


def settings_tried(rows: Iterable[Row]) -> dict[tuple[object, ...], int]:
    """How many settings each model was given on each problem; the length of a run is none."""
    found: dict[tuple[object, ...], set[tuple[str, ...]]] = defaultdict(set)
    for row in rows:
        found[model_and_place(row)].add(setting(row[0]))
    return {which: len(settings) for which, settings in found.items()}


def is_recipe(entry: Entry) -> bool:
    """Whether a run has the settings that its recipe has today; its length may be another."""
    return not changed_settings(entry)


def changed_settings(entry: Entry) -> list[str]:
    """Where a run differs from its recipe as it is today, as ``field=value``; its length is no difference."""
    if all(text.partition("=")[0] in SAME for text in entry.overrides):
        return []  # as most have: no need to compare two configs
    return [text for text in changes(entry.config()) if text.partition("=")[0] not in SAME]


def setting(entry: Entry) -> tuple[str, ...]:
    """Where a run differs from its recipe as the paper has it, as ``field=value``; its length is no difference."""
    found = changes(entry.config(), paper_preset(entry.recipe, RECIPES))
    return tuple(text for text in found if text.partition("=")[0] not in SAME)


def model_and_place(row: Row) -> tuple[object, ...]:
    """What a row is a setting of: the model, and the problem."""
    size, changes = place(row)
    return size, *changes, model_label(row[0].config().model)


def _steps(row: Row) -> int:
    return max(entry.steps for entry in row)


def _loss(row: Row) -> float:
    return sum(entry.final["loss"] for entry in row) / len(row)


def place(row: Row) -> tuple[int, list[str]]:
    """The table that a row belongs to: the size in its recipe's name, 0 if none, and what made it another problem."""
    entry = row[0]
    match = re.search(r"-t(\d+)$", entry.recipe)
    same = entry.config().task.baseline() == RECIPES[entry.recipe]().task.baseline()
    changes = [] if same else [text for text in entry.overrides if text.startswith("task.")]
    if own := entry.config().task.own_data:
        digest = next((text.partition("=")[2] for text in entry.overrides if text.startswith("task.sha256=")), "")
        changes = [f"{own} (sha256 {digest[:8]})"]  # how it is cut into lanes is a setting
    return int(match[1]) if match else 0, changes


def _size_table(task: str, rows: Sequence[Row], tried: Mapping[tuple[object, ...], int]) -> str:
    size, changes = place(rows[0])
    problem = rows[0][0].config().task
    scores = score_names(rows[0][0])
    title = f"**{', '.join([TITLES.get(task, task), *([f'T = {size}'] if size else []), *map(plain, changes)])}**"
    tested = [_test_title(name) for name in _test_names(rows)]
    names = [METRIC_NAMES.get(name, name) for name in scores]
    header = ("model", "settings", "parameters", "steps", "seeds", *names, *tested, "paper", "command")
    lines = [f"{title} (validation; loss of the baseline {problem.baseline():.4f})", ""]
    paper_only = {} if changes else PAPER_ONLY.get((task, size or None), {})
    cells = [_cells(row, _test_names(rows), tried.get(model_and_place(row), 1)) for row in rows]
    cells += [[name, *[""] * (len(header) - 3), text, "not run"] for name, text in paper_only.items()]
    lines += table_lines(header, cells)
    notes = sorted(
        {f"- {entry.recipe}, seed {entry.seed}: {plain(entry.note)}" for row in rows for entry in row if entry.note}
    )
    return "\n".join([*lines, *(["", *notes] if notes else []), ""])


def _test_names(rows: Sequence[Row]) -> list[str]:
    """Test scores to show: the task's metric, or its several forms where it has them, as ``bpc_ptb``."""
    metric = next(iter(score_names(rows[0][0]).values()))
    found = {name for row in rows for entry in row for name in entry.test}
    forms = [name for name in found if name.removeprefix("dynamic_").startswith(f"{metric}_")]
    return sorted(forms or found & {metric}) + sorted(found & {f"uncalibrated_{metric}"})


def _test_title(name: str) -> str:
    """How a table calls a test score; behind the metric stands the convention in which symbols are counted."""
    if name.startswith("uncalibrated_"):
        return "test, temperature 1"
    rest = name.removeprefix("dynamic_")
    metric, _, convention = rest.partition("_")
    kind = "test" if rest == name else "dynamic test"
    return f"{kind}, {convention}" if convention else f"{kind} {METRIC_NAMES.get(metric, metric)}"


def _cells(row: Row, tested: Sequence[str], tried: int) -> list[str]:
    entry, config = row[0], row[0].config()
    optimizer = f"{config.optimizer.name} {config.optimizer.lr:g}"
    shown = ("model.hidden_size", "model.lam", "model.eta", "optimizer.name", "optimizer.lr", "steps")
    settings = [f"H {config.model.hidden_size}", optimizer]
    changed = without_own_data(config, setting(entry))
    settings += [plain(text) for text in changed if text.partition("=")[0] not in shown]
    steps = [item.steps for item in row]
    return [
        model_label(config.model),
        ", ".join(settings) + (f" (best of {tried} settings)" if tried > 1 else ""),
        f"{entry.parameters:,}",
        span(steps, "{:,}"),
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


def headline(results: Path = Path("results"), brief: bool = False) -> dict[str, str]:
    """Our best score of each recipe as it is, whatever the length of the run, in the task's metric.

    Args:
        results: folder of the ledger.
        brief: only the mean over the seeds, without the metric's name and the range.
    """
    entries = read_ledger(results)
    own = [entry for entry in entries if is_recipe(entry)]
    tasks = dict.fromkeys(entry.task for entry in own)
    rows = [row for task in tasks for row in table_rows(own, task)]
    rows.sort(key=_loss, reverse=True)  # the lowest comes last
    found = {row[0].recipe: _headline(row, brief) for row in rows}
    return found | family_headlines(entries, brief)


def _headline(row: Row, brief: bool) -> str:
    name, key = next(iter(score_names(row[0]).items()))
    seeds = f", {len(row)} seeds" if len(row) > 1 else ""
    tested = all(entry.test for entry in row)
    values = [(entry.test if tested else entry.final)[key] for entry in row]
    if brief:
        return spread([sum(values) / len(values)], key)
    return f"{'test ' * tested}{name} {spread(values, key)}{seeds}"


def score_names(entry: Entry) -> dict[str, str]:
    """What a task's scores are called in a table, and where an entry holds them."""
    metric = entry.config().task.metric
    return {"loss / baseline": "ratio", "accuracy": "accuracy"} if metric == "ratio" else {metric: metric}
