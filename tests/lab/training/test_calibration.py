"""The temperature of a model of text: fitted to the validation set, kept with the weights.

Tests of training/evaluation.py.
"""

from dataclasses import replace

import pytest
import torch

from texts import SHORT_MEMORY, small_text
from torchrum.lab.recipes import load_recipe
from torchrum.lab.training import Trainer, evaluate, load_model, override, read_metrics
from torchrum.lab.training.distributed import Engine
from torchrum.lab.training.evaluation import TEMPERATURES, calibrate, score
from torchrum.lab.training.step import build
from torchrum.lab.training.trainer import Run

FIELDS = (
    "steps=40 eval_every=10 log_every=10 batch_size=8 task.lanes=8 task.segment=20 task.validation_lanes=4 "
    "task.shown=0 model.hidden_size=12 model.embedding_size=6 model.calibrated=true optimizer.lr=0.02 device=cpu"
)


def small_config(folder, *fields):
    (folder / "book.txt").write_bytes(small_text(3000))
    config = override(load_recipe("char-rum"), [*FIELDS.split(), *SHORT_MEMORY.split(), *fields])
    return replace(config, task=config.task.reading(folder / "book.txt"))


@pytest.mark.parametrize("scale", [0.9, 1.5, 3.0])
def test_the_temperature_is_the_best_of_all(tmp_path, scale):
    config = small_config(tmp_path)
    Trainer(config, quiet=True).fit(tmp_path / "run")
    model, engine = load_model(tmp_path / "run"), Engine(config)
    batches = list(config.task.validation(0))
    with torch.no_grad():
        for weight in (model.readout.weight, model.readout.bias):
            weight *= scale  # more or less sure of itself than before
    calibrate(config.task, model, batches, engine)
    found, value = score(config.task, model, batches, engine), float(model.temperature)
    assert found["temperature"] == value
    model.temperature.fill_(1.0)
    assert score(config.task, model, batches, engine)["bpc"] == pytest.approx(found["uncalibrated_bpc"])
    for other in torch.linspace(max(0.8 * value, TEMPERATURES[0]), 1.25 * value, 46):
        model.temperature.fill_(other)
        assert score(config.task, model, batches, engine)["loss"] > found["loss"] - 2e-5


def test_the_temperature_stays_within_what_is_tried(tmp_path):
    """A model of random weights that is certain of all it says has no use for any of them."""
    config = small_config(tmp_path)
    model, engine, batches = build(config), Engine(config), list(config.task.validation(0))
    with torch.no_grad():
        model.readout.weight *= 1e4
    calibrate(config.task, model, batches, engine)
    assert float(model.temperature) == pytest.approx(TEMPERATURES[-1])


def test_a_run_keeps_its_temperature(tmp_path):
    config = small_config(tmp_path)
    Trainer(config, quiet=True).fit(tmp_path / "run")
    lines = read_metrics(tmp_path / "run", "validation")
    best = min(lines, key=lambda line: line["bpc"])
    assert float(load_model(tmp_path / "run").temperature) == pytest.approx(best["temperature"], rel=1e-6)
    assert evaluate(tmp_path / "run", device="cpu")["temperature"] == pytest.approx(best["temperature"], rel=1e-6)
    assert len({line["temperature"] for line in lines}) > 1


def test_an_average_keeps_its_temperature_between_validations(tmp_path, monkeypatch):
    config, saved, save = small_config(tmp_path, "average=0.9", "checkpoint_every=6"), {}, Run._save

    def watched(self: Run, best: bool) -> None:
        saved[self.progress.step] = float(self._scored.temperature)
        save(self, best)

    monkeypatch.setattr(Run, "_save", watched)
    Trainer(config, quiet=True).fit(tmp_path / "run")
    fitted = {line["step"]: line["temperature"] for line in read_metrics(tmp_path / "run", "validation")}
    assert saved[36] == pytest.approx(fitted[30], rel=1e-6) and fitted[30] != 1


def test_training_does_not_feel_the_temperature(tmp_path):
    losses = []
    for chosen in ("true", "false"):
        config = small_config(tmp_path, f"model.calibrated={chosen}")
        Trainer(config, quiet=True).fit(tmp_path / chosen)
        losses.append([line["loss"] for line in read_metrics(tmp_path / chosen, "train")])
    assert losses[0] == losses[1]
