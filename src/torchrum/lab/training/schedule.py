"""The learning rate over the steps, as one word or one list of steps, so that one override can choose it."""

import math

from torchrum.lab.training.errors import ConfigError

DECAYS = ("linear", "cosine")
ALLOWED = (
    "it must be constant, linear, cosine, steps in rising order with factors (1000:0.3,2000:0.1) "
    "or plateau/FACTOR/PATIENCE"
)


def plateau(schedule: str) -> tuple[float, int] | None:
    """Factor and patience of ``plateau/0.25/5``; None for any other schedule."""
    word, *numbers = schedule.split("/")
    if word != "plateau":
        return None
    try:
        factor, patience = float(numbers[0]), int(numbers[1])
    except (ValueError, IndexError):
        factor, patience = math.nan, 0
    if len(numbers) != 2 or not 0 < factor < 1 or patience < 1:
        raise ConfigError(
            f"optimizer: schedule is {schedule!r}; a plateau is plateau/FACTOR/PATIENCE, with a factor between 0 and 1 "
            "and a number of validations, such as plateau/0.25/5."
        )
    return factor, patience


def milestones(schedule: str) -> list[tuple[int, float]]:
    """Steps and the factor that holds from each of them on; none for a schedule that is a word."""
    if schedule in ("constant", *DECAYS) or plateau(schedule) is not None:
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


def rate_factors(groups: str) -> dict[str, float]:
    """Parts of names and the factors of lr for parameters that have them in their names."""
    factors: dict[str, float] = {}
    for part in filter(None, groups.split(",")):
        name, _, factor = part.rpartition(":")
        try:
            factors[name.strip()] = float(factor)
        except ValueError:
            factors[name.strip()] = math.nan
    if not all(name and 0 <= factor < math.inf for name, factor in factors.items()):
        raise ConfigError(
            f"optimizer: groups is {groups!r}; write parts of names with factors of lr, such as "
            "weight_hh:0.1,embedding:0.5."
        )
    return factors
