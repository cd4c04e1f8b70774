import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from torchrum import RUM
from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.paper.bench import measure
from torchrum.paper.bench.cpu import peak_memory
from torchrum.paper.bench.layers import Shape, Work, equal_parameters, make_layer
from torchrum.paper.bench.measure import clear_of_threshold, relative_error, summarise, time_cpu, time_cuda


def test_a_sample_may_be_the_mean_of_several_calls():
    made = []
    times = time_cpu({"sleeper": lambda: [made.append(1), time.sleep(0.01)]}, samples=2, warmups=0, calls=3)
    assert len(made) == 6
    assert 10 <= times["sleeper"].median < 30


def test_summary_is_median_and_quartiles():
    times = summarise([5.0, 1.0, 2.0, 4.0, 3.0], [1.0, 9.0, 2.0])
    assert (times.low, times.median, times.high, times.samples, times.cpu) == (2.0, 3.0, 4.0, 5, 2.0)


def test_implementations_take_turns_and_sleeping_costs_no_cpu():
    order = []

    def short() -> None:
        order.append("short")

    def long() -> None:
        order.append("long")
        time.sleep(0.02)

    times = time_cpu({"short": short, "long": long}, samples=3, warmups=1)
    assert order == ["short", "long"] + ["short", "long"] * 3
    assert times["long"].median >= 20
    assert times["long"].cpu < 15
    assert times["short"].median < times["long"].median


def test_a_turn_may_begin_with_a_call_that_is_not_timed():
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    times = time_cpu(runs, samples=4, warmups=0, settle=True)
    assert "".join(order) == "aaaa" + "bbbb" + "aa" + "bb"  # one untimed, three timed; then the fourth
    assert times["a"].samples == times["b"].samples == 4


@pytest.mark.parametrize("samples, turns", [(7, [6, 3]), (30, [6] * 6), (60, [11] * 6)])
def test_on_a_gpu_a_turn_is_a_sixth_of_the_calls_or_five(samples, turns, monkeypatch):
    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None: ...
        def elapsed_time(self, end: "Event") -> float:
            return 1.0

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    order: list[str] = []
    times = time_cuda({name: lambda name=name: order.append(name) for name in ("a", "b")}, samples, warmups=0)
    assert "".join(order) == "".join("a" * turn + "b" * turn for turn in turns)  # one call of each is not timed
    assert times["a"].samples == times["b"].samples == samples


def test_a_slow_implementation_gets_fewer_samples():
    made = []
    runs = {"slow": lambda: [made.append(1), time.sleep(0.21)], "fast": lambda: None}
    times = time_cpu(runs, samples=9, seconds=0.3, settle=True)
    assert times["slow"].samples == 3
    assert len(made) == 4  # one to warm up; what others left behind does not show in so long a call
    assert times["fast"].samples == 9


@pytest.mark.parametrize("name", ["authors", "reference", "torch", "native", "gru", "lstm", "ln_lstm", "gru=", "lstm="])
def test_every_implementation_runs(name):
    shape = Shape(N=16, T=3, B=2)
    work = Work(lambda: make_layer(name, shape), shape)
    assert work.forward().shape[:2] == (3, 2)
    assert not work.forward().requires_grad
    work.forward_backward()
    first = work.x.grad
    work.forward_backward()
    assert torch.equal(work.x.grad, first)  # gradients are fresh, not added up
    assert all(parameter.grad is not None for parameter in work.layer.parameters())


def test_unknown_implementation():
    with pytest.raises(ValueError, match="no implementation 'gruu'"):
        make_layer("gruu", Shape(N=4, T=2))


@pytest.mark.parametrize("name, kind, gates", [("gru=", nn.GRU, 3), ("lstm=", nn.LSTM, 4)])
def test_equal_parameters(name, kind, gates):
    layer = make_layer(name, Shape(N=256, T=2))
    assert isinstance(layer, kind)
    assert layer.hidden_size == equal_parameters(256, gates)
    ours = sum(parameter.numel() for parameter in make_layer("torch", Shape(N=256, T=2)).parameters())
    theirs = sum(parameter.numel() for parameter in layer.parameters())
    assert abs(theirs / ours - 1) < 0.03


