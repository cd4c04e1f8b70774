"""The chunk graphs of kernels/triton_launch.py, on a stand-in for CUDA that records and replays."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton", reason="the table is filled by a Triton kernel")

from torchrum.ops.kernels import triton_launch as graphs

ON_THE_GPU, OFF_THE_GPU = torch.zeros(7), torch.zeros(7)


class FakeGraph:
    recording: "FakeGraph | None" = None

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def replay(self) -> None:
        for piece in self.work:
            piece()


@contextlib.contextmanager
def fake_capture(graph: FakeGraph, *args: object, **kwargs: object) -> Iterator[None]:
    FakeGraph.recording = graph
    yield
    FakeGraph.recording = None


def enqueue(piece: Callable[[], None]) -> None:
    if FakeGraph.recording is None:
        piece()
    else:
        FakeGraph.recording.work.append(piece)


class Quiet:
    """A stream, an event or a place that has nothing to wait for."""

    stream = pool = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


class FakeTable:
    step = 0

    def __getitem__(self, part: slice) -> "FakeTable":
        return self

    def add_(self, number: int) -> None:
        def move() -> None:
            self.step += number

        enqueue(move)


class FakeSteps:
    def __init__(self, stride: int) -> None:
        self.table, self.stride, self.visited, self.warmed = FakeTable(), stride, [], 0

    def launches(self, t: int) -> list[Callable[[], None]]:
        return [functools.partial(self.launch, t)]

    def launch(self, t: int) -> None:
        assert sys._getframe(1).f_code is graphs.run_pass.__code__  # the way to a launch is short
        enqueue(lambda: self.visited.append(self.table.step + self.stride * t))

    def warm_up(self) -> None:
        self.warmed += 1
        self.visited.append(-99)  # begin must undo this

    def release_tensors(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _fake_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fake_capture)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Quiet)
    monkeypatch.setattr(graphs, "can_graph", lambda x, T: x is not OFF_THE_GPU)
    monkeypatch.setattr(
        graphs, "_DeviceResources", lambda: type("Place", (), {"stream": None, "pool": None, "done": Quiet()})()
    )
    monkeypatch.setattr(graphs, "compile_in_parallel", lambda dry_run: None)
    monkeypatch.setattr(graphs, "_device_resources", {})
    monkeypatch.setattr(graphs, "_scans", type(graphs._scans)())


def one_pass(key: str, stride: int, begin, finish, next_pass=None) -> graphs.Pass:
    return graphs.Pass(lambda: key, lambda graphed: FakeSteps(stride), begin, finish, next_pass)


def run(key: str, stride: int, T: int) -> FakeSteps:
    def begin(steps: FakeSteps) -> None:
        steps.visited, steps.table.step = [], 0 if stride == 1 else T - 1

    return graphs.run_pass(one_pass(key, stride, begin, lambda steps: steps), ON_THE_GPU, T)


@pytest.mark.parametrize("T", [1, 5, 127, 128, 150, 385])
def test_every_step_is_replayed_once_and_in_order(T):
    assert run("forward", 1, T).visited == list(range(T))
    assert run("backward", -1, T).visited == list(range(T - 1, -1, -1))


@pytest.mark.parametrize("stride", [1, -1])
def test_off_the_gpu_steps_are_taken_one_by_one(stride):
    taken, events = [], []

    def build(graphed: bool) -> FakeSteps:
        events.append(graphed)
        steps = FakeSteps(stride)
        steps.launch = taken.append
        return steps

    scan_pass = graphs.Pass(lambda: "key", build, lambda steps: events.append("begin"), lambda steps: list(taken))
    assert graphs.run_pass(scan_pass, OFF_THE_GPU, 7) == list(range(7))[::stride]
    assert events == [False, "begin"]
    assert not graphs._scans


def test_another_length_reuses_the_graphs():
    steps = run("a", 1, 12)
    assert list(graphs._scans["a"].graphs) == [8, 4]
    assert run("a", 1, 13) is steps
    assert list(graphs._scans["a"].graphs) == [8, 4, 1]
    assert steps.warmed == 1


def test_the_least_recently_used_scan_is_freed():
    for number in range(graphs.MAX_CACHED_SCANS):
        run(f"scan {number}", 1, 4)
    run("scan 0", 1, 4)
    run("one more", 1, 4)
    assert "scan 0" in graphs._scans
    assert "scan 1" not in graphs._scans
    assert len(graphs._scans) == graphs.MAX_CACHED_SCANS
    graphs.clear_graphs()
    assert not graphs._scans


def test_a_first_call_compiles_itself_and_the_next_scan_without_a_trace(monkeypatch):
    events: list[str] = []

    def compile_in_parallel(dry_run: Callable[[], object]) -> None:
        events.append("dry run")
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "is_dry_run", lambda: True)
            dry_run()

    def begin(steps: FakeSteps) -> None:
        steps.visited, steps.table.step = [], 0
        events.append("begin")

    def finish(steps: FakeSteps) -> list[int]:
        events.append("finish")
        return steps.visited

    def next_pass() -> None:
        events.append("next_pass")
        graphs.run_pass(one_pass("next", -1, begin, finish), ON_THE_GPU, 4)

    monkeypatch.setattr(graphs, "compile_in_parallel", compile_in_parallel)
    first = one_pass("first", 1, begin, finish, next_pass)
    assert graphs.run_pass(first, ON_THE_GPU, 5) == [0, 1, 2, 3, 4]
    compiled, real = ["begin", "finish", "next_pass", "begin", "finish"], ["begin", "begin", "finish"]
    assert events == ["dry run", *compiled, *real]
    assert not graphs._scans["next"].graphs
    assert graphs.run_pass(first, ON_THE_GPU, 5) == [0, 1, 2, 3, 4]
    assert events[9:] == ["begin", "finish"]


def test_after_an_error_a_scan_on_another_stream_still_waits():
    events: list[str] = []

    def finish(steps: FakeSteps) -> None:
        steps.release_tensors = lambda: events.append("forgotten")
        graphs._device_resources[torch.device("cuda", 0)].done.record = lambda: events.append("recorded")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.run_pass(one_pass("a", 1, lambda steps: None, finish), ON_THE_GPU, 4)
    assert events == ["forgotten", "recorded"]
