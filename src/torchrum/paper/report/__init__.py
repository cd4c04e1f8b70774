"""The HTML page of the whole ledger beside the paper, or of a few run folders."""

import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torchrum.lab.models import build_model, count_parameters
from torchrum.lab.page import Block, Items, Page, Playground, Section, picture
from torchrum.lab.tables import Table, code
from torchrum.lab.training.config import flat, to_json
from torchrum.lab.training.environment import read_environment
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.run_folder import read_config, read_metrics
from torchrum.paper.bench.records import read_report
from torchrum.paper.bench.report import report_figure, report_tables
from torchrum.paper.ledger.comparison import compare, comparison_tables
from torchrum.paper.ledger.runs import model_label
from torchrum.paper.ledger.schema import Entry, LedgerError, read_ledger
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
from torchrum.paper.report.headline import HEADER, headlines

Report = Callable[[str], None]


def pictures(name: str, entries: Sequence[Entry], results: Path, report: Report) -> list[Block]:
    """Draw every figure of one name that the ledger has runs for."""
    drawings = plan(name, entries, results)
    if drawings:
        report(f"drawing {name}")
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


def ledger_page(results: Path, report: Report = lambda line: None) -> Page:
    """Gather the report of a ledger; an empty one is an error.

    Args:
        results: the ledger.
        report: receives a line before each step that takes seconds.
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
        Section("At a glance", list(_glance(entries, results, found, report))),
        *(_task(task, entries, results, found, report) for task in TASKS),
        Section("What was not reproduced, and what was not run", list(_missing(found)), "missing"),
        *(
            Section(title, [about, *(pictures(name, entries, results, report) or [NO_ARRAYS])])
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
    """How many runs, of what, on what, and what they cost."""
    hours: dict[str, float] = defaultdict(float)
    for entry in entries:
        hours[entry.hardware] += entry.wall_seconds / 3600
    cost = ", ".join(f"{time:.1f} h on {name}" for name, time in sorted(hours.items(), key=lambda item: -item[1]))
    recipes = len({entry.recipe for entry in entries})
    return [("runs", f"{len(entries)} of {recipes} recipes"), ("training time", cost)]


def _glance(entries: Sequence[Entry], results: Path, found: Sequence[Verdict], report: Report) -> Iterator[Block]:
    counts = Counter(item.word for item in found)
    order: tuple[Word, ...] = ("reproduced", "better", "not reproduced", "not comparable", "not run")
    numbers = ", ".join(f"**{counts[word]}** {word}" for word in order if counts[word])
    yield f"Of {len(found)} printed numbers with a recipe: {numbers}."
    yield Table(HEADER, [row.cells() for row in headlines(entries, results)])
    yield from pictures("headline", entries, results, report)
    yield f"**The rule.** {RULE}"


def _task(task: str, entries: Sequence[Entry], results: Path, found: Sequence[Verdict], report: Report) -> Section:
    title, about, budget = TASKS[task]
    parts: list[Block] = [about]
    here = [item for item in found if item.recipe.partition("-")[0] == task]
    parts.append(verdict_table(here))
    if task in FIGURES:
        parts += pictures(task, entries, results, report)
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
