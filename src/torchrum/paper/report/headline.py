"""The few numbers of the first screen: each from recorded runs, with a link to the page with more."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from torchrum.lab.recipes import registered_recipe
from torchrum.lab.recipes.babi import PAPER
from torchrum.paper.bench.cpu import LONG
from torchrum.paper.bench.records import Report, read_report
from torchrum.paper.ledger.babi import REGENERATED, best_columns
from torchrum.paper.ledger.runs import Row, final_loss, model_label, reached_goal, table_rows
from torchrum.paper.ledger.schema import Entry
from torchrum.paper.table import Link, Table, span, spread, write_marked

AUGMENTED = re.compile(r"-aug\d+$")
"""Recipes that train on changed data: they are reported apart."""
CHANGED = " (task 3's training text partly regenerated)"


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
    rows = [*_recall(entries), *_copying(entries), *_babi(entries), *_treebank(entries)]
    for suite, found in (("gpu", _speed), ("cpu", _memory)):
        if (path := results / "bench" / f"{suite}.json").exists():
            rows += found(read_report(path))
    return rows


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


def _best(rows: Iterable[Row], chosen: Callable[[str], bool]) -> Row | None:
    """The row with the lowest final loss of the models whose labels are ``chosen``."""
    return min((row for row in rows if chosen(_label(row))), key=final_loss, default=None)


def _label(row: Row) -> str:
    return model_label(row[0].config().model)


def _is_rum(label: str) -> bool:
    return "RUM" in label


def _own(entries: Sequence[Entry], task: str, ending: str = "") -> list[Row]:
    """Settings of the recipes' own problems, one run per seed."""
    return table_rows([entry for entry in entries if entry.recipe.endswith(ending) and entry.own_problem], task)


def _budget(steps: Sequence[int], seeds: int) -> str:
    """Format steps and seeds: a reader must see where two numbers rest on different ones."""
    return f"{span(steps, '{:,}')} steps, {seeds} seed{'s' * (seeds > 1)}"


def _score(row: Row, key: str, how: str = "") -> str:
    tested = all(key in entry.test for entry in row)
    mean = fmean((entry.test if tested else entry.final)[key] for entry in row)
    budget = _budget([entry.steps for entry in row], len(row))
    return f"{spread([mean], key)} ({_label(row)}{how}, {'test' if tested else 'validation'}, {budget})"


def _recall(entries: Sequence[Entry]) -> Iterator[Headline]:
    """Recall at equal settings: the best RUM beside every model without a rotation."""
    for ending, how in (("-fresh-t50", ""), ("-window-t50", ", each input joined with the previous one")):
        rows = _own(entries, "recall", ending)
        others = [row for row in rows if not _is_rum(_label(row))]
        if (ours := _best(rows, _is_rum)) and others:
            beside = "; ".join(_score(row, "accuracy") for row in sorted(others, key=final_loss))
            what = f"associative recall, 25 pairs{how}: accuracy"
            yield Headline(what, _score(ours, "accuracy"), beside, "results", "associative-recall")


def _copying(entries: Sequence[Entry]) -> Iterator[Headline]:
    rows = _own(entries, "copying", "-t500")
    others = [_best(rows, lambda label: not _is_rum(label)), _best(rows, "LSTM".__eq__)]
    if (ours := _best(rows, _is_rum)) and all(others):
        what = "copying memory over 500 steps: share of the memoryless loss"
        beside = "; ".join(dict.fromkeys(_solved(row) for row in others if row))
        yield Headline(what, _solved(ours), beside, "results", "copying-memory")


def _solved(row: Row) -> str:
    done = "solved in" if all(reached_goal(entry) for entry in row) else "after"
    budget = _budget([entry.steps for entry in row], len(row))
    return f"{fmean(entry.final['ratio'] for entry in row):.2%} ({_label(row)}, {done} {budget})"


