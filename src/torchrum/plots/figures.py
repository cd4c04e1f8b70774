"""The paper's figures on copying and recall, redrawn from the ledger."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from matplotlib.artist import Artist

from torchrum.ledger.labels import model_label
from torchrum.ledger.schema import Entry, LedgerError
from torchrum.ledger.table import Row, best_settings, table_rows
from torchrum.plots.style import STYLE, Axes, Figure, baseline, colour, count_steps, matplotlib, save
from torchrum.tasks import Copying, Recall

T = TypeVar("T", Copying, Recall)

FIGURES = ("copying", "recall")


def draw_figure(name: str, entries: Sequence[Entry], out: Path) -> list[Path]:
    """Draw one figure from the ledger.

    Args:
        name: ``copying`` (Figure 2 of the paper) or ``recall`` (the figure of its Appendix B).
        entries: the ledger.
        out: a folder; the figure is written there as ``.png`` and ``.svg``.

    Returns:
        The paths of the pictures.
    """
    if name not in FIGURES:
        raise LedgerError(f"no figure {name!r}; there are: {', '.join(FIGURES)}.")
    rows = best_settings(table_rows(entries, name))
    if not rows:
        raise LedgerError(f"no run of {name} is in the ledger; add one with torchrum record RUN.")
    with matplotlib.rc_context(STYLE):
        figure = draw_copying(rows) if name == "copying" else draw_recall(rows)
        return [save(figure, out / f"{name}.{ending}") for ending in ("png", "svg")]


def draw_copying(rows: Sequence[Row]) -> Figure:
    """Loss over the steps, a panel for each delay; training loss, on a fresh batch at every step, as in the paper."""
    tasks = _tasks(rows, Copying)
    figure = Figure(figsize=(3.3 * len(tasks), 3.2), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for row in rows:
            if row[0].config().task == task:
                _lines(axes, row, "train_curve", "loss")
        baseline(axes, task.baseline(), "memoryless baseline")
        axes.set(yscale="log", title=f"T = {task.delay}")
        count_steps(axes)
    figure.axes[0].set_ylabel("cross-entropy, nats per step")
    figure.suptitle("Copying memory", fontsize=11)
    _legend(figure)
    return figure


def draw_recall(rows: Sequence[Row]) -> Figure:
    """Validation loss and accuracy over the steps, a row of panels for each length."""
    tasks = _tasks(rows, Recall)
    figure = Figure(figsize=(7.6, 2.6 * len(tasks) + 0.6), layout="constrained")
    for (left, right), task in zip(figure.subplots(len(tasks), 2, squeeze=False), tasks, strict=True):
        for row in rows:
            if row[0].config().task == task:
                _lines(left, row, "curve", "loss")
                _lines(right, row, "curve", "accuracy")
        baseline(left, task.baseline(), "bag of values")
        baseline(right, task.baseline_accuracy(), "bag of values")
        left.set(ylabel="cross-entropy, nats", title=f"T = {task.length}")
        right.set(ylabel="accuracy", ylim=(0, 1.03), title=f"T = {task.length}")
        count_steps(left)
        count_steps(right)
    figure.suptitle("Associative recall", fontsize=11)
    _legend(figure)
    return figure


def _tasks(rows: Sequence[Row], kind: type[T]) -> list[T]:
    return list(dict.fromkeys(task for row in rows if isinstance(task := row[0].config().task, kind)))


def _lines(axes: Axes, row: Row, curve: str, score: str) -> None:
    """A line a seed, the first with the label: seeds are few, and a mean would hide when each of them learnt.

    A dot ends a run that reached its goal before its last step.
    """
    config = row[0].config()
    label = model_label(config.model)
    for place, entry in enumerate(row):
        points = getattr(entry, curve)
        axes.plot(
            points["step"],
            points[score],
            color=colour(label),
            label=label if place == 0 else None,
            alpha=1 if place == 0 else 0.45,
            linewidth=1.4 if place == 0 else 0.9,
            marker="o" if entry.steps < config.steps else None,
            markevery=[-1],
            markersize=3.5,
            zorder=3 if config.model.layer == "rum" else 2,
        )


def _legend(figure: Figure) -> None:
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(str(label), line)
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=min(len(found), 6))
