"""The test set of a task that has one of its own: every look at it is written down in the run folder.

``test.json`` lists the looks: date, step of the checkpoint, how it was evaluated, and the scores. A model is chosen on
validation and its test set looked at once; the ledger says how often it was.
"""

import datetime
from dataclasses import asdict, dataclass
from pathlib import Path

from torchrum.lab.training.checkpoint import checkpoint_step
from torchrum.lab.training.files import read_json, write_json
from torchrum.lab.training.scoring import evaluate
from torchrum.lab.training.typed_data import Reader

TESTS = "test.json"


@dataclass(frozen=True, kw_only=True)
class Look:
    """One evaluation on the test set."""

    date: str
    """The day, as 2026-01-31."""
    step: int
    """Steps of training before the checkpoint."""
    scores: dict[str, float]
    """What came out."""
    dynamic: str = ""
    """Settings of dynamic evaluation; empty for fixed weights."""


def read_looks(run: Path) -> list[Look]:
    """The looks so far, the oldest first."""
    path = run / TESTS
    if not path.exists():
        return []
    data = read_json(path)
    return [Reader(path).build(Look, item) for item in (data if isinstance(data, list) else [data])]


def write_look(run: Path, step: int, scores: dict[str, float], dynamic: str = "") -> Look:
    """Add a look of today."""
    look = Look(date=datetime.date.today().isoformat(), step=step, scores=scores, dynamic=dynamic)
    write_json(run / TESTS, [asdict(item) for item in (*read_looks(run), look)])
    return look


def best_look(run: Path) -> Look:
    """The look at the best checkpoint with fixed weights; it is made if there was none."""
    step = checkpoint_step(run, "best")
    known = [item for item in read_looks(run) if item.step == step and not item.dynamic]
    return known[-1] if known else write_look(run, step, evaluate(run, "test", "best"))
