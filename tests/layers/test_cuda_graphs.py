"""Layers under CUDA graphs: the same numbers as the layer, at every order of calls that a recording could get wrong.

The bookkeeping runs on the CPU too, on a stand-in for CUDA whose graphs run their work again and write into the results
of the recording, so that a result or a saved value that should have been kept is overwritten as on the device.
"""

import contextlib
import copy
import gc
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from oracle import loss_of, tensors
from tolerances import DEEP, TOL
from torchrum import graphed
from torchrum.cells.base import Cell
from torchrum.layers import cuda_graphs
from torchrum.layers.cuda_graphs import Graphed
from torchrum.layers.registry import CellLayer, build_layer

I, H, T, B = 3, 6, 5, 4
SMALL = {"ntm": {"num_slots": 6, "slot_size": 3}, "exprnn": {"orthogonal_map": "taylor"}}
NAMES = [
    "eunn",
    "goru",
    "fast_weights",
    "ntm",
    "exprnn",
    "urnn",
    "ln_lstm",
    "gru_tf",
    "hyper_lstm",
    "hm_lstm",
    "nas",
    "rhn",
    "fs",
    "rum",
]


class FakeGraph:
    def __init__(self, work, results):
        self.work, self.results = work, results

    def replay(self):
        with torch.enable_grad():
            fresh = self.work()
        with torch.no_grad():
            for old, new in zip(self.results, fresh, strict=True):
                if old is not None:
                    old.copy_(new)


class FakePlace:
    """A device that runs on the CPU; ``made`` counts the graphs."""

    device = torch.device("cpu")

    def __init__(self):
        self.made, self.broken, self.done = 0, False, SimpleNamespace(synchronize=lambda: None)
        self.aside = self.in_order = self.same_random_numbers = contextlib.nullcontext

    def capture(self, pieces):
        if self.broken:
            raise cuda_graphs.UnrecordableError("recording failed: it is broken")
        self.made += len(pieces)
        records = []
        for piece in pieces:
            results = [None if x is None else x.clone() for x in piece()]
            records.append((FakeGraph(piece, results), results))
        return records


@pytest.fixture
def place(monkeypatch):
    place = FakePlace()
    monkeypatch.setattr(cuda_graphs, "place_of", lambda device: place)
    monkeypatch.setattr(cuda_graphs, "device_obstacle", lambda device: None)
    return place


def build(name="goru", device="cpu", dtype=torch.float64, **shared):
    torch.manual_seed(0)
    return build_layer(name, I, H, **shared, **SMALL.get(name, {})).to(device, dtype)


def draw(*shape, seed=1, device="cpu", dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def gradients(layer, *arguments, seed=1, **more):
    """Outputs, gradient of the input and gradients of all weights of one call."""
    x = draw(T, B, I, seed=seed, device=next(layer.parameters()).device, dtype=next(layer.parameters()).dtype)
    x.requires_grad_()
    layer.zero_grad()
    results = layer(x, *arguments, **more)
    loss_of(results).backward()
    return [*(part.detach() for part in tensors(results)), x.grad, *(p.grad for p in layer.parameters())]


def assert_same(given, expected, dtype=torch.float64):
    torch.testing.assert_close(given, expected, **TOL[dtype])


def assert_graphed(layer):
    assert layer.explain().backend == "graphed", layer.explain()


# without a device


def test_on_the_cpu_the_layer_is_called():
    layer = build()
    wrapped = graphed(layer)
    assert wrapped.explain().reason == "it was not called yet"
    assert_same(gradients(wrapped), gradients(layer))
    assert wrapped.explain() == ("eager", "the input is on cpu")
    with pytest.raises(ValueError, match=r"strict=True cannot be met: the input is on cpu\. Pass strict=False"):
        graphed(layer, strict=True)(draw(T, B, I))


def test_parameters_keep_their_names():
    layer = build("ln_lstm", num_layers=2)
    wrapped = graphed(layer)
    assert list(wrapped.state_dict()) == list(layer.state_dict())
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in layer.named_parameters()]
    assert all(a is b for a, b in zip(wrapped.parameters(), layer.parameters(), strict=True))
    model, plain = nn.ModuleDict({"rnn": wrapped}), nn.ModuleDict({"rnn": layer})
    assert list(model.state_dict()) == list(plain.state_dict())
    other = build("ln_lstm", num_layers=2)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    wrapped.load_state_dict(other.state_dict())
    assert_same(list(layer.parameters()), list(other.parameters()))


