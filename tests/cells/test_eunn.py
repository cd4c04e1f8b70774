"""The rotations of EUNN against products of explicit matrices; orthogonal for every size, even and odd.

The code is in cells/unitary.py.
"""

import math

import numpy as np
import pytest
import torch

from tolerances import ORTHOGONAL, TOL
from torchrum.cells.unitary import EUNNCell, Rotations, layer_pairs

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16)
styles = pytest.mark.parametrize("style", ["tunable", "fft"])
fields = pytest.mark.parametrize("complex_valued", [False, True], ids=("real", "complex"))


def as_complex(matrix):
    """Undo the real form of a complex matrix, after checking that it is one."""
    N = len(matrix) // 2
    np.testing.assert_allclose(matrix[:N, :N], matrix[N:, N:], **TOL[torch.float64])
    np.testing.assert_allclose(matrix[:N, N:], -matrix[N:, :N], **TOL[torch.float64])
    return matrix[:N, :N] + 1j * matrix[N:, :N]


def written_out(rotations):
    """The product of one N x N matrix per pair, pairs found by the definition in words."""
    N, theta = rotations.size, rotations.theta.detach().numpy()
    phi = rotations.phi.detach().numpy() if rotations.complex_valued else np.zeros_like(theta)
    whole, number = np.eye(N, dtype=complex), 0
    for layer in range(rotations.capacity):
        bits = max(1, math.ceil(math.log2(N))) if N > 1 else 1
        for i in range(N):
            for j in range(i + 1, N):
                if rotations.style == "tunable":
                    paired = j == i + 1 and i % 2 == layer % 2
                else:
                    paired = i ^ j == 2 ** (layer % bits)
                if paired:
                    turn = np.eye(N, dtype=complex)
                    c, s, p = np.cos(theta[number]), np.sin(theta[number]), np.exp(1j * phi[number])
                    turn[[i, i, j, j], [i, j, i, j]] = c, s, -s * p, c * p
                    whole, number = turn @ whole, number + 1
    assert number == len(theta)
    if rotations.complex_valued:
        whole = np.exp(1j * rotations.omega.detach().numpy())[:, None] * whole
    return whole


@styles
@fields
@pytest.mark.parametrize("size", SIZES)
def test_matrix_is_the_product_of_its_pairs(size, style, complex_valued):
    rotations = Rotations(size, style=style, complex_valued=complex_valued, capacity=3, dtype=torch.float64)
    matrix = rotations.matrix().detach().numpy()
    expected = written_out(rotations)
    np.testing.assert_allclose(as_complex(matrix) if complex_valued else matrix, expected, **TOL[torch.float64])


@styles
@fields
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("capacity", [None, 1, 2, 5])
def test_matrix_is_orthogonal_and_erases_no_unit(size, style, complex_valued, capacity):
    rotations = Rotations(size, style=style, complex_valued=complex_valued, capacity=capacity)
    matrix = rotations.matrix()
    size = len(matrix)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), **ORTHOGONAL[torch.float32])
    assert torch.linalg.matrix_rank(matrix) == size
    for unit in (0, size - 1):  # the bug of the public copies: the last unit multiplied by cos = 0
        assert abs(matrix[:, unit].norm().item() - 1) < 1e-6


def test_the_check_sees_the_bug_of_the_public_copies():
    rotations = Rotations(6, capacity=2)
    matrix = rotations.matrix().detach()
    erase = torch.eye(6)
    erase[5, 5] = 0  # what cos = 0 for the unpaired last unit of odd layers amounts to
    broken = erase @ matrix
    assert torch.linalg.matrix_rank(broken) == 5
    assert (broken @ broken.T - torch.eye(6)).abs().max() > 0.9


@styles
def test_pairs_are_disjoint(style):
    for size in SIZES:
        for layer in range(5):
            units = [unit for pair in layer_pairs(size, layer, style) for unit in pair]
            assert len(units) == len(set(units))
            assert all(0 <= unit < size for unit in units)


def test_a_full_butterfly_connects_every_unit_to_every_unit():
    assert (Rotations(8, style="fft").matrix() != 0).all()
    assert (Rotations(8, style="tunable").matrix() == 0).any()
    assert Rotations(8, style="fft").capacity == 3
    assert Rotations(9, style="fft").capacity == 4


def test_capacity_and_bound_of_the_angles():
    assert [Rotations(6, capacity=k).theta.numel() for k in (1, 2, 3)] == [3, 5, 8]
    assert [Rotations(5, capacity=k).theta.numel() for k in (1, 2)] == [2, 4]
    assert Rotations(200, angle_bound=0.01).theta.abs().max() <= 0.01
    assert Rotations(200).theta.abs().max() > 3
    cell = EUNNCell(3, 200, capacity=3, angle_bound=0.01, modrelu_bias=0.25)
    assert cell.rotations.capacity == 3
    assert cell.rotations.theta.abs().max() <= 0.01
    assert (cell.bias == 0.25).all()


@styles
@fields
def test_cell_is_its_equation(style, complex_valued):
    H, B = 6, 3
    cell = EUNNCell(2, H, style=style, complex_valued=complex_valued, modrelu_bias=-0.1, dtype=torch.float64)
    x, h = torch.randn(B, 2, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64)
    output, (state,) = cell(x, (h,))
    Q, V = written_out(cell.rotations), cell.weight_ih.detach().numpy()
    for row in range(B):
        hs, vx = h[row].numpy(), V @ x[row].numpy()
        if complex_valued:
            hs, vx = hs[:3] + 1j * hs[3:], vx[:3] + 1j * vx[3:]
        z = Q @ hs + vx
        z = np.maximum(np.abs(z) - 0.1, 0) * z / np.abs(z)
        expected = np.concatenate((z.real, z.imag)) if complex_valued else z.real
        np.testing.assert_allclose(output[row].detach(), expected, **TOL[torch.float64])
    assert state is output


@pytest.mark.parametrize("size", [6, 7])
def test_the_state_keeps_its_length_without_input(size):
    cell = EUNNCell(2, size, dtype=torch.float64)
    h = torch.randn(3, size, dtype=torch.float64)
    output, _ = cell.scan(torch.zeros(50, 3, 2, dtype=torch.float64), (h,))
    torch.testing.assert_close(output[-1].norm(dim=-1), h.norm(dim=-1), **TOL[torch.float64])


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="hidden_size=5 is odd"):
        EUNNCell(2, 5, complex_valued=True)
    with pytest.raises(ValueError, match="'tunable', 'fft'"):
        EUNNCell(2, 4, style="butterfly")
    with pytest.raises(ValueError, match="capacity=0"):
        EUNNCell(2, 4, capacity=0)
    with pytest.raises(ValueError, match="angle_bound=-1"):
        EUNNCell(2, 4, angle_bound=-1)
    assert "style='fft'" in repr(EUNNCell(2, 4, style="fft"))
