"""The unitary matrix of the uRNN against the product of its seven factors.

The code is in cells/unitary.py.
"""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from golden import DIGITS, sines
from tolerances import ORTHOGONAL, TOL
from torchrum.cells.unitary import FourierUnitary, FullUnitary, URNNCell


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


def test_golden_numbers():
    unitary = FourierUnitary(4, dtype=torch.float64)
    with torch.no_grad():
        unitary.phases.copy_(torch.stack([sines(first, 4, scale=3.0) for first in (1, 11, 21)]))
        for k, (re, im) in enumerate(((31, 41), (51, 61))):
            unitary.reflections[k].copy_(torch.stack((sines(re, 4, scale=1.0), sines(im, 4, scale=1.0))))
        unitary.permutation.copy_(torch.tensor([2, 0, 3, 1]))
    h = torch.cat((sines(71, 4, scale=1.0), sines(81, 4, scale=1.0)))
    re, im = unitary(h.unsqueeze(0)).detach()[0].chunk(2)
    torch.testing.assert_close(
        re, torch.tensor([0.177778, -0.02932768, -0.86857768, 0.72996336], dtype=torch.float64), **DIGITS
    )
    torch.testing.assert_close(
        im, torch.tensor([0.65315447, -1.49356403, -0.56692666, -0.26295378], dtype=torch.float64), **DIGITS
    )
    torch.testing.assert_close(torch.cat((re, im)).norm().item(), 2.08988842, **DIGITS)


def test_parameter_count_of_the_original_copying_script():
    readout = 256 * 9 + 9
    assert sum(p.numel() for p in URNNCell(10, 256).parameters()) + readout == 6153


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


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_full_unitary_matrix_is_the_exponential_of_a_skew_hermitian_one(size):
    unitary = FullUnitary(size, dtype=torch.float64)
    F = unitary.free.detach().numpy()
    A = np.zeros((size, size), dtype=complex)
    for i in range(size):
        A[i, i] = 1j * F[i, i]
        for j in range(i):
            A[i, j] = F[i, j] + 1j * F[j, i]
            A[j, i] = -A[i, j].conj()
    angles, vectors = np.linalg.eigh(-1j * A)
    expected = vectors @ np.diag(np.exp(1j * angles)) @ vectors.conj().T
    matrix = unitary.matrix().detach().numpy()
    np.testing.assert_allclose(as_complex(matrix), expected, **TOL[torch.float64])
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(2 * size), **ORTHOGONAL[torch.float64])


def test_full_capacity_stays_unitary_under_training():
    torch.manual_seed(0)
    cell = URNNCell(3, 12, full_capacity=True)
    before = cell.unitary.matrix().detach()
    optimizer = torch.optim.SGD(cell.parameters(), lr=1.0)
    for _ in range(3):
        output, _ = cell.scan(torch.randn(4, 2, 3), cell.initial_state(2, device="cpu", dtype=torch.float32))
        optimizer.zero_grad()
        (output - torch.randn_like(output)).square().mean().backward()
        optimizer.step()
    after = cell.unitary.matrix().detach()
    torch.testing.assert_close(after @ after.T, torch.eye(12), **ORTHOGONAL[torch.float32])
    assert (after - before).abs().max() > 1e-3


def test_full_capacity_has_all_angles_and_as_many_numbers_as_unitary_matrices():
    torch.manual_seed(0)
    cell = URNNCell(10, 256, full_capacity=True)
    assert cell.unitary.free.numel() == 128**2
    angles = torch.linalg.eigvals(cell.unitary.matrix().detach()).angle()
    assert angles.max() > 2.8
    assert angles.abs().min() < 0.1


def test_gradient_of_a_full_unitary_matrix():
    unitary = FullUnitary(3, dtype=torch.float64)
    assert gradcheck(lambda free: torch.func.functional_call(unitary, {"free": free}, (probe,)), (unitary.free,))


probe = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_start_of_the_parameters():
    torch.manual_seed(0)
    cell = URNNCell(10, 400, modrelu_bias=0.25)
    assert (cell.bias == 0.25).all()
    assert 0.009 < URNNCell(10, 400).bias.abs().max() <= 0.01
    assert 0.1 < cell.weight_ih.abs().max() <= (6 / 410) ** 0.5
    assert 0.1 < cell.unitary.reflections.abs().max() <= (6 / 402) ** 0.5
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
