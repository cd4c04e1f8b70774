"""Rows that start again at given steps: the same as running each stretch between two resets by itself."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from grids import form_of
from torchrum import RUM, RUMCell, graphed
from torchrum.layers import recurrent
from torchrum.layers.registry import build_layer

T, B, I, H = 7, 4, 3, 4
SHAPES = [dict(), dict(num_layers=2, bidirectional=True), dict(batch_first=True)]


def draw_reset(seed: int = 0, chance: float = 0.3) -> Tensor:
    """Rows with several resets, with none, at the first step, and at all."""
    reset = torch.rand(T, B, generator=torch.Generator().manual_seed(seed)) < chance
    reset[:, 1] = False
    reset[0, 2] = True
    reset[:, 3] = True
    return reset


def parts_of(hidden) -> tuple[Tensor, ...]:
    return hidden if isinstance(hidden, tuple) else (hidden,)


def draw_state(layer, lam: float) -> list[Tensor]:
    count = layer.num_layers * layer.num_directions
    h = torch.randn(count, B, H, dtype=torch.float64, requires_grad=True)
    skew = torch.randn(count, B, H, H, dtype=torch.float64)
    R = torch.linalg.matrix_exp(0.3 * (skew - skew.mT)).requires_grad_()  # determinant +1, which real powers need
    return [h, R] if lam else [h]


def by_hand(layer, x: Tensor, hx: list[Tensor], reset: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One recurrence after the other, row by row and stretch by stretch, unbatched; x is ``(T, B, I)``."""
    outputs, states = torch.zeros(T, B, 0, dtype=x.dtype), []
    for index in range(layer.num_layers * layer.num_directions):
        backwards = bool(index % layer.num_directions)
        if not backwards:
            x, outputs = (x, outputs) if index == 0 else (outputs, outputs[..., :0])
        columns, last = [], []
        for row in range(B):
            cuts = [0, *(t for t in range(1, int(lengths[row])) if reset[t, row]), int(lengths[row])]
            done, stretches = [], list(itertools.pairwise(cuts))
            for start, end in reversed(stretches) if backwards else stretches:
                begun = end == lengths[row] if backwards else start == 0 and not reset[0, row]
                given = tuple(part[index, row : row + 1] for part in hx)
                piece = x[start:end, row : row + 1]
                state = given if begun else layer.initial_state(index, 1, x)
                out, state = layer.scan(index, piece.flip(0) if backwards else piece, state, None)
                done.append(out.flip(0) if backwards else out)
            column = torch.cat(list(reversed(done)) if backwards else done)[:, 0]
            columns.append(torch.cat([column, column.new_zeros(T - len(column), H)]))
            last.append(state)
        outputs = torch.cat([outputs, torch.stack(columns, 1)], -1)
        states.append([torch.cat(column) for column in zip(*last, strict=True)])
    return outputs, [torch.stack(column) for column in zip(*states, strict=True)]


@pytest.mark.parametrize("with_lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "lam, backend",
    [(0, "auto"), (1, "auto"), (0, "torch"), (1, "torch"), (0, "reference"), (1, "reference"), (0.5, "auto")],
)
def test_resets_are_stretches_run_one_by_one(lam, backend, shape, with_lengths):
    rum = RUM(I, H, **form_of(lam, activation="tanh"), backend=backend, dtype=torch.float64, **shape)
    x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
    reset, hx = draw_reset(), draw_state(rum, lam)
    lengths = torch.tensor([5, 7, 1, 6]) if with_lengths else None
    swap = (lambda part: part.transpose(0, 1)) if rum.batch_first else (lambda part: part)
    output, hidden = rum(swap(x), tuple(hx) if lam else hx[0], lengths=lengths, reset=swap(reset))
    results = [swap(output), *parts_of(hidden)]
    whole = torch.full((B,), T) if lengths is None else lengths
    expected_output, expected_states = by_hand(rum, x, hx, reset, whole)
    expected = [expected_output, *expected_states]
    torch.testing.assert_close(results, expected)
    weights = [torch.randn_like(part) for part in expected]
    leaves = [x, *hx, *rum.parameters()]
    got = torch.autograd.grad(results, leaves, weights)
    torch.testing.assert_close(got, torch.autograd.grad(expected, leaves, weights))


def test_a_cell_that_is_started_anew_gives_the_same():
    rum, cell = RUM(I, H), RUMCell(I, H)
    cell.load_state_dict({name.removesuffix("_l0"): part for name, part in rum.state_dict().items()})
    x, reset, h = torch.randn(T, B, I), draw_reset(), torch.zeros(B, H)
    states = []
    for x_t, begins in zip(x, reset, strict=True):
        h = cell(x_t, torch.where(begins.unsqueeze(-1), 0.0, h))
        states.append(h)
    torch.testing.assert_close(rum(x, reset=reset)[0], torch.stack(states))


@pytest.mark.parametrize("most", [1, 40])
def test_segments_in_small_calls(most, monkeypatch):
    rum, x, reset = RUM(I, H, lam=1, dtype=torch.float64), torch.randn(T, B, I, dtype=torch.float64), draw_reset()
    expected = rum(x, reset=reset)
    monkeypatch.setattr(recurrent, "MOST_NUMBERS", most)
    torch.testing.assert_close(rum(x, reset=reset), expected)


