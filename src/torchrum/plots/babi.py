"""bAbI, task by task: the paper's accuracy beside ours."""

from collections.abc import Sequence
from statistics import fmean

from torchrum.data.babi import NAMES
from torchrum.ledger.labels import model_label
from torchrum.ledger.schema import Entry
from torchrum.ledger.verdicts import one_per_seed
from torchrum.plots.diagonal import PALETTE
from torchrum.plots.style import Axes, Figure, ink
from torchrum.recipes.babi import PAPER

Scores = dict[int, list[float]]
"""Task to the test accuracy of every seed."""


def babi_scores(entries: Sequence[Entry]) -> dict[str, Scores]:
    """Test accuracy by model and task: of models that have one task each, and of those that have all in one."""
    found: dict[str, Scores] = {}
    rows: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.task == "babi" and not any(text.startswith("task.") for text in entry.overrides):
            rows.setdefault(entry.recipe, []).append(entry)
    for recipe, row in rows.items():
        label, _, task = recipe.removeprefix("babi-").partition("-qa")
        for entry in one_per_seed(row):
            scores = entry.test or entry.final
            if task:
                name = f"{model_label(entry.config().model)}, one model per task"
                found.setdefault(name, {}).setdefault(int(task), []).append(scores["accuracy"])
            else:
                name = f"{label.removeprefix('joint-')}, one model for all tasks"
                for number in range(1, len(NAMES) + 1):
                    found.setdefault(name, {}).setdefault(number, []).append(scores[f"task{number:02d}"])
    return found


def babi_figure(entries: Sequence[Entry]) -> Figure:
    """A line of dots for each task: the mean over seeds, with a bar over their range; hollow for the paper's RUM."""
    figure = Figure(figsize=(7.6, 6.6), layout="constrained")
    axes = figure.subplots()
    places = {task: len(NAMES) - task for task in range(1, len(NAMES) + 1)}
    axes.plot(
        [value / 100 for value in PAPER["rum"]],
        list(places.values()),
        "D",
        markerfacecolor="none",
        color=ink(),
        markersize=6,
        label=f"RUM in the paper (mean {fmean(PAPER['rum']):.1f} %)",
    )
    for number, (label, scores) in enumerate(babi_scores(entries).items()):
        _dots(axes, scores, places, PALETTE[number % len(PALETTE)], label, 0.16 * ((number + 1) // 2) * (-1) ** number)
    axes.set_yticks(list(places.values()), [f"{task}. {name.replace('-', ' ')}" for task, name in enumerate(NAMES, 1)])
    axes.set(xlabel="test accuracy", xlim=(-0.02, 1.03), title="bAbI (10,000 questions per task)")
    axes.axvline(0.95, color=ink(), linewidth=0.7, linestyle=":")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=1)
    return figure


def _dots(axes: Axes, scores: Scores, places: dict[int, int], colour: str, label: str, shift: float) -> None:
    tasks = sorted(scores)
    heights = [places[task] + shift for task in tasks]
    whole = f" (mean {100 * fmean(fmean(scores[task]) for task in tasks):.1f} %)" if len(tasks) == len(NAMES) else ""
    axes.hlines(heights, [min(scores[t]) for t in tasks], [max(scores[t]) for t in tasks], color=colour, linewidth=1.5)
    axes.plot([fmean(scores[t]) for t in tasks], heights, "o", color=colour, markersize=4.5, label=label + whole)
