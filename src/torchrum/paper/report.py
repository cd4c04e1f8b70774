"""The HTML page of the ledger beside the paper or of a few run folders, and the headline numbers of the README."""

import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from torchrum.lab.models import build_model, count_parameters
from torchrum.lab.page import Block, Items, Page, Playground, Section, picture
from torchrum.lab.tables import Link, Table, code, span, write_marked
from torchrum.lab.training.config import flat, to_json
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.run_folder import read_config, read_environment, read_metrics
from torchrum.paper.bench.records import Report, read_report
from torchrum.paper.bench.report import report_figure, report_tables
from torchrum.paper.bench.suites import STEPS
from torchrum.paper.ledger.babi import Column, best_columns
from torchrum.paper.ledger.entries import Entry, LedgerError, read_ledger
from torchrum.paper.ledger.runs import Row, compare, comparison_tables, model_label, reached_goal
from torchrum.paper.ledger.tables import (
    RULE,
    Verdict,
    Word,
    condensed,
    runs_table,
    task_tables,
    verdict_table,
    verdicts,
)
from torchrum.paper.plots.catalog import FIGURES, plan, plan_run
from torchrum.paper.plots.run import comparison_figure

Say = Callable[[str], None]


def pictures(name: str, entries: Sequence[Entry], results: Path, say: Say) -> list[Block]:
    """Draw every figure of one name that the ledger has runs for."""
    drawings = plan(name, entries, results)
    if drawings:
        say(f"drawing {name}")
    return [picture(each.name, each.draw, each.caption, f"torchrum figure {name}") for each in drawings]


TASKS: dict[str, tuple[str, str, int | None]] = {
    "copying": (
        "Copying memory (Figure 2 of the paper)",
        "Ten symbols, a delay of T steps, then the ten symbols again. The paper: RUM solves it, LSTM and GRU stay at "
        "the loss of the best model without memory (the baseline), GORU is the only other gated model that succeeds. "
        "Losses are shares of the baseline's.",
        2_000_000,
    ),
    "recall": (
        "Associative recall (Table 1, Appendix B)",
        "Pairs of a key and a value, then a key; the answer is its value. The paper: RUM with λ = 1 recalls perfectly, "
        "an LSTM does not. A model that knows which values occurred but not where is right in 24.1% (T = 30) and "
        "20.7% (T = 50): the bag of values.",
        600_000,
    ),
    "babi": (
        "bAbI question answering (table of the appendix)",
        "Twenty tasks; the paper has one model for each. Its LSTM and MemN2N columns are quoted from work on 1,000 "
        "training questions per task, where RUM had 10,000; they are not comparable.",
        None,
    ),
    "char": (
        "Character-level Penn Treebank (Table 3)",
        "Bits per character of the next character. The paper: 1.189 with FS-RUM-2.",
        None,
    ),
}
"""Title, introduction, and the step budget at which models are compared; without it every run counts."""

LOOKS = {
    "kernels": (
        "Heat maps of W_hh (Figure 3, Appendix E)",
        "The paper shows the recurrent matrix of four trained models and points at the diagonal of the block that "
        "generates the target τ. Each map names its block and says how far its diagonal stands out.",
    ),
    "diagonal": (
        "Diagonal dominance over training",
        "The mean size of the diagonal of each block over that of its other entries; 1 is a matrix without structure.",
    ),
    "gradients": (
        "Gradients through time (section 2.1)",
        "The paper argues that a recurrence makes gradients vanish or explode unless its step is orthogonal.",
    ),
    "rotation": (
        "Angles, planes and norms over a sequence (Figure 1 at work)",
        "What a trained RUM does with one sequence of the validation set: the angle θ of each rotation, the norm of "
        "the state, and how far the planes of any two steps agree (1: the same plane, 0: orthogonal). With zoneout, as "
        "on Penn Treebank, a state that is scored mixes two of norm η and is a little shorter.",
    ),
    "phases": (
        "Phases of R for λ = 1",
        "With λ = 1 the rotations accumulate in R. Its eigenvalues lie on the unit circle, in conjugate pairs; their "
        "phases tell how far R has turned in how many planes.",
    ),
}
"""Figure to its section's title and introduction."""


