"""The learning rate over the steps, as one word or one list of steps, so that one override can choose it."""

import math

from torchrum.training.errors import ConfigError

DECAYS = ("linear", "cosine")
ALLOWED = "it must be constant, linear, cosine, or rising steps with factors of lr, as 1000:0.3,2000:0.1"


def milestones(schedule: str) -> list[tuple[int, float]]:
    """Steps and the factor that holds from each of them on; none for a schedule that is a word."""
    if schedule in ("constant", *DECAYS):
        return []
    try:
        pairs = [
            (int(step), float(factor)) for step, _, factor in (part.partition(":") for part in schedule.split(","))
        ]
    except ValueError:
        raise ConfigError(f"optimizer: schedule is {schedule!r}, but {ALLOWED}.") from None
    steps = [step for step, _ in pairs]
    if steps != sorted(set(steps)) or steps[0] < 0 or not all(0 <= factor < math.inf for _, factor in pairs):
        raise ConfigError(f"optimizer: schedule is {schedule!r}, but {ALLOWED}.")
    return pairs


def schedule_factor(schedule: str, warmup: int, step: int, steps: int) -> float:
    """What lr is multiplied by in the step that follows ``step`` finished ones, of ``steps`` in all.

    A function of the step alone, so it needs no state: a resumed run finds its place. linear and cosine fall from the
    end of the warm-up to zero at the end of the run.
    """
    if step < warmup:
        return (step + 1) / warmup * _milestone_factor(schedule, step)
    if schedule not in DECAYS:
        return _milestone_factor(schedule, step)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


def _milestone_factor(schedule: str, step: int) -> float:
    return next((factor for start, factor in reversed(milestones(schedule)) if step >= start), 1.0)
