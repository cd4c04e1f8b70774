"""Real powers of rotations against matrix powers and exponentials, with gradients where eigenvalues repeat."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

from tolerances import TOL
from torchrum.ops.orthogonal_power import orthogonal_power
from torchrum.ops.rotation import rotation_matrix

# Repeated eigenvalues: the identity, one plane in six dimensions, twice the same angle, all angles different.
ANGLES = {"identity": [0, 0, 0], "one plane": [1.1, 0, 0], "same twice": [0.8, 0.8, -2.0], "distinct": [0.5, -1.4, 2.9]}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def skew(A: Tensor) -> Tensor:
    return (A - A.mT) / 2


def generator_of(angles: list[float], seed: int = 0) -> Tensor:
    """A skew matrix whose exponential turns random orthogonal planes by the given angles."""
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    basis = torch.linalg.qr(draw(2 * len(angles), 2 * len(angles), seed=seed))[0]
    return skew(basis @ torch.block_diag(*(angle * turn for angle in angles)) @ basis.mT)


def learnable(lam: float) -> Tensor:
    return torch.tensor(lam, dtype=torch.float64, requires_grad=True)


def is_rotation(R: Tensor, tol: float = 1e-12) -> bool:
    eye = torch.eye(R.shape[-1], dtype=R.dtype)
    return bool((R.mT @ R - eye).abs().max() < tol and (torch.linalg.det(R) > 0).all())


# The value


@pytest.mark.parametrize("angles", ANGLES.values(), ids=ANGLES)
@pytest.mark.parametrize("lam", [-1.7, -0.5, 0.25, 0.5, 1.3, 3.1])
def test_is_the_exponential_of_the_scaled_logarithm(angles, lam):
    A = generator_of(angles)
    R = torch.linalg.matrix_exp(A)
    torch.testing.assert_close(orthogonal_power(R, lam), torch.linalg.matrix_exp(lam * A), **TOL[torch.float64])


@pytest.mark.parametrize("angles", ANGLES.values(), ids=ANGLES)
@pytest.mark.parametrize("kind", [float, learnable])  # repeated matmuls, and the eigenvalues
def test_laws_of_powers(angles, kind):
    R = torch.linalg.matrix_exp(generator_of(angles)).expand(2, 1, 6, 6)
    eye = torch.eye(6, dtype=torch.float64).expand_as(R)
    for lam, want in [(0, eye), (1, R), (2, R @ R), (3, R @ R @ R), (-1, R.mT), (-2, R.mT @ R.mT)]:
        torch.testing.assert_close(orthogonal_power(R, kind(lam)), want, **TOL[torch.float64])
    half = orthogonal_power(R, 0.5)
    torch.testing.assert_close(half @ half, R, **TOL[torch.float64])
    assert is_rotation(orthogonal_power(R, 0.3))


def test_integers_are_exact_and_need_no_eigenvectors():
    R = draw(3, 3)  # not even orthogonal
    assert orthogonal_power(R, 1) is R
    assert torch.equal(orthogonal_power(R, 2.0), R @ R)
    assert torch.equal(orthogonal_power(R, 0), torch.eye(3, dtype=torch.float64))


def test_scales_the_angle_of_one_rotation():
    a, b = draw(7), draw(7, seed=1)
    u, w = a / a.norm(), b / b.norm()
    v = w - (u @ w) * u
    v, theta = v / v.norm(), torch.acos(u @ w)
    partly = torch.cos(0.3 * theta) * u + torch.sin(0.3 * theta) * v
    torch.testing.assert_close(orthogonal_power(rotation_matrix(a, b), 0.3), rotation_matrix(a, partly))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lam", [0.5, 2])
def test_lower_precision(dtype, lam):
    A = generator_of(ANGLES["distinct"])
    R = torch.linalg.matrix_exp(A).to(dtype).requires_grad_()
    y = orthogonal_power(R, lam)
    y.backward(draw(6, 6).to(dtype))
    assert (y.dtype, R.grad.dtype) == (dtype, dtype)
    torch.testing.assert_close(y.double(), torch.linalg.matrix_exp(lam * A), **TOL[dtype])


def test_float32_rounding_is_not_magnified_by_close_eigenvalues():
    angles = (torch.linspace(-3, 3, 24, dtype=torch.float64)).tolist()
    A = generator_of(angles)
    R = torch.linalg.matrix_exp(A).float()
    half = orthogonal_power(R, 0.5)
    assert is_rotation(half.double(), tol=1e-6)
    torch.testing.assert_close(half @ half, R, **TOL[torch.float32])


@settings(max_examples=40, deadline=None)
@given(
    angles=st.lists(st.floats(-3.1, 3.1), min_size=1, max_size=4),
    lam=st.floats(-2, 2),
    mu=st.floats(-2, 2),
    seed=st.integers(0, 1000),
)
def test_exponents_add(angles, lam, mu, seed):
    R = torch.linalg.matrix_exp(generator_of(angles, seed))
    first, second, both = (orthogonal_power(R, torch.tensor(x, dtype=torch.float64)) for x in (lam, mu, lam + mu))
    torch.testing.assert_close(first @ second, both, rtol=0, atol=1e-9)


# The gradient


@pytest.mark.parametrize("angles", ANGLES.values(), ids=ANGLES)
@pytest.mark.parametrize("lam", [0.5, -0.8, 1.7])
def test_gradient_equals_that_of_the_exponential(angles, lam):
    A, G = generator_of(angles).requires_grad_(), draw(6, 6, seed=3)
    ours, theirs = learnable(lam), learnable(lam)
    got = torch.autograd.grad(orthogonal_power(torch.linalg.matrix_exp(skew(A)), ours), (A, ours), G)
    want = torch.autograd.grad(torch.linalg.matrix_exp(theirs * skew(A)), (A, theirs), G)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, **TOL[torch.float64])


@pytest.mark.parametrize("angles", ANGLES.values(), ids=ANGLES)
def test_gradient_equals_finite_differences_along_rotations(angles):
    R = torch.linalg.matrix_exp(generator_of(angles))
    A = torch.zeros(6, 6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda A, lam: orthogonal_power(R @ torch.linalg.matrix_exp(skew(A)), lam), (A, learnable(0.6)), atol=1e-6
    )


def test_eigenvalue_and_matmul_gradients_agree_along_rotations():
    R, G = torch.linalg.matrix_exp(generator_of(ANGLES["same twice"])).requires_grad_(), draw(6, 6)
    for n in (2, 3):  # matmuls are differentiable in every direction, and so is the formula
        (by_products,) = torch.autograd.grad(orthogonal_power(R, n), R, G)
        (by_eigenvalues,) = torch.autograd.grad(orthogonal_power(R, learnable(n)), R, G)
        torch.testing.assert_close(by_eigenvalues, by_products, **TOL[torch.float64])


def test_autograd_through_eig_is_wrong_where_this_is_right():
    A, G = generator_of(ANGLES["one plane"]).requires_grad_(), draw(6, 6)
    values, vectors = torch.linalg.eig(torch.linalg.matrix_exp(skew(A)))
    by_eig = (vectors @ torch.diag(values**0.5) @ torch.linalg.inv(vectors)).real
    want = torch.autograd.grad(torch.linalg.matrix_exp(0.5 * skew(A)), A, G)[0]
    torch.testing.assert_close(by_eig, torch.linalg.matrix_exp(0.5 * skew(A)), rtol=0, atol=1e-7)
    (wrong,) = torch.autograd.grad(by_eig, A, G)
    assert not torch.allclose(wrong, want, atol=1e-2)


# Half turns


@pytest.mark.parametrize("size, planes", [(2, 1), (3, 1), (6, 2), (6, 3)])
def test_power_of_a_half_turn_is_a_rotation(size, planes):
    basis = torch.linalg.qr(draw(size, size))[0]
    signs = torch.ones(size, dtype=torch.float64)
    signs[: 2 * planes] = -1
    R = (basis @ torch.diag(signs) @ basis.mT).requires_grad_()
    lam = learnable(0.5)
    half = orthogonal_power(R, lam)
    assert is_rotation(half)
    torch.testing.assert_close(half @ half, R, **TOL[torch.float64])
    gradients = torch.autograd.grad(half, (R, lam), draw(size, size, seed=1))
    assert all(g.isfinite().all() and g.abs().max() < 100 for g in gradients)


@pytest.mark.parametrize("gap", [1e-3, 1e-5, 1e-6, 1e-8, 1e-12])
def test_nearly_a_half_turn_stays_finite_and_orthogonal(gap):
    A = generator_of([math.pi - gap, 0.4, 0])
    R = torch.linalg.matrix_exp(A).requires_grad_()
    half = orthogonal_power(R, 0.5)
    half.sum().backward()
    assert is_rotation(half, tol=1e-8)
    assert R.grad.isfinite().all()
    torch.testing.assert_close(half @ half, R, rtol=0, atol=2e-7)


# Transforms


@pytest.mark.parametrize("lam", [0.4, 2])
def test_vmap_and_per_sample_gradients(lam):
    R, G = torch.linalg.matrix_exp(skew(draw(4, 5, 5))), draw(4, 5, 5, seed=1)
    lams = torch.tensor([0.1, 0.5, 1.0, -0.3], dtype=torch.float64)
    each = torch.stack([orthogonal_power(r, x) for r, x in zip(R, lams, strict=True)])
    torch.testing.assert_close(vmap(orthogonal_power)(R, lams), each)

    def loss(R: Tensor, G: Tensor) -> Tensor:
        return (orthogonal_power(R, lam) * G).sum()

    x = R.clone().requires_grad_()
    torch.testing.assert_close(vmap(grad(loss))(R, G), torch.autograd.grad(loss(x, G), x)[0])
    by_lam = grad(lambda value: (orthogonal_power(R, value) * G).sum())(lams[0])
    value = learnable(0.1)
    torch.testing.assert_close(by_lam, torch.autograd.grad((orthogonal_power(R, value) * G).sum(), value)[0])


def test_compiles_into_one_graph():
    R = torch.linalg.matrix_exp(torch.stack([generator_of(x) for x in ANGLES.values()])).requires_grad_()
    R = torch.cat([R.detach(), torch.diag(torch.tensor([-1.0, -1, -1, 1, -1, 1])).double()[None]]).requires_grad_()
    lam, G = learnable(0.4), draw(5, 6, 6)
    compiled = torch.compile(orthogonal_power, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(R, lam), orthogonal_power(R, lam))
    for got, want in zip(
        *(torch.autograd.grad(f(R, lam), (R, lam), G) for f in (compiled, orthogonal_power)), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_second_derivative_exists_for_integers_and_is_an_error_otherwise():
    R = torch.linalg.matrix_exp(skew(draw(4, 4))).requires_grad_()
    assert gradgradcheck(lambda R: orthogonal_power(R, 2), R)
    for lam in (0.5, learnable(2.0)):
        (g,) = torch.autograd.grad(orthogonal_power(R, lam).sum(), R, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"second derivative of a non-integer power .* integer lam"):
            g.sum().backward()
    with pytest.raises(NotImplementedError, match="second derivative"):
        grad(lambda x: grad(lambda x: orthogonal_power(x, 0.5).sum())(x).sum())(R.detach())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gpu_matches_cpu(dtype):
    R = torch.linalg.matrix_exp(torch.stack([generator_of(x) for x in ANGLES.values()]))
    R = torch.cat([R, torch.diag(torch.tensor([-1.0, -1, -1, 1, -1, 1])).double()[None]]).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        x, lam = R.to(device).requires_grad_(), learnable(0.4)
        y = orthogonal_power(x, lam)[:4]
        results.append([z.cpu() for z in (y, *torch.autograd.grad(y.sum(), (x, lam)))])
        assert is_rotation(orthogonal_power(R.to(device), 0.5).cpu().double(), tol=10 * TOL[dtype]["atol"])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **TOL[dtype])


# Odd input


def test_empty_batch_nan_and_one_dimension():
    assert orthogonal_power(torch.ones(0, 3, 3), 0.5).shape == (0, 3, 3)
    assert torch.equal(orthogonal_power(torch.ones(2, 1, 1), 0.5), torch.ones(2, 1, 1))
    R = torch.eye(3).repeat(2, 1, 1)
    R[0, 0, 0] = math.nan
    y = orthogonal_power(R, 0.5)
    assert y[0].isnan().all()
    torch.testing.assert_close(y[1], torch.eye(3))


def test_errors_name_the_argument_and_the_way_out():
    eye = torch.eye(3)
    with pytest.raises(ValueError, match=r"orthogonal_power: R has shape \(3, 2\); it must be \(..., N, N\)"):
        orthogonal_power(eye[:, :2], 0.5)
    with pytest.raises(ValueError, match=r"orthogonal_power: R has dtype torch.int64"):
        orthogonal_power(eye.long(), 0.5)
    with pytest.raises(ValueError, match=r"lam=nan is not allowed; it must be a finite number"):
        orthogonal_power(eye, math.nan)
    with pytest.raises(ValueError, match=r"lam has shape \(2,\); it must be a number or a tensor with one element"):
        orthogonal_power(eye, torch.ones(2))
    with pytest.raises(ValueError, match=r"R is not orthogonal, max\|R\^T R - I\| = 3; .* Pass rotations"):
        orthogonal_power(2 * eye, 0.5)
    with pytest.raises(ValueError, match=r"R has determinant -1; only rotation matrices"):
        orthogonal_power(torch.diag(torch.tensor([1.0, -1.0, 1.0])), 0.5)