def _babi(entries: Sequence[Entry]) -> Iterator[Headline]:
    """Mean over the twenty tasks: the best RUM, per task and for all tasks in one, beside the best of other models.

    Memory networks attend to the story, which no recurrent reader does: they stand beside those, not instead of them.
    """
    whole = [column for column in best_columns(entries) if column.whole() and not AUGMENTED.search(column.name)]
    kinds: dict[str, list[str]] = {"RUM": [], "": [], "MemN2N": []}
    for kind, found in kinds.items():
        for joint, mode in ((True, "one model for all tasks"), (False, "one model per task")):
            same = [column for column in whole if column.joint is joint]
            group = [column for column in same if kind == _kind(column.label)]
            if group:
                best = max(group, key=lambda column: fmean(column.whole()))
                budget = _budget([entry.steps for entry in best.entries], len(best.whole()))
                found.append(f"{fmean(best.whole()):.1%} ({best.label}, {mode}, {budget})")
    if kinds["RUM"]:
        paper = f"{fmean(PAPER['rum']) / 100:.1%} (the paper's RUM, one model per task)"
        changed = any(REGENERATED in entry.note for entry in entries if entry.task == "babi")
        what = f"bAbI, 20 tasks{CHANGED * changed}: mean test accuracy"
        others = "; ".join([*kinds[""], *kinds["MemN2N"], paper])
        yield Headline(what, "; ".join(kinds["RUM"]), others, "results", "babi-question-answering")


def _kind(label: str) -> str:
    return next((kind for kind in ("RUM", "MemN2N") if kind in label), "")


def _treebank(entries: Sequence[Entry]) -> Iterator[Headline]:
    rows = [row for row in _own(entries, "char") if row[0].recipe.startswith("char-ptb")]
    ours, other = _best(rows, _is_rum), _best(rows, lambda label: not _is_rum(label))
    paper = registered_recipe("char-ptb-fs-rum-2")
    if ours and paper.paper:
        shown = [_score(row, "bpc", ", calibrated" * row[0].config().model.calibrated) for row in (ours, other) if row]
        shown.append(f"{paper.paper.value:g} (the paper's {model_label(paper.model)})")
        what = "character-level Penn Treebank: bits per character"
        yield Headline(what, shown[0], "; ".join(shown[1:]), "results", "character-level-penn-treebank")


def _speed(report: Report, case: str = "eta-bf16-n1000") -> Iterator[Headline]:
    """Compare RUM with the GRU in one case and, where RUM is slower anywhere, in the case where it is slowest."""
    times: dict[str, dict[str, float]] = {}
    shapes = {}
    for row in report.rows:
        if row.mode == "forward_backward" and row.us_per_step is not None:
            name = row.case.removesuffix("-baselines")
            times.setdefault(name, {}).setdefault(row.implementation, row.us_per_step)
            shapes[name] = row.shape
    both = {name: found for name, found in times.items() if {"fused graphed", "gru graphed"} <= found.keys()}
    ratios = {name: found["fused graphed"] / found["gru graphed"] for name, found in both.items()}
    slowest = max(ratios, key=ratios.__getitem__, default=case)
    for name in dict.fromkeys([case, *([slowest] if ratios.get(slowest, 0) > 1 else [])]):
        if name in both:
            found, shape = both[name], shapes[name]
            ours, gru = (
                f"{found[f'{who} graphed']:.1f} µs" + (f", plain calls {found[who]:.1f} µs" if who in found else "")
                for who in ("fused", "gru")
            )
            size = f"{shape.N} units, {shape.T} steps, {shape.dtype}"
            what = f"time per step in a CUDA graph, forward and backward, {size}, {report.environment.get('gpu')}"
            what += ": the slowest case beside the GRU" * (name == slowest)
            yield Headline(what, ours, f"{gru} (cuDNN's GRU)", "benchmarks", "on-a-gpu")


def _memory(report: Report) -> Iterator[Headline]:
    peaks = {row.implementation: row.peak_bytes for row in report.rows if row.case == LONG[0]}
    ours, theirs = peaks.get("torch"), peaks.get("authors")
    if ours and theirs:
        what = "peak memory of a training pass, λ = 1, 100 units, 1000 steps, CPU"
        share, whole = f"{ours / theirs:.1%}", "100% (the original implementation)"
        yield Headline(what, share, whole, "benchmarks", "on-a-cpu")
