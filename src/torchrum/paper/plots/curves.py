"""Learning curves from the ledger: the median over seeds, and their range."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from torchrum.lab.tasks import CharLM, Copying, Recall
from torchrum.paper.ledger.labels import model_label
from torchrum.paper.ledger.table import Row
from torchrum.paper.ledger.verdicts import one_per_seed
from torchrum.paper.plots.style import LOOKS, Axes, Figure, baseline, count_steps, ink, look

T = TypeVar("T", Copying, Recall, CharLM)
Points = NDArray[np.float64]
CORPORA = {"ptb": "Penn Treebank"}
"""What a text is called in a title."""


def copying_figure(rows: Sequence[Row]) -> Figure:
    """Loss over the steps, a panel for each delay; training loss, on a fresh batch at every step, as in the paper."""
    tasks = _tasks(rows, Copying)
    across = min(2, len(tasks))
    down = -(-len(tasks) // across)
    figure = Figure(figsize=(3.8 * across, 2.6 * down + 0.9), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(tasks) :]:
        axes.set_visible(False)
    for axes, task in zip(grid.flat, tasks, strict=False):
        for row in rows:
            if row[0].config().task == task:
                draw_row(axes, row, "train_curve", "loss")
        baseline(axes, task.baseline(), "memoryless baseline")
        axes.set(yscale="log", title=f"T = {task.delay}", ylabel="cross-entropy, nats per step")
        count_steps(axes)
    _finish(figure, "Copying memory: training loss")
    return figure


def recall_figure(rows: Sequence[Row]) -> Figure:
    """Validation loss and accuracy over the steps, a row of panels for each length."""
    tasks = _tasks(rows, Recall)
    figure = Figure(figsize=(7.6, 2.6 * len(tasks) + 0.9), layout="constrained")
    for (left, right), task in zip(figure.subplots(len(tasks), 2, squeeze=False), tasks, strict=True):
        for row in rows:
            if row[0].config().task == task:
                draw_row(left, row, "curve", "loss")
                draw_row(right, row, "curve", "accuracy")
        baseline(left, task.baseline(), "bag of values")
        baseline(right, task.baseline_accuracy(), "bag of values")
        left.set(ylabel="cross-entropy, nats", title=f"T = {task.length}")
        right.set(ylabel="accuracy", ylim=(0, 1.03), title=f"T = {task.length}")
        count_steps(left)
        count_steps(right)
    _finish(figure, "Associative recall: validation")
    return figure


def headline_figure(rows: Sequence[Row]) -> Figure:
    """Accuracy of recall over the steps, of few models, each named at its line: for the top of a page."""
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.subplots()
    task = rows[0][0].config().task
    assert isinstance(task, Recall)
    baseline(axes, task.baseline_accuracy(), "the best without pairing keys and values")
    for row in rows:
        draw_row(axes, row, "curve", "accuracy", linewidth=2.2)
        _name_line(axes, row)
    axes.set(ylabel="validation accuracy", ylim=(0, 1.05), title=f"Associative recall of {task.pairs} pairs, 50 units")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    count_steps(axes)
    return figure


def _name_line(axes: Axes, row: Row) -> None:
    """Model, last score and seeds below the end of its line, which may be in the middle of the figure."""
    steps, median, *_ = over_seeds(row, "curve", "accuracy")
    label, seeds = model_label(row[0].config().model), len(one_per_seed(row))
    text = f"{label}: {median[-1]:.2%} after {steps[-1] / 1000:g}k steps ({seeds} seed{'s' if seeds > 1 else ''})"
    right = steps[-1] > axes.dataLim.x1 / 2
    axes.plot(steps[-1], median[-1], "o", color=look(label)["color"], markersize=6, zorder=4)
    axes.annotate(
        text,
        (steps[-1], median[-1]),
        xytext=(0, -13),
        textcoords="offset points",
        ha="right" if right else "left",
        va="top",
        color=ink(),
        fontsize=9.5,
    )


def char_figure(rows: Sequence[Row]) -> Figure:
    """Bits per character of the validation part over the epochs, a panel for each text.

    Models of the paper's table stand alone where there are any: a small one is not to be measured against them.
    """
    rows = [row for row in rows if row[0].recipe.startswith("char-ptb")] or rows
    texts: dict[tuple[str, str], list[CharLM]] = {}  # by name and hash; its tasks differ in how they cut it
    for task in _tasks(rows, CharLM):
        texts.setdefault((task.corpus, task.sha256), []).append(task)
    figure = Figure(figsize=(max(6.4, 3.6 * len(texts)), 3.6), layout="constrained")
    panels = figure.subplots(1, len(texts), squeeze=False)[0]
    for axes, ((name, _), tasks) in zip(panels, texts.items(), strict=True):
        here = [(row, task) for row in rows for task in tasks if row[0].config().task == task]
        for row, task in here:
            draw_row(axes, row, "curve", task.metric, per=task.segments)
        lowest = min(min(entry.curve[task.metric]) for row, task in here for entry in row)
        # the first epochs are far above
        axes.set(ylim=(lowest - 0.02, lowest + 0.4), title=CORPORA.get(name, name), xlabel="epoch")
    figure.axes[0].set_ylabel("bits per character")
    _finish(figure, "Character language modelling: validation")
    return figure


def over_seeds(row: Row, curve: str, score: str) -> tuple[Points, Points, Points, Points]:
    """Steps, and median, least and greatest of a score over the seeds at each.

    Between its points a curve is read off a straight line. A run that stopped at its goal keeps its last value; one
    that was cut short counts as far as it went.
    """
    entries = one_per_seed(row)
    steps = np.unique(np.concatenate([np.asarray(getattr(entry, curve)["step"], float) for entry in entries]))
    values = np.full((len(entries), len(steps)), np.nan)
    for line, entry in zip(values, entries, strict=True):
        points = getattr(entry, curve)
        reached = entry.steps < entry.config().steps
        line[:] = np.interp(steps, points["step"], points[score], left=np.nan, right=None if reached else np.nan)
    kept = ~np.isnan(values).all(0)
    values = values[:, kept]
    return steps[kept], np.nanmedian(values, 0), np.nanmin(values, 0), np.nanmax(values, 0)


def draw_row(axes: Axes, row: Row, curve: str, score: str, linewidth: float = 1.2, per: int = 1) -> None:
    """The median of a setting's seeds and a band over their range; a dot ends runs that all reached their goal.

    The axis counts steps, or as many of them as ``per`` says.
    """
    config = row[0].config()
    label = model_label(config.model)
    steps, median, low, high = over_seeds(row, curve, score)
    steps = steps / per
    front = 3 if config.model.layer == "rum" else 2
    at_goal = all(entry.steps < entry.config().steps for entry in row)
    axes.plot(
        steps,
        median,
        **look(label),
        label=label,
        linewidth=linewidth,
        marker="o" if at_goal else None,
        markevery=[-1],
        markersize=3.5,
        zorder=front,
    )
    if len(one_per_seed(row)) > 1:
        axes.fill_between(steps, low, high, color=look(label)["color"], alpha=0.2, linewidth=0, zorder=front - 1)


def _tasks(rows: Sequence[Row], kind: type[T]) -> list[T]:
    return list(dict.fromkeys(task for row in rows if isinstance(task := row[0].config().task, kind)))


def _finish(figure: Figure, title: str) -> None:
    figure.suptitle(f"{title} (line: median over seeds; band: their range)", fontsize=10)
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(str(label), line)
    labels = sorted(found, key=lambda label: list(LOOKS).index(label) if label in LOOKS else len(LOOKS))
    widest = 0.45 + 0.065 * max(map(len, labels), default=0)  # inches, with its line
    columns = max(1, min(len(found), 6, int(figure.get_figwidth() / widest)))
    figure.legend([found[label] for label in labels], labels, loc="outside lower center", ncols=columns)
