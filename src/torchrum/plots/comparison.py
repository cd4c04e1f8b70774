"""Several runs of one task in one picture."""

from collections.abc import Mapping
from pathlib import Path

from torchrum.plots.style import Figure, baseline, count_steps, drawing, look, save
from torchrum.tasks import Recall
from torchrum.training.records import read_metrics


def draw_comparison(runs: Mapping[str, Path], task: Recall, out: Path) -> Path:
    """Draw validation loss and accuracy of associative recall.

    Args:
        runs: label and run folder of each model.
        task: what they learnt.
        out: the picture.

    Returns:
        The path of the picture.
    """
    with drawing():
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        for label, run in runs.items():
            lines = read_metrics(run, "validation")
            for axes, score in ((left, "loss"), (right, "accuracy")):
                points = [line["step"] for line in lines], [line[score] for line in lines]
                axes.plot(*points, **look(label), label=label)
        baseline(left, task.baseline(), "bag of values")
        baseline(right, task.baseline_accuracy(), "bag of values")
        left.set_ylabel("cross-entropy, nats")
        right.set(ylabel="accuracy", ylim=(0, 1.03))
        count_steps(left)
        count_steps(right)
        figure.legend(*right.get_legend_handles_labels(), loc="outside right center")
        figure.suptitle(f"Associative recall, {task.pairs} pairs", fontsize=11)
        return save(figure, out)
