"""The few numbers of the first screen: one of RUM against one of another model, from recorded runs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from torchrum.lab.tables import Link, Table
from torchrum.paper.bench.gpu import STEPS
from torchrum.paper.bench.records import Report, read_report
from torchrum.paper.ledger.babi import Column, best_columns
from torchrum.paper.ledger.runs import Row, model_label, reached_goal
from torchrum.paper.ledger.schema import Entry
from torchrum.paper.table import span, write_marked

HEADER = ("what", "RUM", "the other", "equal for both", "RUM is")
LEAST_SEEDS = 3
"""Seeds of each model below which a comparison is open."""


@dataclass(frozen=True)
class Headline:
    """One row: what was measured, the two numbers, what both models were given, and the verdict."""

    what: str
    ours: str
    other: str
    equal: str
    verdict: str
    page: str
    """Page of the documentation, without ending."""
    anchor: str = ""

    def cells(self) -> tuple[str, ...]:
        """The cells of a table, in the order of ``HEADER``."""
        return self.what, self.ours, self.other, self.equal, self.verdict


@dataclass(frozen=True)
class Side:
    """The runs of one model: its name, its score with each seed, and their steps."""

    name: str
    values: Sequence[float]
    steps: Sequence[int]

    def shown(self, form: str) -> str:
        return f"{form.format(fmean(self.values))} ({self.name})"


def headlines(entries: Sequence[Entry], results: Path) -> list[Headline]:
    """The rows that the ledger and the benchmark have numbers for."""
    rows = [*_recall(entries), *_babi(entries), *_treebank(entries)]
    if (path := results / "bench" / "gpu.json").exists():
        rows += _speed(read_report(path))
    return rows


def headline_table(rows: Iterable[Headline], docs: str = "docs") -> Table:
    """Make a table in which each row links to its page."""
    targets = ((row, f"{docs}/{row.page}.md{'#' + row.anchor if row.anchor else ''}") for row in rows)
    return Table(HEADER, [(Link(row.what, target), *row.cells()[1:]) for row, target in targets])


def write_headlines(path: Path, entries: Sequence[Entry], results: Path) -> bool:
    """Put the table between ``<!-- torchrum:headline -->`` and its end; says whether the file changed."""
    table = headline_table(headlines(entries, results)).markdown()
    return write_marked(path, "headline", "", lambda _: table)


def compared(ours: Side, other: Side, *, least: bool = False, budget: str = "", doubt: str = "") -> tuple[str, str]:
    """Describe what both models were given, and judge: ahead or behind only where the ranges do not overlap.

    Args:
        ours, other: the two models.
        least: whether the lower score is the better one.
        budget: describes the steps where they are what is compared.
        doubt: why this is not a comparison at equal settings; the verdict is then open.
    """
    steps = [span(side.steps, "{:,}") for side in (ours, other)]
    seeds = [f"{len(side.values)} seed{'s' * (len(side.values) > 1)}" for side in (ours, other)]
    equal = " and ".join(dict.fromkeys([budget] if budget else steps))
    equal += " steps" * (not budget) + (f", {seeds[0]} each" if seeds[0] == seeds[1] else f", {' and '.join(seeds)}")
    doubts = [doubt] if doubt else []
    if steps[0] != steps[1] and not budget:
        doubts.append("unequal steps")
    if min(len(side.values) for side in (ours, other)) < LEAST_SEEDS:
        doubts.append("too few seeds")
    mine, theirs = ([-value if least else value for value in side.values] for side in (ours, other))
    apart = "ahead" if min(mine) > max(theirs) else "behind" if max(mine) < min(theirs) else "level"
    return equal, f"open: {', '.join(doubts)}" if doubts else f"**{apart}**"


def _rows(entries: Sequence[Entry], recipe: str) -> list[Row]:
    """Runs of a recipe on its own problem, grouped by setting."""
    settings: dict[tuple[str, ...], Row] = {}
    for entry in entries:
        if entry.recipe == recipe and entry.own_problem and entry.test:
            settings.setdefault(tuple(entry.overrides), []).append(entry)
    return list(settings.values())


def _side(entries: Sequence[Entry], recipe: str, score: str, name: str = "") -> Side | None:
    """The setting of a recipe with most seeds: its test scores or, for ``steps``, how long it trained."""
    row = max(_rows(entries, recipe), key=len, default=None)
    if row is None:
        return None
    steps = [entry.steps for entry in row]
    values = steps if score == "steps" else [entry.test[score] for entry in row]
    return Side(name or model_label(row[0].config().model), values, steps)


def _recall(entries: Sequence[Entry]) -> Iterator[Headline]:
    """Recall at equal settings: accuracy beside an LSTM, and the steps to solve it beside a DeltaNet."""
    where = "results", "associative-recall"
    pair = [_side(entries, f"recall-{name}-fresh-t50", "accuracy") for name in ("rum-lam1", "lstm")]
    if pair[0] and pair[1]:
        ours, other = replace(pair[0], name="lam=1"), pair[1]
        what = "recall one of 25 pairs: accuracy"
        yield Headline(what, ours.shown("{:.1%}"), other.shown("{:.1%}"), *compared(ours, other), *where)
    solved = [entry for entry in entries if reached_goal(entry)]
    pair = [_side(solved, f"recall-{name}-window-t50", "steps") for name in ("rum-lam1", "delta-net")]
    if pair[0] and pair[1]:
        ours, other = replace(pair[0], name="lam=1"), replace(pair[1], name="DeltaNet")
        judged = compared(ours, other, least=True, budget="until 99.95% are right")
        what = "the same, each symbol with the one before it: steps to solve it"
        yield Headline(what, ours.shown("{:,.0f}"), other.shown("{:,.0f}"), *judged, *where)


def _babi(entries: Sequence[Entry]) -> Iterator[Headline]:
    """All twenty tasks in one model: the RUM that is best on validation beside the GRU."""
    joint = {column.name: column for column in best_columns(entries) if column.joint and column.whole()}
    gru = joint.get("babi-joint-gru-deep")
    rums = [column for name, column in joint.items() if name.startswith("babi-joint-rum-deep")]
    rums = [column for column in rums if gru and _column_side(column).steps == _column_side(gru).steps]
    if gru and rums:
        ours, other = _column_side(max(rums, key=lambda column: column.validation)), _column_side(gru)
        what = "answer the 20 bAbI tasks with one model: accuracy"
        where = "results", "babi-question-answering"
        yield Headline(what, ours.shown("{:.1%}"), other.shown("{:.1%}"), *compared(ours, other), *where)


def _column_side(column: Column) -> Side:
    name = "RUM" if "RUM" in column.label else column.label.rpartition(" ")[2]
    return Side(name, column.whole(), sorted(entry.steps for entry in column.entries))


def _treebank(entries: Sequence[Entry]) -> Iterator[Headline]:
    """Our best model beside FS-LSTM-2 in the same recipe, or in another one while that is not recorded."""
    ours = _side(entries, "char-ptb-fs-rum-2-slim", "bpc", "FS-RUM-2")
    other, doubt = _side(entries, "char-ptb-fs-lstm-2-constant", "bpc"), ""
    if other is None:
        other, doubt = _side(entries, "char-ptb-fs-lstm-2-tuned", "bpc"), "other recipe"
    if ours and other:
        what = "predict characters of Penn Treebank: bits per character, less is better"
        where = "results", "character-level-penn-treebank"
        judged = compared(ours, other, least=True, doubt=doubt)
        yield Headline(what, ours.shown("{:.3f}"), other.shown("{:.3f}"), *judged, *where)


FORMS = {"gated": "", "eta": ", in the paper's form"}
"""Kinds of RUM in the names of the benchmark's cases, the default first, and what a headline says of each."""


