"""Steps and their average, schedules of the learning rate, and the optimizers."""

import copy
import math
import threading
from dataclasses import replace

import pytest
import torch

from lab.training.tiny import tiny, tiny_model
from tolerances import TOL
from torchrum.lab.models import build_model
from torchrum.lab.tasks.base import Batch
from torchrum.lab.training import ConfigError, ModelConfig, OptimizerConfig, Trainer
from torchrum.lab.training.errors import RunError
from torchrum.lab.training.run_folder import Progress
from torchrum.lab.training.step import (
    RMSpropTF,
    build_optimizer,
    copy_into,
    detached_copy,
    learning_rate,
    set_learning_rate,
    to_device,
)
from torchrum.layers.registry import build_layer


def test_a_batch_is_cut_and_moved_with_its_lengths():
    batch = Batch(torch.arange(12).view(4, 3), torch.arange(4), torch.tensor([3, 2, 1, 3]))
    part = batch.rows(1, 3)
    assert part.x.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert part.y.tolist() == [1, 2]
    assert part.lengths.tolist() == [2, 1]
    assert batch.to("meta").lengths.is_meta
    assert Batch(batch.x, batch.y).rows(0, 1).to("cpu").lengths is None


def test_carried_state_may_be_nested_and_partly_absent():
    state = (torch.ones(2, requires_grad=True) * 2, (torch.zeros(1), None))
    cut = detached_copy(state)
    assert not cut[0].requires_grad
    assert cut[0].data_ptr() != state[0].data_ptr()
    assert cut[1][1] is None
    place = cut[0].data_ptr()
    assert copy_into(cut, (torch.full((2,), 7.0), (torch.ones(1), None))) is cut
    assert (cut[0].tolist(), cut[1][0].tolist(), cut[0].data_ptr()) == ([7, 7], [1], place)
    assert to_device(cut, torch.device("meta"))[1][0].is_meta


