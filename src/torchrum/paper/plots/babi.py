"""bAbI, task by task: the paper's accuracy beside ours."""

from collections.abc import Sequence
from statistics import fmean

from torchrum.lab.data.babi import NAMES, TASKS
from torchrum.lab.recipes.babi import PAPER
from torchrum.paper.ledger.babi import Column, best_columns
from torchrum.paper.ledger.schema import Entry
from torchrum.paper.plots.diagonal import PALETTE
from torchrum.paper.plots.style import Axes, Figure, ink

MARKERS = "os^vPX*<>h"
"""One for each model, so that colour is not needed to tell them apart."""
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
    figure = Figure(figsize=(7.6, 6.8), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, group in zip(grid, panels, strict=True):
        if not group[0].joint:
            paper = [value / 100 for value in PAPER["rum"]]
            mean = f"RUM in the paper (mean {fmean(PAPER['rum']):.1f}%)"
            axes.plot(paper, list(PLACES.values()), "D", markerfacecolor="none", color=ink(), markersize=6, label=mean)
        for number, column in enumerate(group):
            shift = 0.7 * ((number + 0.5) / len(group) - 0.5)
            _marks(axes, column, PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)], -shift)
        axes.axvline(0.95, color=ink(), linewidth=0.7, linestyle=":")
        axes.set(xlabel="test accuracy", xlim=(-0.03, 1.04))
        axes.set_title("one model for all tasks" if group[0].joint else "one model per task")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=1)
    names = [f"{task}. {name.replace('-', ' ')}" for task, name in enumerate(NAMES, 1)]
    grid[0].set_yticks(list(PLACES.values()), names)
    return figure


def _marks(axes: Axes, column: Column, colour: str, marker: str, shift: float) -> None:
    scores = {task: [found[task] for found in column.scores.values() if task in found] for task in TASKS}
    tasks = [task for task in TASKS if scores[task]]
    heights = [PLACES[task] + shift for task in tasks]
    mean = f" (mean {100 * fmean(whole):.1f}%)" if (whole := column.whole()) else ""
    axes.hlines(heights, [min(scores[t]) for t in tasks], [max(scores[t]) for t in tasks], color=colour, linewidth=1.5)
    values = [fmean(scores[task]) for task in tasks]
    axes.plot(values, heights, marker, color=colour, markersize=4.5, label=column.label + mean)
