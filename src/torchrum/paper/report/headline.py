"""The few numbers of the first screen: each from recorded runs, with a link to the page with more."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from torchrum.lab.recipes import registered_recipe
from torchrum.lab.recipes.babi import PAPER
from torchrum.paper.bench.cpu import LONG
from torchrum.paper.bench.records import Report, read_report
from torchrum.paper.ledger.babi import REGENERATED, Column, best_columns
from torchrum.paper.ledger.runs import Row, best_settings, final_loss, model_label, reached_goal, table_rows
from torchrum.paper.ledger.schema import Entry
from torchrum.paper.table import Link, Table, span, spread, write_marked

AUGMENTED = re.compile(r"-aug\d+$")
"""Recipes that train on changed data: they are reported apart."""


@dataclass(frozen=True)
class Headline:
    """One row: what was measured, ours, and the others'."""

    what: str
    ours: str
    others: str
    page: str
    """Page of the documentation, without ending."""
    anchor: str = ""


def headlines(entries: Sequence[Entry], results: Path) -> list[Headline]:
    """The rows that the ledger and the benchmark have numbers for."""
    rows = [_recall(entries), _copying(entries), _babi(entries), _treebank(entries), *_benchmarks(results / "bench")]
    return [row for row in rows if row is not None]


def headline_table(rows: Iterable[Headline], docs: str = "docs") -> Table:
    """Make a table in which each row links to its page."""
    cells = []
    for row in rows:
        target = f"{docs}/{row.page}.md{'#' + row.anchor if row.anchor else ''}"
        cells.append((Link(row.what, target), row.ours, row.others))
    return Table(("", "RUM", "for comparison"), cells)


def write_headlines(path: Path, entries: Sequence[Entry], results: Path) -> bool:
    """Put the table between ``<!-- torchrum:headline -->`` and its end; says whether the file changed."""
    table = headline_table(headlines(entries, results)).markdown()
    return write_marked(path, "headline", "", lambda _: table)


def _own(entries: Sequence[Entry], task: str, ending: str = "") -> list[Row]:
    """Best settings of the recipes' own problems, one run per seed."""
    kept = [entry for entry in entries if entry.recipe.endswith(ending) and entry.own_problem]
    return best_settings(table_rows(kept, task))


def _best(rows: Sequence[Row], *, rum: bool) -> Row | None:
    chosen = [row for row in rows if ("RUM" in model_label(row[0].config().model)) is rum]
    return min(chosen, key=final_loss, default=None)


def _named(rows: Sequence[Row], label: str) -> Row | None:
    return next((row for row in rows if model_label(row[0].config().model) == label), None)


def _budget(row: Row) -> str:
    """Format steps and seeds: a reader must see where two numbers rest on different ones."""
    return f"{span([entry.steps for entry in row], '{:,}')} steps, {_counted(len(row))}"


def _counted(seeds: int) -> str:
    return f"{seeds} seed{'s' * (seeds > 1)}"


def _score(row: Row, key: str, how: str = "") -> str:
    tested = all(key in entry.test for entry in row)
    values = [(entry.test if tested else entry.final)[key] for entry in row]
    label, source = model_label(row[0].config().model), "test" if tested else "validation"
    return f"{spread([fmean(values)], key)} ({label}{how}, {source}, {_budget(row)})"


def _recall(entries: Sequence[Entry]) -> Headline | None:
    rows = [row for row in _own(entries, "recall", "-t50") if row[0].config().model.window == 1]
    ours, lstm = _best(rows, rum=True), _named(rows, "LSTM")
    if ours is None or lstm is None:
        return None
    what = "associative recall, 25 pairs: accuracy"
    return Headline(what, _score(ours, "accuracy"), _score(lstm, "accuracy"), "results", "associative-recall")


def _copying(entries: Sequence[Entry]) -> Headline | None:
    rows = _own(entries, "copying", "-t500")
    ours, best, lstm = _best(rows, rum=True), _best(rows, rum=False), _named(rows, "LSTM")
    if ours is None or best is None or lstm is None:
        return None
    others = "; ".join(_solved(row) for row in ((best,) if best is lstm else (best, lstm)))
    what = "copying memory over 500 steps: share of the memoryless loss"
    return Headline(what, _solved(ours), others, "results", "copying-memory")


def _solved(row: Row) -> str:
    label = model_label(row[0].config().model)
    done = "solved in" if all(reached_goal(entry) for entry in row) else "after"
    return f"{fmean(entry.final['ratio'] for entry in row):.2%} ({label}, {done} {_budget(row)})"