def test_a_run_in_another_thread_leaves_the_signals_alone(tmp_path):
    config, results = replace(tiny(), steps=2), []
    thread = threading.Thread(
        target=lambda: results.append(Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run"))
    )
    thread.start()
    thread.join(60)
    assert results[0].stopped == "finished"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_clipping_drops_a_gradient_that_is_not_finite(tmp_path, value):
    """One bad entry in one step; without clipping the run stops with a clear error."""
    for clip in (1.0, None):
        config = replace(tiny(), steps=6, optimizer=OptimizerConfig(lr=1e-2, clip=clip))
        model, seen = tiny_model(config), []

        def spoil(grad, seen=seen):
            seen.append(1)
            return torch.full_like(grad, value) if len(seen) == 3 else grad

        next(model.parameters()).register_hook(spoil)
        trainer = Trainer(config, model, quiet=True)
        if clip is None:
            with pytest.raises(RunError, match="loss is nan"):
                trainer.fit(tmp_path / "plain")
        else:
            assert trainer.fit(tmp_path / "clipped").stopped == "finished"
            assert all(weight.isfinite().all() for weight in model.parameters())


def test_a_cell_is_told_the_step_before_it(tmp_path):
    """HM-LSTM's slope follows the steps, also those of a resumed run."""
    options = {"slope_per_step": 0.25, "max_slope": 3.0}
    config = replace(tiny(), steps=4, model=ModelConfig(layer="hm_lstm", hidden_size=4, options=options))
    model = build_model(config.model, config.task)
    (cell,) = model.layer.cells
    Trainer(config, model, quiet=True).fit(tmp_path / "run")
    assert cell.slope.item() == 1.75  # the last of four steps follows three
    cell.slope.fill_(9.0)
    Trainer(replace(config, steps=7), model, quiet=True).fit(tmp_path / "run", resume=True)
    assert cell.slope.item() == 2.5


def test_rmsprop_tf_follows_tensorflow_written_in_plain_numbers():
    lr, decay, eps = 0.01, 0.9, 1e-10
    weight = torch.nn.Parameter(torch.tensor([0.5, -2.0, 0.0], dtype=torch.float64))
    optimizer = RMSpropTF([weight], lr=lr, decay=decay, eps=eps)
    values, squares = weight.tolist(), [1.0] * 3  # TensorFlow's slot starts at one
    for step in range(20):
        grads = [math.sin(step + i) * 10.0 ** (i - 1) for i in range(3)]
        weight.grad = torch.tensor(grads, dtype=torch.float64)
        optimizer.step()
        for i, g in enumerate(grads):
            squares[i] = decay * squares[i] + (1 - decay) * g * g
            values[i] -= lr * g / math.sqrt(squares[i] + eps)
    torch.testing.assert_close(weight.detach(), torch.tensor(values, dtype=torch.float64), **TOL[torch.float64])


def test_rmsprop_tf_differs_from_torch_as_documented():
    first = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    ours, theirs = RMSpropTF(first[:1], lr=0.1), torch.optim.RMSprop(first[1:], lr=0.1, alpha=0.9)
    for parameter, optimizer in zip(first, (ours, theirs), strict=True):
        parameter.grad = torch.full((1,), 1e-3)
        optimizer.step()
    assert abs(first[0].item() - (1 - 0.1 * 1e-3 / math.sqrt(0.9))) < 1e-6  # the ones make the first step small
    assert first[1].item() < 0.7


def test_rmsprop_tf_state_survives_a_round_trip():
    weights = [torch.nn.Parameter(torch.arange(3.0)) for _ in range(2)]
    one, two = (RMSpropTF([weight]) for weight in weights)
    for weight, optimizer in zip(weights, (one, two), strict=True):
        weight.grad = torch.ones(3)
        optimizer.step()
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for weight, optimizer in zip(weights, (one, two), strict=True):
        weight.grad = torch.full((3,), 2.0)
        optimizer.step()
    assert torch.equal(*weights)
    with pytest.raises(ValueError, match=r"decay=1\.5"):
        RMSpropTF(weights, decay=1.5)


def test_rmsprop_tf_leaves_parameters_without_gradient_alone():
    weight = torch.nn.Parameter(torch.ones(2))
    RMSpropTF([weight]).step()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["adam", "rmsprop", "rmsprop_tf"])
def test_a_tensor_rate_gives_the_steps_of_a_number(name):
    results = []
    for graph in (False, True):
        model = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.zeros_(model.bias)
        optimizer = build_optimizer(OptimizerConfig(name=name), model, False, torch.device("cpu"))
        if graph:  # what capture needs, without the flag that only CUDA accepts
            optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
        for step in range(3):
            set_learning_rate(optimizer, 0.1 / (step + 1))
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        results.append(model.weight.detach().clone())
    torch.testing.assert_close(*results)


def rates(schedule: str, steps: int, at: tuple[int, ...], warmup: int = 0) -> list[float]:
    config = OptimizerConfig(lr=2.0, warmup=warmup, schedule=schedule)
    return [learning_rate(config, step, steps) for step in at]


def test_constant_rate():
    assert rates("constant", 10, (0, 5, 9)) == [2.0, 2.0, 2.0]
    assert rates("constant", 10, (0, 1, 3, 4, 9), warmup=4) == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_rate_falls_at_milestones():
    assert rates("10:0.5,20:0.25", 100, (0, 9, 10, 19, 20, 99)) == [2.0, 2.0, 1.0, 1.0, 0.5, 0.5]
    assert rates("2:0.5", 100, (0, 1, 2, 3, 4), warmup=4) == [0.5, 1.0, 0.75, 1.0, 1.0]


