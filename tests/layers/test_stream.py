"""A stream against one call over each stretch of each row, which starts from the initial state."""

import copy
import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from grids import thinned
from tolerances import DEEP, TOL
from torchrum import RUM, InputWindow, RUMCell, Stream, graphed
from torchrum.layers.registry import build_layer
from torchrum.ops.rum_scan import native

T, I, H = 13, 5, 9
PAPER = {"form": "paper"}
ALL = {"eta": 1.0, "layer_norm": True, "zoneout": 0.3, "activation": "tanh", "embed_bias": False}
LAYERS = {
    "gated": lambda **more: RUM(I, H, **more),
    "gated-options": lambda **more: RUM(I, H, head_size=4, rotated=0.7, zoneout=0.2, dropout=0.5, **more),
    "gated-no-bias": lambda **more: RUM(I, H, bias=False, **more),
    "lam0": lambda **more: RUM(I, H, **PAPER, **more),
    "lam0-all": lambda **more: RUM(I, H, **PAPER, **ALL, **more),
    "lam0-norm": lambda **more: RUM(I, H, **PAPER, eta=0.7, layer_norm=True, update_gate=False, **more),
    "lam1": lambda **more: RUM(I, H, lam=1, **more),
    "lam1-all": lambda **more: RUM(I, H, lam=1, **ALL, **more),
    "lam-between": lambda **more: RUM(I, H, lam=0.5, **more),
    "lam-learnt": lambda **more: RUM(I, H, lam=1, learn_lam=True, **more),
    "reference": lambda **more: RUM(I, H, backend="reference", **more),
    "goru": lambda **more: build_layer("goru", I, 8, **more),
    "ln_lstm": lambda **more: build_layer("ln_lstm", I, H, **more),
    "nn.GRU": lambda **more: nn.GRU(I, H, **more),
    "nn.LSTM": lambda **more: nn.LSTM(I, H, proj_size=4, **more),
    "nn.RNN": lambda **more: nn.RNN(I, H, **more),
}
NATIVE = ("gated", "gated-options", "gated-no-bias", "lam0", "lam0-norm", "lam1")
CUTS = ([1] * T, [1, 1, 5, 1, 2, 1, 1, 1], [T], [4, 1, 1, 7])
RESETS: dict[int, list[int]] = {1: [0], 7: [0, 2], 9: [2]}
"""Rows that start again before a step; each begins a piece of some of the cuts."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(modules: tuple[nn.Module, ...], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
        x = x[0] if isinstance(x, tuple) else x
    return x


@torch.no_grad()
def by_rows(modules: tuple[nn.Module, ...], x: Tensor, resets: dict[int, list[int]]) -> Tensor:
    """Outputs for ``x`` ``(T, B, I)``, each stretch of each row by itself."""
    modules = tuple(copy.deepcopy(module).eval() for module in modules)
    rows = []
    for row in range(x.shape[1]):
        cuts = [0, *(t for t, reset in sorted(resets.items()) if row in reset), x.shape[0]]
        rows.append(torch.cat([run(modules, x[a:b, row : row + 1]) for a, b in pairwise(cuts)]))
    return torch.cat(rows, 1)


def streamed(stream: Stream, x: Tensor, cuts: list[int], resets: dict[int, list[int]], time: int = 0) -> Tensor:
    """Outputs of the stream; single steps go in without their time dimension every other time."""
    outputs, t = [], 0
    for number, length in enumerate(cuts):
        if t in resets:
            stream.reset(resets[t])
        piece = x[t : t + length]
        if length == 1 and number % 2 == 0:
            outputs.append(stream(piece[0]).unsqueeze(0))
        else:
            outputs.append(stream(piece.transpose(0, 1)).transpose(0, 1) if time else stream(piece))
        t += length
    return torch.cat(outputs)


@pytest.mark.parametrize(
    "name, layers, B, cut", thinned([(n, k, b, c) for n in LAYERS for k in (1, 2) for b in (3, 40) for c in CUTS], 5)
)
def test_pieces_are_the_whole(name, layers, B, cut):
    torch.manual_seed(0)
    layer = LAYERS[name](num_layers=layers) if layers > 1 or name != "gated-options" else LAYERS[name](num_layers=2)
    layer, x = layer.double(), draw(T, B, I)
    begins = {sum(cut[:n]) for n in range(len(cut))}
    resets = {t: rows for t, rows in RESETS.items() if t in begins}
    stream = Stream(layer, batch_size=B)
    found = streamed(stream, x, cut, resets)
    torch.testing.assert_close(found, by_rows((layer,), x, resets), **DEEP[torch.float64])
    if name in NATIVE and 1 in cut and not isinstance(native.build_obstacle(True), str):
        assert (stream._step.kept[0].steps is not None) == (B <= 32)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("name", ["gated", "lam1"])
@pytest.mark.parametrize("B", [1, 3])
def test_a_window_before_the_layer_and_a_head_behind(width, name, B):
    torch.manual_seed(0)
    options = {"lam": 1} if name == "lam1" else {}
    modules = InputWindow(I, width), RUM(width * I, H, 2, **options).double(), nn.Linear(H, 2).double()
    x, resets = draw(T, B, I), {1: [0], 7: [0, B - 1]}
    expected = by_rows(modules, x, resets)
    for cut in ([1] * T, [1, 3, 1, 1, 1, 2, 3, 1]):
        found = streamed(Stream(*modules, batch_size=B), x, cut, resets)
        torch.testing.assert_close(found, expected, **DEEP[torch.float64])


@pytest.mark.parametrize("name", ["gated", "lam1", "nn.GRU"])
def test_batch_first(name):
    layer, x = LAYERS[name](num_layers=2, batch_first=True).double(), draw(T, 3, I)
    found = streamed(Stream(layer, batch_size=3), x, CUTS[1], {7: [1]}, time=1)
    layer.batch_first = False
    torch.testing.assert_close(found, by_rows((layer,), x, {7: [1]}), **DEEP[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gated", "lam0", "lam1"])
def test_other_dtypes(name, dtype):
    layer, x = LAYERS[name](num_layers=2).to(dtype), draw(T, 2, I).to(dtype)
    found = streamed(Stream(layer, batch_size=2), x, CUTS[1], {1: [0], 7: [1]})
    expected = by_rows((layer,), x, {1: [0], 7: [1]})
    torch.testing.assert_close(found, expected, **TOL[dtype])


@pytest.mark.parametrize("name", ["gated", "lam1", "nn.LSTM", "goru"])
def test_save_and_load_in_between(name, tmp_path):
    layer, x = LAYERS[name](num_layers=2).double(), draw(T, 3, I)
    modules = InputWindow(I, 1), layer
    first = Stream(*modules, batch_size=3)
    begin = streamed(first, x[:6], [1, 1, 3, 1], {})
    first.save(tmp_path / "state.safetensors")
    again = Stream(*modules, batch_size=3)
    again(x[0])
    again.load(tmp_path / "state.safetensors")
    found = torch.cat([begin, streamed(again, x[6:], [1, 1, 4, 1], {})])
    torch.testing.assert_close(found, by_rows(modules, x, {}), **DEEP[torch.float64])
    parts = ["1.h", "1.R"] if name == "lam1" else ["1.h", "1.c"] if name == "nn.LSTM" else ["1.h"]
    assert list(first.state_dict()) == ["0.x", *parts]


class Tagger(nn.Module):
    """Embedded symbols, a layer that is given an initial state, and a score of the last state."""

    def __init__(self, **options):
        super().__init__()
        self.embedding, self.rum = nn.Embedding(11, I), RUM(I, H, batch_first=True, dtype=torch.float64, **options)
        self.embedding.double()
        self.head = nn.Linear(H, 3, dtype=torch.float64)

    def forward(self, symbols):
        hx = torch.zeros(self.rum.num_layers, len(symbols), H, dtype=torch.float64)
        output, h_n = self.rum(self.embedding(symbols), hx)
        return self.head(h_n[-1]), output


@pytest.mark.parametrize("layers", [1, 2])
def test_a_whole_model_even_if_it_passes_a_state(layers):
    model, x = Tagger(num_layers=layers), torch.randint(11, (2, T), generator=torch.Generator().manual_seed(0))
    stream = Stream(model, batch_size=2)
    for end in range(1, T + 1):
        with torch.no_grad():
            expected = model(x[:, :end])[0]
        torch.testing.assert_close(stream(x[:, end - 1 : end]), expected, **DEEP[torch.float64])
    assert list(stream.state_dict()) == ["0.rum.h"]


@pytest.mark.parametrize("rows", [1, [1], (1, 1), torch.tensor([False, True, False]), torch.tensor([1])], ids=str)
def test_reset_takes_rows_in_several_forms(rows):
    stream = Stream(RUM(I, H, lam=1), batch_size=3)
    fresh = stream.state_dict()
    stream(torch.randn(3, I))
    stream.reset([])
    before = stream.state_dict()
    stream.reset(rows)
    for name, part in stream.state_dict().items():
        assert torch.equal(part[:, 1], fresh[name][:, 1]) and not torch.equal(part[:, 1], before[name][:, 1])
        assert torch.equal(part[:, ::2], before[name][:, ::2])
    stream.reset()
    assert all(torch.equal(part, fresh[name]) for name, part in stream.state_dict().items())


def follows(stream: Stream, layer: nn.Module, x: Tensor) -> None:
    stream.reset()
    expected = by_rows((layer,), x, {})
    torch.testing.assert_close(streamed(stream, x, [1] * len(x), {}), expected, **DEEP[x.dtype])


@pytest.mark.parametrize("name", ["gated", "lam0", "nn.GRU"])
def test_weights_that_change_are_followed(name):
    layer, x = LAYERS[name](num_layers=2), draw(4, 1, I).float()
    stream = Stream(layer)
    follows(stream, layer, x)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(x)[0].sum().backward()
    optimizer.step()
    follows(stream, layer, x)
    layer.load_state_dict({key: torch.randn_like(part) / 4 for key, part in layer.state_dict().items()})
    follows(stream, layer, x)
    for part in layer.parameters():
        part.data = torch.randn(part.shape[::-1]).T / 4 if part.dim() == 2 else torch.randn(part.shape)
    follows(stream, layer, x)


def test_weights_of_another_dtype_are_an_error_until_there_is_a_new_stream():
    layer = RUM(I, H)
    stream = Stream(layer)
    stream(torch.randn(1, I))
    layer.double()
    with pytest.raises(ValueError, match=r"RUM: input is torch.float32, the weights torch.float64"):
        stream(torch.randn(1, I))
    follows(Stream(layer), layer, draw(4, 1, I))


def test_the_model_itself_stays_as_it_is():
    layer = RUM(I, H, 2, dropout=0.5)
    stream = Stream(layer)
    x = torch.randn(1, I)
    first = stream(x)
    assert layer.training and "forward" not in vars(layer) and not first.requires_grad
    other = Stream(layer)
    assert torch.equal(other(x), first)  # neither another stream's state nor dropout
    assert not torch.equal(stream(x), first)
    assert layer(x.unsqueeze(0))[0].requires_grad


@pytest.mark.parametrize("name", ["gated", "lam1", "nn.GRU"])
def test_results_are_the_users_to_change(name):
    layer, x = LAYERS[name](num_layers=2).double(), draw(6, 1, I)
    stream, outputs = Stream(layer), []
    for step in x:
        output = stream(step)
        outputs.append(output.clone())
        output.fill_(7)
        stream.state_dict()["0.h"].fill_(7)
    torch.testing.assert_close(torch.stack(outputs), by_rows((layer,), x, {}), **DEEP[torch.float64])


def test_a_call_that_fails_changes_nothing():
    class Picky(nn.Module):
        def forward(self, x):
            if x.isnan().any():
                raise RuntimeError("not a number")
            return x

    layer, x = RUM(I, H), torch.randn(3, 1, I)
    stream = Stream(layer, Picky())
    stream(x[0])
    with pytest.raises(RuntimeError, match="not a number"):
        stream(x[1] * torch.nan)
    torch.testing.assert_close(stream(x[1]), layer(x[:2])[0][1])


def test_streams_of_one_model_in_several_threads():
    layer, x, found = RUM(I, 64, 2, dtype=torch.float64), draw(200, 4, I), {}

    def follow(row: int) -> None:
        stream = Stream(layer)
        found[row] = torch.cat([stream(step) for step in x[:, row : row + 1]])

    threads = [threading.Thread(target=follow, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = layer(x)[0].detach()
    torch.testing.assert_close(torch.stack([found[row] for row in range(4)], 1), expected, **DEEP[torch.float64])


def test_inputs_that_are_not_contiguous():
    layer, x = RUM(I, H), torch.randn(6, I, 2)
    stream = Stream(layer, batch_size=2)
    found = torch.stack([stream(step.T) for step in x])
    torch.testing.assert_close(found, layer(x.transpose(1, 2))[0].detach(), **TOL[torch.float32])


def test_autocast_rounds_as_in_the_layer():
    layer, x = RUM(I, H), torch.randn(6, 1, I)
    stream = Stream(layer)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.stack([stream(step) for step in x])
        torch.testing.assert_close(found, layer(x)[0].detach(), **TOL[torch.bfloat16])
    assert (found - layer(x)[0]).abs().max() > 1e-4


def test_a_loaded_state_is_a_copy():
    stream = Stream(RUM(I, H))
    stream(torch.randn(1, I))
    state = stream.state_dict()
    stream.load_state_dict(state)
    state["0.h"].fill_(7)
    assert not torch.equal(stream.state_dict()["0.h"], state["0.h"])


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.rum = RUM(I, I)

    def forward(self, x):
        return self.rum(self.rum(x)[0])[0]


class WithLengths(Twice):
    def forward(self, x):
        return self.rum(x, lengths=torch.tensor([1]))[0]


class Packed(Twice):
    def forward(self, x):
        return self.rum(pack_sequence(list(x.unbind(1))))[0]


@pytest.mark.parametrize(
    "modules, message",
    [
        ((RUM(I, H, bidirectional=True),), "Stream: 0 is a bidirectional RUM, which reads a sequence from its end too"),
        ((nn.Linear(I, 2), nn.GRU(2, H, bidirectional=True)), "Stream: 1 is a bidirectional GRU"),
        ((nn.Linear(I, 2),), "Stream: the modules contain no recurrent layer"),
        ((), "Stream: the modules contain no recurrent layer"),
        ((RUMCell(I, H),), "Stream: 0 is a RUMCell, whose state the model keeps itself"),
        ((nn.Sequential(nn.LSTMCell(I, H)),), "Stream: 0.0 is a LSTMCell, whose state the model keeps itself"),
        ((graphed(RUM(I, H)),), "Stream: a graphed layer is given; pass .layer"),
        ((len,), "Stream: a builtin_function_or_method is given; it must be an nn.Module"),
        ((RUM(I, H), RUM(H, H, batch_first=True)), "Stream: the layers differ in batch_first"),
    ],
)
def test_what_it_refuses_to_stream(modules, message):
    with pytest.raises(ValueError, match=message):
        Stream(*modules)


@pytest.mark.parametrize(
    "module, x, message",
    [
        (RUM(I, H), torch.randn(2, I), r"input of shape \(2, 5\); it must be \(1, I\), one step, or \(T, 1, I\)"),
        (RUM(I, H, batch_first=True), torch.randn(2, 1, I), r"one step, or \(1, T, I\). Pass batch_size="),
        (RUM(I, H), torch.randn(I), r"Stream: 0 reads an input of shape \(5,\)"),
        (RUM(I, H), torch.randn(1, I + 1), r"Expected 5, got 6"),
        (Twice(), torch.randn(1, I), "Stream: 0.rum is called twice in one forward pass"),
        (WithLengths(), torch.randn(1, 1, I), "Stream: 0.rum is called with lengths, but in a stream every row"),
        (Packed(), torch.randn(1, 1, I), "Stream: 0.rum is called with PackedSequence, but in a stream every row"),
    ],
)
def test_inputs_that_it_refuses(module, x, message):
    with pytest.raises(ValueError, match=message):
        Stream(module)(x)


def test_wrong_rows_sizes_and_files(tmp_path):
    stream = Stream(RUM(I, H), batch_size=2)
    with pytest.raises(ValueError, match="Stream: batch_size=0 is not allowed"):
        Stream(RUM(I, H), batch_size=0)
    for rows in (2, -1, [0, 5]):
        with pytest.raises(ValueError, match="rows run from 0 to 1"):
            stream.reset(rows)
    for rows in (torch.tensor([True]), 0.5):
        with pytest.raises(ValueError, match=r"it must be integers, or bool of shape \(2,\)"):
            stream.reset(rows)
    with pytest.raises(ValueError, match=r"the state has 0.c, 0.h; this stream has 0.h. Use a stream of the same"):
        stream.load_state_dict(Stream(nn.LSTM(I, H), batch_size=2).state_dict())
    with pytest.raises(ValueError, match=r"0.h has shape \(1, 1, 9\) and torch.float32; it must be \(1, 2, 9\)"):
        stream.load_state_dict(Stream(RUM(I, H)).state_dict())
    (tmp_path / "damaged").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match="damaged is not a whole safetensors file"):
        stream.load(tmp_path / "damaged")
    assert repr(stream) == "Stream(RUM(5, 9), batch_size=2)"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gated", "lam0", "lam1", "nn.GRU", "nn.LSTM", "goru"])
@pytest.mark.parametrize("B", [1, 3])
def test_on_a_gpu_repeated_steps_are_replayed(name, B, tmp_path):
    layer, x = LAYERS[name](num_layers=2), draw(T, B, I).float()
    modules = InputWindow(I, 1), layer, nn.Linear(4 if name == "nn.LSTM" else layer.hidden_size, 2)
    resets = {1: [0], 7: [0]}
    expected = by_rows(tuple(module.double() for module in modules), x.double(), resets).float()
    stream = Stream(*(module.float().cuda() for module in modules), batch_size=B)
    for cut in CUTS:  # the resets that fall on a cut
        begins = {sum(cut[:n]) for n in range(len(cut))}
        if set(resets) <= begins:
            stream.reset()
            found = torch.cat([stream(piece.cuda()) for piece in _pieces(stream, x, cut, resets)])
            torch.testing.assert_close(found.cpu(), expected, **DEEP[torch.float32])
    assert stream._captured.explain().backend == "graphed", stream._captured.explain().reason
    stream.save(tmp_path / "state.safetensors")
    on_cpu = Stream(*(copy.deepcopy(module).cpu() for module in modules), batch_size=B)
    on_cpu.load(tmp_path / "state.safetensors")
    torch.testing.assert_close(on_cpu(x[:1]), stream(x[:1].cuda()).cpu(), **DEEP[torch.float32])


def _pieces(stream: Stream, x: Tensor, cut: list[int], resets: dict[int, list[int]]):
    t = 0
    for length in cut:
        if t in resets:
            stream.reset(resets[t])
        yield x[t : t + length]
        t += length
