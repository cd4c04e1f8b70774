"""The orthogonal cell: its matrix stays orthogonal under training, whatever the map and the start."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from tolerances import ORTHOGONAL, TOL
from torchrum.cells.orthogonal import (
    INITS,
    MAPS,
    NearlyOrthogonal,
    OrthogonalCell,
    SoftOrthogonalCell,
    TaylorExponential,
    plane_rotations,
)

I, H = 3, 6


@pytest.mark.parametrize("size", [5, 6])
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("orthogonal_map", MAPS)
def test_matrix_stays_orthogonal_under_training(orthogonal_map, init, size):
    torch.manual_seed(0)
    cell = OrthogonalCell(I, size, orthogonal_map=orthogonal_map, init=init)
    before = cell.weight_hh.detach().clone()
    optimizer = torch.optim.SGD(cell.parameters(), lr=1.0)
    for _ in range(3):
        output, _ = cell.scan(torch.randn(4, 2, I), cell.initial_state(2, device="cpu", dtype=torch.float32))
        loss = (output - torch.randn_like(output)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = cell.weight_hh.detach()
    for matrix in (before, after):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), **ORTHOGONAL[torch.float32])
    assert (after - before).abs().max() > 1e-3


def test_cell_is_its_equation():
    cell = OrthogonalCell(I, H, dtype=torch.float64)
    x, h = torch.randn(2, I, dtype=torch.float64), torch.randn(2, H, dtype=torch.float64)
    output, (state,) = cell(x, (h,))
    Q, V, b = (p.detach().numpy() for p in (cell.weight_hh, cell.weight_ih, cell.bias))
    np.testing.assert_allclose(Q @ Q.T, np.eye(H), **ORTHOGONAL[torch.float64])
    z = h.numpy() @ Q.T + x.numpy() @ V.T
    np.testing.assert_allclose(output.detach(), np.sign(z) * np.maximum(np.abs(z) + b, 0), **TOL[torch.float64])
    assert state is output


@pytest.mark.parametrize("scale", [0.1, 3.0, 8.0])
def test_taylor_is_the_matrix_exponential(scale):
    base = nn.init.orthogonal_(torch.empty(H, H, dtype=torch.float64))
    free = scale * torch.randn(H, H, dtype=torch.float64)
    A = free.tril(-1) - free.tril(-1).mT
    result = TaylorExponential(base)(free)
    torch.testing.assert_close(result, base @ torch.matrix_exp(A), **TOL[torch.float64])
    single = TaylorExponential(base.float())(free.float())
    torch.testing.assert_close(single @ single.T, torch.eye(H), **ORTHOGONAL[torch.float32])


def test_maps_start_at_the_same_matrix():
    starts = []
    for orthogonal_map in MAPS:
        torch.manual_seed(0)
        starts.append(OrthogonalCell(I, H, orthogonal_map=orthogonal_map).weight_hh.detach())
    for start in starts[1:]:
        torch.testing.assert_close(start, starts[0])


def test_starts_are_rotations_of_planes_by_the_angles_of_their_papers():
    torch.manual_seed(0)
    for init, low, high in (("henaff", -np.pi, np.pi), ("cayley", 0, np.pi / 2)):
        Q = OrthogonalCell(I, 100, init=init).weight_hh.detach()
        assert not Q[0, 2:].any()
        angles = torch.atan2(Q[1::2, ::2].diagonal(), Q[::2, ::2].diagonal())
        assert low <= angles.min() < low + 0.3
        assert high - 0.3 < angles.max() <= high
    assert OrthogonalCell(I, 100, init="haar").weight_hh[0, 2:].all()
    odd, angle = plane_rotations(torch.tensor([0.3]), 3), torch.tensor(0.3)
    torch.testing.assert_close(odd[:, 0], torch.stack((angle.cos(), angle.sin(), torch.tensor(0.0))))
    assert odd[2, 2] == 1


def test_start_of_the_input_weights():
    torch.manual_seed(0)
    bounded, normal = (OrthogonalCell(8, 192, input_init=init).weight_ih for init in ("glorot", "kaiming"))
    assert 0.16 < bounded.abs().max() <= 0.03**0.5
    assert abs(normal.std().item() - 0.5) < 0.03


def test_the_free_numbers_of_the_original_copying_script():
    cell = OrthogonalCell(10, 190)
    assert cell.parametrizations.weight_hh.original.numel() == 36_100
    cell.weight_hh.backward(torch.randn(190, 190))
    assert cell.parametrizations.weight_hh.original.grad.count_nonzero() == 17_955


def trained(cell, lr):
    optimizer = torch.optim.SGD(cell.parameters(), lr=lr)
    for _ in range(3):
        output, _ = cell.scan(torch.randn(4, 2, I), cell.initial_state(2, device="cpu", dtype=torch.float32))
        optimizer.zero_grad()
        (output - 3 * torch.randn_like(output)).square().mean().backward()
        optimizer.step()
    return torch.linalg.svdvals(cell.recurrent.matrix().detach())


def test_soft_orthogonality_keeps_the_singular_values_within_the_margin():
    torch.manual_seed(0)
    cell = SoftOrthogonalCell(I, H, margin=0.2)
    matrix = cell.recurrent.matrix()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(H), **ORTHOGONAL[torch.float32])
    values = trained(cell, 1.0)
    assert 0.8 <= values.min() < 1 < values.max() <= 1.2
    with torch.no_grad():
        cell.recurrent.free.diagonal().copy_(torch.tensor([-30.0, 30, 30, 30, 30, 30]))
    values = torch.linalg.svdvals(cell.recurrent.matrix().detach())
    torch.testing.assert_close(values, torch.tensor([1.2] * 5 + [0.8]))
    torch.testing.assert_close(trained(SoftOrthogonalCell(I, H, margin=0), 1.0), torch.ones(H))


def test_a_nearly_orthogonal_matrix_is_the_product_of_its_factors():
    weight = NearlyOrthogonal(H, 0.3, dtype=torch.float64)
    with torch.no_grad():
        weight.free.normal_()
    free = weight.free.detach()
    U, V = (torch.matrix_exp(part - part.T) for part in (free.tril(-1), free.triu(1)))
    scales = 0.7 + 0.6 * torch.sigmoid(free.diagonal())
    torch.testing.assert_close(weight.matrix().detach(), U @ scales.diag() @ V, **TOL[torch.float64])
    probe = torch.randn(2, H, dtype=torch.float64)
    assert gradcheck(lambda free: torch.func.functional_call(weight, {"free": free}, (probe,)), (weight.free,))


def test_soft_orthogonal_cell_is_its_equation():
    cell = SoftOrthogonalCell(I, H, dtype=torch.float64)
    x, h = torch.randn(2, I, dtype=torch.float64), torch.randn(2, H, dtype=torch.float64)
    output, (state,) = cell(x, (h,))
    W, C, b = (p.detach().numpy() for p in (cell.recurrent.matrix(), cell.weight_ih, cell.bias))
    z = h.numpy() @ W.T + x.numpy() @ C.T
    np.testing.assert_allclose(output.detach(), np.sign(z) * np.maximum(np.abs(z) + b, 0), **TOL[torch.float64])
    assert state is output
    assert sum(p.numel() for p in cell.parameters()) == H * (H + I + 1)


def test_new_weights_can_be_drawn():
    cell = OrthogonalCell(I, H)
    before = cell.weight_hh.detach().clone()
    cell.reset_parameters()
    assert not torch.allclose(cell.weight_hh, before)
    torch.testing.assert_close(cell.weight_hh @ cell.weight_hh.T, torch.eye(H), **ORTHOGONAL[torch.float32])


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="Did you mean 'cayley'"):
        OrthogonalCell(I, H, orthogonal_map="caley")
    with pytest.raises(ValueError, match="Did you mean 'henaff'"):
        OrthogonalCell(I, H, init="henaf")
    with pytest.raises(ValueError, match="Did you mean 'kaiming'"):
        OrthogonalCell(I, H, input_init="kaimin")
    with pytest.raises(ValueError, match="margin=-1"):
        SoftOrthogonalCell(I, H, margin=-1)
    assert "init='henaff'" in repr(OrthogonalCell(I, H))
