"""The pages: the whole ledger beside the paper, and a few run folders side by side."""

import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from torchrum.lab.training.config import TrainConfig, to_json
from torchrum.lab.training.environment import read_environment
from torchrum.lab.training.errors import RunError
from torchrum.lab.training.run_folder import read_config, read_metrics
from torchrum.paper.bench.records import read_report
from torchrum.paper.bench.report import report_figure, report_tables
from torchrum.paper.ledger.arrays import collect_arrays, drawable
from torchrum.paper.ledger.comparison import compare, comparison_tables
from torchrum.paper.ledger.record import count_parameters
from torchrum.paper.ledger.runs import model_label
from torchrum.paper.ledger.schema import Entry, LedgerError, read_ledger
from torchrum.paper.ledger.tables import runs_table, task_tables
from torchrum.paper.ledger.verdicts import RULE, Verdict, Word, condensed, verdict_table, verdicts
from torchrum.paper.plots.catalog import FIGURES
from torchrum.paper.plots.curves import comparison_figure
from torchrum.paper.plots.trained import diagonal_figure, kernels_figure, phases_figure, rotation_figure
from torchrum.paper.report.headline import headlines
from torchrum.paper.report.page import Block, Items, Page, Playground, Section, picture, pictures
from torchrum.paper.table import Table, code

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
            [PLAYGROUND, Playground(), *_shown(("reflections", "cell"), entries, results)],
            "playground",
        ),
        Section("Benchmarks", list(_benchmarks(results / "bench"))),
        Section("Every run", [runs_table(entries)], "runs"),
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
    yield f"Of {len(found)} printed numbers with a recipe: {numbers}."
    rows = [(row.what, row.ours, row.others) for row in headlines(entries, results)]
    yield Table(("what", "RUM", "for comparison"), rows)
    yield from pictures("headline", entries, results)
    yield f"**The rule.** {RULE}"


def _task(task: str, entries: Sequence[Entry], results: Path, found: Sequence[Verdict]) -> Section:
    title, about, budget = TASKS[task]
    parts: list[Block] = [about]
    here = [item for item in found if item.recipe.partition("-")[0] == task]
    parts.append(verdict_table(here))
    if task in FIGURES:
        parts += pictures(task, entries, results)
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


def _look(name: str, about: str, entries: Sequence[Entry], results: Path) -> Iterator[Block]:
    yield about
    drawn = pictures(name, entries, results)
    yield from drawn
    if not drawn:
        yield "No run with the arrays for this figure is in the ledger (`torchrum record --arrays RUN`)."


def _shown(names: Sequence[str], entries: Sequence[Entry], results: Path) -> list[Block]:
    return [drawn for name in names for drawn in pictures(name, entries, results)]


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


def runs_page(
    runs: Sequence[Path],
    title: str = "torchrum runs",
    lead: str = "",
    drawn: Mapping[Path, list[Block]] | None = None,
) -> Page:
    """Gather the page of run folders; each needs at least one validation.

    Args:
        runs: the folders.
        title, lead: what stands at the top.
        drawn: what ``run_blocks`` has given for some of them already.
    """
    configs = {run: read_config(run) for run in runs}
    for run in runs:
        if not read_metrics(run, "validation"):
            raise RunError(f"{run} has no validation scores to report yet.")
    labels = _labels(configs)
    parts = {run: (drawn or {}).get(run) or run_blocks(run) for run in runs}
    sections = [
        Section("Side by side" if len(runs) > 1 else "Scores", list(_comparison(configs, labels)), "scores"),
        *(Section(labels[run], part, f"run-{n}") for n, (run, part) in enumerate(parts.items())),
        Section("Rotation playground", [PLAYGROUND, Playground()], "playground"),
    ]
    told = f"{len(runs)} runs, from their folders." if len(runs) > 1 else "One run, from its folder."
    return Page(title, lead or told, sections)


def _labels(configs: dict[Path, TrainConfig]) -> dict[Path, str]:
    """The model's name, with the folder where two are alike."""
    labels = {run: model_label(config.model) for run, config in configs.items()}
    alike = list(labels.values())
    return {run: label if alike.count(label) == 1 else f"{label}, {run.name}" for run, label in labels.items()}


def _comparison(configs: dict[Path, TrainConfig], labels: dict[Path, str]) -> Iterator[Block]:
    lines = {run: read_metrics(run, "validation") for run in configs}
    names = [name for name in next(iter(lines.values()))[0] if name not in ("kind", "step", "seconds")]
    header = ["model", "task", "parameters", "steps", "seconds", *names]
    rows = []
    for run, config in configs.items():
        last = lines[run][-1]
        scores = [f"{last[name]:{'.1%' if name == 'accuracy' else '.4g'}}" if name in last else "" for name in names]
        counts = [f"{count_parameters(config):,}", f"{last['step']:,}", f"{last['seconds']:.0f}"]
        rows.append([labels[run], type(config.task).__name__, *counts, *scores])
    yield Table(header, rows)
    task = next(iter(configs.values())).task
    if all(config.task == task for config in configs.values()):
        caption = "Validation over the steps; the dashed line is the best that is possible without memory."
        shown = {labels[run]: run for run in configs}
        yield picture("side-by-side", lambda: comparison_figure(shown, task), caption)


def run_blocks(run: Path) -> list[Block]:
    """The part of the page that is about one run."""
    return list(_run(run, read_config(run)))


def _run(run: Path, config: TrainConfig) -> Iterator[Block]:
    environment = read_environment(run)
    place = environment.accelerator or environment.processor
    commit = (environment.commit or "unknown")[:10]
    yield f"Command: {code(shlex.join(environment.command))}. {place}, commit {commit}, seed {config.seed}."
    arrays = drawable(collect_arrays(run))
    title = f"{config.name}, {config.model.hidden_size} units, seed {config.seed}"
    if arrays:
        yield picture(
            "kernels", lambda: kernels_figure(arrays, title), "The recurrent matrices of the best checkpoint."
        )
        caption = "Angle and plane of each rotation and the norm of the state over one validation sequence."
        yield picture("rotation", lambda: rotation_figure(arrays, title, config.task), caption)
        if any(key.endswith("/phases") for key in arrays):
            caption = "Phases of the accumulated rotation R as it reads that sequence."
            yield picture("phases", lambda: phases_figure(arrays, title, config.task), caption)
        if "steps" in arrays:
            caption = "How far the diagonals of the recurrent matrices stand out in the course of training."
            yield picture("diagonal", lambda: diagonal_figure({title: arrays}), caption)
    yield Table(("field", "value"), _fields(to_json(config)))


def _fields(config: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """List the fields of a config with their values, nested names joined by dots."""
    rows = []
    for key, value in config.items():
        if isinstance(value, dict):
            rows += _fields(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", str(value)))
    return rows