def test_rate_falls_to_zero_over_the_run():
    """Full at the end of the warm-up; one step short of zero in the last step; zero after it."""
    assert rates("linear", 8, (0, 4, 7, 8)) == [2.0, 1.0, 0.25, 0.0]
    assert rates("linear", 10, (0, 1, 2, 6, 9), warmup=2) == [1.0, 2.0, 2.0, 1.0, 0.25]
    found = rates("cosine", 12, (0, 4, 6, 8, 12, 13))
    assert found == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0, 0.0], abs=1e-12)
    assert rates("cosine", 3, (0, 1, 2), warmup=3) == pytest.approx([2 / 3, 4 / 3, 2.0])  # all of it is warm-up


def test_rate_falls_on_a_plateau():
    """After two validations in a row without a better one, and again two later."""
    config, progress = OptimizerConfig(lr=2.0, warmup=4, schedule="plateau/0.5/2"), Progress()
    rates = []
    for step, improved in enumerate([True, False, True, False, False, False, False, True, False]):
        progress.wait(improved, 2)
        rates.append(learning_rate(config, 10 + step, 100, progress.drops))
    assert rates == [2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    assert learning_rate(config, 1, 100) == 1.0


@pytest.mark.parametrize("end", ["", "/0.5", "/2/3", "/0.5/0", "/a/b", "/0.5/3/1"])
def test_a_wrong_plateau_is_refused(end):
    with pytest.raises(ConfigError, match="a plateau is plateau/FACTOR/PATIENCE"):
        OptimizerConfig(schedule="plateau" + end)


@pytest.mark.parametrize("name", ["adam", "rmsprop", "rmsprop_tf"])
def test_a_recorded_step_reads_the_rate_from_memory(name):
    """A graph replays with the addresses of its recording, so the rate is a tensor that is filled in place."""
    optimizer = build_optimizer(OptimizerConfig(name=name), torch.nn.Linear(2, 1), True, torch.device("cpu"))
    (group,) = optimizer.param_groups
    rate = group["lr"]
    assert group["capturable"]
    assert isinstance(rate, torch.Tensor)
    set_learning_rate(optimizer, 0.25)
    assert group["lr"] is rate
    assert rate.item() == 0.25


@pytest.mark.parametrize("graph", [False, True])
def test_groups_have_rates_of_their_own(graph):
    model = torch.nn.GRU(2, 3)
    config = OptimizerConfig(groups="weight_hh:0.1, bias:0")
    optimizer = build_optimizer(config, model, graph, torch.device("cpu"))
    set_learning_rate(optimizer, 0.5)
    rates = {id(param): float(group["lr"]) for group in optimizer.param_groups for param in group["params"]}
    found = {name: rates[id(param)] for name, param in model.named_parameters()}
    wanted = {"weight_ih_l0": 0.5, "weight_hh_l0": 0.05, "bias_ih_l0": 0.0, "bias_hh_l0": 0.0}
    assert found == pytest.approx(wanted)


def test_weight_decay_pulls_matrices_alone():
    model = build_layer("hm_lstm", 3, 4)  # its layer norms have a row of gains per level
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.1), model, False, torch.device("cpu"))
    pulled = {id(p) for group in optimizer.param_groups if group["weight_decay"] == 0.1 for p in group["params"]}
    names = {name.rpartition("cells.0.")[2] for name, p in model.named_parameters() if id(p) in pulled}
    assert names == {"weight_ih", "gate_weight", "output_weight", *(f"weight_hh.{n}" for n in range(3))}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, before[name] * (1 - 0.1 * 1e-3 if id(p) in pulled else 1))


def test_wrong_groups_are_refused():
    for text in ("weight_hh", "weight_hh:x", ":2", "a:-1"):
        with pytest.raises(ConfigError, match="write parts of names with factors of lr"):
            OptimizerConfig(groups=text)
    config = OptimizerConfig(groups="kernel:0.1")
    with pytest.raises(
        ConfigError, match="groups names kernel, but no parameter has such a name; there are weight_ih_l0"
    ):
        build_optimizer(config, torch.nn.GRU(2, 3), False, torch.device("cpu"))