def ledger_page(results: Path, say: Say = lambda line: None) -> Page:
    """Gather the report of a ledger; an empty one is an error.

    Args:
        results: the ledger.
        say: receives a line before each step that takes seconds.
    """
    if not results.is_dir():
        raise ConfigError(
            f"{results} is not a folder; pass the folder of a results ledger with --results DIR, or runs."
        )
    entries = read_ledger(results)
    if not entries:
        raise LedgerError(f"{results} holds no run yet; add one with torchrum record RUN, or name run folders.")
    found = verdicts(entries)
    sections = [
        Section("At a glance", list(_glance(entries, results, found, say))),
        *(_task(task, entries, results, found, say) for task in TASKS),
        Section("What was not reproduced, and what was not run", list(_missing(found)), "missing"),
        *(
            Section(title, [about, *(pictures(name, entries, results, say) or [NO_ARRAYS])])
            for name, (title, about) in LOOKS.items()
        ),
        Section("Rotation playground (Figure 1)", [PLAYGROUND, Playground()], "playground"),
        Section("Benchmarks", list(_benchmarks(results / "bench"))),
        Section("Every run", [runs_table(entries)], "runs"),
    ]
    lead = "The Rotational Unit of Memory: every number and figure of the paper beside ours, from recorded runs."
    return Page("torchrum report", lead, sections, facts(entries))


NO_ARRAYS = "No run with the arrays for this figure is in the ledger (`torchrum record --arrays RUN`)."
PLAYGROUND = (
    "R(a, b) takes the direction of a to that of b and leaves everything orthogonal to their plane in place: two "
    "reflections, across a and across the bisector m. In the cell a is the embedded input ε, b the target τ, h the "
    "state."
)