def test_padding_of_calls_is_bounded(monkeypatch):
    """A row without a reset beside one that is reset at every step is not padded to T rows of T steps."""
    ran = []
    scan = RUM.scan
    monkeypatch.setattr(RUM, "scan", lambda self, i, x, *rest: [ran.append(x.shape[:2]), scan(self, i, x, *rest)][1])
    reset = torch.zeros(64, 2, dtype=torch.bool)
    reset[:, 0] = True
    RUM(I, H)(torch.randn(64, 2, I), reset=reset)
    assert sorted(ran) == [(1, 64), (64, 1)]


@pytest.mark.parametrize("name", ["ln_lstm", "goru", "urnn", "fs"])
def test_every_layer_takes_resets(name):
    layer, x, reset = build_layer(name, I, H), torch.randn(T, B, I), draw_reset()
    output, _ = layer(x, reset=reset)
    first = int(reset[1:, 0].nonzero()[0]) + 1
    torch.testing.assert_close(output[:first, 0], layer(x[:first, 0])[0])
    torch.testing.assert_close(output[:, 1], layer(x[:, 1])[0])


def test_unbatched_and_empty_batches():
    rum, x, reset = RUM(I, H), torch.randn(T, I), draw_reset()[:, 0]
    torch.testing.assert_close(rum(x, reset=reset)[0], rum(x.unsqueeze(1), reset=reset.unsqueeze(1))[0].squeeze(1))
    assert rum(torch.randn(T, 0, I), reset=torch.zeros(T, 0, dtype=torch.bool))[0].shape == (T, 0, H)


def test_without_gradients_and_in_sixteen_bits():
    rum, x, reset = RUM(I, H), torch.randn(T, B, I), draw_reset()
    expected = rum(x, reset=reset)[0]
    with torch.no_grad():
        torch.testing.assert_close(rum(x, reset=reset)[0], expected)
    low = rum.bfloat16()(x.bfloat16(), reset=reset)[0]
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected, rtol=0.1, atol=0.1)


def test_compiled_with_a_break_in_the_graph():
    rum, x, reset = RUM(I, H), torch.randn(T, B, I), draw_reset()
    torch._dynamo.reset()
    compiled = torch.compile(rum, backend="eager")
    torch.testing.assert_close(compiled(x, reset=reset), rum(x, reset=reset))


def test_traced_by_fx():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rum = RUM(I, H)

        def forward(self, x: Tensor, reset: Tensor) -> Tensor:
            return self.rum(x, reset=reset)[0]

    model, x, reset = Model(), torch.randn(T, B, I), draw_reset()
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x, reset), model(x, reset))


def test_wrong_resets_are_refused_in_words():
    rum, x = RUM(I, H), torch.randn(T, B, I)
    with pytest.raises(RuntimeError, match=r"reset has shape \(4, 7\) and torch\.bool; expected \(7, 4\)"):
        rum(x, reset=draw_reset().T)
    with pytest.raises(ValueError, match=r"torch\.float32; expected \(7, 4\) and torch\.bool, a flag for each step"):
        rum(x, reset=draw_reset().float())
    with pytest.raises(TypeError, match=r"reset is a list; it must be a bool Tensor of shape \(7, 4\)"):
        rum(x, reset=draw_reset().tolist())
    with pytest.raises(ValueError, match="reset needs padded input; pass it with lengths= instead of packing"):
        rum(nn.utils.rnn.pack_padded_sequence(x, [T] * B), reset=draw_reset())
    with pytest.raises(RuntimeError, match=r"reset= cannot be exported.*with lengths="):
        torch.export.export(rum, (x,), {"reset": draw_reset()})


def test_graphed_layers_pass_resets_on():
    layer, x, reset = graphed(build_layer("goru", I, H)), torch.randn(T, B, I), draw_reset()
    torch.testing.assert_close(layer(x, reset=reset), layer.layer(x, reset=reset))
    assert "reset is given" in layer.explain().reason


@pytest.mark.parametrize("lam", [0, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "lengths, steps", [([2, 20, 1, 3], 20 + 2 * 3 + 1), ([9, 20, 12, 6], 20 + 2 * 12 + 6), ([17, 20, 18, 16], 4 * 20)]
)
def test_rows_run_side_by_side_with_those_of_like_lengths(lam, packed, lengths, steps, monkeypatch):
    monkeypatch.setattr(recurrent, "WORTH_GROUPING", 1)
    layer = RUM(I, H, num_layers=2, bidirectional=True, lam=lam, dtype=torch.float64)
    lengths = torch.tensor(lengths)
    x = torch.randn(20, B, I, dtype=torch.float64)
    hx = draw_state(layer, lam)
    computed = []
    scan = layer.scan

    def counted(index, x, *rest):
        computed.append(x.shape[0] * x.shape[1])
        return scan(index, x, *rest)

    monkeypatch.setattr(layer, "scan", counted)
    given = x
    if packed:
        given = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    whole, ends = layer(given, tuple(hx) if lam else hx[0], **({} if packed else {"lengths": lengths}))
    if packed:
        whole, _ = nn.utils.rnn.pad_packed_sequence(whole)
    assert sum(computed) == 4 * steps
    grads = torch.autograd.grad(whole.square().sum() + parts_of(ends)[-1].sum(), [*layer.parameters(), *hx])
    outs, lasts = [], []
    for row, length in enumerate(lengths.tolist()):
        state = tuple(part[:, row] for part in hx)
        out, last = layer(x[:length, row], state if lam else state[0])
        torch.testing.assert_close(whole[:length, row], out)
        assert (whole[length:, row] == 0).all()
        outs.append(out.square().sum())
        lasts.append(parts_of(last)[-1].sum())
    alone = torch.autograd.grad(sum(outs) + sum(lasts), [*layer.parameters(), *hx])
    torch.testing.assert_close(grads, alone)
