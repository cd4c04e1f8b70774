"""Learning curves of the ledger, bAbI task by task, and gradients through time at initialisation."""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.artist import Artist
from matplotlib.ticker import PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.lab.data.babi import NAMES, TASKS
from torchrum.lab.plot_style import LOOKS, PALETTE, Axes, Figure, baseline, count_steps, grid_of_panels, ink, look
from torchrum.lab.recipes.babi import PAPER
from torchrum.lab.tasks import CharLM, Copying, Recall
from torchrum.lab.training.distributed import threads
from torchrum.layers.introspection import gradient_norms
from torchrum.layers.registry import build_layer
from torchrum.paper.ledger.babi import Column, best_columns
from torchrum.paper.ledger.entries import Entry
from torchrum.paper.ledger.runs import Row, model_label

T = TypeVar("T", Copying, Recall)
Points = NDArray[np.float64]
CORPORA = {"ptb": "Penn Treebank"}
"""Names of texts in titles."""


def copying_figure(rows: Sequence[Row]) -> Figure:
    """Loss over the steps, a panel for each delay; training loss, on a fresh batch at every step, as in the paper."""
    groups = _by_task(rows, Copying)
    figure, panels = grid_of_panels(len(groups), 3.8, 2.6, 0.9)
    for axes, (task, here) in zip(panels, groups.items(), strict=True):
        for row in here:
            draw_row(axes, row, "train_curve", "loss")
        baseline(axes, task.baseline(), "memoryless baseline")
        axes.set(yscale="log", title=f"T = {task.delay}", ylabel="cross-entropy, nats per step")
        count_steps(axes)
    _finish(figure, "Copying memory: training loss")
    return figure


def recall_figure(rows: Sequence[Row]) -> Figure:
    """Validation loss and accuracy over the steps, a row of panels for each length."""
    groups = _by_task(rows, Recall)
    figure = Figure(figsize=(7.6, 2.6 * len(groups) + 0.9), layout="constrained")
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for (left, right), (task, here) in zip(panels, groups.items(), strict=True):
        for row in here:
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


def headline_figure(panels: Mapping[str, Sequence[Row]]) -> Figure:
    """Accuracy of recall over the steps, a panel for each kind of input: for the top of a page."""
    figure = Figure(figsize=(7.2, 3.3), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        task = rows[0][0].config().task
        assert isinstance(task, Recall)
        baseline(axes, task.baseline_accuracy(), "bag of values")
        pairs = task.pairs
        for row in rows:
            draw_row(axes, row, "curve", "accuracy", linewidth=2)
        axes.set(title=title, ylim=(0, 1.05), xscale="log")
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xlabel("training steps")
    figure.axes[0].set_ylabel("validation accuracy")
    _finish(figure, f"Associative recall of {pairs} pairs")
    return figure


def char_figure(rows: Sequence[Row]) -> Figure:
    """Bits per character of the validation part over the epochs, a panel for each text.

    Models of the paper's table stand alone where there are any: a small one is not to be measured against them. Runs
    of less than a quarter of the longest one's epochs are left out.
    """
    rows = [row for row in rows if row[0].recipe.startswith("char-ptb")] or rows
    pairs = [(row, task) for row in rows if isinstance(task := row[0].config().task, CharLM)]
    epochs = [max(entry.steps for entry in row) / task.segments for row, task in pairs]
    texts: dict[tuple[str, str], list[tuple[Row, CharLM]]] = defaultdict(list)  # by name and hash of the text
    for (row, task), length in zip(pairs, epochs, strict=True):
        if length >= max(epochs) / 4:
            texts[task.corpus, task.sha256].append((row, task))
    figure = Figure(figsize=(max(6.4, 3.6 * len(texts)), 3.6), layout="constrained")
    panels = figure.subplots(1, len(texts), squeeze=False)[0]
    for axes, ((name, _), here) in zip(panels, texts.items(), strict=True):
        for row, task in here:
            draw_row(axes, row, "curve", task.metric, per=task.segments)
        lowest = min(min(entry.curve[task.metric]) for row, task in here for entry in row)
        # the first epochs are far above
        axes.set(ylim=(lowest - 0.02, lowest + 0.4), title=CORPORA.get(name, name), xlabel="epoch")
    figure.axes[0].set_ylabel("bits per character")
    _finish(figure, "Character language modelling: validation")
    return figure


def over_seeds(row: Row, curve: str, score: str) -> tuple[Points, Points, Points, Points]:
    """Return steps, and the median, lowest and highest score over the seeds at each of them.

    Curves are interpolated linearly. A run that stopped at its goal keeps its last value; a run that was cut short
    counts as far as it went.
    """
    steps = np.unique(np.concatenate([np.asarray(getattr(entry, curve)["step"], float) for entry in row]))
    values = np.full((len(row), len(steps)), np.nan)
    for line, entry in zip(values, row, strict=True):
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
    label = model_label(replace(config.model, window=1))  # a panel has one kind of input
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
    if len(row) > 1:
        axes.fill_between(steps, low, high, color=look(label)["color"], alpha=0.2, linewidth=0, zorder=front - 1)


def _by_task(rows: Sequence[Row], kind: type[T]) -> dict[T, list[Row]]:
    groups: dict[T, list[Row]] = defaultdict(list)
    for row in rows:
        if isinstance(task := row[0].config().task, kind):
            groups[task].append(row)
    return groups


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


MARKERS = "os^vPX*<>h"
"""Markers of the models, to tell them apart without colour."""
PLACES = {task: len(NAMES) - task for task in TASKS}
"""Task to its line, the first at the top."""


def babi_figure(entries: Sequence[Entry]) -> Figure:
    """A line of marks for each task: the mean over seeds, with a bar over their range; hollow for the paper's RUM.

    Models of one task each and those of all tasks have a panel of their own, where there are both. A set of which only
    some tasks were run is left out where others are complete.
    """
    found = best_columns(entries)
    groups = ([column for column in found if column.joint is joint] for joint in (False, True))
    panels = [[column for column in group if column.whole()] or group for group in groups if group]
    figure = Figure(figsize=(7.6, 10), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, group in zip(grid, panels, strict=True):
        if not group[0].joint:
            paper = [value / 100 for value in PAPER["rum"]]
            mean = f"RUM in the paper (mean {fmean(PAPER['rum']):.1f}%)"
            axes.plot(paper, list(PLACES.values()), "D", markerfacecolor="none", color=ink(), markersize=6, label=mean)
        for number, column in enumerate(group):
            shift = 0.85 * ((number + 0.5) / len(group) - 0.5)
            _marks(axes, column, PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)], -shift)
        axes.axvline(0.95, color=ink(), linewidth=0.7, linestyle=":")
        axes.set(xlabel="test accuracy", xlim=(-0.03, 1.04))
        axes.set_title("one model for all tasks" if group[0].joint else "one model per task")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=1)
    names = [f"{task}. {name.replace('-', ' ')}" for task, name in enumerate(NAMES, 1)]
    grid[0].set_yticks(list(PLACES.values()), names)
    return figure


