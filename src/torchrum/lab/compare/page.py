"""The page of a comparison: the verdict first, then the table, the curves, the guesses, and how to go on."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from torchrum.lab.compare.problem import Problem
from torchrum.lab.compare.run import count_cores
from torchrum.lab.compare.verdict import RATES, RULE, SEEDS, Standing, Verdict, in_words
from torchrum.lab.page import Block, Items, Page, Section, picture
from torchrum.lab.plot_style import Figure, baseline, count_steps
from torchrum.lab.tables import Table, code

COLOURS = {"GRU": "#808080", "LSTM": "#009e73", "RUM": "#0072b2", "RUM lam=1": "#d55e00"}
"""Colours of the models; those with the window have the same, dashed."""
KINDS = {
    "classification": "a class for each sequence",
    "regression": "numbers for each sequence",
    "forecasting": "the next values at every step",
    "tagging": "a class at every step",
    "symbols": "the next symbol",
}


def curves(found: Sequence[Standing], floor: Mapping[str, float], metric: str) -> Figure:
    """Draw the scores on the validation part over steps and over seconds: the mean over the seeds and their range."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
    shown = [min(floor.values())]
    for each in found:
        name, _, window = each.model.partition(",")
        style = {"color": COLOURS[name], "linestyle": "--" if window else "-"}
        points = list(zip(*(run.curve for run in each.runs), strict=False))  # a training that diverged is shorter
        scores = [[score for *_, score in point] for point in points]
        shown += scores[-1]
        for axes, column in ((by_steps, 0), (by_seconds, 1)):
            where = [sum(place[column] for place in point) / len(point) for point in points]
            label = in_words(each.model) if axes is by_steps else None
            axes.plot(where, [sum(values) / len(values) for values in scores], label=label, **style)
            axes.fill_between(where, [*map(min, scores)], [*map(max, scores)], color=style["color"], alpha=0.12, lw=0)
    best = min(floor, key=lambda name: floor[name])
    for axes in (by_steps, by_seconds):
        baseline(axes, floor[best], f"{best}, on the test part" if axes is by_steps else "")
    # the first scores, before any step, may be far above the others
    low, high = min(shown), max(shown)
    margin = 0.15 * (high - low) or 0.1 * abs(high)
    by_steps.set_ylim(0 if metric == "error rate" else max(0, low - margin), high + 2 * margin)
    count_steps(by_steps)
    by_seconds.set_xlabel("seconds of one training, on one core or the GPU")
    by_steps.set_ylabel(f"{metric}, validation")
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def new_sequences(problem: Problem) -> str:
    """Say what ``predict`` takes."""
    if problem.symbols is not None:
        return "a list of texts, or of lists of symbols"
    columns = ", ".join(problem.reading.get("columns", []))
    return f"a list of arrays (steps, {problem.features})" + (f" with the columns {columns}" if columns else "")


def comparison_page(
    folder: Path, problem: Problem, verdict: Verdict, table: Table, found: Sequence[Standing], more: str
) -> Page:
    """Gather the page.

    Args:
        folder: of the comparison.
        problem: what was learnt.
        verdict: the outcome.
        table: the scores.
        found: the models.
        more: the command that goes on.
    """
    scored = [each for each in found if each.runs]
    results: list[Block] = [table]
    sections = [Section("Scores", results)]
    if scored:
        caption = (
            "Scores on the validation part over the steps and the seconds of a training: the mean over the seeds and "
            "their range. The table has the test scores of the weights that were best here."
        )
        results.append(picture("curves", lambda: curves(scored, problem.floor, problem.metric), caption))
        use = (
            "The best model on the validation part is saved. Two lines load it, and a third reads new sequences, as "
            f"they are in your data: {new_sequences(problem)}."
        )
        lines = (
            "from torchrum.lab.compare import load",
            f'model = load("{folder.resolve().as_posix()}")',
            "model.predict(sequences)",
        )
        sections.append(Section("Use the best model", [use, Items([code(line) for line in lines])]))
    parts = (problem.train, problem.validation, problem.test)
    counts = "\N{NO-BREAK SPACE}/\N{NO-BREAK SPACE}".join(f"{len(part.inputs):,}" for part in parts)
    facts = [
        ("to predict", KINDS[problem.kind]),
        ("sequences for training / validation / test", counts),
        ("score", f"{problem.metric}, lower is better"),
        ("trained on", torch.cuda.get_device_name() if torch.cuda.is_available() else f"{count_cores()} cores"),
    ]
    how = [
        RULE,
        f"Learning rates: {', '.join(f'{rate:g}' for rate in RATES)}. Fresh seeds: {len(SEEDS)}. All models have "
        "about as many parameters, meet the same examples in the same order, and begin every sequence with an empty "
        "state. With the window a model reads each input together with the one before it.",
        *([f"To go on where this stopped: {code(more)}"] if verdict.word == "undecided" else []),
    ]
    sections.append(Section("What was guessed", [Items([*problem.guesses])] if problem.guesses else ["Nothing."]))
    sections.append(Section("How it was decided", how))
    title = f"{folder.name}: {re.split('[:;]', verdict.sentence)[0].rstrip('.')}"
    return Page(title, verdict.sentence, sections, facts)
