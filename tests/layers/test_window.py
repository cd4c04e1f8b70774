"""A window over the inputs, against a loop over rows and steps."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from torchrum import RUM, InputWindow

T, B, I = 7, 3, 2


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def by_hand(
    x: Tensor, hx: Tensor, width: int, lengths: list[int], reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``x`` is ``(T, B, I)``; a queue of the last inputs for each row."""
    outputs, last = [], []
    for row, length in enumerate(lengths):
        queue, zero = list(hx[0, row]), torch.zeros(I, dtype=x.dtype)
        steps = []
        for t in range(length):
            if reset is not None and reset[t, row]:
                queue = [zero] * (width - 1)
            queue.append(x[t, row])
            steps.append(torch.cat(queue[::-1]))
            queue.pop(0)
        outputs.append(torch.stack([*steps, *[torch.zeros(width * I, dtype=x.dtype)] * (T - length)]))
        last.append(torch.stack(queue) if queue else x.new_zeros(0, I))
    return torch.stack(outputs, 1), torch.stack(last).unsqueeze(0)


def assert_alike(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], leaves: list[Tensor]) -> None:
    """Outputs, states, and gradients of a sum with random weights."""
    grads = []
    for output, last in (found, expected):
        total = (output * draw(*output.shape, seed=5)).sum() + (last * draw(*last.shape, seed=6)).sum()
        grads.append(torch.autograd.grad(total, leaves, allow_unused=True))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("width", [1, 2, 3, 10])
@pytest.mark.parametrize("lengths", [None, [7, 1, 4]], ids=str)
@pytest.mark.parametrize("resets", [False, True])
def test_it_is_the_loop(width, lengths, resets):
    x, hx = draw(T, B, I), draw(1, B, width - 1, I, seed=1)
    reset = torch.rand(T, B, generator=torch.Generator().manual_seed(2)) < 0.3 if resets else None
    words = {} if lengths is None else {"lengths": torch.tensor(lengths)}
    found = InputWindow(I, width)(x, hx, reset=reset, **words)
    assert_alike(found, by_hand(x, hx, width, lengths or [T] * B, reset), [x, *([hx] if width > 1 else [])])


def test_two_inputs_by_default_the_newest_first_and_zeros_before_the_start():
    x = draw(T, B, I)
    output, last = InputWindow(I)(x)
    torch.testing.assert_close(output[..., :I], x)
    torch.testing.assert_close(output[1:, :, I:], x[:-1])
    assert not output[0, :, I:].any()
    torch.testing.assert_close(last, x[-1].unsqueeze(1).unsqueeze(0))


@pytest.mark.parametrize("cuts", [[1] * T, [3, 4], [6, 1]], ids=str)
def test_segments_are_the_whole(cuts):
    window, x = InputWindow(I, 3), draw(T, B, I)
    outputs, state = [], None
    for segment in x.split(cuts):
        output, state = window(segment, state)
        outputs.append(output)
    assert_alike((torch.cat(outputs), state), window(x), [x])


def test_batch_first_unbatched_and_packed():
    window, x = InputWindow(I, 3), draw(T, B, I)
    output, last = window(x)
    swapped, same = InputWindow(I, 3, batch_first=True)(x.transpose(0, 1))
    assert torch.equal(swapped.transpose(0, 1), output) and torch.equal(same, last)
    alone, state = window(x[:, 1])
    assert torch.equal(alone, output[:, 1]) and torch.equal(state, last[:, 1])
    packed, last = window(pack_sequence([x[:n, row] for row, n in enumerate((2, 7, 4))], enforce_sorted=False))
    for row, (given, n) in enumerate(zip(unpack_sequence(packed), (2, 7, 4), strict=True)):
        alone, state = window(x[:n, row])
        assert torch.equal(given, alone) and torch.equal(last[:, row], state)


def test_it_takes_every_dtype_and_has_no_state_dict():
    window = InputWindow(I)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        output, last = window(torch.randn(T, B, I).to(dtype))
        assert output.dtype == last.dtype == dtype
    assert not window.state_dict()
    assert repr(InputWindow(I, 3, batch_first=True)) == "InputWindow(2, width=3, batch_first=True)"


def test_it_compiles_and_exports_before_a_layer():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.window, self.rum = InputWindow(I), RUM(2 * I, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.rum(self.window(x)[0])[0]

    model, x = Model(), torch.randn(T, B, I)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
    time = torch.export.Dim("T", min=2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: time},)).module()
    longer = torch.randn(3 * T, B, I)
    torch.testing.assert_close(program(longer), model(longer))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="InputWindow: width=0 is not allowed; it must be an integer of at least 1"):
        InputWindow(I, 0)
    with pytest.raises(
        ValueError, match=r"InputWindow: input.size\(-1\) must be equal to input_size. Expected 2, got 3"
    ):
        InputWindow(I)(torch.randn(T, B, 3))
    with pytest.raises(ValueError, match=r"InputWindow: x in hx has shape \(1, 3, 2\); expected \(1, 3, 1, 2\)"):
        InputWindow(I)(torch.randn(T, B, I), torch.randn(1, B, I))
