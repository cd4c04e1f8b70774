"""The recorded step does what the plain one does. Everything marked gpu needs a CUDA device.

Tests of training/step.py.
"""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch

from lab.training.test_trainer import Buckets, ResettableModel, Stream
from lab.training.tiny import Model, tiny, tiny_model
from tolerances import DEEP
from torchrum.lab.tasks.base import Batch
from torchrum.lab.training import ModelConfig, OptimizerConfig, Trainer, read_metrics
from torchrum.lab.training.checkpoint import load_checkpoint
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.step import graph_obstacle
from torchrum.layers.registry import build_layer, compile_steps


def quiet_model(config):
    """Without dropout: recorded and plain steps draw their masks from different places of the stream."""
    model = tiny_model(config)
    model.dropout.p = 0.0
    return model


def cuda(**changes):
    return replace(tiny(), device="cuda", steps=24, log_every=1, eval_every=8, checkpoint_every=8, **changes)


def losses(folder):
    return [line["loss"] for line in read_metrics(folder, "train")]


def test_on_the_cpu_the_step_is_not_recorded():
    class Step:
        config = tiny()

        class engine:  # noqa: N801
            device, world_size = torch.device("cpu"), 1

    assert graph_obstacle(Step) == "the run is on cpu"
    Step.engine.device = torch.device("cuda")
    assert graph_obstacle(Step) is None
    Step.config = replace(tiny(), precision="16-mixed")
    assert "16-mixed" in graph_obstacle(Step)
    Step.engine.world_size = 2
    assert "several processes" in graph_obstacle(Step)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name, schedule", [("adam", "cosine"), ("rmsprop", "linear"), ("rmsprop_tf", "12:0.1")])
def test_recorded_steps_give_the_losses_of_plain_ones(tmp_path, monkeypatch, name, schedule, precision):
    """With a rate that changes while steps are replayed, and with clipping."""
    optimizer = OptimizerConfig(name=name, lr=1e-2, clip=0.5, warmup=4, schedule=schedule)
    config = cuda(optimizer=optimizer, precision=precision)
    replays = []
    original = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), original(graph)))
    Trainer(config, quiet_model(config), quiet=True).fit(tmp_path / "graph")
    assert len(replays) == config.steps - 3
    Trainer(replace(config, graph=False), quiet_model(config), quiet=True).fit(tmp_path / "plain")
    tolerance = 1e-4 if precision == "32-true" else 2e-2
    assert losses(tmp_path / "graph") == pytest.approx(losses(tmp_path / "plain"), rel=tolerance)
    graph, plain = (load_checkpoint(tmp_path / kind)[0] for kind in ("graph", "plain"))
    for key in graph:
        torch.testing.assert_close(graph[key], plain[key], rtol=tolerance, atol=tolerance)


on_each = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])  # plain, replayed


