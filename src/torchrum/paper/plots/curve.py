"""The curve of one run: loss and metrics over the steps."""

from pathlib import Path

from torchrum.lab.training.errors import RunError
from torchrum.lab.training.run_folder import read_config, read_metrics, shared_scores
from torchrum.paper.plots.style import Figure, baseline, count_steps, drawing, save

TRAINING, VALIDATION = "#9ecae1", "#d55e00"


def draw_curve(run: Path | str, out: Path | str | None = None) -> Path:
    """Draw loss and metrics of a run folder, training and validation.

    Args:
        run: the run folder.
        out: the picture, ``.png``, ``.svg`` or ``.pdf``; ``curve.png`` in the run folder if None.

    Returns:
        The path of the picture.
    """
    config = read_config(run)
    training, validation = read_metrics(run, "train"), read_metrics(run, "validation")
    if not training and not validation:
        raise RunError(f"{run} has no scores to draw yet.")
    # ratio is the loss in other units: one panel serves both
    scores = [key for key in shared_scores([*training, *validation]) if key != "ratio"]
    with drawing():
        figure = Figure(figsize=(3.6 * len(scores), 2.8), layout="constrained")
        for axes, score in zip(figure.subplots(1, len(scores), squeeze=False)[0], scores, strict=True):
            for lines, label, colour in ((training, "training", TRAINING), (validation, "validation", VALIDATION)):
                axes.plot([line["step"] for line in lines], [line[score] for line in lines], color=colour, label=label)
            if score == "loss":
                if min(line["loss"] for line in training + validation) < config.task.baseline() / 10:
                    axes.set_yscale("log")
                baseline(axes, config.task.baseline(), "baseline")
            if score == "accuracy":
                axes.set_ylim(-0.02, 1.02)
            axes.set_ylabel(score)
            count_steps(axes)
        figure.axes[-1].legend(loc="best")
        figure.suptitle(f"{config.name}, seed {config.seed}", fontsize=10)
        return save(figure, Path(run) / "curve.png" if out is None else Path(out))
