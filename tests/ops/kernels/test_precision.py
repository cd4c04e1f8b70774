"""Matmuls that must stay exact while torch rounds float32 to TF32: kernels/linear.py and rum_scan/plain.py."""

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tolerances import TOL
from torchrum import RUM
from torchrum.cells.rum import TANH_OPTIONS, project_rum
from torchrum.ops.kernels import linear
from torchrum.ops.kernels.linear import (
    ExactMatmuls,
    bf16x3_linear,
    has_tf32,
    rounds_matmuls,
    split_left,
    split_right,
    tf32_allowed,
)
from torchrum.ops.kernels.machine import autocasts
from torchrum.ops.rum_scan import plain

AUTOCAST_DEVICES = ("cpu", "cuda", "mps")


@pytest.fixture(autouse=True)
def _restored():
    yield
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # leaves the newer interface, if a test took it
    torch.set_float32_matmul_precision("highest")
    for device in AUTOCAST_DEVICES:
        torch.set_autocast_enabled(device, False)


def older(name):
    torch.set_float32_matmul_precision(name)


def newer(name):
    torch.backends.cuda.matmul.fp32_precision = name


SETTINGS = [
    (older, "highest", False),
    (older, "high", True),
    (older, "medium", True),
    (newer, "ieee", False),
    (newer, "tf32", True),
]


@pytest.mark.parametrize(("choose", "name", "allowed"), SETTINGS)
def test_exact_matmuls_come_and_go(choose, name, allowed):
    choose(name)
    assert tf32_allowed() == allowed
    with ExactMatmuls():
        assert not tf32_allowed()
    assert tf32_allowed() == allowed
    if choose is older:
        assert torch.get_float32_matmul_precision() == name


def test_only_float32_on_a_gpu_is_rounded():
    torch.set_float32_matmul_precision("high")
    assert not rounds_matmuls(torch.zeros(2, 3))