def _babi(entries: Sequence[Entry]) -> Headline | None:
    """Mean over the twenty tasks: the best RUM, per task and for all tasks in one, beside the best of other models.

    Memory networks attend to the story, which no recurrent reader does: they stand beside those, not instead of them.
    """
    whole = [column for column in best_columns(entries) if column.whole() and not AUGMENTED.search(column.name)]
    rums = [column for column in whole if "RUM" in column.label]
    if not rums:
        return None
    others = [column for column in whole if column not in rums]
    attentive = [column for column in others if "MemN2N" in column.label]
    recurrent = [column for column in others if column not in attentive]
    paper = f"{fmean(PAPER['rum']) / 100:.1%} (the paper's RUM, one model per task)"
    changed = any(REGENERATED in entry.note for entry in entries if entry.task == "babi")
    data = " (task 3's training text partly regenerated)" if changed else ""
    return Headline(
        f"bAbI, 20 tasks{data}: mean test accuracy",
        "; ".join(_best_columns(rums)),
        "; ".join([*_best_columns(recurrent), *_best_columns(attentive), paper]),
        "results",
        "babi-question-answering",
    )


def _best_columns(columns: Sequence[Column]) -> Iterator[str]:
    for joint, mode in ((True, "one model for all tasks"), (False, "one model per task")):
        group = [column for column in columns if column.joint is joint]
        if group:
            best = max(group, key=lambda column: fmean(column.whole()))
            counted = f"{span([entry.steps for entry in best.entries], '{:,}')} steps, {_counted(len(best.whole()))}"
            yield f"{fmean(best.whole()):.1%} ({best.label}, {mode}, {counted})"


def _per_recipe(entries: Sequence[Entry], task: str) -> list[Row]:
    """The best setting of every recipe of a task."""
    lowest: dict[str, Row] = {}
    for row in table_rows(entries, task):
        if not row[0].own_problem:
            continue
        kept = lowest.get(row[0].recipe)
        if kept is None or final_loss(row) < final_loss(kept):
            lowest[row[0].recipe] = row
    return list(lowest.values())


def _treebank(entries: Sequence[Entry]) -> Headline | None:
    rows = [row for row in _per_recipe(entries, "char") if row[0].recipe.startswith("char-ptb")]
    ours, other = _best(rows, rum=True), _best(rows, rum=False)
    if ours is None:
        return None
    paper = registered_recipe("char-ptb-fs-rum-2")
    assert paper.paper is not None
    beside = [_trained(other)] if other else []
    beside.append(f"{paper.paper.value:g} (the paper's {model_label(paper.model)})")
    what = "character-level Penn Treebank: bits per character"
    return Headline(what, _trained(ours), "; ".join(beside), "results", "character-level-penn-treebank")


def _trained(row: Row) -> str:
    """Format the score of a model of text, and whether it is calibrated."""
    return _score(row, "bpc", ", calibrated" * row[0].config().model.calibrated)


def _benchmarks(folder: Path) -> list[Headline]:
    rows: list[Headline | None] = []
    if (folder / "gpu.json").exists():
        rows += _speed(read_report(folder / "gpu.json"))
    if (folder / "cpu.json").exists():
        rows.append(_memory(read_report(folder / "cpu.json")))
    return [row for row in rows if row is not None]


def _speed(report: Report, case: str = "eta-bf16-n1000") -> Iterator[Headline]:
    """Compare RUM with the GRU in one case and, where RUM is slower anywhere, in the case where it is slowest."""
    times: dict[str, dict[str, float]] = {}
    shapes = {}
    for row in report.rows:
        if row.mode == "forward_backward" and row.us_per_step is not None:
            name = row.case.removesuffix("-baselines")
            times.setdefault(name, {}).setdefault(row.implementation, row.us_per_step)
            shapes[name] = row.shape
    ratios = {
        name: found["fused graphed"] / found["gru graphed"]
        for name, found in times.items()
        if {"fused graphed", "gru graphed"} <= found.keys()
    }
    slowest = max(ratios, key=ratios.__getitem__, default=case)
    for name in dict.fromkeys([case, *([slowest] if ratios.get(slowest, 0) > 1 else [])]):
        if name in ratios:
            found, shape = times[name], shapes[name]
            ours, gru = (
                f"{found[f'{who} graphed']:.1f} µs" + (f", plain calls {found[who]:.1f} µs" if who in found else "")
                for who in ("fused", "gru")
            )
            size = f"{shape.N} units, {shape.T} steps, {shape.dtype}"
            what = f"time per step in a CUDA graph, forward and backward, {size}, {report.environment.get('gpu')}"
            what += ": the slowest case beside the GRU" * (name == slowest)
            yield Headline(what, ours, f"{gru} (cuDNN's GRU)", "benchmarks", "on-a-gpu")


def _memory(report: Report) -> Headline | None:
    peaks = {row.implementation: row.peak_bytes for row in report.rows if row.case == LONG[0]}
    ours, theirs = peaks.get("torch"), peaks.get("authors")
    if not ours or not theirs:
        return None
    what = "peak memory of a training pass, λ = 1, 100 units, 1000 steps, CPU"
    return Headline(what, f"{ours / theirs:.1%}", "100% (the original implementation)", "benchmarks", "on-a-cpu")
