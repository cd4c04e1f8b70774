"""The rotation against dense matrices, its gradients, and its policy at zero and opposite vectors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

from tolerances import TOL
from torchrum.ops.rotation import bisector, dot, rotate, rotation_angle, rotation_matrix, saturate, unit

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Worked out apart from this package, from the definition, to ten digits.
A = torch.tensor([4.2, 5.22, 7, 2, 3.3, 4], dtype=torch.float64)
B = torch.tensor([0.7, 10, 2.3, 6.5, 0, 0.5], dtype=torch.float64)
D = torch.tensor([1.21, 1.23, 3.2, 0, 1.7, 0], dtype=torch.float64)
ROTATED = torch.tensor(
    [0.2315436077, 2.9223623355, 1.9302729020, 1.4985156740, 0.7560053737, -0.9849564008], dtype=torch.float64
)


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense_rotation(a: Tensor, b: Tensor, angle: float | None = None) -> Tensor:
    """The definition for two vectors: an orthonormal basis of the plane, and the 2 x 2 turn in it."""
    u = a / a.norm()
    w = b / b.norm()
    v = w - (u @ w) * u
    v = v / v.norm()
    theta = math.acos(float(u @ w)) if angle is None else angle
    Q = torch.stack([u, v], dim=1)
    turn = torch.tensor([[math.cos(theta), -math.sin(theta)], [math.sin(theta), math.cos(theta)]], dtype=a.dtype)
    return torch.eye(len(a), dtype=a.dtype) - Q @ Q.mT + Q @ turn @ Q.mT


def authors_rotate(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """The published way: orthonormalise, then sin = sqrt(1 - cos^2)."""
    u = torch.nn.functional.normalize(a, dim=-1, eps=1e-12)
    w = torch.nn.functional.normalize(b, dim=-1, eps=1e-12)
    cos = dot(u, w)
    sin = torch.sqrt(1 - cos**2)
    v = torch.nn.functional.normalize(b - dot(u, b) * u, dim=-1, eps=1e-12)
    uh, vh = dot(u, h), dot(v, h)
    return h - u * uh - v * vh + u * (cos * uh - sin * vh) + v * (sin * uh + cos * vh)


def pair_at_angle(theta: float, size: int, dtype: torch.dtype, rows: int = 16) -> tuple[Tensor, Tensor]:
    """Vectors of different lengths with the given angle between them, rounded once, at the end."""
    u = draw(rows, size)
    u = u / u.norm(dim=-1, keepdim=True)
    v = draw(rows, size, seed=1)
    v = v - dot(u, v) * u
    v = v / v.norm(dim=-1, keepdim=True)
    return (2 * u).to(dtype), (3 * (math.cos(theta) * u + math.sin(theta) * v)).to(dtype)


# The value


def test_golden_vectors():
    torch.testing.assert_close(rotate(A, B, D), ROTATED, rtol=0, atol=1e-9)
    torch.testing.assert_close(rotation_matrix(A, B) @ D, ROTATED, rtol=0, atol=1e-9)
    assert float(rotation_angle(A, B)) == pytest.approx(0.8840655607, abs=1e-10)
    assert float(rotate(A, B, D).norm()) == pytest.approx(4.0133527131, abs=1e-9)


def test_angle_is_that_of_a_and_b_not_a_quarter_turn():
    quarter = dense_rotation(A, B, angle=math.pi / 2) @ D  # what the paper's text says when taken word for word
    torch.testing.assert_close(quarter[:2].tolist(), [-0.8448098937, 2.8060193394], rtol=0, atol=1e-9)
    assert (rotate(A, B, D) - quarter).abs().max() > 0.1


def test_turns_a_towards_b_and_not_back():
    e1, e2, _ = torch.eye(3, dtype=torch.float64)
    h = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(rotate(e1, e2, h), torch.tensor([-2.0, 1.0, 3.0], dtype=torch.float64))


@pytest.mark.parametrize("size", [2, 3, 7, 50])
def test_matches_the_dense_definition(size):
    a, b, h = draw(size), draw(size, seed=1), draw(size, seed=2)
    R = dense_rotation(a, b)
    torch.testing.assert_close(rotate(a, b, h), R @ h, **TOL[torch.float64])
    torch.testing.assert_close(rotation_matrix(a, b), R, **TOL[torch.float64])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_a_rotation_that_takes_a_to_b(dtype):
    a, b, h = draw(20, 9, dtype=dtype), draw(20, 9, dtype=dtype, seed=1), draw(20, 9, dtype=dtype, seed=2)
    u, w = unit(a).to(dtype), unit(b).to(dtype)
    y = rotate(a, b, h)
    assert y.dtype == dtype
    torch.testing.assert_close(rotate(a, b, u), w, **TOL[dtype])
    torch.testing.assert_close(y.double().norm(dim=-1), h.double().norm(dim=-1), **TOL[dtype])
    torch.testing.assert_close(rotate(b, a, y), h, **TOL[dtype])
    R = rotation_matrix(a, b).double()
    torch.testing.assert_close(R.mT @ R, torch.eye(9).double().expand_as(R), **TOL[dtype])
    torch.testing.assert_close(torch.linalg.det(R), torch.ones(20).double(), rtol=0, atol=10 * TOL[dtype]["atol"])
    torch.testing.assert_close(rotate(7 * a, b / 3, h), y, **TOL[dtype])  # lengths do not matter


@pytest.mark.parametrize("theta", [0, 1e-7, 1e-5, 1e-3, 1, 3, *(math.pi - gap for gap in (1e-2, 1e-3, 3e-4, 1e-6, 0))])
def test_float32_is_orthogonal_to_rounding_at_every_angle(theta):
    a, b = pair_at_angle(theta, 50, torch.float32)
    R = rotation_matrix(a, b).double()
    assert (R.mT @ R - torch.eye(50).double()).abs().max() < 2e-6  # 16 roundings
    u, w = a.double() / a.double().norm(dim=-1, keepdim=True), b.double() / b.double().norm(dim=-1, keepdim=True)
    missed = ((R @ u.unsqueeze(-1)).squeeze(-1) - w).norm(dim=-1).max()
    assert missed < (1e-6 if theta < math.pi - 1e-4 else 1.1e-4)  # by policy a half turn from |u + w| = 1e-4 on


@pytest.mark.parametrize("theta", [0.0, 1e-12, 1e-9, 1e-5, 0.5, 2.0, math.pi - 1e-5, math.pi - 1e-9, math.pi])
def test_angle_is_accurate_to_rounding(theta):
    a = torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64)
    b = torch.tensor([math.cos(theta), 0.0, math.sin(theta)], dtype=torch.float64)
    assert float(rotation_angle(a, b)) == pytest.approx(theta, rel=1e-14 if theta < 1 else 1e-15, abs=1e-16)
    a32, b32 = pair_at_angle(theta, 20, torch.float32)
    torch.testing.assert_close(rotation_angle(a32, b32), torch.full((16,), theta), rtol=0, atol=5e-7)


def test_broadcasting_equals_one_by_one():
    a, b, h = draw(3, 1, 5), draw(2, 5, seed=1), draw(4, 1, 1, 5, seed=2)
    y, R, theta = rotate(a, b, h), rotation_matrix(a, b), rotation_angle(a, b)
    assert (y.shape, R.shape, theta.shape) == ((4, 3, 2, 5), (3, 2, 5, 5), (3, 2))
    for i, j, k in [(0, 0, 0), (3, 2, 1), (1, 0, 1)]:
        torch.testing.assert_close(y[i, j, k], dense_rotation(a[j, 0], b[k]) @ h[i, 0, 0], **TOL[torch.float64])
    assert rotate(draw(0, 5), draw(0, 5), draw(0, 5)).shape == (0, 5)


def test_mixed_dtypes_are_promoted():
    a, b, h = draw(4, 6, dtype=torch.bfloat16), draw(4, 6, dtype=torch.bfloat16, seed=1), draw(4, 6, seed=2).float()
    assert rotate(a, b, h).dtype == torch.float32
    torch.testing.assert_close(rotate(a, b, h), rotate(a.float(), b.float(), h))
    assert rotation_angle(a, b.double()).dtype == torch.float64


# The policy for vectors without a direction


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("a_scale, b_scale", [(0, 1), (1, 0), (0, 0)])
def test_zero_vector_rotates_nothing_and_gets_no_gradient(a_scale, b_scale, dtype):
    a = (a_scale * draw(5, dtype=dtype)).requires_grad_()
    b = (b_scale * draw(5, dtype=dtype, seed=1)).requires_grad_()
    h = draw(5, dtype=dtype, seed=2).requires_grad_()
    g = draw(5, dtype=dtype, seed=3)
    y = rotate(a, b, h)
    y.backward(g)
    assert torch.equal(y, h)
    assert torch.equal(h.grad, g)
    assert not a.grad.any()
    assert not b.grad.any()
    theta = rotation_angle(a, b)
    assert theta == 0
    assert not any(x.any() for x in torch.autograd.grad(theta, (a, b)))


@pytest.mark.parametrize("dtype, below, above", [(torch.float32, 1e-13, 1e-11), (torch.float64, 1e-31, 1e-29)])
def test_a_vector_counts_as_zero_below_the_documented_length(dtype, below, above):
    a, b, h = unit(draw(5, dtype=dtype)), draw(5, dtype=dtype, seed=1), draw(5, dtype=dtype, seed=2)
    assert torch.equal(rotate(below * a, b, h), h)
    torch.testing.assert_close(rotate(above * a, b, h), rotate(a, b, h), **TOL[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opposite_vectors_give_a_half_turn(dtype):
    a = draw(30, 6, dtype=dtype).requires_grad_()
    b = (-2 * a.detach()).requires_grad_()
    R = rotation_matrix(a, b)
    u = unit(a.detach())
    torch.testing.assert_close((R.double() @ u.double().unsqueeze(-1)).squeeze(-1), -u.double(), **TOL[dtype])
    torch.testing.assert_close(
        torch.linalg.det(R.double()), torch.ones(30).double(), rtol=0, atol=10 * TOL[dtype]["atol"]
    )
    torch.testing.assert_close((R.double() @ R.double()), torch.eye(6).double().expand(30, 6, 6), **TOL[dtype])
    # The plane is that of u and the axis where u is smallest.
    axis = torch.eye(6).double()[u.abs().argmin(-1)]
    turned = (R.double() @ axis.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(turned, -axis, **TOL[dtype])
    rotate(a, b, draw(30, 6, dtype=dtype, seed=2)).backward(draw(30, 6, dtype=dtype, seed=3))
    assert not b.grad.any()
    assert a.grad.any()
    assert a.grad.isfinite().all()


def test_first_of_equal_axes_carries_the_half_turn():
    a = torch.tensor([0.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(rotation_matrix(a, -a), torch.diag(torch.tensor([-1.0, -1.0, 1.0, 1.0])))
    torch.testing.assert_close(bisector(a, -a), torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_a_line_has_no_rotation():
    a = torch.tensor([[1.0], [2.0], [0.0]], requires_grad=True)
    b, h = torch.tensor([[-3.0], [1.0], [1.0]], requires_grad=True), torch.tensor([[5.0], [-6.0], [7.0]])
    assert torch.equal(rotate(a, b, h), h)
    assert not any(g.any() for g in torch.autograd.grad(rotate(a, b, h).sum(), (a, b)))
    torch.testing.assert_close(rotation_angle(a, b), torch.tensor([math.pi, 0.0, 0.0]))


@pytest.mark.parametrize("other", [0.0, 1.0])
def test_nan_is_not_repaired(other):
    bad, good = torch.tensor([1.0, math.nan, 0.0]), torch.full((3,), other)
    for a, b in [(bad, good), (good, bad)]:
        assert rotate(a, b, torch.ones(3)).isnan().all()
        assert rotation_angle(a, b).isnan()
    assert rotate(torch.ones(3), torch.eye(3)[0], bad).isnan().any()


def hostile_vectors(dtype: torch.dtype, rows: int = 10_000, size: int = 6) -> tuple[Tensor, Tensor]:
    """Pairs that are zero, parallel, opposite, nearly so, or of any length the dtype has, subnormals too."""
    generator = torch.Generator().manual_seed(7)
    info = torch.finfo(dtype)
    low, high = math.log10(info.smallest_normal * info.eps), math.log10(info.max) - 1

    def any_length() -> Tensor:
        power = low + (high - low) * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
        return torch.randn(rows, size, generator=generator, dtype=torch.float64).clamp(-9, 9) * 10**power

    a, b, noise = any_length(), any_length(), torch.randn(rows, size, generator=generator, dtype=torch.float64)
    kind = torch.randint(0, 8, (rows, 1), generator=generator)
    a = torch.where(kind % 2 == 0, torch.randn(rows, size, generator=generator, dtype=torch.float64), a)
    near = 10 ** (-17 * torch.rand(rows, 1, generator=generator, dtype=torch.float64)) * a.abs().amax(-1, keepdim=True)
    factor = 10 ** (2 * torch.rand(rows, 1, generator=generator, dtype=torch.float64) - 1)
    cases = {2: a, 3: -a, 4: factor * (a + near * noise), 5: factor * (near * noise - a), 6: 0 * a, 7: -factor * a}
    for case, value in cases.items():
        b = torch.where(kind == case, value, b)
    a = torch.where((kind == 6) & (noise[:, :1] > 0), 0.0, a)
    return tuple(x.clamp(info.min, info.max).to(dtype).requires_grad_() for x in (a, b))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ten_thousand_hostile_rotations_stay_finite(dtype):
    a, b = hostile_vectors(dtype)
    h, g = draw(len(a), 6, dtype=dtype, seed=1).requires_grad_(), draw(len(a), 6, dtype=dtype, seed=2)
    y, theta = rotate(a, b, h), rotation_angle(a, b)
    y.backward(g)
    grads = (a.grad, b.grad, h.grad, *torch.autograd.grad(theta.sum(), (a, b)))
    for name, x in zip(["y", "theta", "da", "db", "dh", "dtheta/da", "dtheta/db"], [y, theta, *grads], strict=True):
        assert x.isfinite().all(), name
    torch.testing.assert_close(y.double().norm(dim=-1), h.double().norm(dim=-1), **TOL[dtype])
    torch.testing.assert_close(h.grad.double().norm(dim=-1), g.double().norm(dim=-1), **TOL[dtype])
    assert (theta >= 0).all()
    assert (theta.double() <= math.pi + 1e-2).all()


def test_where_the_published_formula_fails():
    a, h = draw(200, 50, dtype=torch.float32), draw(200, 50, dtype=torch.float32, seed=1)
    for b in [3 * a, 3 * a + 1e-5 * draw(200, 50, dtype=torch.float32, seed=2)]:
        assert authors_rotate(a, b, h).isnan().any()  # 1 - cos^2 below zero
        x = a.clone().requires_grad_()
        y = rotate(x, b, h)
        y.sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()
        torch.testing.assert_close(y, h, rtol=0, atol=2e-4)
    far = draw(200, 50, dtype=torch.float32, seed=3)
    torch.testing.assert_close(rotate(a, far, h), authors_rotate(a, far, h), **TOL[torch.float32])


def test_float16_gradient_saturates():
    a = torch.tensor([1e-6, 0.0, 0.0], dtype=torch.float16, requires_grad=True)
    b, h = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float16), torch.ones(3, dtype=torch.float16)
    (g,) = torch.autograd.grad(rotate(a, b, h).sum(), a)
    assert g.isfinite().all()
    assert g.abs().max() == torch.finfo(torch.float16).max
    # What arrives as Inf or NaN is passed on, so that a loss scaler sees it.
    (g,) = torch.autograd.grad(rotate(a, b, h), a, torch.full_like(h, math.inf))
    assert not g.isfinite().all()
    passed = saturate(torch.tensor([1e6, -1e6, math.inf, math.nan, 2.0]), torch.float16)
    assert torch.equal(passed[[0, 1, 2, 4]], torch.tensor([65504, -65504, math.inf, 2.0], dtype=torch.float16))
    assert passed[3].isnan()


@pytest.mark.parametrize(
    "dtype, length", [(torch.float64, 1e200), (torch.float32, 1e30), (torch.bfloat16, 1e38), (torch.float16, 2e4)]
)
def test_squares_of_long_vectors_do_not_overflow(dtype, length):
    a, b, h = unit(draw(8, 5)), unit(draw(8, 5, seed=1)), draw(8, 5, seed=2).to(dtype)
    long_a, long_b = (length * a).to(dtype), (length * b).to(dtype)
    torch.testing.assert_close(rotate(long_a, b.to(dtype), h), rotate(a, b, h.double()).to(dtype), **TOL[dtype])
    torch.testing.assert_close(rotate(a.to(dtype), long_b, h), rotate(a, b, h.double()).to(dtype), **TOL[dtype])
    torch.testing.assert_close(rotation_angle(long_a, long_b), rotation_angle(a, b).to(dtype), **TOL[dtype])


# The gradient


@pytest.mark.parametrize("shapes", [[(4,), (4,), (4,)], [(3, 1, 4), (2, 4), (4,)], [(2,), (2,), (3, 2)]], ids=str)
def test_gradients(shapes):
    a, b, h = (draw(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes))
    assert gradcheck(rotate, (a, b, h))
    assert gradgradcheck(rotate, (a, b, h))
    assert gradcheck(rotation_angle, (a, b))
    assert gradgradcheck(rotation_angle, (a, b))
    assert gradcheck(rotation_matrix, (a, b))


@pytest.mark.parametrize("theta", [0.0, 1e-9, 1e-3, 3.0, math.pi - 1e-2])
def test_gradients_near_parallel_and_near_opposite(theta):
    a, b = (x.requires_grad_() for x in pair_at_angle(theta, 5, torch.float64, rows=2))
    h = draw(2, 5, seed=2).requires_grad_()
    assert gradcheck(rotate, (a, b, h), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("length", [1e-25, 1e-8, 1e200])
def test_gradient_scales_as_one_over_the_length(length):
    a, b, h = draw(5), draw(5, seed=1), draw(5, seed=2)
    x, y = a.clone().requires_grad_(), (length * a).requires_grad_()
    rotate(x, b, h).sum().backward()
    rotate(y, b, h).sum().backward()
    torch.testing.assert_close(y.grad * length, x.grad, **TOL[torch.float64])


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 40),
    batch=st.lists(st.integers(1, 3), max_size=2),
    theta=st.floats(0, math.pi),
    lengths=st.tuples(st.floats(-25, 25), st.floats(-25, 25)),
    seed=st.integers(0, 10_000),
)
def test_any_shape_angle_and_length(size, batch, theta, lengths, seed):
    u = unit(draw(*batch, size, seed=seed))
    v = draw(*batch, size, seed=seed + 1)
    v = unit(v - dot(u, v) * u)
    w, h = math.cos(theta) * u + math.sin(theta) * v, draw(*batch, size, seed=seed + 2)
    a, b = (10 ** lengths[0] * u).requires_grad_(), (10 ** lengths[1] * w).requires_grad_()
    y = rotate(a, b, h)
    torch.testing.assert_close(y.norm(dim=-1), h.norm(dim=-1), **TOL[torch.float64])
    torch.testing.assert_close(
        rotation_angle(a, b), torch.full(batch, theta, dtype=torch.float64), **TOL[torch.float64]
    )
    if theta < 3:
        torch.testing.assert_close(rotate(a, b, u), w, **TOL[torch.float64])
        uh, vh = dot(u, h), dot(v, h)
        moved = (math.cos(theta) - 1) * (uh * u + vh * v) + math.sin(theta) * (uh * v - vh * u)
        torch.testing.assert_close(y, h + moved, **TOL[torch.float64])
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (a, b)))


# Transforms


def test_per_sample_gradients():
    a, b, h = draw(4, 5), draw(4, 5, seed=1), draw(4, 5, seed=2)
    weights = draw(5, seed=3)

    def loss(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        return (rotate(a, b, h) * weights).sum() + rotation_angle(a, b).sum()

    expected = torch.autograd.grad(loss(*(xs := [x.clone().requires_grad_() for x in (a, b, h)])), xs)
    for got, want in zip(vmap(grad(loss, argnums=(0, 1, 2)))(a, b, h), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_compiles_into_one_graph():
    dtype = torch.float16  # the one with all casts

    def loss(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        return (rotate(a, b, h) * h.roll(1, -1)).sum()

    a, b = hostile_vectors(dtype, rows=64)
    h = draw(64, 6, dtype=dtype)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b, h), loss(a, b, h))
    for got, want in zip(*(torch.autograd.grad(f(a, b, h), (a, b)) for f in (compiled, loss)), strict=True):
        torch.testing.assert_close(got, want)


def test_autocast_does_not_lower_the_precision():
    a, b, h = (draw(4, 6, dtype=torch.float32, seed=seed) for seed in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, R = rotate(a, b, h), rotation_matrix(a, b)
    assert torch.equal(inside, rotate(a, b, h))
    assert torch.equal(R, rotation_matrix(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_matches_cpu_and_stays_finite(dtype):
    a, b, h = (draw(50, 33, dtype=dtype, seed=seed) for seed in range(3))
    torch.testing.assert_close(rotate(a.cuda(), b.cuda(), h.cuda()).cpu(), rotate(a, b, h), **TOL[dtype])
    torch.testing.assert_close(rotation_angle(a.cuda(), b.cuda()).cpu(), rotation_angle(a, b), **TOL[dtype])
    a, b = (x.detach().cuda().requires_grad_() for x in hostile_vectors(dtype))
    h = draw(len(a), 6, dtype=dtype).cuda().requires_grad_()
    y, theta = rotate(a, b, h), rotation_angle(a, b)
    grads = (*torch.autograd.grad(y.sum(), (a, b, h)), *torch.autograd.grad(theta.sum(), (a, b)))
    assert all(x.isfinite().all() for x in (y, theta, *grads))


# Errors


def test_errors_name_the_argument_and_the_way_out():
    x = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"rotate: b has shape \(3, 7\), but a has \(3, 5\); all inputs must be"):
        rotate(x, torch.ones(3, 7), x)
    with pytest.raises(ValueError, match=r"rotate: h has shape \(4, 5\), but a has \(3, 5\)"):
        rotate(x, x, torch.ones(4, 5))
    with pytest.raises(ValueError, match=r"rotate: h has shape \(3, 1\)"):
        rotate(x, x, torch.ones(3, 1))  # the last dimension is a space, not a batch
    with pytest.raises(ValueError, match=r"rotation_angle: b has dtype torch.int64; .* Convert it with .float\(\)"):
        rotation_angle(x, x.long())
    with pytest.raises(TypeError, match=r"rotation_matrix: b is a list; it must be a torch.Tensor"):
        rotation_matrix(x, [1.0, 2.0])
    with pytest.raises(ValueError, match=r"rotate: b is on meta, but a is on cpu; move them"):
        rotate(x, x.to("meta"), x)
    with pytest.raises(ValueError, match=r"rotate: a has shape \(\); it must be \(..., H\) with H at least 1"):
        rotate(torch.tensor(1.0), x, x)
