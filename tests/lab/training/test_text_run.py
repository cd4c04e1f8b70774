"""A run on a text: cut in the middle of an epoch and resumed, it is the run that was never cut.

Tests of training/trainer.py.
"""

from dataclasses import replace

import pytest
import torch

from texts import small_text
from torchrum.lab.recipes import load_recipe
from torchrum.lab.training import ModelConfig, Trainer, evaluate, override, read_metrics
from torchrum.lab.training.checkpoint import load_checkpoint
from torchrum.lab.training.errors import DivergedError
from torchrum.lab.training.trainer import Run

SMALL = "steps=30 eval_every=3 log_every=3 batch_size=8 task.lanes=8 task.segment=20 task.validation_lanes=4 device=cpu"
FIELDS = "model.hidden_size=12 model.embedding_size=6 model.weight_drop=0.2 model.input_dropout=0.1 task.shown=5"


@pytest.mark.parametrize(
    "fields, average",
    [("optimizer.schedule=plateau/0.5/1", None), ("optimizer.schedule=cosine model.calibrated=true", 0.9)],
    ids=["plateau", "average"],
)
def test_a_run_survives_being_cut(tmp_path, fields, average):
    (tmp_path / "book.txt").write_bytes(small_text(3000))
    config = override(load_recipe("char-rum"), [*SMALL.split(), *FIELDS.split(), *fields.split()])
    # a rate at which validation does not improve every time
    optimizer = replace(config.optimizer, lr=0.5, warmup=0)
    config = replace(config, task=config.task.reading(tmp_path / "book.txt"), optimizer=optimizer, average=average)
    assert config.task.segments == 16  # cut after 18 steps: in the second epoch
    Trainer(config, quiet=True).fit(tmp_path / "whole")

    first = replace(config, checkpoint_every=18)
    run, saved = tmp_path / "cut", Run._save

    def cut(self: Run, best: bool) -> None:
        saved(self, best)
        if self.progress.step == 18:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_save", cut)
        with pytest.raises(KeyboardInterrupt):
            Trainer(first, quiet=True).fit(run)
    torch.manual_seed(999)
    Trainer(first, quiet=True).fit(run, resume=True)

    def numbers(folder):
        return [{key: line[key] for key in line if key != "seconds"} for line in read_metrics(folder)]

    assert numbers(run) == numbers(tmp_path / "whole")
    weights, expected = load_checkpoint(run)[0], load_checkpoint(tmp_path / "whole")[0]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    rates = {line["lr"] for line in read_metrics(run, "train")}
    assert len(rates) > 1  # the schedule acted


@pytest.mark.parametrize(
    "lr, message", [(1e30, "the loss is (nan|inf) at step"), (1e38, "a rate of the optimizer is too large for a float")]
)
def test_a_run_that_diverges_shows_no_text_and_says_so(tmp_path, lr, message):
    (tmp_path / "book.txt").write_bytes(small_text(3000))
    config = override(load_recipe("char-rum"), [*SMALL.split(), *FIELDS.split(), "log_every=30", "eval_every=2"])
    optimizer = replace(config.optimizer, lr=lr, warmup=0, clip=None)
    config = replace(config, task=config.task.reading(tmp_path / "book.txt"), optimizer=optimizer)
    with pytest.raises(DivergedError, match=message):
        Trainer(config, quiet=True).fit(tmp_path / "run")


@pytest.mark.parametrize("layer, recorded", [("hm_lstm", 3), ("rum", 0)])
def test_the_final_score_records_cells_that_run_step_by_step(tmp_path, layer, recorded, monkeypatch):
    monkeypatch.setattr("torchrum.lab.tasks.char_lm.ONE_LANE", 40)
    (tmp_path / "book.txt").write_bytes(small_text(3000))
    config = override(
        replace(load_recipe("char-rum"), model=ModelConfig(layer=layer, hidden_size=8, embedding_size=4)),
        [*SMALL.split(), "task.shown=0"],
    )
    Trainer(replace(config, task=config.task.reading(tmp_path / "book.txt")), quiet=True).fit(tmp_path / "run")
    scores = evaluate(tmp_path / "run", device="cpu")
    lengths = []

    def watched(model):
        def call(x, state):
            lengths.append(x.shape[1])
            return model(x, state)

        return call

    monkeypatch.setattr("torchrum.lab.training.evaluation.graphed", watched)
    assert evaluate(tmp_path / "run", device="cpu") == scores
    assert lengths == [40, 40, 30][:recorded]  # 150 symbols; the first segment starts without a state


LAYERS = {
    "rum": ["model.hidden_size=64"],
    "fs": ["model.hidden_size=32", "model.slow=rum", "model.slow_size=48", "model.eta=1"],
    "lstm": ["model.hidden_size=32"],
    "hyper_lstm": ["model.hidden_size=16"],  # by steps; of HM-LSTM a boundary may fall elsewhere in the last bits
}


@pytest.mark.gpu
@pytest.mark.parametrize("precision, tolerance", [("32-true", 1e-3), ("bf16-mixed", 2e-2)])
@pytest.mark.parametrize("layer", LAYERS)
def test_captured_steps_give_the_losses_of_plain_ones(tmp_path, layer, precision, tolerance, monkeypatch):
    """Over the start of a second epoch, where the carried state is reset in its place; then scored in one lane."""
    monkeypatch.setattr("torchrum.lab.tasks.char_lm.ONE_LANE", 40)
    (tmp_path / "book.txt").write_bytes(small_text(3000))
    fields = [
        *SMALL.replace("device=cpu", "device=cuda").split(),
        "task.shown=0",
        "log_every=1",
        "average=0.9",
        "model.calibrated=true",
        f"precision={precision}",
    ]
    config = replace(load_recipe("char-rum"), model=ModelConfig(layer=layer, embedding_size=16))
    config = override(config, [*fields, *LAYERS[layer]])
    config = replace(config, task=config.task.reading(tmp_path / "book.txt"))
    for name, graph in (("captured", True), ("plain", False)):
        Trainer(replace(config, graph=graph), quiet=True).fit(tmp_path / name)
    losses = [[line["loss"] for line in read_metrics(tmp_path / name, "train")] for name in ("captured", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    fitted = [read_metrics(tmp_path / name, "validation")[-1]["temperature"] for name in ("captured", "plain")]
    assert fitted[0] == pytest.approx(fitted[1], rel=0.05)  # where the loss is flat, a little moves it far
    on = [evaluate(tmp_path / "captured", device=device)["bpc"] for device in ("cuda", "cpu")]
    assert on[0] == pytest.approx(on[1], rel=tolerance)
