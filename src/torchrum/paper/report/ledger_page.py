"""The report of the whole ledger: the paper beside ours."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from torchrum.paper.bench.plot import report_figure
from torchrum.paper.bench.records import read_report
from torchrum.paper.bench.report import markdown as bench_markdown
from torchrum.paper.ledger.babi import babi_tables
from torchrum.paper.ledger.cells import spread, table_lines
from torchrum.paper.ledger.labels import model_label
from torchrum.paper.ledger.notes import comparison_section
from torchrum.paper.ledger.record import without_own_data
from torchrum.paper.ledger.schema import Entry, LedgerError, read_ledger
from torchrum.paper.ledger.table import score_names, table
from torchrum.paper.ledger.verdicts import RULE, Verdict, Word, condensed, verdict_table, verdicts
from torchrum.paper.plots.catalog import FIGURES
from torchrum.paper.report.blocks import Block, Items, Playground, Text, blocks, inline
from torchrum.paper.report.headline import headlines
from torchrum.paper.report.page import Page, Section
from torchrum.paper.report.pictures import picture, pictures

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


def ledger_page(results: Path) -> Page:
    """Gather the report of a ledger; an empty one is an error."""
    if not results.is_dir():
        raise LedgerError(
            f"{results} is not a folder; pass the folder of a results ledger with --results DIR, or runs."
        )
    entries = read_ledger(results)
    if not entries:
        raise LedgerError(f"{results} holds no run yet; add one with torchrum record RUN, or name run folders.")
    found = verdicts(entries)
    sections = [
        Section("At a glance", list(_glance(entries, results, found))),
        *(_task(task, entries, results, found) for task in TASKS),
        Section("What was not reproduced, and what was not run", list(_missing(found)), "missing"),
        *(Section(title, list(_look(name, about, entries, results))) for name, (title, about) in LOOKS.items()),
        Section(
            "Rotation playground (Figure 1)",
            [Text(inline(PLAYGROUND)), Playground(), *_shown(("reflections", "cell"), entries, results)],
            "playground",
        ),
        Section("Benchmarks", list(_benchmarks(results / "bench"))),
        Section("Every run", list(blocks(runs_table(entries))), "runs"),
    ]
    lead = "The Rotational Unit of Memory: every number and figure of the paper beside ours, from recorded runs."
    return Page("torchrum report", lead, sections, facts(entries))


PLAYGROUND = (
    "R(a, b) takes the direction of a to that of b and leaves everything orthogonal to their plane in place: two "
    "reflections, across a and across the bisector m. In the cell a is the embedded input ε, b the target τ, h the "
    "state."
)


def facts(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """How many runs, of what, on what, and what they cost."""
    hours: dict[str, float] = defaultdict(float)
    for entry in entries:
        hours[entry.hardware] += entry.wall_seconds / 3600
    cost = ", ".join(f"{time:.1f} h on {name}" for name, time in sorted(hours.items(), key=lambda item: -item[1]))
    recipes = len({entry.recipe for entry in entries})
    return [("runs", f"{len(entries)} of {recipes} recipes"), ("training time", cost)]


def _glance(entries: Sequence[Entry], results: Path, found: Sequence[Verdict]) -> Iterator[Block]:
    counts = Counter(item.word for item in found)
    order: tuple[Word, ...] = ("reproduced", "better", "not reproduced", "not comparable", "not run")
    numbers = ", ".join(f"**{counts[word]}** {word}" for word in order if counts[word])
    yield Text(inline(f"Of {len(found)} printed numbers with a recipe: {numbers}."))
    rows = [(row.what, row.ours, row.others) for row in headlines(entries, results)]
    yield from blocks("\n".join(table_lines(("what", "RUM", "for comparison"), rows)))
    yield from pictures("headline", entries, results)
    yield Text(inline(f"**The rule.** {RULE}"))


def _task(task: str, entries: Sequence[Entry], results: Path, found: Sequence[Verdict]) -> Section:
    title, about, budget = TASKS[task]
    parts: list[Block] = [Text(inline(about))]
    here = [item for item in found if item.recipe.partition("-")[0] == task]
    parts += blocks(verdict_table(here))
    if task in FIGURES:
        parts += pictures(task, entries, results)
    if not any(entry.task == task for entry in entries):
        parts.append(Text(inline("No run of this task is in the ledger yet.")))
    elif budget is not None:
        parts.append(Text(inline(f"**At a matched step budget** of {budget:,} / T steps:")))
        parts += blocks(comparison_section(entries, task, budget))
    else:
        parts += blocks(babi_tables(entries, best=True) if task == "babi" else table(entries, task))
    return Section(title, parts, task)


def _missing(found: Sequence[Verdict]) -> Iterator[Block]:
    found = condensed(found)
    short = [item for item in found if item.word == "not reproduced"]
    if short:
        yield Text(inline("**Not reproduced:**"))
        yield Items([inline(_compared(item)) for item in short])
    absent = [item.recipe for item in found if item.word == "not run"]
    if absent:
        yield Text(inline(f"**Not run:** {', '.join(f'`{name}`' for name in absent)}."))
    if not short and not absent:
        yield Text(inline("Every printed number with a recipe was run and reproduced or bettered."))


def _compared(item: Verdict) -> str:
    difference = f" ({item.difference})" if item.difference else ""
    difference += " of the memoryless loss" if item.config.task.metric == "ratio" else ""
    return f"`{item.recipe}` ({item.model}). The paper: {item.paper.text}; ours: {item.ours}{difference}."


def _look(name: str, about: str, entries: Sequence[Entry], results: Path) -> Iterator[Block]:
    yield Text(inline(about))
    drawn = pictures(name, entries, results)
    yield from drawn
    if not drawn:
        yield Text(inline("No run with the arrays for this figure is in the ledger (`torchrum record --arrays RUN`)."))


def _shown(names: Sequence[str], entries: Sequence[Entry], results: Path) -> list[Block]:
    return [drawn for name in names for drawn in pictures(name, entries, results)]


def _benchmarks(folder: Path) -> Iterator[Block]:
    for name, title in (("gpu", "On a GPU"), ("cpu", "On a CPU")):
        if (folder / f"{name}.json").exists():
            report = read_report(folder / f"{name}.json")
            yield Text(inline(f"**{title}**"))
            if name == "gpu":
                caption = "Time per step over the number of units, RUM beside cuDNN's GRU."
                command = "torchrum bench --report results/bench/gpu.json --plot gpu.svg"
                yield picture("bench", partial(report_figure, report), caption, command)
            yield from blocks(bench_markdown(report))


def runs_table(entries: Sequence[Entry]) -> str:
    """Every run as a line of a Markdown table."""
    header = ("recipe", "model", "changes", "seed", "validation", "test", "steps", "seconds", "hardware", "commit")
    rows = []
    for entry in entries:
        name, key = next(iter(score_names(entry).items()))
        test = f"{name} {spread([entry.test[key]], key)}" if key in entry.test else ""
        cells = (
            entry.recipe,
            model_label(entry.config().model),
            ", ".join(without_own_data(entry.config(), entry.overrides)),
            str(entry.seed),
            f"{name} {spread([entry.final[key]], key)}",
            test,
            f"{entry.steps:,}",
            f"{entry.wall_seconds:,.0f}",
            entry.hardware,
            entry.commit[:10],
            f"`{entry.command}`",
        )
        rows.append(cells)
    return "\n".join(table_lines((*header, "command"), rows))