def test_it_is_the_layer_in_all_else():
    layer = build(dtype=torch.float32)
    wrapped = graphed(layer)
    assert wrapped.hidden_size == H
    wrapped.eval()
    assert not layer.training
    assert not layer.cells[0].training
    wrapped.train()
    assert layer.training
    wrapped.double()
    assert next(layer.parameters()).dtype == torch.float64
    assert repr(layer) in repr(wrapped)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        wrapped.nothing_of_the_kind  # noqa: B018
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(graphed(build("rum"))))):
        assert twin.layer is not layer
        assert twin._parameters is twin.layer._parameters
        assert all(a is b for a, b in zip(twin.parameters(), twin.layer.parameters(), strict=True))
        assert twin(draw(T, B, I))[0].shape == (T, B, H)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3,), "layer is of type int"),
        ((nn.Identity(), {"strict": 1}), "strict=1"),
        ((nn.Identity(), {"max_graphs": 0}), "max_graphs=0"),
    ],
)
def test_wrong_arguments(arguments, message):
    layer, more = (*arguments, {})[:2]
    with pytest.raises(ValueError, match=message):
        graphed(layer, **more)
    with pytest.raises(ValueError, match="layer is of type Graphed"):
        graphed(Graphed(nn.Identity()))


def test_compile_takes_the_layer():
    layer = build("rum", dtype=torch.float32)
    compiled = torch.compile(graphed(layer), fullgraph=True, backend="eager")
    x = draw(T, B, I, dtype=torch.float32)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])


# the bookkeeping, on the stand-in


@pytest.mark.parametrize("name", NAMES)
def test_same_results_on_the_stand_in(name, place):
    layer = build(name, **(dict(num_layers=2, bidirectional=True) if name in ("rum", "ln_lstm") else {}))
    wrapped = graphed(layer, strict=True)
    for seed in (1, 2, 3):
        assert_same(gradients(wrapped, seed=seed), gradients(layer, seed=seed))
    assert place.made == 2
    _, hidden = layer(draw(T, B, I))
    hx = torch.utils._pytree.tree_map(torch.detach, hidden)
    lengths = torch.tensor([2, 5, 1, 3])
    for seed in (1, 2):
        assert_same(gradients(wrapped, hx, seed=seed), gradients(layer, hx, seed=seed))
        assert_same(gradients(wrapped, lengths=lengths, seed=seed), gradients(layer, lengths=lengths, seed=seed))
    assert place.made == 6
    with torch.no_grad():
        assert_same(tensors(wrapped(draw(T, B, I))), tensors(layer(draw(T, B, I))))
    assert place.made == 7


def test_gradient_of_the_initial_state(place):
    layer = build()
    wrapped = graphed(layer)
    found = []
    for run in (layer, wrapped, wrapped):
        hx = draw(1, B, H, seed=5).requires_grad_()
        loss_of(run(draw(T, B, I), hx)).backward()
        found.append(hx.grad)
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    assert_graphed(wrapped)


def test_weights_are_read_where_they_lie(place):
    layer = build()
    wrapped = graphed(layer, strict=True)
    gradients(wrapped)
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(1.5)
    assert_same(gradients(wrapped), gradients(layer))
    assert place.made == 2
    next(layer.parameters()).data = next(layer.parameters()).detach() * 0.5
    assert_same(gradients(wrapped), gradients(layer))
    assert place.made == 4
    assert len(wrapped._recordings) == 1


def test_weights_that_keep_moving_are_not_recorded_for_ever(place):
    layer = build()
    wrapped = graphed(layer)
    kept = []
    for _ in range(8):
        kept.append(next(layer.parameters()).data)
        next(layer.parameters()).data = kept[-1].clone()
        assert_same(gradients(wrapped), gradients(layer))
    assert place.made == 2 * (1 + cuda_graphs.MOST_MOVES)
    assert wrapped.explain() == ("eager", "the weights were at 5 addresses; update them in place")


def test_two_calls_before_their_backward(place):
    layer = build()
    wrapped = graphed(layer, max_graphs=2)

    def both(run, order):
        layer.zero_grad()
        losses = [loss_of(run(draw(T, B, I, seed=seed))) for seed in (1, 2, 3)]
        for index in order:
            losses[index].backward()
        return [p.grad for p in layer.parameters()]

    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        assert_same(both(wrapped, order), both(layer, order))
    assert place.made == 4
    assert wrapped.explain().reason == "2 recordings, all that max_graphs allows, wait for their backward"
    del both
    gc.collect()
    wrapped(draw(T, B, I))
    assert_graphed(wrapped)


