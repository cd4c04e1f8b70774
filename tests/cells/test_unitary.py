"""modReLU against complex arithmetic, and the matrix that is built once for a sequence."""

import pytest
import torch
from torch.autograd import gradcheck

from tolerances import TOL
from torchrum.cells.base import matrices_fixed
from torchrum.cells.fast_slow import FastSlowCell
from torchrum.cells.lstm import GRUCell
from torchrum.cells.unitary import EUNNCell, modrelu, modrelu_complex, real_form


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def test_modrelu_is_its_formula():
    z, bias = draw(7, 5), draw(5)
    expected = torch.where(z.abs() + bias > 0, (z.abs() + bias) * z / z.abs(), 0)
    torch.testing.assert_close(modrelu(z, bias), expected, **TOL[torch.float64])
    assert not modrelu(torch.zeros(1, 5), torch.ones(5)).any()


def test_complex_modrelu_is_its_formula():
    z, bias = torch.randn(7, 5, dtype=torch.complex128), draw(5)
    expected = torch.where(z.abs() + bias > 0, (z.abs() + bias) * z / z.abs(), 0)
    result = modrelu_complex(torch.cat((z.real, z.imag), -1), bias)
    torch.testing.assert_close(torch.complex(*result.chunk(2, -1)), expected, **TOL[torch.float64])


def test_gradients_of_modrelu():
    z, bias = draw(4, 6).requires_grad_(), draw(6).requires_grad_()
    assert gradcheck(modrelu, (z, bias))
    assert gradcheck(modrelu_complex, (z, bias[:3].detach().requires_grad_()))
    zero = torch.zeros(2, 6, requires_grad=True)
    for function, shift in ((modrelu, torch.ones(6)), (modrelu_complex, torch.ones(3))):
        (gradient,) = torch.autograd.grad(function(zero, shift).sum(), zero)
        assert gradient.isfinite().all()


def test_small_half_numbers_keep_their_phase():
    z = torch.tensor([[3e-5, 4e-5]], dtype=torch.float16)  # their squares are 0 in float16
    torch.testing.assert_close(
        modrelu_complex(z, torch.ones(1, dtype=torch.float16)).float(), torch.tensor([[0.6, 0.8]]), rtol=0.02, atol=0
    )


def test_real_form_multiplies_as_the_complex_matrix():
    matrix, z = torch.randn(4, 4, dtype=torch.complex128), torch.randn(4, dtype=torch.complex128)
    result = real_form(matrix) @ torch.cat((z.real, z.imag))
    torch.testing.assert_close(torch.complex(*result.chunk(2)), matrix @ z, **TOL[torch.float64])


def count_builds(rotations, monkeypatch):
    builds = []
    whole = type(rotations).matrix
    monkeypatch.setattr(type(rotations), "matrix", lambda self: builds.append(1) or whole(self))
    return builds


def test_a_sequence_builds_the_matrix_once(monkeypatch):
    cell = EUNNCell(3, 4)
    builds = count_builds(cell.rotations, monkeypatch)
    state = cell.initial_state(2, device="cpu", dtype=torch.float32)
    cell.scan(draw(6, 2, 3, dtype=torch.float32), state)
    assert len(builds) == 1
    cell(draw(2, 3, dtype=torch.float32), state)
    cell(draw(2, 3, dtype=torch.float32), state)
    assert len(builds) == 3  # single steps must see new angles


def test_a_sequence_of_a_cell_of_cells_builds_it_once(monkeypatch):
    slow = EUNNCell(4, 4)
    cell = FastSlowCell([GRUCell(3, 4), GRUCell(4, 4)], slow)
    builds = count_builds(slow.rotations, monkeypatch)
    cell.scan(draw(6, 2, 3, dtype=torch.float32), cell.initial_state(2, device="cpu", dtype=torch.float32))
    assert len(builds) == 1


def test_the_matrix_is_let_go_after_an_error():
    cell = EUNNCell(3, 4)
    with matrices_fixed(cell, torch.float64):
        assert cell.rotations._kept.dtype == torch.float64
    assert cell.rotations._kept is None
    with pytest.raises(RuntimeError, match="shape"):
        cell.scan(torch.zeros(2, 2, 9), cell.initial_state(2, device="cpu", dtype=torch.float32))
    assert cell.rotations._kept is None