def _marks(axes: Axes, column: Column, colour: str, marker: str, shift: float) -> None:
    scores = {task: found for task in TASKS if (found := column.of_task(task))}
    tasks = list(scores)
    heights = [PLACES[task] + shift for task in tasks]
    mean = f" (mean {100 * fmean(whole):.1f}%)" if (whole := column.whole()) else ""
    axes.hlines(heights, [min(scores[t]) for t in tasks], [max(scores[t]) for t in tasks], color=colour, linewidth=1.5)
    values = [fmean(scores[task]) for task in tasks]
    axes.plot(values, heights, marker, color=colour, markersize=4.5, label=column.label + mean)


def gradients_figure(delay: int = 200, units: int = 100, sequences: int = 32) -> Figure:
    """Norm of the gradient that reaches each earlier state, relative to the last, on sequences of the copying task.

    A line is the median over the sequences, a band the middle 90%; the models are as their recipes initialise them.
    """
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for label, values in initial_gradients(delay, units, sequences).items():
        back = np.arange(len(values) - 1, -1, -1)  # steps back from the last
        axes.plot(back, np.median(values, 1), **look(label), label=label)
        low, high = np.quantile(values, (0.05, 0.95), 1)
        axes.fill_between(back, low, high, color=look(label)["color"], alpha=0.15, linewidth=0)
    baseline(axes, 1, "neither vanishes nor explodes")
    title = f"Gradients through time at initialisation, {units} units, copying T = {delay}"
    axes.set(yscale="log", xlabel="steps back from the loss", ylabel="$|dC/dh_{T-k}|\\,/\\,|dC/dh_T|$", title=title)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-12))
    axes.legend(loc="lower left")
    return figure


@functools.cache  # a figure is drawn in two themes
def initial_gradients(delay: int, units: int, sequences: int) -> dict[str, NDArray[np.float64]]:
    """The share of a gradient at the last step that reaches each step, ``(T, B)``, by model."""
    task = Copying(delay=delay)
    x = F.one_hot(task.batch(sequences, torch.Generator().manual_seed(0)).x.T, task.input_size).double()
    exact = {**PAPER_OPTIONS, "backend": "reference"}  # in float64: the figure is the same on every machine
    models: dict[str, tuple[str, dict[str, Any]]] = {
        "RUM λ=0": ("rum", exact),
        "RUM λ=0, η=1": ("rum", {**exact, "eta": 1.0}),
        "RUM λ=1": ("rum", {**exact, "lam": 1}),
        "LSTM": ("lstm", {}),
        "GRU": ("gru", {}),
    }
    generator = torch.Generator().manual_seed(1)
    norms = {}
    with threads(1):  # thousands of tiny calls: waiting for a second thread costs more than it gives
        for label, (name, options) in models.items():
            with torch.random.fork_rng(devices=()):  # the global random state stays as it was
                torch.manual_seed(0)
                layer = build_layer(name, task.input_size, units, **options).double()
            norms[label] = gradient_norms(layer, x, generator).numpy()
    return norms