def facts(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """Count the runs and recipes, and sum up the training time by hardware."""
    hours: dict[str, float] = defaultdict(float)
    for entry in entries:
        hours[entry.hardware] += entry.wall_seconds / 3600
    cost = ", ".join(f"{time:.1f} h on {name}" for name, time in sorted(hours.items(), key=lambda item: -item[1]))
    recipes = len({entry.recipe for entry in entries})
    return [("runs", f"{len(entries)} of {recipes} recipes"), ("training time", cost)]


def _glance(entries: Sequence[Entry], results: Path, found: Sequence[Verdict], say: Say) -> Iterator[Block]:
    counts = Counter(item.word for item in found)
    order: tuple[Word, ...] = ("reproduced", "better", "not reproduced", "not comparable", "not run")
    numbers = ", ".join(f"**{counts[word]}** {word}" for word in order if counts[word])
    yield f"Of {len(found)} printed numbers with a recipe: {numbers}."
    yield Table(HEADER, [row.cells() for row in headlines(entries, results)])
    yield from pictures("headline", entries, results, say)
    yield f"**The rule.** {RULE}"


def _task(task: str, entries: Sequence[Entry], results: Path, found: Sequence[Verdict], say: Say) -> Section:
    title, about, budget = TASKS[task]
    parts: list[Block] = [about]
    here = [item for item in found if item.recipe.partition("-")[0] == task]
    parts.append(verdict_table(here))
    if task in FIGURES:
        parts += pictures(task, entries, results, say)
    if not any(entry.task == task for entry in entries):
        parts.append("No run of this task is in the ledger yet.")
    elif budget is not None:
        parts.append(f"**At a matched step budget** of {budget:,} / T steps:")
        parts += comparison_tables(compare(entries, task, budget))
    else:
        parts += task_tables(entries, task, sys.maxsize if task == "babi" else None)
    return Section(title, parts, task)


def _missing(found: Sequence[Verdict]) -> Iterator[Block]:
    found = condensed(found)
    short = [item for item in found if item.word == "not reproduced"]
    if short:
        yield "**Not reproduced:**"
        yield Items([_compared(item) for item in short])
    absent = [item.recipe for item in found if item.word == "not run"]
    if absent:
        yield f"**Not run:** {', '.join(f'`{name}`' for name in absent)}."
    if not short and not absent:
        yield "Every printed number with a recipe was run and reproduced or bettered."


def _compared(item: Verdict) -> str:
    difference = f" ({item.difference})" if item.difference else ""
    difference += " of the memoryless loss" if item.config.task.metric == "ratio" else ""
    return f"`{item.recipe}` ({item.model}). The paper: {item.paper.text}; ours: {item.ours}{difference}."


def _benchmarks(folder: Path) -> Iterator[Block]:
    for name, title in (("gpu", "On a GPU"), ("cpu", "On a CPU")):
        if (folder / f"{name}.json").exists():
            report = read_report(folder / f"{name}.json")
            yield f"**{title}**"
            if name == "gpu":
                caption = "Time per step over the number of units, RUM beside cuDNN's GRU."
                command = "torchrum bench --report results/bench/gpu.json --plot gpu.svg"
                yield picture("bench", partial(report_figure, report), caption, command)
            yield from report_tables(report)


def runs_page(runs: Sequence[Path], title: str = "torchrum runs", lead: str = "") -> Page:
    """Gather the page of run folders; each needs at least one validation."""
    configs = {run: read_config(run) for run in runs}
    scores = {run: read_metrics(run, "validation") for run in runs}
    for run in runs:
        if not scores[run]:
            raise RunError(f"{run} has no validation scores to report yet.")
    models = [model_label(config.model) for config in configs.values()]
    labels = {  # with the folder where two are alike
        run: model if models.count(model) == 1 else f"{model}, {run.name}"
        for run, model in zip(configs, models, strict=True)
    }
    names = [name for name in scores[runs[0]][0] if name not in ("kind", "step", "seconds")]
    rows = []
    for run, config in configs.items():
        last = scores[run][-1]
        cells = [f"{last[name]:{'.1%' if name == 'accuracy' else '.4g'}}" if name in last else "" for name in names]
        counts = [
            f"{count_parameters(build_model(config.model, config.task)):,}",
            f"{last['step']:,}",
            f"{last['seconds']:.0f}",
        ]
        rows.append([labels[run], type(config.task).__name__, *counts, *cells])
    compared: list[Block] = [Table(["model", "task", "parameters", "steps", "seconds", *names], rows)]
    task = configs[runs[0]].task
    if all(config.task == task for config in configs.values()):
        caption = "Validation over the steps; the dashed line is the best that is possible without memory."
        shown = {labels[run]: run for run in configs}
        compared.append(picture("side-by-side", lambda: comparison_figure(shown, task), caption))
    sections = [
        Section("Side by side" if len(runs) > 1 else "Scores", compared, "scores"),
        *(Section(labels[run], list(_run(run)), f"run-{number}") for number, run in enumerate(runs)),
        Section("Rotation playground", [PLAYGROUND, Playground()], "playground"),
    ]
    return Page(
        title, lead or (f"{len(runs)} runs, from their folders." if runs[1:] else "One run, from its folder."), sections
    )


def _run(run: Path) -> Iterator[Block]:
    """The part of the page that is about one run."""
    config, environment = read_config(run), read_environment(run)
    place = environment.accelerator or environment.processor
    commit = (environment.commit or "unknown")[:10]
    yield f"Command: {code(shlex.join(environment.command))}. {place}, commit {commit}, seed {config.seed}."
    for drawing in plan_run(run):
        yield picture(drawing.name, drawing.draw, drawing.caption)
    yield Table(("field", "value"), [(name, str(value)) for name, value in flat(to_json(config)).items()])


HEADER = ("what", "RUM", "the other", "equal for both", "RUM is")
LEAST_SEEDS = 3
"""Seeds of each model below which a comparison is open."""


@dataclass(frozen=True)
class Headline:
    """A row: the measurement, two numbers, the equal settings of both models, and the verdict."""

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


def headline_table(rows: Iterable[Headline]) -> Table:
    """Make a table in which each row links to its page."""
    targets = ((row, f"docs/{row.page}.md{'#' + row.anchor if row.anchor else ''}") for row in rows)
    return Table(HEADER, [(Link(row.what, target), *row.cells()[1:]) for row, target in targets])


def write_headlines(path: Path, entries: Sequence[Entry], results: Path) -> bool:
    """Put the table between ``<!-- torchrum:headline -->`` and its end; return whether the file changed."""
    table = headline_table(headlines(entries, results)).markdown()
    return write_marked(path, "headline", "", lambda _: table)


def compared(ours: Side, other: Side, *, least: bool = False, budget: str = "") -> tuple[str, str]:
    """Describe what both models were given, and judge: ahead or behind only where the ranges do not overlap.

    Args:
        ours, other: the two models.
        least: whether the lower score is the better one.
        budget: describes the steps where they are what is compared.
    """
    steps = [span(side.steps, "{:,}") for side in (ours, other)]
    seeds = [f"{len(side.values)} seed{'s' * (len(side.values) > 1)}" for side in (ours, other)]
    equal = " and ".join(dict.fromkeys([budget] if budget else steps))
    equal += " steps" * (not budget) + (f", {seeds[0]} each" if seeds[0] == seeds[1] else f", {' and '.join(seeds)}")
    doubts = []
    if steps[0] != steps[1] and not budget:
        doubts.append("unequal steps")
    if min(len(side.values) for side in (ours, other)) < LEAST_SEEDS:
        doubts.append("too few seeds")
    mine, theirs = ([-value if least else value for value in side.values] for side in (ours, other))
    apart = "ahead" if min(mine) > max(theirs) else "behind" if max(mine) < min(theirs) else "level"
    return equal, f"open: {', '.join(doubts)}" if doubts else f"**{apart}**"


def _side(entries: Sequence[Entry], recipe: str, score: str) -> Side | None:
    """The setting of a recipe on its own problem with most seeds: its test scores or, for ``steps``, its length."""
    settings: dict[tuple[str, ...], Row] = defaultdict(list)
    for entry in entries:
        if entry.recipe == recipe and entry.own_problem and entry.test:
            settings[tuple(entry.overrides)].append(entry)
    if not settings:
        return None
    row = max(settings.values(), key=len)
    steps = [entry.steps for entry in row]
    values = steps if score == "steps" else [entry.test[score] for entry in row]
    return Side(model_label(row[0].config().model), values, steps)


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
    """Compare on all twenty tasks in one model the RUM that is best on validation with the GRU."""
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
    name = "paper's form" if "RUM" in column.label else column.label.rpartition(" ")[2]
    return Side(name, column.whole(), sorted(entry.steps for entry in column.entries))


def _treebank(entries: Sequence[Entry]) -> Iterator[Headline]:
    """Compare our best RUM with FS-LSTM-2 in the same recipe; without a run of both there is no row."""
    pair = [_side(entries, f"char-ptb-{name}", "bpc") for name in ("fs-rum-2-slim", "fs-lstm-2-constant")]
    if pair[0] and pair[1]:
        ours, other = replace(pair[0], name="FS-RUM-2"), pair[1]
        what = "predict characters of Penn Treebank: bits per character, less is better"
        where = "results", "character-level-penn-treebank"
        judged = compared(ours, other, least=True)
        yield Headline(what, ours.shown("{:.3f}"), other.shown("{:.3f}"), *judged, *where)


FORMS = {"gated": "", "eta": ", in the paper's form"}
"""Kinds of RUM in the names of the benchmark's cases, the default first, and what a headline says of each."""


def _speed(report: Report) -> Iterator[Headline]:
    """Compare RUM with the GRU in bfloat16 and, where RUM is slower anywhere, in the case where it is slowest."""
    pair = "fused graphed", "gru graphed"
    shapes = {row.case: row.shape for row in report.rows if row.implementation in pair}
    ratios = {name: ratio for name in shapes if (ratio := report.ratio(name, *pair)) is not None}
    kind = next((kind for kind in FORMS if any(name.startswith(f"{kind}-") for name in ratios)), "")
    ratios = {name: ratio for name, ratio in ratios.items() if name.startswith(f"{kind}-") and shapes[name].T == STEPS}
    usual = [name for name in ratios if name.startswith(f"{kind}-bf16-") and shapes[name].N <= 1024]
    case = max(usual, key=lambda name: shapes[name].N, default="")
    slowest = max(ratios, key=ratios.__getitem__, default=case)
    for name in dict.fromkeys([case, *([slowest] if ratios.get(slowest, 0) > 1 else [])]):
        if name in ratios:
            shape, rows = shapes[name], [report.find(name, who) for who in pair]
            what = f"train {shape.N} units: time per time step{FORMS[kind]}{', the slowest case' * (name != case)}"
            equal = f"{shape.T} steps, batch of {shape.B}, {shape.dtype}, CUDA graph, {report.environment.get('gpu')}"
            ours, gru = (f"{row.us_per_step:.1f} µs" for row in rows if row is not None)
            verdict = "**faster**" if ratios[name] < 1 else "**slower**"
            yield Headline(what, ours, f"{gru} (cuDNN's GRU)", equal, verdict, "benchmarks", "on-a-gpu")
