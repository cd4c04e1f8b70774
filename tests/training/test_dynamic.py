from dataclasses import replace

import pytest
import torch

from texts import small_text
from torchrum.cli import main
from torchrum.recipes import load_recipe
from torchrum.training import ConfigError, Trainer, evaluate, override
from torchrum.training.dynamic import DynamicConfig, Follower, dynamic_evaluate
from torchrum.training.errors import DivergedError

SMALL = "steps=40 eval_every=20 batch_size=8 task.lanes=8 task.segment=20 model.hidden_size=24 task.shown=0 device=cpu"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a text whose test part has a phrase again and again that training never showed."""
    folder = tmp_path_factory.mktemp("dynamic")
    for name, text in {
        "train": small_text(4000),
        "valid": small_text(400, 1),
        "test": b"the wind the sea " * 60,
    }.items():
        (folder / f"{name}.txt").write_bytes(text)
    config = override(load_recipe("char-rum"), SMALL.split())
    Trainer(replace(config, task=config.task.reading(folder)), quiet=True).fit(folder / "run")
    return folder / "run"


def test_the_update_has_the_published_numbers():
    """Two tensors, computed by hand from the method's equations; each matrix counts once in the mean."""
    rms = [torch.tensor([0.05, 0.04]).sqrt(), torch.tensor([0.1]).sqrt()]
    weights = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    follower = Follower(weights, rms, DynamicConfig(lr=0.01, decay=0.02, eps=1e-3))
    for weight, now in zip(weights, ([1.1, 1.9], [2.5]), strict=True):
        weight.copy_(torch.tensor(now))
    follower.update([torch.tensor([0.5, -0.5]), torch.tensor([0.25])])
    torch.testing.assert_close(weights[0], torch.tensor([1.07604498, 1.92639068]))
    torch.testing.assert_close(weights[1], torch.tensor([2.50409684]))


def test_without_a_rate_it_is_the_plain_evaluation(run):
    still = dynamic_evaluate(run, device="cpu", dynamic=DynamicConfig(lr=0.0, segment=30))
    assert still == pytest.approx(evaluate(run, device="cpu"), rel=1e-5)


def test_weights_that_follow_score_better_on_what_repeats(run):
    fixed = evaluate(run, device="cpu")["bpc"]
    followed = dynamic_evaluate(run, device="cpu", dynamic=DynamicConfig(lr=3e-3, segment=20, decay=0.001))
    assert followed["bpc"] < fixed - 0.1
    assert evaluate(run, device="cpu")["bpc"] == fixed  # the checkpoint is as it was


def test_a_rate_that_leads_nowhere_is_told_and_not_written_down(run, capsys):
    with pytest.raises(DivergedError, match=r"the loss is nan with segment 50, lr 1e\+30, .*; take a smaller lr"):
        dynamic_evaluate(run, device="cpu", dynamic=DynamicConfig(lr=1e30))
    assert main(["eval", str(run), "--device", "cpu", "--dynamic", "lr=1e30"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not (run / "test.json").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("lr=x", "--dynamic 'lr=x': lr must be a number"),
        ("lanes=1.5", "--dynamic 'lanes=1.5': lanes must be a whole number"),
        ("rate=1", "--dynamic 'rate=1': write FIELD=VALUE; the fields are segment, lr, decay, eps, lanes"),
        ("segment=0", "segment is 0, but it must be at least 1"),
        ("lr=-1", "lr and decay must be at least 0"),
        ("decay=nan", "lr and decay must be at least 0"),
    ],
)
def test_wrong_settings_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        DynamicConfig.parse(text)


def test_settings_are_read_and_told():
    config = DynamicConfig.parse("lr=1e-4, segment=20")
    assert (config.lr, config.segment, config.decay) == (1e-4, 20, 0.05)
    assert str(config) == "segment 20, lr 0.0001, decay 0.05, eps 2e-05, lanes 100"