def test_a_call_without_backward_gives_its_recording_back(place):
    wrapped = graphed(build(), max_graphs=1)
    for _ in range(3):
        wrapped(draw(T, B, I))
        assert_graphed(wrapped)
    kept = wrapped(draw(T, B, I))
    wrapped(draw(T, B, I))
    assert wrapped.explain().backend == "eager"
    assert kept[0].requires_grad


def test_outputs_and_gradients_are_fresh(place):
    wrapped = graphed(build())
    first = gradients(wrapped, seed=1)
    before = [part.clone() for part in first]
    gradients(wrapped, seed=2)
    assert_same(first[:2], before[:2])
    with torch.no_grad():
        out = wrapped(draw(T, B, I))[0]
        kept = out.clone()
        wrapped(draw(T, B, I, seed=2))
    assert_same(out, kept)
    wrapped.zero_grad()
    loss_of(wrapped(draw(T, B, I))).backward()
    once = [p.grad.clone() for p in wrapped.parameters()]
    loss_of(wrapped(draw(T, B, I))).backward()
    assert_same([p.grad for p in wrapped.parameters()], [2 * grad for grad in once])


def test_backward_twice_and_outputs_one_by_one(place):
    layer = build("ln_lstm")
    wrapped = graphed(layer)
    x = draw(T, B, I)

    def separately(run):
        output, (h, c) = run(x)
        grads = [
            torch.autograd.grad(part.sin().sum(), list(layer.parameters()), retain_graph=True, allow_unused=True)
            for part in (output, h, c)
        ]
        run(x + 1)  # another call must not take what the retained graph needs
        return [*grads, torch.autograd.grad(c.sum(), list(layer.parameters()), allow_unused=True)]

    for mine, theirs in zip(separately(wrapped), separately(layer), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert_same(a, torch.zeros_like(a) if b is None else b)
    assert_graphed(wrapped)


def test_gradients_of_some_inputs_only(place):
    layer = build()
    wrapped = graphed(layer)
    x, weights = draw(T, B, I).requires_grad_(), list(layer.parameters())
    for chosen in ([x], [weights[-1]], [weights[0], x]):
        for _ in range(2):
            mine = torch.autograd.grad(loss_of(wrapped(x)), chosen)
            assert_same(mine, torch.autograd.grad(loss_of(layer(x)), chosen))
    weights[0].requires_grad_(False)
    loss_of(wrapped(x)).backward()
    assert_graphed(wrapped)
    assert weights[0].grad is None
    mine = [weight.grad.clone() for weight in weights[1:]]
    layer.zero_grad()
    loss_of(layer(x)).backward()
    assert_same(mine, [weight.grad for weight in weights[1:]])


def test_wrong_numbers_are_errors(place, monkeypatch):
    layer = build()
    wrapped = graphed(layer)
    x = draw(T, B, I).requires_grad_()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(loss_of(wrapped(x)), x, create_graph=True)
    loss = loss_of(wrapped(x))
    with torch.no_grad():
        next(layer.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="a weight was changed in place"):
        loss.backward()
    del loss
    monkeypatch.setattr(cuda_graphs, "_graph_is_kept", lambda: False)  # as where a backward frees the graph
    loss = loss_of(wrapped(x))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    wrapped(x)
    with pytest.raises(RuntimeError, match="a later call has overwritten"):
        loss.backward()


def test_signatures_and_their_bound(place):
    wrapped = graphed(build(), max_graphs=3)

    def graphs_for(call):
        before = place.made
        call()
        assert_graphed(wrapped)
        return place.made - before

    x = draw(T, B, I)
    assert graphs_for(lambda: wrapped(x)) == 2
    assert graphs_for(lambda: wrapped(x.transpose(0, 1).contiguous().transpose(0, 1))) == 0  # strides do not matter
    assert graphs_for(lambda: wrapped(draw(T + 1, B, I))) == 2
    assert graphs_for(lambda: wrapped(draw(T, B + 1, I))) == 2
    assert len(wrapped._recordings) == 3
    assert graphs_for(lambda: wrapped(x)) == 0
    assert graphs_for(lambda: wrapped(x.clone().requires_grad_())) == 2  # frees T + 1, the least recently used
    assert len(wrapped._recordings) == 3
    assert graphs_for(lambda: wrapped(x)) == 0
    assert graphs_for(lambda: wrapped(draw(T + 1, B, I))) == 2
    wrapped.eval()
    assert graphs_for(lambda: wrapped(x)) == 2
    wrapped.train()
    next(wrapped.parameters()).requires_grad_(False)
    assert graphs_for(lambda: wrapped(x)) == 2
    wrapped.clear()
    assert len(wrapped._recordings) == 0
    assert graphs_for(lambda: wrapped(x)) == 2


def test_memory_of_freed_recordings_goes(place):
    wrapped = graphed(build(), max_graphs=1)
    wrapped(draw(T, B, I))
    gone = torch.multiprocessing.reductions.StorageWeakRef(
        next(iter(wrapped._recordings.entries.values())).copies[0].inputs[0].untyped_storage()
    )
    wrapped(draw(T + 1, B, I))
    gc.collect()
    assert gone.expired()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", [(5, 3, 2), (2, 5, 3)], ids=("sorted", "unsorted"))
def test_packed_sequences(lengths, batch_first, place):
    layer = build(bidirectional=True, batch_first=batch_first)
    wrapped = graphed(layer, strict=True)
    packed = pack_sequence([draw(n, I, seed=n) for n in lengths], enforce_sorted=lengths == (5, 3, 2))
    mine, h = wrapped(packed)
    theirs, expected = layer(packed)
    assert_same([mine.data, h], [theirs.data, expected])
    assert torch.equal(mine.batch_sizes, theirs.batch_sizes)
    assert place.made == 2
    with pytest.raises(ValueError, match="leave lengths out"):
        wrapped(packed, lengths=torch.tensor(lengths))
    gru = graphed(nn.GRU(I, H, dtype=torch.float64))
    gru(packed)
    assert gru.explain().reason.startswith("the input is a PackedSequence")


def test_hooks(place):
    layer = build()
    wrapped = graphed(layer)
    seen = []
    handle = layer.cells[0].register_forward_hook(lambda *call: seen.append(1))
    wrapped(draw(T, B, I))
    assert wrapped.explain() == ("eager", "cells.0 has hooks, which a replay would not call")
    handle.remove()
    handle = wrapped.register_forward_hook(lambda *call: seen.append("outer"))
    weight = next(layer.parameters())
    weight.register_hook(lambda grad: seen.append("grad") or 2 * grad)
    expected = gradients(layer)
    seen.clear()
    assert_same(gradients(wrapped), expected)
    assert_same(gradients(wrapped), expected)
    assert seen == ["outer", "grad"] * 2
    assert_graphed(wrapped)


class Doubling(Cell):
    """A user's cell: any PyTorch."""

    def __init__(self, noise=False):
        super().__init__(I, H)
        self.weight = nn.Parameter(torch.randn(H, I + H, dtype=torch.float64) / 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.noise = noise

    def initial_state(self, batch_size, *, device, dtype):
        return (torch.zeros(batch_size, H, device=device, dtype=dtype),)

    def step(self, x, state):
        self.count += 1
        h = torch.tanh(torch.cat([x, state[0]], -1) @ self.weight.T)
        if self.noise == "host":
            h = h + torch.rand(1, dtype=h.dtype).to(h.device)
        if self.noise == "reads":
            h = h * h.max().item()
        if self.noise == "mask":
            h = nn.functional.dropout(h, 0.5, self.training)
        return h, (h,)


def user_layer(noise=False, device="cpu"):
    torch.manual_seed(0)
    return CellLayer(lambda size: Doubling(noise), I, H).to(device)


def test_a_users_cell_and_its_buffers(place):
    layer, twin = user_layer(), user_layer()
    wrapped = graphed(layer, strict=True)
    for _ in range(3):
        assert_same(gradients(wrapped), gradients(twin))
    # warm-up leaves no trace; T steps more because the stand-in, unlike a device, does the work that it records
    assert layer.cells[0].count == twin.cells[0].count + T


def test_one_call_of_a_cell(place):
    cell = Doubling()
    wrapped = graphed(cell, strict=True)
    x = draw(B, I)
    for _ in range(2):
        out, (h,) = wrapped(x)
        assert_same([out, h], [cell(x)[0]] * 2)


def test_reasons(place):
    with torch.no_grad():
        wrapped = graphed(user_layer("host"))
        wrapped(draw(T, B, I))
        assert "draws random numbers on the CPU" in wrapped.explain().reason
    wrapped = graphed(build())
    with pytest.raises(ValueError, match="input_size"):
        wrapped(draw(T, B, I + 1))
    with pytest.raises(ValueError, match="lengths range from 0"):
        wrapped(draw(T, B, I).to("cpu"), lengths=torch.tensor([0, 1, 1, 1]))
    assert wrapped(draw(T, 0, I))[0].shape == (T, 0, H)
    assert wrapped.explain().reason == "the input is empty"
    with nn.utils.parametrize.cached():
        wrapped(draw(T, B, I))
    assert "parametrize.cached()" in wrapped.explain().reason
    torch.func.vmap(lambda x: wrapped(x)[0])(draw(2, T, B, I))
    assert wrapped.explain().reason == "it is being transformed or traced"
    place.broken = True
    for _ in range(2):
        assert_same(gradients(wrapped), gradients(wrapped.layer))
        assert wrapped.explain() == ("eager", "recording failed: it is broken")
    wrapped.strict = True
    with pytest.raises(ValueError, match="it is broken"):
        gradients(wrapped)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_from_the_first_call(place, reentrant):
    layer = build()
    wrapped = graphed(layer)
    expected = gradients(layer)[2:]
    for _ in range(2):
        layer.zero_grad()
        x = draw(T, B, I).requires_grad_()
        loss_of(checkpoint(wrapped, x, use_reentrant=reentrant)).backward()
        assert_same([x.grad, *(p.grad for p in layer.parameters())], expected)
        assert_graphed(wrapped)


def test_one_process_of_ddp(place, process_group):
    layer = build()
    wrapped = graphed(layer)
    parallel = nn.parallel.DistributedDataParallel(wrapped)
    expected = gradients(layer)
    for _ in range(3):
        assert_same(gradients(parallel), expected)
        assert_graphed(wrapped)


def test_weights_out_of_sight_are_refused(place):
    class Hoard(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(I, dtype=torch.float64))
            self.hoard = [self.weight]

        def forward(self, input, hx=None):
            return input * self.hoard[0], input

    wrapped = graphed(Hoard())
    wrapped(draw(T, B, I))
    assert "references to its weights outside its parameters" in wrapped.explain().reason


def test_a_graphed_layer_inside_another(place):
    class Wrapper(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.inner = layer

        def forward(self, input, hx=None):
            return self.inner(input, hx)

    layer = build()
    wrapped = graphed(Wrapper(graphed(layer)))
    for seed in (1, 2):
        assert_same(gradients(wrapped, seed=seed), gradients(layer, seed=seed))
    assert_graphed(wrapped)


# on the device


def on_gpu(name="goru", **shared):
    return build(name, device="cuda", dtype=torch.float32, **shared)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_same_results(name):
    layer = on_gpu(name, num_layers=2)
    wrapped = graphed(layer, strict=True)
    for seed in (1, 2, 3):
        assert_same(gradients(wrapped, seed=seed), gradients(layer, seed=seed), torch.float32)
    lengths = torch.tensor([2, 5, 1, 3])
    for _ in range(2):
        assert_same(gradients(wrapped, lengths=lengths), gradients(layer, lengths=lengths), torch.float32)
    with torch.inference_mode():
        x = draw(T, B, I, device="cuda", dtype=torch.float32)
        for _ in range(2):
            assert_same(tensors(wrapped(x)), tensors(layer(x)), torch.float32)


@pytest.mark.gpu
def test_training_follows_eager():
    trained = []
    for wrap in (graphed, lambda layer: layer):
        layer = on_gpu("goru", num_layers=2)
        run = wrap(layer)
        optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(run(draw(T, B, I, seed=step, device="cuda", dtype=torch.float32))).backward()
            optimizer.step()
        trained.append([p.detach() for p in layer.parameters()])
    torch.testing.assert_close(trained[0], trained[1], **DEEP[torch.float32])  # Adam magnifies the first roundings


@pytest.mark.gpu
def test_random_numbers_are_eagers_and_differ():
    layer, x = user_layer("mask", "cuda"), draw(T, B, I, device="cuda")
    wrapped = graphed(layer, strict=True)
    runs = []
    for run in (wrapped, wrapped, layer):
        torch.manual_seed(7)
        runs.append([run(x)[0].detach() for _ in range(3)])
    assert not torch.equal(runs[0][0], runs[0][1])
    assert_same(runs[0], runs[2])
    assert_same(runs[1], runs[2])
    torch.manual_seed(7)
    expected = gradients(layer)
    torch.manual_seed(7)
    assert_same(gradients(wrapped), expected)
    layer.eval()
    assert_same(wrapped(x)[0], layer(x)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    layer = on_gpu("ln_lstm")
    wrapped = graphed(layer, strict=True)

    def run(module, seed):
        module.zero_grad()
        x = draw(T, B, I, seed=seed, device="cuda", dtype=torch.float32)
        with torch.autocast("cuda", dtype):
            results = module(x)
        loss_of(results).backward()
        return [*(part.detach() for part in tensors(results)), *(p.grad for p in module.parameters())]

    for seed in (1, 2):
        mine, theirs = run(wrapped, seed), run(layer, seed)
        assert mine[0].dtype == theirs[0].dtype
        assert_same(mine, theirs, dtype)
        with torch.no_grad():
            for p in layer.parameters():
                p.mul_(1.2)  # a cast of the old weights in the recording would show


@pytest.mark.gpu
def test_pending_backwards_and_streams():
    layer = on_gpu(num_layers=2)
    wrapped = graphed(layer, strict=True)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def losses(run):
        layer.zero_grad()
        found = []
        for seed in range(6):
            stream = streams[seed % 2]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(loss_of(run(draw(T, B, I, seed=seed, device="cuda", dtype=torch.float32))))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return found

    total = losses(wrapped)
    sum(total).backward()
    mine = [p.grad for p in layer.parameters()]
    sum(losses(layer)).backward()
    torch.testing.assert_close(mine, [p.grad for p in layer.parameters()], **DEEP[torch.float32])


@pytest.mark.gpu
def test_what_cannot_be_recorded_runs_and_says_why():
    layer = user_layer("reads", "cuda")
    wrapped = graphed(layer)
    for _ in range(2):
        assert_same(gradients(wrapped), gradients(layer))
        assert wrapped.explain().reason.startswith("recording failed: ")
    print(wrapped.explain().reason)
    torch.rand(3, device="cuda")  # the generator is whole
    other = graphed(user_layer("mask", "cuda"), strict=True)  # and so is the recording of others
    other(draw(T, B, I, device="cuda"))


@pytest.mark.gpu
def test_inside_another_recording():
    layer = on_gpu()
    wrapped = graphed(layer)
    x = draw(T, B, I, device="cuda", dtype=torch.float32)
    with torch.no_grad():
        expected = wrapped(x)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = wrapped(x)[0]
        assert wrapped.explain().reason == "the stream is being recorded already"
        graph.replay()
    assert_same(out, expected, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant):
    layer = on_gpu()
    wrapped = graphed(layer, strict=True)
    expected = gradients(layer)[2:]
    for _ in range(2):  # the first records, with the re-entrant form in autograd's thread
        layer.zero_grad()
        x = draw(T, B, I, device="cuda", dtype=torch.float32).requires_grad_()
        loss_of(checkpoint(wrapped, x, use_reentrant=reentrant)).backward()
        assert_same([x.grad, *(p.grad for p in layer.parameters())], expected, torch.float32)


@pytest.mark.gpu
def test_lengths_on_the_cpu_are_checked():
    wrapped = graphed(on_gpu())
    x = draw(T, B, I, device="cuda", dtype=torch.float32)
    for _ in range(2):
        wrapped(x, lengths=torch.tensor([1, 5, 2, 3]))
        assert_graphed(wrapped)
        with pytest.raises(ValueError, match="lengths range from 0 to 6"):
            wrapped(x, lengths=torch.tensor([0, 6, 1, 1]))


@pytest.mark.gpu
def test_freed_recordings_return_their_memory():
    wrapped = graphed(on_gpu("goru"), max_graphs=2)
    sizes = []
    for steps in (40, 41, 42, 43, 44, 45, 46, 47):
        loss_of(wrapped(draw(steps, 256, I, device="cuda", dtype=torch.float32))).backward()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved())
    assert sizes[-1] <= 1.5 * sizes[2], sizes


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_torchs_own_layers(name):
    layer = on_gpu(name)
    wrapped = graphed(layer, strict=True)
    for seed in (1, 2):
        assert_same(gradients(wrapped, seed=seed), gradients(layer, seed=seed), torch.float32)