@on_each
@pytest.mark.parametrize("name", ["adam", "rmsprop", "rmsprop_tf"])
def test_a_step_takes_the_rate_of_its_time(tmp_path, name, device):
    """From step 8 on, long after the recording, the rate is zero: scoring sees the weights of step 8 until the end."""
    optimizer = OptimizerConfig(name=name, lr=1e-2, schedule="8:0")
    config = replace(cuda(optimizer=optimizer), device=device, eval_every=2)
    model, scored = quiet_model(config), []

    def watch(module, _):
        if not module.training:
            scored.append(torch.cat([weight.detach().flatten() for weight in module.parameters()]))

    model.register_forward_pre_hook(watch)
    Trainer(config, model, quiet=True).fit(tmp_path)
    evaluations = scored[:: len(scored) // 12]
    still = [torch.equal(before, after) for before, after in itertools.pairwise(evaluations)]
    assert still == [False] * 3 + [True] * 8


@on_each
def test_clipping_acts_in_a_step(tmp_path, device):
    """With a large epsilon Adam's step is nearly proportional to the gradient: a tiny norm leaves the weights alone."""
    moved = {}
    for clip in (None, 1e-6):
        config = replace(cuda(optimizer=OptimizerConfig(name="adam", lr=1.0, eps=1.0, clip=clip)), device=device)
        model = quiet_model(config)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        Trainer(config, model, quiet=True).fit(tmp_path / str(clip))
        moved[clip] = max((a.cpu() - b).abs().max().item() for a, b in zip(model.parameters(), before, strict=True))
    assert moved[1e-6] < 1e-3 < moved[None]


@pytest.mark.gpu
def test_each_replay_draws_new_data(tmp_path):
    config = cuda(optimizer=OptimizerConfig(lr=1e-12))
    Trainer(config, quiet_model(config), quiet=True).fit(tmp_path / "run")
    assert len({round(loss, 6) for loss in losses(tmp_path / "run")}) > 12


@pytest.mark.gpu
def test_a_resumed_graph_run_draws_the_same_data(tmp_path):
    config = cuda()
    Trainer(config, quiet_model(config), quiet=True).fit(tmp_path / "whole")
    Trainer(replace(config, steps=13), quiet_model(config), quiet=True).fit(tmp_path / "half")
    model = Model(config.task)
    model.dropout.p = 0.0
    Trainer(config, model, quiet=True).fit(tmp_path / "half", resume=True)
    assert losses(tmp_path / "half") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


@pytest.mark.gpu
def test_dropout_masks_change_under_replay(tmp_path):
    config = cuda(optimizer=OptimizerConfig(lr=1e-12))
    model = tiny_model(config)
    model.dropout.p = 0.9
    batch = config.task.batch(8, torch.Generator("cuda").manual_seed(0))  # fixed: only the masks can change the loss
    task = replace(config.task)
    object.__setattr__(task, "train_batch", lambda size, generator, step, data: batch)
    config = replace(config, task=task)
    Trainer(config, model, quiet=True).fit(tmp_path / "run")
    assert len({round(loss, 6) for loss in losses(tmp_path / "run")}) > 12


@pytest.mark.gpu
def test_a_step_that_cannot_be_recorded_runs_plainly_and_says_why(tmp_path, capsys):
    class Reader(Model):
        def forward(self, x, lengths=None):
            if self.training:
                assert math.isfinite(self.readout.weight.sum().item())  # reads a value on the host
            return super().forward(x, lengths)

    config = cuda()
    Trainer(config, Reader(config.task)).fit(tmp_path / "run")
    assert "no CUDA graph" in capsys.readouterr().err
    assert len(losses(tmp_path / "run")) == config.steps


@pytest.mark.gpu
def test_a_cuda_run_goes_on_on_the_cpu(tmp_path):
    config = cuda()
    Trainer(replace(config, steps=8), quiet_model(config), quiet=True).fit(tmp_path / "run")
    result = Trainer(replace(config, device="cpu"), quiet_model(config), quiet=True).fit(tmp_path / "run", resume=True)
    assert result.step == 24


def test_compiled_steps_are_those_of_the_cells_in_layers(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda step: compiled.append(step.__qualname__) or step)
    model = torch.nn.Sequential(build_layer("ntm", 3, 4, 1), build_layer("goru", 4, 6, 2), torch.nn.LSTM(6, 6))
    assert compile_steps(model) == 3
    assert compiled == ["NTMCell.step", "GORUCell.step", "GORUCell.step"]


def test_a_copy_of_compiled_steps_has_its_own_weights():
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        layer, plain, x = build_layer("nas", 3, 4), build_layer("nas", 3, 4), torch.randn(5, 2, 3)
        compile_steps(layer)
        twin = copy.deepcopy(layer)  # as an average of the weights is made
        twin.load_state_dict(plain.state_dict())
        assert torch.equal(twin(x)[0], plain(x)[0])
        assert not torch.equal(layer(x)[0], plain(x)[0])


def test_compiling_a_layer_without_steps_is_refused(tmp_path):
    config = replace(tiny(), device="cpu", compile=True, model=ModelConfig(layer="rum", hidden_size=4))
    with pytest.raises(ConfigError, match="compile=true, but the layer 'rum' has no steps to compile"):
        Trainer(config, quiet=True).fit(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("layer", ["goru", "ntm", "nas", "rhn"])  # the last two gather their weight gradients
def test_compiled_and_recorded_steps_give_the_losses_of_plain_ones(tmp_path, layer):
    config = cuda(model=ModelConfig(layer=layer, hidden_size=8))
    for how, changes in (("compiled", {"compile": True}), ("plain", {"graph": False})):
        Trainer(replace(config, **changes), quiet=True).fit(tmp_path / how)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("average", [None, 0.9])
def test_each_shape_has_its_own_graph(tmp_path, monkeypatch, average):
    config = cuda(task=Buckets(), average=average)
    replays = []
    original = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), original(graph)))
    Trainer(config, quiet_model(config), quiet=True).fit(tmp_path / "graph")
    assert len(set(map(id, replays))) == 2
    assert len(replays) >= config.steps - 6
    Trainer(replace(config, graph=False), quiet_model(config), quiet=True).fit(tmp_path / "plain")
    assert losses(tmp_path / "graph") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    graph, plain = (load_checkpoint(tmp_path / kind)[0] for kind in ("graph", "plain"))
    for key in graph:
        torch.testing.assert_close(graph[key], plain[key], **DEEP[torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_carried_state_is_captured_and_reset_in_its_place(tmp_path, monkeypatch, precision):
    config = cuda(task=DeviceStream(), precision=precision)
    replays = []
    original = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), original(graph)))
    for kind, graph in (("graph", True), ("plain", False)):
        torch.manual_seed(0)
        Trainer(replace(config, graph=graph), ResettableModel(), quiet=True).fit(tmp_path / kind)
    assert len(replays) == config.steps - 3
    tolerance = 1e-4 if precision == "32-true" else 2e-2
    assert losses(tmp_path / "graph") == pytest.approx(losses(tmp_path / "plain"), rel=tolerance)


class DeviceStream(Stream):
    """The same text on the device, read without a look at the step from the host."""

    def setup(self, device, seed):
        return super().setup(torch.device("cpu"), seed).to(device)

    def train_batch(self, size, generator, step, data):
        places = step % self.epoch * self.length + torch.arange(self.length + 1, device=data.device)
        text = data[:size].index_select(1, places)
        return Batch(text[:, :-1], text[:, 1:])
