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
from pathlib import Path

from torchrum.lab.recipes import PAPER_ONLY
from torchrum.paper.ledger.babi import babi_tables
from torchrum.paper.ledger.comparison import compare, comparison_tables
from torchrum.paper.ledger.record import without_own_data
from torchrum.paper.ledger.runs import (
    METRIC_NAMES,
    Row,
    best,
    best_settings,
    model_and_place,
    model_label,
    place,
    score_names,
    setting,
    settings_tried,
    table_rows,
)
from torchrum.paper.ledger.schema import Entry, LedgerError
from torchrum.paper.ledger.verdicts import verdict_table, verdicts
from torchrum.paper.table import Table, code, markdown_tables, span, spread, with_best, write_marked

TITLES = {"char": "character language modelling"}
"""Task to its title, where that is not its name."""


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
    paper_only = {} if changes else PAPER_ONLY.get((task, size or None), {})
    cells += [[name, *[""] * (len(header) - 3), text, "not run"] for name, text in paper_only.items()]
    title = ", ".join([TITLES.get(task, task), *([f"T = {size}"] if size else []), *changes])
    baseline = rows[0][0].config().task.baseline()
    return Table(
        header,
        cells,
        title=f"**{title}** (validation; loss of the baseline {baseline:.4f})",
        notes=sorted(
            {f"{entry.recipe}, seed {entry.seed}: {entry.note}" for row in rows for entry in row if entry.note}
        ),
    )


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
