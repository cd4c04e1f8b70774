"""The Neural Turing Machine against its equations, written out slot by slot."""

import numpy as np
import pytest
import torch

from equations import sigmoid
from tolerances import TOL
from torchrum.cells.ntm import NTMCell, address

I, H, N, M = 3, 5, 7, 4


def softplus(z):
    return np.log1p(np.exp(z))


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def look(memory, before, asked, shifts):
    """Section 3.3 of the paper, one head, one slot after the other."""
    key, (beta, gate), move, gamma = asked[:M], asked[M : M + 2], asked[M + 2 : M + 2 + shifts], asked[-1]
    cosine = [key @ slot / (np.linalg.norm(key) * np.linalg.norm(slot)) for slot in memory]
    content = softmax(softplus(beta) * np.array(cosine))
    weights = sigmoid(gate) * content + (1 - sigmoid(gate)) * before
    move, reach = softmax(move), shifts // 2
    moved = np.zeros(N)
    for slot in range(N):
        for index, chance in enumerate(move):
            moved[(slot + index - reach) % N] += chance * weights[slot]
    sharp = moved ** (1 + softplus(gamma))
    return sharp / sharp.sum()


def written_out(cell, xs):
    """Outputs for one sequence ``xs`` ``(T, I)``, and the memory after it."""
    R, W, shifts = cell.num_read_heads, cell.num_write_heads, 2 * cell.max_shift + 1
    P = {key: value.numpy() for key, value in cell.state_dict().items()}
    h, c, read = np.zeros(H), np.zeros(H), np.zeros((R, M))
    memory, weights = np.full((N, M), cell.memory_start), np.eye(N)[[0] * (R + W)]
    outputs = []
    for x in xs:
        z = P["weight_ih"] @ x + P["controller.weight_ih"] @ read.ravel() + P["controller.weight_hh"] @ h
        i, j, f, o = np.split(z + P["controller.bias"], 4)
        c = c * sigmoid(f + 1) + sigmoid(i) * np.tanh(j)
        h = np.tanh(c) * sigmoid(o)
        heads = P["heads.weight"] @ h + P["heads.bias"]
        size = M + 3 + shifts
        asked = heads[: (R + W) * size].reshape(R + W, size)
        erase, add = heads[(R + W) * size :].reshape(2, W, M)
        weights[R:] = [look(memory, weights[R + w], asked[R + w], shifts) for w in range(W)]
        written = memory.copy()
        for w in range(W):
            written = written * (1 - np.outer(weights[R + w], sigmoid(erase[w])))
        for w in range(W):
            written = written + np.outer(weights[R + w], np.tanh(add[w]))
        memory = written
        weights[:R] = [look(memory, weights[r], asked[r], shifts) for r in range(R)]
        read = weights[:R] @ memory
        outputs.append(P["readout.weight"] @ np.concatenate((h, read.ravel())) + P["readout.bias"])
    return np.stack(outputs), memory


@pytest.mark.parametrize(
    "words", [{}, {"num_read_heads": 2, "num_write_heads": 3}, {"max_shift": 2, "memory_start": 0.1}], ids=str
)
def test_cell_is_its_equations(words):
    torch.manual_seed(0)
    cell = NTMCell(I, H, num_slots=N, slot_size=M, **words, dtype=torch.float64)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(6, 2, I, dtype=torch.float64)
    output, state = cell.scan(x, cell.initial_state(2, device="cpu", dtype=torch.float64))
    for row in range(2):
        expected, memory = written_out(cell, x[:, row].numpy())
        np.testing.assert_allclose(output[:, row].detach(), expected, **TOL[torch.float64])
        np.testing.assert_allclose(state[3][row].detach(), memory, **TOL[torch.float64])
    for weights in state[-2:]:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), **TOL[torch.float64])


def ask(key, *, beta=0.0, gate=0.0, shift=(0.0, 30.0, 0.0), gamma=-30.0):
    return [torch.tensor([[list(value)]]) for value in (key, (beta,), (gate,), shift, (gamma,))]


def test_a_head_finds_content_or_moves_from_where_it_was():
    memory = torch.eye(4).unsqueeze(0)
    before = torch.tensor([[[0.0, 1.0, 0.0, 0.0]]])
    found = address(memory, before, *ask((0.0, 0.0, 0.0, 1.0), beta=50.0, gate=30.0))
    torch.testing.assert_close(found, torch.tensor([[[0.0, 0.0, 0.0, 1.0]]]), atol=1e-5, rtol=0)
    for shift, place in (((30.0, 0.0, 0.0), 0), ((0.0, 30.0, 0.0), 1), ((0.0, 0.0, 30.0), 2)):
        moved = address(memory, before, *ask((0.0, 0.0, 0.0, 1.0), gate=-30.0, shift=shift))
        assert moved.argmax() == place
        assert moved.max() > 0.999


def test_a_large_sharpness_keeps_the_sum():
    memory, before = torch.ones(1, 300, 2), torch.full((1, 1, 300), 1 / 300)
    weights = address(memory, before, *ask((1.0, 1.0), gamma=100.0)).requires_grad_()
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))


def test_16bit_dtypes_keep_a_wide_memory():
    cell = NTMCell(I, H, num_slots=N, slot_size=M, dtype=torch.bfloat16)
    output, state = cell(torch.randn(2, I, dtype=torch.bfloat16))
    assert [part.dtype for part in (output, *state)] == [torch.bfloat16] * 4 + [torch.float32] * 3
    assert [tuple(part.shape) for part in state[2:]] == [(2, 1, M), (2, N, M), (2, 1, N), (2, 1, N)]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="max_shift=4 wraps around 7 slots; it must be at most 3"):
        NTMCell(I, H, num_slots=7, max_shift=4)
    with pytest.raises(ValueError, match="num_read_heads=0"):
        NTMCell(I, H, num_read_heads=0)
    assert "num_slots=128" in repr(NTMCell(I, H))
