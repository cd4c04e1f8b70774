"""Fast weights against their other form: attention to all former states, without a matrix.

The code is in cells/memory.py.
"""

import numpy as np
import pytest
import torch

from golden import DIGITS, X, fill, sines
from tolerances import TOL
from torchrum.cells.memory import FastWeightsCell

I, H, T = 3, 5, 7


def relu(z):
    return np.maximum(z, 0)


def as_attention(cell, xs):
    """A h_s = rate * sum over the past of decay^age * h_past (h_past . h_s), for one sequence ``xs`` ``(T, I)``."""
    P = {name: parameter.detach().numpy() for name, parameter in cell.named_parameters()}
    past, h, outputs = [], np.zeros(cell.hidden_size), []

    def normalized(z):
        if not cell.layer_norm:
            return z
        return P["ln_weight"] * (z - z.mean()) / np.sqrt(z.var() + cell.ln_eps) + P["ln_bias"]

    for x in xs:
        past.append(h)
        for layer in range(len(cell.encoder)):
            x = relu(P[f"encoder.{layer}.weight"] @ x + P[f"encoder.{layer}.bias"])
        slow = P["weight_hh"] @ h + P["weight_ih"] @ x + P.get("bias", 0)
        h = relu(normalized(slow) if cell.start_norm else slow)
        for _ in range(cell.inner_steps):
            ages = range(len(past) - 1, -1, -1)
            z = slow + cell.rate * sum(cell.decay**age * p * (p @ h) for age, p in zip(ages, past, strict=True))
            h = relu(normalized(z))
        outputs.append(h)
    return np.stack(outputs)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"inner_steps": 3},
        {"decay": 0.5, "rate": 0.9, "ln_eps": 0.1},
        {"layer_norm": False, "recurrent_scale": 0.5, "rate": 0.1},
        {"start_norm": False, "bias": True, "decay": 0.95},
        {"encoder": True},
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


def test_golden_numbers():
    cell = FastWeightsCell(2, 3, dtype=torch.float64)
    fill(cell.weight_ih, sines(10, 2, 3))  # W starts as 0.05 I, decay is 0.9, rate 0.5
    _, (h, A) = cell.scan(X, cell.initial_state(1, device="cpu", dtype=torch.float64))
    torch.testing.assert_close(h[0], torch.tensor([0, 0.66950958, 0.74293836], dtype=torch.float64), **DIGITS)
    diagonal = torch.tensor([0, 0.0186996, 1.42280501], dtype=torch.float64)
    torch.testing.assert_close(A[0].diagonal(), diagonal, **DIGITS)
    torch.testing.assert_close(A[0, 1, 2].item(), 0.1015395, **DIGITS)


def count(cell):
    return sum(p.numel() for p in cell.parameters())


def test_parameter_count_beside_that_of_the_recall_table():
    plain, with_bias = FastWeightsCell(36, 50), FastWeightsCell(36, 50, bias=True)
    assert count(plain) == 50 * (36 + 50) + 2 * 50 == 4400
    assert 2 * (count(with_bias) - 100) == 8700  # the table counts the map of [x; h] twice and no layer norm


def test_parameter_count_of_the_original_model():
    readout = 50 * 100 + 100 + 100 * 37 + 37
    assert count(FastWeightsCell(37, 50, encoder=True)) + readout == 23_437


def test_start_of_the_parameters():
    cell = FastWeightsCell(I, H, recurrent_scale=0.3)
    torch.testing.assert_close(cell.weight_hh.detach(), 0.3 * torch.eye(H))
    assert (cell.ln_weight == 1).all()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="inner_steps=0"):
        FastWeightsCell(I, H, inner_steps=0)
    with pytest.raises(ValueError, match="decay"):
        FastWeightsCell(I, H, decay=float("nan"))
    assert "decay=0.9" in repr(FastWeightsCell(I, H))
