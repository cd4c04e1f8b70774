"""Fast weights against their other form: attention to all former states, without a matrix."""

import numpy as np
import pytest
import torch

from tolerances import TOL
from torchrum.cells.fast_weights import FastWeightsCell

I, H, T = 3, 5, 7


def relu(z):
    return np.maximum(z, 0)


def as_attention(cell, xs):
    """A h_s = rate * sum over the past of decay^age * h_past (h_past . h_s), for one sequence ``xs`` ``(T, I)``."""
    C, W, b = (p.detach().numpy() for p in (cell.weight_ih, cell.weight_hh, cell.bias))
    past, h, outputs = [], np.zeros(cell.hidden_size), []
    for x in xs:
        past.append(h)
        slow = W @ h + C @ x + b
        h = relu(slow)
        for _ in range(cell.inner_steps):
            ages = range(len(past) - 1, -1, -1)
            z = slow + cell.rate * sum(cell.decay**age * p * (p @ h) for age, p in zip(ages, past, strict=True))
            if cell.layer_norm:
                z = (z - z.mean()) / np.sqrt(z.var() + cell.ln_eps)
                z = cell.ln_weight.detach().numpy() * z + cell.ln_bias.detach().numpy()
            h = relu(z)
        outputs.append(h)
    return np.stack(outputs)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"inner_steps": 3},
        {"decay": 0.5, "rate": 0.9, "ln_eps": 0.1},
        {"layer_norm": False, "recurrent_scale": 0.5, "rate": 0.1},
    ],
    ids=str,
)
def test_cell_is_attention_to_its_past(words):
    torch.manual_seed(0)
    cell = FastWeightsCell(I, H, **words, dtype=torch.float64)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    x = torch.randn(T, 2, I, dtype=torch.float64)
    output, (h, A) = cell.scan(x, cell.initial_state(2, device="cpu", dtype=torch.float64))
    assert output[-1].any()
    for row in range(2):
        np.testing.assert_allclose(output[:, row].detach(), as_attention(cell, x[:, row].numpy()), **TOL[torch.float64])
    assert h is output[-1] or torch.equal(h, output[-1])
    torch.testing.assert_close(A, A.mT)


def test_the_matrix_is_wide_for_16bit_dtypes():
    cell = FastWeightsCell(I, H, dtype=torch.bfloat16)
    output, (h, A) = cell(torch.randn(2, I, dtype=torch.bfloat16))
    assert (output.dtype, h.dtype, A.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_parameter_count_beside_that_of_the_recall_table():
    count = sum(p.numel() for p in FastWeightsCell(36, 50).parameters())
    assert count == 50 * (36 + 50 + 1) + 2 * 50 == 4450
    assert 2 * (count - 100) == 8700  # the table counts the map of [x; h] twice and no layer norm


def test_start_of_the_parameters():
    cell = FastWeightsCell(I, H, recurrent_scale=0.3)
    torch.testing.assert_close(cell.weight_hh.detach(), 0.3 * torch.eye(H))
    assert (cell.ln_weight == 1).all()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="inner_steps=0"):
        FastWeightsCell(I, H, inner_steps=0)
    with pytest.raises(ValueError, match="decay"):
        FastWeightsCell(I, H, decay=float("nan"))
    assert "decay=0.95" in repr(FastWeightsCell(I, H))