def test_error_is_small_for_the_torch_backend_and_large_for_wrong_weights():
    torch.manual_seed(0)
    shape = Shape(N=8, T=30, B=3)
    rum = RUM(8, 8, eta=1.0, layer_norm=True, zoneout=0.2, backend="torch")
    assert relative_error(rum, shape) < 2e-5
    assert relative_error(rum.bfloat16(), Shape(N=8, T=30, B=3, dtype="bfloat16")) > 1e-4


def test_samples_near_the_relu_threshold_are_told_from_the_others():
    exact = RUM(2, 3, dtype=torch.float64, backend="reference", **PAPER_OPTIONS)
    with torch.no_grad():
        exact.weight_ih_l0.zero_()
        exact.weight_ih_l0[6:] = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, -1.0]])  # eps, relu's argument from h = 0
        exact.bias_ih_l0.zero_()
    x = torch.tensor([[1, 0], [1e-9, 0], [1e9, 1e9 - 1e3], [1, 1 - 1e-6], [1, 0.999]], dtype=torch.float64)
    assert clear_of_threshold(exact, x[None]).tolist() == [
        True,
        True,
        False,
        False,
        True,
    ]  # at any scale
    below = torch.tensor([-1.0, 0.0], dtype=torch.float64).expand_as(x)  # leaves h at 0
    assert clear_of_threshold(exact, torch.stack((below, x, below))).tolist() == [True, True, False, False, True]
    exact.options = replace(exact.options, activation="tanh")
    assert clear_of_threshold(exact, x[None]).all()


def test_an_error_that_is_not_a_number_is_not_lost(monkeypatch):
    monkeypatch.setattr(measure, "_outputs", lambda rum, x, grad: [torch.ones(2), torch.full((2,), math.nan)])
    assert math.isnan(relative_error(RUM(6, 6, backend="torch"), Shape(N=6, T=4, B=3)))
    monkeypatch.setattr(measure, "clear_of_threshold", lambda exact, x: torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="every sample is near the ReLU threshold"):
        relative_error(RUM(6, 6, backend="torch"), Shape(N=6, T=4, B=3), exclude_near_threshold=True)


def test_rows_left_out_have_no_gradient(monkeypatch):
    grads, outputs = [], measure._outputs
    monkeypatch.setattr(measure, "_outputs", lambda rum, x, grad: grads.append(grad) or outputs(rum, x, grad))
    monkeypatch.setattr(measure, "clear_of_threshold", lambda exact, x: torch.tensor([True, False, True]))
    rum = RUM(6, 6, backend="torch")
    assert relative_error(rum, Shape(N=6, T=4, B=3), exclude_near_threshold=True) < 2e-5
    assert relative_error(rum, Shape(N=6, T=4, B=3)) < 2e-5
    assert [grad.abs().sum((0, 2)).gt(0).tolist() for grad in grads] == 2 * [[True, False, True]] + 2 * [[True] * 3]


@pytest.mark.slow
def test_peak_memory_sees_what_autograd_keeps():
    shape = Shape(N=64, T=100, B=32)
    authors = peak_memory("authors", shape, 1)
    assert authors > 4 * peak_memory("torch", shape, 1)
    matrices = shape.T * shape.B * shape.N**2 * 4  # one of each step
    assert 2 * matrices < authors < 3 * matrices  # the new rotation and R; the rest are vectors and what is passing


def test_plain_ln_lstm_is_not_our_kernel():
    shape = Shape(N=4, T=2)
    assert make_layer("ln_lstm", shape).cells[0].backend == "reference"
    assert make_layer("ln_lstm_fused", shape).cells[0].backend == "fused"
