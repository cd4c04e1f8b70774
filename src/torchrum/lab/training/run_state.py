"""What a run remembers from step to step, and how it ends."""

import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Progress:
    """What the loop itself remembers; all of it is in the checkpoint."""

    step: int = 0
    """Steps done."""
    since_log: int = 0
    """Steps in the sums that are not logged yet."""
    best: float | None = None
    """Best value of the task's metric on the validation set."""
    best_step: int = 0
    """Where it was reached."""
    reached: int = 0
    """Validations in a row that reached stop_at."""
    waited: int = 0
    """Validations since the best one, or since the rate last fell on a plateau."""
    drops: int = 0
    """How often it fell."""
    seconds: float = 0.0
    """Time spent in training, over all resumptions."""

    def wait(self, improved: bool, patience: int) -> None:
        """Count a validation of a schedule that falls on a plateau."""
        self.waited = 0 if improved else self.waited + 1
        if self.waited >= patience:
            self.waited, self.drops = 0, self.drops + 1


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    """Where everything about it is written."""
    stopped: str
    """Why: "finished", "goal" (stop_at was reached), the name of a signal or, in a sweep, "diverged"."""
    step: int
    """Steps done."""
    scores: dict[str, float]
    """Loss and metrics of the last validation."""
    best: float | None
    """Best value of the task's metric."""
    best_step: int
    """Where it was reached."""
    seconds: float
    """Time spent in training."""

    def __post_init__(self) -> None:
        if self.stopped not in ("finished", "goal", "diverged", *signal.Signals.__members__):
            raise ValueError(f"stopped is {self.stopped!r:.60}; it must be finished, goal, diverged or a signal.")

    @property
    def exit_code(self) -> int:
        """0, or 128 plus the number of the signal, as shells expect, or 1 for a run that diverged."""
        if self.stopped.startswith("SIG"):
            return 128 + signal.Signals[self.stopped].value
        return int(self.stopped == "diverged")
