"""Tests of training/distributed.py: TensorBoard and Weights & Biases."""

import sys
import types
from dataclasses import replace

import pytest

from lab.training.tiny import tiny, tiny_model
from torchrum.lab.training import RunError, Trainer, read_metrics

SHORT = replace(tiny(), steps=4, log_every=2, eval_every=2)


def test_tensorboard_gets_the_numbers_of_the_file(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is an extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(SHORT, logger="tensorboard")
    Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for kind in ("train", "validation"):
        seen = [(event.step, pytest.approx(event.value)) for event in events.Scalars(f"{kind}/loss")]
        assert seen == [(line["step"], line["loss"]) for line in read_metrics(tmp_path / "run", kind)]


def test_wandb_is_given_the_numbers_and_closed(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, sorted(values))), finish=lambda: calls.append("finished")
    )
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: calls.append(options["config"]["steps"]) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = replace(SHORT, logger="wandb")
    Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run")
    assert calls[0] == 4
    assert calls[1] == (2, ["train/accuracy", "train/loss", "train/lr"])
    assert calls[2] == (2, ["validation/accuracy", "validation/loss"])
    assert calls[-1] == "finished"


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = replace(SHORT, logger="wandb")
    with pytest.raises(RunError, match=r'pip install "torchrum\[wandb\]"'):
        Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run")
    assert not (tmp_path / "run").exists()
