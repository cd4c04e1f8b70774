"""Tests of training/evaluation.py: dynamic evaluation."""

from dataclasses import replace

import pytest
import torch

from texts import SHORT_MEMORY, small_text
from torchrum.cli import main
from torchrum.lab.data.text import encode
from torchrum.lab.recipes import load_recipe
from torchrum.lab.training import ConfigError, Trainer, evaluate, load_model, override, read_config
from torchrum.lab.training.errors import DivergedError
from torchrum.lab.training.evaluation import DynamicConfig, Follower

SMALL = "steps=40 eval_every=20 batch_size=8 task.lanes=8 task.segment=20 model.hidden_size=24 task.shown=0 device=cpu"


def train(folder, *fields):
    """A run on a text whose test part has a phrase again and again that training never showed."""
    for name, text in {
        "train": small_text(4000),
        "valid": small_text(400, 1),
        "test": b"the wind the sea " * 60,
    }.items():
        (folder / f"{name}.txt").write_bytes(text)
    config = override(load_recipe("char-rum"), [*SMALL.split(), *SHORT_MEMORY.split(), *fields])
    Trainer(replace(config, task=config.task.reading(folder)), quiet=True).fit(folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("dynamic"))


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


def written_out(run, segment, lanes, lr, decay, eps, temperature):
    """Nats per symbol of the test part, by the method's equations with plain loops in float64."""
    task, model = read_config(run).task, load_model(run)
    train, valid, test = (encode(part, task.facts.symbols).long() for part in task.read())
    weights = list(model.parameters())

    def gradient(x, y, state):
        logits, state = model(x, None, state)
        kept = y >= 0
        loss = torch.nn.functional.cross_entropy(logits[kept] / temperature, y[kept])
        return loss.item(), torch.autograd.grad(loss, weights), tuple(part.detach() for part in state)

    length = -(-len(train) // lanes)
    padded = torch.full((lanes * length,), -1)
    padded[: len(train)] = train
    shifted = torch.zeros_like(padded)
    shifted[: len(train)] = torch.cat((test[-1:], train[:-1]))  # what is before the first symbol hardly matters
    squares, segments, state = [0.0] * len(weights), range(0, length, segment), None
    for start in segments:
        part = slice(start, start + segment)
        _, grads, state = gradient(shifted.view(lanes, -1)[:, part], padded.view(lanes, -1)[:, part], state)
        squares = [square + grad**2 for square, grad in zip(squares, grads, strict=True)]
    rms = [(square / len(segments)).sqrt() for square in squares]
    mean = sum(value.mean() for value in rms) / len(rms)
    trained = [weight.detach().clone() for weight in weights]
    before, total, state = torch.cat((valid[-1:], test[:-1])), 0.0, None
    for start in range(0, len(test), segment):
        part = slice(start, start + segment)
        loss, grads, state = gradient(before[None, part], test[None, part], state)
        total += loss * len(test[part])
        for weight, start_value, grad, value in zip(weights, trained, grads, rms, strict=True):
            pull = (decay * value / mean).clamp(max=1) * (start_value - weight.detach())
            weight.data += pull - lr * grad / (value + eps)
    return total / len(test)


def test_it_is_its_equations(tmp_path):
    """Segments do not divide the text and lanes are padded; in float64, since updates amplify rounding."""
    run = train(tmp_path, "precision=64-true")
    config = DynamicConfig(segment=47, lanes=6, lr=2e-3, decay=0.02, eps=1e-4, temperature=0.9)
    found = evaluate(run, device="cpu", dynamic=config)["loss"]
    assert found == pytest.approx(written_out(run, 47, 6, 2e-3, 0.02, 1e-4, 0.9), rel=1e-7)


def test_without_a_rate_it_is_the_plain_evaluation(run):
    still = evaluate(run, device="cpu", dynamic=DynamicConfig(lr=0.0, segment=30))
    assert still == pytest.approx(evaluate(run, device="cpu"), rel=1e-5)


def test_weights_that_follow_score_better_on_what_repeats(run):
    fixed = evaluate(run, device="cpu")["bpc"]
    followed = evaluate(run, device="cpu", dynamic=DynamicConfig(lr=3e-3, segment=20, decay=0.001))
    assert followed["bpc"] < fixed - 0.1
    assert evaluate(run, device="cpu")["bpc"] == fixed  # the checkpoint is as it was


def test_a_rate_that_leads_nowhere_is_told_and_not_written_down(run, capsys):
    with pytest.raises(DivergedError, match=r"the loss is nan with segment 50, lr 1e\+30, .*; take a smaller lr"):
        evaluate(run, device="cpu", dynamic=DynamicConfig(lr=1e30))
    with pytest.raises(ConfigError, match="evaluate: split is 'dev', but it must be one of 'validation', 'test'"):
        evaluate(run, "dev", device="cpu", dynamic=DynamicConfig())
    assert main(["eval", str(run), "--device", "cpu", "--dynamic", "lr=1e30"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not (run / "test.json").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("lr=x", r"dynamic\.lr is 'x', but it must be a number"),
        ("lanes=1.5", r"dynamic\.lanes is '1.5', but it must be a whole number"),
        ("rate=1", r"no field 'dynamic\.rate'; did you mean 'dynamic\."),
        ("lr", "'lr' is not an assignment; write it as field=value"),
        ("segment=0", "segment is 0, but it must be at least 1"),
        ("lr=-1", "lr -1.0, decay 0.05; they must be at least 0 and finite"),
        ("decay=nan", "decay nan; they must be at least 0 and finite"),
        ("lr=inf", "lr inf, .* at least 0 and finite"),
        ("temperature=0", "temperature 0.0; they must be above 0 and finite"),
    ],
)
def test_wrong_settings_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        DynamicConfig.parse(text)


def test_settings_of_a_wrong_type_are_refused():
    with pytest.raises(ConfigError, match="dynamic: segment is '20', but it must be a whole number"):
        DynamicConfig(segment="20")
    with pytest.raises(ConfigError, match="dynamic: lr is None, but it must be a number"):
        DynamicConfig(lr=None)


def test_the_run_comes_before_the_option(run, capsys):
    assert main(["eval", "--dynamic", str(run)]) == 2
    assert "name the run before --dynamic" in capsys.readouterr().err
    for words in (["--dynamic"], ["--dynamic", "--json"], ["--dynamic", ""]):
        assert main(["eval", str(run), "--split", "validation", "--device", "cpu", *words]) == 0


def test_settings_are_read_and_told():
    config = DynamicConfig.parse("lr=1e-4, segment=20")
    assert (config.lr, config.segment, config.decay) == (1e-4, 20, 0.05)
    assert str(config) == "segment 20, lr 0.0001, decay 0.05, eps 2e-05, temperature 1, lanes 100"
