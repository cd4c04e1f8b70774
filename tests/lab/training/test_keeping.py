"""Which checkpoints reach the disk, and when. Tests of training/checkpoint.py."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lab.training.tiny import tiny, tiny_model
from torchrum.lab.training import Trainer, checkpoint
from torchrum.lab.training.checkpoint import HOLD, Keeper, load_checkpoint
from torchrum.lab.training.errors import DivergedError


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: clock.now)
    return clock


def keep(keeper: Keeper, step: int, best: bool, due: bool) -> None:
    keeper.keep(step, {"w": torch.full((2,), float(step))}, {"step": step}, best, due)


def kept(run) -> tuple[str | None, str | None]:
    path = run / "checkpoints" / "index.json"
    index = json.loads(path.read_text()) if path.exists() else {"last": None, "best": None}
    return index["last"], index["best"]


def test_a_better_model_waits_for_the_next_checkpoint(tmp_path, clock):
    keeper = Keeper(tmp_path)
    for step in (1, 2, 3):
        keep(keeper, step, best=True, due=False)
    assert kept(tmp_path) == (None, None)
    keep(keeper, 4, best=False, due=True)
    assert kept(tmp_path) == ("step-00000004", "step-00000003")
    assert load_checkpoint(tmp_path, "best")[0]["w"].tolist() == [3.0, 3.0]
    keep(keeper, 5, best=True, due=False)
    keep(keeper, 6, best=True, due=True)  # what waited is the best no longer, and is never written
    assert kept(tmp_path) == ("step-00000006", "step-00000006")
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000006"]


def test_it_waits_a_minute_at_most(tmp_path, clock):
    keeper = Keeper(tmp_path)
    clock.now += HOLD
    keep(keeper, 1, best=True, due=False)
    assert kept(tmp_path) == ("step-00000001", "step-00000001")
    clock.now += HOLD / 2
    keep(keeper, 2, best=True, due=False)
    assert kept(tmp_path) == ("step-00000001", "step-00000001")
    clock.now += HOLD / 2
    keep(keeper, 3, best=True, due=False)
    assert kept(tmp_path) == ("step-00000003", "step-00000003")


def test_what_waits_is_a_copy(tmp_path, clock):
    keeper, weight = Keeper(tmp_path), torch.ones(2)
    keeper.keep(1, {"w": weight}, {"also": weight}, True, False)
    weight.zero_()
    keeper.flush()
    weights, state = load_checkpoint(tmp_path, "best")
    assert weights["w"].tolist() == state["also"].tolist() == [1.0, 1.0]


def test_a_run_that_breaks_off_keeps_its_best_model(tmp_path):
    """A loss that is no longer finite ends the run between two checkpoints."""
    config = replace(tiny(), steps=40, log_every=2, eval_every=2, checkpoint_every=1000)

    class Breaking(type(tiny_model(config))):
        calls = 0

        def forward(self, x, lengths=None):
            self.calls += self.training
            return super().forward(x, lengths) * (torch.nan if self.calls > 20 else 1)

    with pytest.raises(DivergedError, match="the loss is nan at step 22"):
        Trainer(config, Breaking(config.task), quiet=True).fit(tmp_path / "run")
    last, best = kept(tmp_path / "run")
    assert last == best and last is not None
    assert load_checkpoint(tmp_path / "run", "best")[1]["progress"]["best_step"] == int(best.removeprefix("step-"))