@pytest.mark.parametrize(("capability", "rounded"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_older_gpus_have_no_tf32(capability, rounded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    has_tf32.cache_clear()
    assert has_tf32(torch.device("cuda", 0)) == rounded
    has_tf32.cache_clear()


@pytest.mark.parametrize(
    ("hidden", "options", "matmul"), [(8, {}, "exact"), (513, {}, "split"), (513, {"lam": 1}, "exact")]
)
def test_the_projection_has_the_digits_of_the_recurrence(hidden, options, matmul, monkeypatch):
    layer = RUM(5, hidden, form="paper", **options)
    exact = []

    class Exact:
        def __enter__(self):
            exact.append(True)

        def __exit__(self, *error):
            exact.pop()

    seen = []
    multiply = torch.nn.functional.linear

    def watched(x, weight, bias=None):
        seen.append("exact" if exact else "rounded")
        return multiply(x, weight, bias)

    def split(x, weight, bias=None):
        seen.append("split")
        return multiply(x, weight, bias)

    monkeypatch.setattr(plain, "rounds_matmuls", lambda x: True)
    monkeypatch.setattr(plain, "ExactMatmuls", Exact)
    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    monkeypatch.setattr(plain, "bf16x3_linear", split)
    project_rum(torch.randn(2, 3, 5), layer._weights(0), layer.options)
    assert seen == [matmul]
    assert not exact


@pytest.mark.parametrize(
    ("x", "apart"),
    [
        (torch.empty(53, 128, 50, device="meta"), True),
        (torch.empty(530, 128, 50, device="meta"), False),
        (torch.empty(53, 128, 50, device="meta", dtype=torch.bfloat16), False),
    ],
)
def test_small_projections_on_a_gpu_add_the_bias_apart(x, apart, monkeypatch):
    weight = torch.empty(150, 50, device="meta", dtype=x.dtype)
    assert not linear.adds_bias_separately(x, weight)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert linear.adds_bias_separately(x, weight) is apart
    monkeypatch.setattr(linear, "autocasts", lambda x: True)
    assert not linear.adds_bias_separately(x, weight)


@pytest.mark.parametrize(
    ("shape", "dtype", "projects"),
    [
        ((1, 1, 50), torch.float32, True),
        ((2, 10, 50), torch.float32, True),
        ((3, 7, 50), torch.float32, False),  # 1050 numbers
        ((1, 1, 50), torch.bfloat16, False),
    ],
)
def test_small_projections_on_a_gpu_are_left_to_the_kernel(shape, dtype, projects, monkeypatch):
    x = torch.empty(shape, device="meta", dtype=dtype)
    assert not plain.kernel_projects(x)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert plain.kernel_projects(x) is projects


@pytest.mark.parametrize("on", AUTOCAST_DEVICES)
@pytest.mark.parametrize("device", [*AUTOCAST_DEVICES, "meta"])
def test_autocast_is_that_of_the_tensors_device(on, device):
    x = SimpleNamespace(is_cpu=device == "cpu", is_cuda=device == "cuda", device=torch.device(device))
    assert not autocasts(x)
    torch.set_autocast_enabled(on, True)
    assert autocasts(x) is (on == device)


def test_a_bias_added_apart_is_the_same_sum(monkeypatch):
    layer, x = RUM(5, 8, form="paper", dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    together = project_rum(x, layer._weights(0), layer.options)
    monkeypatch.setattr(linear, "adds_bias_separately", lambda x, weight: True)
    apart = project_rum(x, layer._weights(0), layer.options)
    torch.testing.assert_close(apart, together)
    with torch.no_grad():
        assert torch.equal(project_rum(x, layer._weights(0), layer.options), apart)
        several = torch.func.vmap(lambda bias: plain.project(x, layer.weight_ih_l0, bias, layer.options))
        torch.testing.assert_close(several(layer.bias_ih_l0.expand(2, -1)), together.expand(2, -1, -1, -1))
    torch.testing.assert_close(
        torch.autograd.grad(apart.square().sum(), layer.bias_ih_l0),
        torch.autograd.grad(together.square().sum(), layer.bias_ih_l0),
    )


def test_the_units_of_exact_matmuls_are_those_of_the_persistent_kernels():
    persistent = importlib.import_module("torchrum.ops.rum_scan.persistent")
    assert persistent.MAX_HIDDEN[torch.float32] == plain.EXACT_UNITS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "hidden, options",
    [(250, {}), (250, {"layer_norm": True}), (704, {}), (1000, {"eta": 1.0}), (2000, {}), (100, {"lam": 1})],
)
def test_gradients_with_tf32_products_and_relu(hidden, options):
    torch.manual_seed(0)
    layer = RUM(hidden, hidden, form="paper", **options, device="cuda")
    exact = RUM(hidden, hidden, form="paper", **options, device="cuda", dtype=torch.float64, backend="reference")
    exact.load_state_dict(layer.state_dict())
    x, grad = torch.randn(2, 20, 128, hidden, device="cuda").unbind(0)

    def results(layer, x):
        x = x.requires_grad_()
        output = layer(x)[0]
        return output.detach(), *torch.autograd.grad(output, [x, *layer.parameters()], grad.to(x.dtype))

    torch.set_float32_matmul_precision("high")
    found = results(layer, x.clone())
    for mine, theirs in zip(found, results(exact, x.double()), strict=True):
        assert (mine - theirs).norm() <= 5e-3 * theirs.norm()


@pytest.mark.parametrize(
    ("shape", "dtype", "autocast", "zeros"),
    [
        ((4500, 1500), torch.bfloat16, None, (4, 4)),
        ((3000, 128), torch.float16, None, None),
        ((2100, 128), torch.bfloat16, None, (0, 4)),
        ((4500, 1500), torch.float32, None, None),
        ((4500, 1500), torch.float32, torch.bfloat16, (4, 4)),
    ],
)
def test_rows_of_a_16_bit_projection_on_a_gpu_are_to_be_aligned(shape, dtype, autocast, zeros, monkeypatch):
    x, weight = torch.empty(2, 3, shape[1], device="meta", dtype=dtype), torch.empty(shape, device="meta", dtype=dtype)
    assert linear.alignment_padding(x, weight) is None  # no GPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(linear, "autocast_dtype", lambda device_type: autocast)
    assert linear.alignment_padding(x, weight) == zeros


@pytest.mark.parametrize("zeros", [(3, 6), (0, 2), (1, 0)])
def test_a_padded_projection_is_the_projection(zeros, monkeypatch):
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3, 5), (18, 5), (18,))]
    wanted = torch.nn.functional.linear(*given)
    seen = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, given, seen)
    monkeypatch.setattr(linear, "MIN_NUMBERS_TO_PAD", 1)
    monkeypatch.setattr(linear, "alignment_padding", lambda x, weight: zeros)
    found = linear.linear(*given)
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted, **TOL[torch.float64])
    torch.testing.assert_close(torch.autograd.grad(found, given, seen), wanted_grads, **TOL[torch.float64])
    x, weight, _ = (part.detach() for part in given)
    by_hand = linear.linear_backward(seen, x, weight, None, (True, True, True))
    torch.testing.assert_close(by_hand, wanted_grads, **TOL[torch.float64])
    assert linear.linear_backward(seen, x, weight, None, (False, False, False)) == (None, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_a_stack_of_odd_width_has_the_gradients_of_float32(autocast):
    torch.manual_seed(0)
    options = {**TANH_OPTIONS, "form": "paper", "eta": 1.0}
    exact = RUM(154, 154, num_layers=2, **options, device="cuda")
    half = RUM(154, 154, num_layers=2, **options, device="cuda", dtype=None if autocast else torch.bfloat16)
    half.load_state_dict(exact.state_dict())
    x, seen = torch.randn(2, 60, 128, 154, device="cuda")  # above MIN_NUMBERS_TO_PAD
    results = []
    for layer in (exact, half):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast and layer is half):
            out, _ = layer(x if layer is exact or autocast else x.bfloat16())
        grads = torch.autograd.grad((out.float() * seen).sum(), layer.parameters())
        results.append([out.float(), *(grad.float() for grad in grads)])
    for found, wanted in zip(*reversed(results), strict=True):
        assert (found - wanted).norm() <= 0.03 * wanted.norm()  # five times what bfloat16 costs on a CPU


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def relative(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 33), (1, 1, 1), (0, 4)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients(device, shape, with_bias):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=device), torch.randn(6, shape[-1], device=device)]
    inputs += [torch.randn(6, device=device)] * with_bias
    mine = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    found, wanted = bf16x3_linear(*mine), F.linear(*exact)
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    if not found.numel():
        return
    assert relative(found, wanted) <= 2e-5  # a matmul of heads alone: 2e-3
    grads = torch.autograd.grad(found.square().sum(), mine), torch.autograd.grad(wanted.square().sum(), exact)
    for m, w in zip(*grads, strict=True):
        assert relative(m, w) <= 1e-4


