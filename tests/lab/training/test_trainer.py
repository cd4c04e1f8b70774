import json
import math
import shutil
import signal
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from lab.training.tiny import First, Model, numbers, tiny, tiny_model
from torchrum.lab.tasks import Copying
from torchrum.lab.tasks.base import Batch
from torchrum.lab.training import (
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    RunError,
    Trainer,
    distributed,
    evaluate,
    load_model,
    override,
    read_metrics,
)
from torchrum.lab.training import trainer as run_module
from torchrum.lab.training.checkpoint import load_checkpoint
from torchrum.lab.training.step import TrainStep


class Interrupted(Model):
    """Sends the process a signal while it computes step ``at``."""

    def __init__(self, config, at, number):
        super().__init__(config.task, config.model.hidden_size)
        self.load_state_dict(tiny_model(config).state_dict())
        self.at, self.number, self.calls = at, number, 0

    def forward(self, x, lengths=None):
        self.calls += self.training
        if self.calls == self.at and self.training:
            signal.raise_signal(self.number)
        return super().forward(x, lengths)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The tiny run from start to end."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = Trainer(tiny(), tiny_model(tiny()), quiet=True).fit(folder)
    return folder, result


def test_on_end_is_called_once_when_a_run_is_complete(tmp_path):
    ended = []

    def on_end(folder):
        assert (folder / "result.json").exists()
        ended.append(folder)

    config, run = tiny(), tmp_path / "run"
    stopped = Trainer(config, Interrupted(config, 20, signal.SIGTERM), quiet=True, on_end=on_end).fit(run)
    assert stopped.stopped == "SIGTERM"
    assert ended == []
    Trainer(config, tiny_model(config), quiet=True, on_end=on_end).fit(run, resume=True)
    assert ended == [run]


def test_the_run_folder_tells_its_story(whole):
    folder, result = whole
    assert {path.name for path in folder.iterdir()} >= {
        *("config.json", "environment.json", "metrics.jsonl", "checkpoints", "result.json")
    }
    assert result.stopped == "finished"
    assert result.step == 40
    assert result.exit_code == 0
    assert [line["step"] for line in read_metrics(folder, "train")] == [7, 14, 21, 28, 35, 40]
    assert [line["step"] for line in read_metrics(folder, "validation")] == [10, 20, 30, 40]
    assert read_metrics(folder, "train")[0]["lr"] == 1e-2
    assert read_metrics(folder, "train")[-1]["lr"] == 5e-3
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["processes"] == 1
    index = json.loads((folder / "checkpoints" / "index.json").read_text())
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {"index.json", index["last"], index["best"]}
    assert index["last"] == "step-00000040"
    best = max(read_metrics(folder, "validation"), key=lambda line: line["accuracy"])
    assert result.best == best["accuracy"]
    assert index["best"] == f"step-{result.best_step:08d}"


def test_logged_loss_is_the_mean_over_the_steps(tmp_path):
    config = replace(tiny(), steps=6, log_every=1)
    Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "each")
    Trainer(replace(config, log_every=6), tiny_model(config), quiet=True).fit(tmp_path / "once")
    each = [line["loss"] for line in read_metrics(tmp_path / "each", "train")]
    (once,) = (line["loss"] for line in read_metrics(tmp_path / "once", "train"))
    assert len(each) == 6
    assert math.isclose(once, sum(each) / 6, rel_tol=1e-6)


