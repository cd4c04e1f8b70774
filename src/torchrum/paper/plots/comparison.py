"""Several runs of one task in one picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrum.lab.tasks import Recall
from torchrum.lab.tasks.base import Task
from torchrum.lab.training.run_folder import read_metrics
from torchrum.paper.plots.diagonal import PALETTE
from torchrum.paper.plots.style import LOOKS, Figure, baseline, count_steps, drawing, look, save


def draw_comparison(runs: Mapping[str, Path], task: Task, out: Path) -> Path:
    """Draw ``comparison_figure`` into a file; says where."""
    with drawing():
        return save(comparison_figure(runs, task), out)


def comparison_figure(runs: Mapping[str, Path], task: Task) -> Figure:
    """Validation loss and the task's metric over the steps, a line for each run.

    Args:
        runs: label and run folder of each model.
        task: what they learnt.
    """
    scores = dict.fromkeys(("loss", "accuracy" if isinstance(task, Recall) else task.metric))
    figure = Figure(figsize=(3.6 * len(scores), 2.9), layout="constrained")
    for axes, score in zip(figure.subplots(1, len(scores), squeeze=False)[0], scores, strict=True):
        for number, (label, run) in enumerate(runs.items()):
            lines = read_metrics(run, "validation")
            axes.plot(
                [line["step"] for line in lines], [line[score] for line in lines], **_look(label, number), label=label
            )
        if score == "loss":
            baseline(axes, task.baseline(), "bag of values" if isinstance(task, Recall) else "without memory")
        elif isinstance(task, Recall):
            baseline(axes, task.baseline_accuracy(), "bag of values")
        axes.set_ylabel("cross-entropy, nats" if score == "loss" else score)
        if score == "accuracy":
            axes.set_ylim(0, 1.03)
        count_steps(axes)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    if isinstance(task, Recall):
        figure.suptitle(f"Associative recall, {task.pairs} pairs", fontsize=11)
    return figure


def _look(label: str, number: int) -> dict[str, Any]:
    return look(label) if label in LOOKS else {"color": PALETTE[number % len(PALETTE)]}
