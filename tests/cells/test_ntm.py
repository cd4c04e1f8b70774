"""The Neural Turing Machine against its equations, written out slot by slot.

The code is in cells/memory.py.
"""

import numpy as np
import pytest
import torch

from equations import sigmoid
from golden import DIGITS, shuffled, sines
from tolerances import TOL
from torchrum.cells.memory import STYLES, NTMCell, address

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
    collier = cell.style == "collier"
    limit = 20 if collier else np.inf
    if collier:
        read, memory = np.tanh(P["start_read"]), P["start_memory"]
        weights = np.stack([softmax(row) for row in P["start_weights"]])
    outputs = []
    for x in xs:
        z = P["weight_ih"] @ x + P["controller.weight_ih"] @ read.ravel() + P["controller.weight_hh"] @ h
        i, j, f, o = np.split(z + P["controller.bias"], 4)
        c = c * sigmoid(f + 1) + sigmoid(i) * np.tanh(j)
        h = np.tanh(c) * sigmoid(o)
        heads = np.clip(P["heads.weight"] @ h + P["heads.bias"], -limit, limit)
        size = M + 3 + shifts
        asked = heads[: (R + W) * size].reshape(R + W, size).copy()
        if collier:
            asked[:, :M] = np.tanh(asked[:, :M])
        erase, add = heads[(R + W) * size :].reshape(2, W, M)
        weights[R:] = [look(memory, weights[R + w], asked[R + w], shifts) for w in range(W)]
        written = memory.copy()
        for w in range(W):
            written = written * (1 - np.outer(weights[R + w], sigmoid(erase[w])))
        for w in range(W):
            written = written + np.outer(weights[R + w], np.tanh(add[w]))
        source = memory if collier else written
        weights[:R] = [look(source, weights[r], asked[r], shifts) for r in range(R)]
        read, memory = weights[:R] @ source, written
        output = P["readout.weight"] @ np.concatenate((h, read.ravel())) + P["readout.bias"]
        outputs.append(np.clip(output, -limit, limit))
    return np.stack(outputs), memory


@pytest.mark.parametrize("scale", [2, 20], ids=["", "clipped"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "words", [{}, {"num_read_heads": 2, "num_write_heads": 3}, {"max_shift": 2, "memory_start": 0.1}], ids=str
)
def test_cell_is_its_equations(words, style, scale):
    torch.manual_seed(0)
    cell = shuffled(NTMCell(I, H, num_slots=N, slot_size=M, style=style, **words, dtype=torch.float64))
    with torch.no_grad():
        for linear in (cell.heads, cell.readout):
            linear.weight.mul_(scale)
    x = torch.randn(6, 2, I, dtype=torch.float64)
    output, state = cell.scan(x, cell.initial_state(2, device="cpu", dtype=torch.float64))
    for row in range(2):
        expected, memory = written_out(cell, x[:, row].numpy())
        np.testing.assert_allclose(output[:, row].detach(), expected, **TOL[torch.float64])
        np.testing.assert_allclose(state[3][row].detach(), memory, **TOL[torch.float64])
    for weights in state[-2:]:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), **TOL[torch.float64])


def test_golden_numbers():
    cell = NTMCell(2, 3, num_slots=4, slot_size=3, dtype=torch.float64)
    key, by, erase, add = (sines(first, 3, scale=1.0) for first in (20, 30, 40, 50))
    by = by[[2, 0, 1]]  # given for the shifts 0, +1, -1; the cell has -1, 0, +1
    head = torch.cat((key, torch.tensor([1.0, 0.5]), by, torch.tensor([0.3])))  # key, beta, gate, shifts, gamma
    with torch.no_grad():
        cell.heads.weight.zero_()
        cell.heads.bias.copy_(torch.cat((head, head, erase, add)))  # one head to read, one to write
        cell.start_memory.copy_(sines(1, 4, 3, scale=1.0))
        cell.start_weights.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]).log())
    _, (_, _, read, memory, *weights) = cell(torch.zeros(1, 2, dtype=torch.float64))
    expected = torch.tensor([0.08879563, 0.39745877, 0.13354791, 0.38019769], dtype=torch.float64)
    for found in weights:
        torch.testing.assert_close(found[0, 0], expected, **DIGITS)
    expected = torch.tensor([-0.34517523, -0.54845847, -0.24749152], dtype=torch.float64)
    torch.testing.assert_close(read[0, 0], expected, **DIGITS)
    expected = torch.tensor([0.76802565, 0.92407882, 0.20466281], dtype=torch.float64)
    torch.testing.assert_close(memory[0, 0], expected, **DIGITS)


def test_parameter_count_of_the_original_model():
    cell = NTMCell(7, 100)
    inside = sum(p.numel() for name, p in cell.named_parameters() if not name.startswith("readout."))
    assert inside + (100 + 20) * 6 + 6 == 64_054  # their read-out has 6 outputs


def test_start_of_the_parameters():
    cell = NTMCell(I, 100, num_slots=N, memory_start=0.25)
    assert (cell.start_memory == 0.25).all()
    assert 0.15 < cell.heads.weight.abs().max() <= 0.2  # normal, cut at two deviations of 0.1
    output, _ = cell(torch.randn(2, I))
    output.sum().backward()
    assert all(cell.get_parameter(f"start_{name}").grad.any() for name in ("read", "memory", "weights"))


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
    with pytest.raises(ValueError, match=r"style='grave'.*'graves'"):
        NTMCell(I, H, style="grave")
    assert "num_slots=128" in repr(NTMCell(I, H))