def test_the_loop_is_plain_training(tmp_path):
    config = replace(tiny(), steps=5, log_every=1, optimizer=OptimizerConfig(lr=0.1, clip=0.01))
    model = tiny_model(config).train()
    model.dropout.p = 0.0
    reference = Model(config.task)
    reference.load_state_dict(model.state_dict())
    reference.dropout.p = 0.0
    Trainer(config, model, quiet=True).fit(tmp_path / "run")

    optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)
    generator, losses = torch.Generator().manual_seed(config.seed), []
    for _ in range(5):
        batch = config.task.batch(8, generator)
        loss = nn.functional.cross_entropy(reference(batch.x), batch.y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        optimizer.step()
        losses.append(loss.item())
    assert [line["loss"] for line in read_metrics(tmp_path / "run", "train")] == pytest.approx(losses, rel=1e-6)


@pytest.fixture
def terminal():
    """Signals as in a terminal, even if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("at", [3, 16, 20, 37])
def test_a_signal_saves_and_the_resumed_run_is_bit_identical(whole, tmp_path, at, number):
    config, folder = tiny(), tmp_path / "run"
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    result = Trainer(config, Interrupted(config, at, number), quiet=True).fit(folder)
    assert (result.stopped, result.step, result.exit_code) == (signal.Signals(number).name, at, 128 + number)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert not (folder / "result.json").exists()

    other = replace(config, seed=config.seed)
    torch.manual_seed(999)  # whatever the process did before must not matter
    resumed = Trainer(other, Model(config.task), quiet=True).fit(folder, resume=True)
    assert resumed.stopped == "finished"
    assert numbers(folder) == numbers(whole[0])
    weights, expected = load_checkpoint(folder)[0], load_checkpoint(whole[0])[0]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert json.loads((folder / "environment.json").read_text())["resumed"][0]["step"] == at


def test_under_nohup_a_closed_terminal_changes_nothing(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = Trainer(tiny(), Interrupted(tiny(), 3, signal.SIGHUP), quiet=True).fit(tmp_path / "run")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result.stopped, result.step) == ("finished", 40)


def interrupted_twice(config, number):
    model = Interrupted(config, 3, number)
    model.register_forward_hook(lambda *_: signal.raise_signal(number) if model.calls == 3 else None)
    return model


def test_a_later_signal_acts_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "AT_ONCE", -1.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            Trainer(tiny(), interrupted_twice(tiny(), signal.SIGINT), quiet=True).fit(tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_told_twice_at_once_is_one(tmp_path, number):
    """As ``timeout`` sends it, to the process and to its group."""
    result = Trainer(tiny(), interrupted_twice(tiny(), number), quiet=True).fit(tmp_path / "run")
    assert (result.stopped, result.step) == (signal.Signals(number).name, 3)


def test_a_signal_that_comes_too_late_for_the_run_is_not_lost(tmp_path):
    """A sweep, for one, must not go on to its next run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer = Trainer(tiny(), quiet=True, on_end=lambda run: signal.raise_signal(signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["stopped"] == "finished"


def test_a_damaged_line_of_metrics_is_named(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"kind": \n', *lines[2:]]))
    with pytest.raises(RunError, match=r"metrics.jsonl, line 2, is damaged"):
        read_metrics(tmp_path / "run")


class Meddled(Model):
    """Calls ``meddle`` once, while it computes step 20."""

    def __init__(self, config, meddle):
        super().__init__(config.task, config.model.hidden_size)
        self.load_state_dict(tiny_model(config).state_dict())
        self.calls, self.meddle = 0, meddle

    def forward(self, x, lengths=None):
        self.calls += self.training
        if self.calls == 20 and self.training:
            self.calls += 1
            self.meddle()
        return super().forward(x, lengths)


def test_metrics_that_are_deleted_are_written_again(whole, tmp_path):
    run = tmp_path / "run"
    model = Meddled(tiny(), (run / "metrics.jsonl").unlink)
    with pytest.warns(UserWarning, match=r"metrics.jsonl was deleted during the run; it was written again"):
        Trainer(tiny(), model, quiet=True).fit(run)
    assert numbers(run) == numbers(whole[0])


def test_metrics_that_are_replaced_stop_the_run(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    other.write_text("{}")
    model = Meddled(tiny(), lambda: other.rename(run / "metrics.jsonl"))
    with pytest.raises(RunError, match=r"metrics.jsonl was replaced by another program during the run"):
        Trainer(tiny(), model, quiet=True).fit(run)


@pytest.mark.parametrize("replaced", [False, True], ids=["moved", "replaced"])
def test_a_folder_that_is_moved_stops_the_run_and_resumes(whole, tmp_path, replaced):
    run, moved = tmp_path / "run", tmp_path / "moved"

    def meddle():
        run.rename(moved)
        if replaced:
            run.mkdir()
            (run / ".lock").write_text("another run\n")

    with pytest.raises(RunError, match=r"run was moved, replaced or deleted during the run, which stops here"):
        Trainer(tiny(), Meddled(tiny(), meddle), quiet=True).fit(run)
    assert (sorted(path.name for path in run.iterdir()) == [".lock"]) if replaced else not run.exists()
    Trainer(tiny(), tiny_model(tiny()), quiet=True).fit(moved, resume=True)
    assert numbers(moved) == numbers(whole[0])


def test_a_longer_resumed_run_goes_on(tmp_path):
    config = replace(tiny(), steps=10)
    Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run")
    with pytest.raises(RunError, match="is complete: 10 steps are done, 10 are asked for"):
        Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run", resume=True)
    longer = replace(config, steps=20)
    assert Trainer(longer, tiny_model(config), quiet=True).fit(tmp_path / "run", resume=True).step == 20
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 20


def test_a_resumed_run_may_end_where_it_is(tmp_path):
    for number, steps in enumerate((7, 5)):  # as many steps as are done, and fewer
        run = tmp_path / str(number)
        Trainer(tiny(), Interrupted(tiny(), 7, signal.SIGTERM), quiet=True).fit(run)
        config = replace(tiny(), steps=steps)
        result = Trainer(config, tiny_model(config), quiet=True).fit(run, resume=True)
        assert (result.stopped, result.step, result.best_step) == ("finished", 7, 7)
        assert [line["step"] for line in read_metrics(run, "validation")] == [7]
        assert evaluate(run, "validation", "best", device="cpu")["loss"] == pytest.approx(result.scores["loss"])


def test_a_set_or_checkpoint_that_does_not_exist_is_refused(whole):
    """Any other word was taken for the test set, or for the best checkpoint."""
    with pytest.raises(ConfigError, match="evaluate: split is 'dev', but it must be one of 'validation', 'test'"):
        evaluate(whole[0], "dev")
    for load in (load_model, lambda run, which: evaluate(run, "validation", which)):
        with pytest.raises(ConfigError, match="load_model: which is 'final', but it must be one of 'last', 'best'"):
            load(whole[0], "final")


def test_a_trainer_takes_a_config_and_a_config_a_task():
    with pytest.raises(ConfigError, match="Trainer: config is 'copying-rum', but it must be a TrainConfig"):
        Trainer("copying-rum")
    with pytest.raises(ConfigError, match="config: task is None, but it must be a Task"):
        replace(tiny(), task=None)


def test_a_folder_is_never_overwritten(whole):
    before = {path: path.read_bytes() for path in whole[0].rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"holds a run already; resume it with fit\(folder, resume=True\) or torchrum"):
        Trainer(tiny(), tiny_model(tiny()), quiet=True).fit(whole[0])
    changed = replace(tiny(), optimizer=OptimizerConfig(lr=0.5), steps=80)
    with pytest.raises(ConfigError, match=r"cannot change optimizer.lr 0.01 -> 0.5"):
        Trainer(changed, tiny_model(tiny()), quiet=True).fit(whole[0], resume=True)
    assert before == {path: path.read_bytes() for path in whole[0].rglob("*") if path.is_file()}


def test_it_stops_when_the_goal_is_reached_twice(tmp_path):
    config = replace(tiny(), stop_at=0.0, stop_after=2)
    result = Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run")
    assert (result.stopped, result.step) == ("goal", 20)
    with pytest.raises(RunError, match="is complete: 20 steps are done, 40 are asked for"):
        Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run", resume=True)
    on = Trainer(replace(config, stop_at=None), tiny_model(config), quiet=True).fit(tmp_path / "run", resume=True)
    assert (on.stopped, on.step) == ("finished", 40)


@pytest.mark.parametrize("stop_at", [None, 0.0])
def test_a_run_killed_before_its_last_word_says_it_when_resumed(tmp_path, stop_at):
    config = replace(tiny(), stop_at=stop_at)
    result = Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run")
    before = numbers(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    again = Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run", resume=True)
    assert (again.stopped, again.step, again.scores) == (result.stopped, result.step, result.scores)
    assert numbers(tmp_path / "run") == before
    assert (tmp_path / "run" / "result.json").exists()


def test_a_diverged_loss_is_a_clear_error(tmp_path):
    config = replace(tiny(), optimizer=OptimizerConfig(lr=1e-3))
    model = tiny_model(config)
    nn.init.constant_(model.readout.weight, math.nan)
    with pytest.raises(RunError, match="the loss is nan at step 7"):
        Trainer(config, model, quiet=True).fit(tmp_path / "run")
    rare = replace(config, log_every=100)
    with pytest.raises(RunError, match="the loss is nan at step 8"):  # where a checkpoint is due
        Trainer(rare, model, quiet=True).fit(tmp_path / "rare")
    assert not (tmp_path / "rare" / "checkpoints").exists()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions_train_and_resume(tmp_path, precision):
    config = replace(tiny(), precision=precision, steps=12)
    model = tiny_model(config)
    result = Trainer(config, model, quiet=True).fit(tmp_path / "run")
    assert math.isfinite(result.scores["loss"])
    expected = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    assert load_checkpoint(tmp_path / "run")[0]["readout.weight"].dtype == expected
    Trainer(replace(config, steps=16), tiny_model(config), quiet=True).fit(tmp_path / "run", resume=True)


def test_evaluate_and_load_model_give_the_scores_of_the_run(tmp_path):
    config = replace(tiny(), steps=20)
    result = Trainer(config, quiet=True).fit(tmp_path / "run")
    scores = evaluate(tmp_path / "run", "validation", "last", device="cpu")
    assert scores == pytest.approx(result.scores, rel=1e-6)
    assert evaluate(tmp_path / "run", "test", "last", device="cpu") != scores
    model = load_model(tmp_path / "run")
    assert not model.training
    assert model(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 3)
    with pytest.raises(RunError, match="is not a run folder"):
        evaluate(tmp_path)


@dataclass(frozen=True, kw_only=True)
class Stream(First):
    """Predict the next symbol of one long text, cut into lanes and segments."""

    answers: ClassVar = "steps"
    carries_state: ClassVar = True
    epoch: int = 5
    """Segments until the text starts over."""

    def setup(self, device, seed):
        return torch.randint(
            self.symbols, (8, self.epoch * self.length + 1), generator=torch.Generator().manual_seed(seed)
        )

    def train_batch(self, size, generator, step, data):
        start = int(step) % self.epoch * self.length
        return Batch(data[:size, start : start + self.length], data[:size, start + 1 : start + self.length + 1])

    def starts_over(self, step):
        return step % self.epoch == 0

    def loss(self, logits, batch):
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.y.flatten())

    def validation(self, seed):
        data = self.setup(torch.device("cpu"), seed + 1)
        for step in range(self.epoch):
            yield self.train_batch(8, None, torch.tensor(step), data)


class StreamModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.readout, self.states = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 3), []

    def forward(self, x, lengths=None, state=None):
        if self.training:
            self.states.append(None if state is None else state.clone())
        output, state = self.layer(nn.functional.one_hot(x, 3).float(), state)
        return self.readout(output), state


class ResettableModel(StreamModel):
    """The same with a state to start from, so that the carried one can stay in its place."""

    def initial_state(self, batch_size, device, dtype):
        return torch.zeros(1, batch_size, 8, device=device, dtype=dtype)


@pytest.mark.parametrize("kind", [StreamModel, ResettableModel])
def test_state_is_carried_reset_and_resumed(tmp_path, kind):
    config = replace(tiny(), task=Stream(), steps=13, checkpoint_every=100, eval_every=8)
    torch.manual_seed(0)
    model = kind()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    Trainer(config, model, quiet=True).fit(tmp_path / "whole")
    assert [state is None or not state.any() for state in model.states] == [step % 5 == 0 for step in range(13)]
    assert [state is None for state in model.states].count(True) == (3 if kind is StreamModel else 1)
    assert not model.states[1].requires_grad

    half = kind()
    half.load_state_dict(weights)
    Trainer(replace(config, steps=8), half, quiet=True).fit(tmp_path / "half")
    rest = kind()
    Trainer(config, rest, quiet=True).fit(tmp_path / "half", resume=True)
    assert torch.equal(rest.states[0], model.states[8])
    assert numbers(tmp_path / "half")[-1] == numbers(tmp_path / "whole")[-1]


@dataclass(frozen=True, kw_only=True)
class Buckets(First):
    """Sequences of two lengths, drawn in an order that is new in each epoch."""

    epoch: int = 4
    """Steps of an epoch."""

    def setup(self, device, seed):
        return {"seen": [], "widths": [], "width": 0, "epoch": None}

    def plan(self, size, step, data):
        epoch, place = divmod(step, self.epoch)
        if data["epoch"] != epoch:  # from the step alone: a resumed run comes in the middle of one
            order = torch.randperm(self.epoch, generator=torch.Generator().manual_seed(epoch))
            data["widths"], data["epoch"] = [self.length + int(number) % 2 for number in order], epoch
        data["width"] = data["widths"][place]
        data["seen"].append(data["width"])
        return data["width"]

    def train_batch(self, size, generator, step, data):
        x = torch.randint(self.symbols, (size, data["width"]), generator=generator, device=generator.device)
        return Batch(x, x[:, 0].clone())


def test_a_step_is_planned_on_the_host_and_resumed_in_the_middle_of_an_epoch(tmp_path):
    config = replace(tiny(), task=Buckets(), steps=14, checkpoint_every=100, eval_every=7)
    Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "whole")
    Trainer(replace(config, steps=6), tiny_model(config), quiet=True).fit(tmp_path / "half")
    Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "half", resume=True)
    whole, half = (load_checkpoint(tmp_path / name)[0] for name in ("whole", "half"))
    for name in whole:
        assert torch.equal(whole[name], half[name])


def test_the_average_of_the_weights_is_scored_kept_and_resumed(tmp_path, monkeypatch):
    config = replace(tiny(), average=0.5, steps=9, eval_every=3, checkpoint_every=100)
    plain = replace(config, average=None)
    seen, scored = [], []
    original = TrainStep.run

    def run(step):
        original(step)
        seen.append({name: weight.detach().clone() for name, weight in step.model.state_dict().items()})

    monkeypatch.setattr(TrainStep, "run", run)
    real = run_module.score
    monkeypatch.setattr(
        run_module, "score", lambda task, model, *rest: scored.append(model) or real(task, model, *rest)
    )
    torch.manual_seed(0)
    model = tiny_model(config)
    expected = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    Trainer(config, model, quiet=True).fit(tmp_path / "run")
    for step, weights in enumerate(seen):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = {name: decay * expected[name] + (1 - decay) * weights[name] for name in expected}
    kept = load_checkpoint(tmp_path / "run")[0]
    assert scored[0] is not model
    for name in kept:
        torch.testing.assert_close(kept[name], expected[name])
        assert not torch.equal(kept[name], model.state_dict()[name])

    monkeypatch.setattr(TrainStep, "run", original)
    Trainer(plain, tiny_model(config), quiet=True).fit(tmp_path / "plain")
    trained = load_checkpoint(tmp_path / "plain")[0]
    assert all(torch.equal(trained[name], model.state_dict()[name]) for name in trained)  # it changes no step

    Trainer(replace(config, steps=4), tiny_model(config), quiet=True).fit(tmp_path / "half")
    Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "half", resume=True)
    half = load_checkpoint(tmp_path / "half")[0]
    assert all(torch.equal(half[name], kept[name]) for name in kept)


@pytest.mark.parametrize("value", ["0", "1", "nan", "-0.5"])
def test_an_average_that_keeps_nothing_or_everything_is_refused(value):
    with pytest.raises(ConfigError, match="average is"):
        override(tiny(), [f"average={value}"])


def test_the_default_device_of_torch_decides_nothing(tmp_path):
    """As torch.set_default_device("cuda") would: the config says where a run is, and load_model returns on the CPU."""
    config = replace(tiny(), task=Copying(delay=3), model=ModelConfig(layer="rum", hidden_size=8), steps=20)
    wanted = Trainer(config, quiet=True).fit(tmp_path / "wanted")
    with torch.device("meta"):
        found = Trainer(config, quiet=True).fit(tmp_path / "found")
        scores = evaluate(tmp_path / "found", device="cpu")
        model = load_model(tmp_path / "found")
        assert torch.get_default_device().type == "meta"
    assert found.scores == wanted.scores
    assert numbers(tmp_path / "found") == numbers(tmp_path / "wanted")
    assert scores == evaluate(tmp_path / "wanted", device="cpu")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
