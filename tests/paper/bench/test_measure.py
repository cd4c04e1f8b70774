import time

import pytest
import torch

from torchrum.paper.bench.layers import Shape, Work, make_layer
from torchrum.paper.bench.measure import summarise, time_cpu, time_cuda
from torchrum.paper.bench.suites import peak_memory


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


@pytest.mark.parametrize("name", ["authors", "reference", "torch", "native", "gru", "lstm", "ln_lstm"])
def test_every_implementation_runs(name):
    shape = Shape(N=16, T=3, B=2)
    work = Work(name, shape)
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


@pytest.mark.slow
def test_peak_memory_sees_what_autograd_keeps():
    shape = Shape(N=64, T=100, B=32)
    authors = peak_memory("authors", shape, {"lam": 1})
    assert authors > 4 * peak_memory("torch", shape, {"lam": 1})
    matrices = shape.T * shape.B * shape.N**2 * 4  # one of each step
    assert 2 * matrices < authors < 3 * matrices  # the new rotation and R; the rest are vectors and what is passing


def test_plain_ln_lstm_is_not_our_kernel():
    shape = Shape(N=4, T=2)
    assert make_layer("ln_lstm", shape).cells[0].backend == "reference"
    assert make_layer("ln_lstm_fused", shape).cells[0].backend == "fused"