def test_large_and_small_numbers_keep_their_digits(device):
    scale = torch.tensor([1e-30, 1.0, 1e30], device=device)[:, None]
    x, weight = torch.randn(3, 20, device=device) * scale, torch.randn(4, 20, device=device)
    assert (
        (bf16x3_linear(x, weight) - F.linear(x.double(), weight.double())).norm(dim=1) <= 3e-5 * scale[:, 0] * 20
    ).all()


def test_twice_differentiable_mapped_and_forward():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 4), torch.randn(2, 4)
    mapped = torch.vmap(bf16x3_linear, (0, None))(x, weight)
    assert torch.equal(mapped, bf16x3_linear(x, weight))
    per_sample = torch.vmap(torch.func.grad(lambda w, x: bf16x3_linear(x, w).sin().sum()), (None, 0))(weight, x)
    summed = torch.func.grad(lambda w: bf16x3_linear(x, w).sin().sum())(weight)
    torch.testing.assert_close(per_sample.sum(0), summed)
    tangents = torch.randn_like(x), torch.randn_like(weight)
    _, found = torch.func.jvp(bf16x3_linear, (x, weight), tangents)
    torch.testing.assert_close(found, F.linear(tangents[0], weight) + F.linear(x, tangents[1]))
    hessian = torch.func.hessian(lambda w: bf16x3_linear(x, w).square().sum())(weight)
    wanted = torch.func.hessian(lambda w: F.linear(x, w).square().sum())(weight)
    torch.testing.assert_close(hessian, wanted)


def test_pieces_stand_as_described():
    x = torch.tensor([[1 + 2.0**-10]])
    assert split_left(x).tolist() == [[1.0, 2.0**-10, 1.0]]
    assert split_right(x).tolist() == [[1.0, 1.0, 2.0**-10]]
