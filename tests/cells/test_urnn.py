"""The unitary matrix of the uRNN against the product of its seven factors."""

import numpy as np
import pytest
import torch

from tolerances import ORTHOGONAL, TOL
from torchrum.cells.urnn import FourierUnitary, URNNCell


def written_out(unitary):
    """D3 R2 F^-1 D2 Pi R1 F D1, every factor a dense complex matrix."""
    N = unitary.size
    D1, D2, D3 = (np.diag(np.exp(1j * phases)) for phases in unitary.phases.detach().numpy())
    v1, v2 = (re + 1j * im for re, im in unitary.reflections.detach().numpy())
    R1, R2 = (np.eye(N) - 2 * np.outer(v, v.conj()) / np.vdot(v, v).real for v in (v1, v2))
    n = np.arange(N)
    F = np.exp(-2j * np.pi * np.outer(n, n) / N) / np.sqrt(N)
    Pi = np.eye(N)[unitary.permutation.numpy()]
    return D3 @ R2 @ F.conj().T @ D2 @ Pi @ R1 @ F @ D1


def as_complex(matrix):
    N = len(matrix) // 2
    return matrix[:N, :N] + 1j * matrix[N:, :N]


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_matrix_is_the_product_of_its_factors_and_unitary(size):
    unitary = FourierUnitary(size, dtype=torch.float64)
    matrix = unitary.matrix().detach().numpy()
    np.testing.assert_allclose(as_complex(matrix), written_out(unitary), **TOL[torch.float64])
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(2 * size), **ORTHOGONAL[torch.float64])
    single = FourierUnitary(size).matrix()
    torch.testing.assert_close(single @ single.T, torch.eye(2 * size), **ORTHOGONAL[torch.float32])


def test_a_reflection_along_nothing_is_nothing():
    unitary = FourierUnitary(4, dtype=torch.float64)
    with torch.no_grad():
        unitary.reflections.zero_()
    matrix = unitary.matrix()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(8, dtype=torch.float64))
    matrix.sum().backward()
    assert unitary.reflections.grad.isfinite().all()


def test_cell_is_its_equation():
    cell = URNNCell(3, 8, modrelu_bias=-0.05, dtype=torch.float64)
    x = torch.randn(2, 3, dtype=torch.float64)
    output, (state,) = cell(x)  # from h_0, which is trained
    W, V, h_0 = written_out(cell.unitary), cell.weight_ih.detach().numpy(), cell.h_0.detach().numpy()
    for row in range(2):
        vx = V @ x[row].numpy()
        z = W @ (h_0[:4] + 1j * h_0[4:]) + vx[:4] + 1j * vx[4:]
        z = np.maximum(np.abs(z) - 0.05, 0) * z / np.abs(z)
        np.testing.assert_allclose(output[row].detach(), np.concatenate((z.real, z.imag)), **TOL[torch.float64])
    output.sum().backward()
    assert cell.h_0.grad.any()
    assert state is output


def test_start_of_the_parameters():
    torch.manual_seed(0)
    cell = URNNCell(10, 400, modrelu_bias=0.25)
    assert (cell.bias == 0.25).all()
    assert abs(cell.h_0.norm().item() - 1) < 0.1
    assert cell.unitary.phases.abs().max() > 3
    assert sorted(cell.unitary.permutation.tolist()) == list(range(200))
    assert "unitary.permutation" in cell.state_dict()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="hidden_size=7 is odd"):
        URNNCell(3, 7)
    with pytest.raises(ValueError, match="input_size=0"):
        URNNCell(0, 8)
    assert "3, 8" in repr(URNNCell(3, 8))