def _speed(report: Report) -> Iterator[Headline]:
    """Compare RUM with the GRU in bfloat16 and, where RUM is slower anywhere, in the case where it is slowest."""
    times: dict[str, dict[str, float]] = {}
    shapes = {}
    for row in report.rows:
        if row.mode == "forward_backward" and row.us_per_step is not None:
            name = row.case.removesuffix("-baselines")
            times.setdefault(name, {}).setdefault(row.implementation, row.us_per_step)
            shapes[name] = row.shape
    both = {name: found for name, found in times.items() if {"fused graphed", "gru graphed"} <= found.keys()}
    kind = next((kind for kind in FORMS if any(name.startswith(f"{kind}-") for name in both)), "")
    ratios = {
        name: found["fused graphed"] / found["gru graphed"]
        for name, found in both.items()
        if name.startswith(f"{kind}-") and shapes[name].T == STEPS
    }
    usual = [name for name in ratios if name.startswith(f"{kind}-bf16-") and shapes[name].N <= 1024]
    case = max(usual, key=lambda name: shapes[name].N, default="")
    slowest = max(ratios, key=ratios.__getitem__, default=case)
    for name in dict.fromkeys([case, *([slowest] if ratios.get(slowest, 0) > 1 else [])]):
        if name in ratios:
            shape, found = shapes[name], both[name]
            what = f"train {shape.N} units: time per step{FORMS[kind]}{', the slowest case' * (name != case)}"
            equal = f"{shape.T} steps, batch of {shape.B}, {shape.dtype}, CUDA graph, {report.environment.get('gpu')}"
            ours, gru = (f"{found[f'{who} graphed']:.1f} µs" for who in ("fused", "gru"))
            verdict = "**faster**" if ratios[name] < 1 else "**slower**"
            yield Headline(what, ours, f"{gru} (cuDNN's GRU)", equal, verdict, "benchmarks", "on-a-gpu")
