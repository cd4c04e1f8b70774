"""What a run's recorded curves tell: its best, whether it was done, and whether it was still learning."""

from statistics import fmean, median

from torchrum.paper.ledger.schema import Entry

FALLING = 0.99
"""Still learning: the median validation loss of the last quarter of a run is below this share of the quarter before."""
APART = 0.995
"""Overfitting: the training loss of the last fifth of a run is below this share of its validation loss."""


def seen(entry: Entry, key: str, steps: int | None = None) -> list[float]:
    """The validation scores of a run, up to ``steps`` where given."""
    points = zip(entry.curve["step"], entry.curve[key], strict=True)
    return [value for step, value in points if steps is None or step <= steps]


def best(entry: Entry, key: str, steps: int | None = None) -> float:
    """The best validation score, by ``steps`` where given: the highest accuracy, the lowest of anything else."""
    return (max if key == "accuracy" else min)(seen(entry, key, steps))


def reached_goal(entry: Entry) -> bool:
    """Whether a run ended because it had solved its task."""
    config = entry.config()
    if config.stop_at is None:
        return False
    score = entry.final[config.task.metric]
    return score <= config.stop_at if config.task.goal == "min" else score >= config.stop_at


def still_learning(entry: Entry, steps: int | None = None) -> bool:
    """Whether the validation loss was still falling at the end, or after ``steps``: medians of the last two quarters.

    Medians, because a loss that spikes says little at any one point.
    """
    losses = seen(entry, "loss", steps)
    quarter = len(losses) // 4
    if quarter == 0 or (reached_goal(entry) and (steps is None or entry.steps <= steps)):
        return False
    return median(losses[-quarter:]) < FALLING * median(losses[-2 * quarter : -quarter])


def overfits(entry: Entry, steps: int | None = None) -> bool:
    """Whether validation is above the loss of the best model without memory, and training below validation."""
    points = zip(entry.train_curve["step"], entry.train_curve["loss"], strict=True)
    training = [loss for step, loss in points if steps is None or step <= steps]
    validation = seen(entry, "loss", steps)
    if not training or not validation or validation[-1] <= entry.baseline:
        return False
    return fmean(training[-max(1, len(training) // 5) :]) < APART * validation[-1]
