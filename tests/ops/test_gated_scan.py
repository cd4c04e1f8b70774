"""The gated form of RUM: its reference against nn.GRU and dense rotations, its fast backends against the reference."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacrev, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from tolerances import DEEP, NORM_ERROR, TOL
from torchrum.ops.gated_scan import GatedInputs, GatedOptions, gated_scan, gated_scan_choice
from torchrum.ops.rotation import rotation_matrix

BACKENDS = ["native", "torch"]

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""xp, h0, weight_hh, bias_hh"""


def draw(T: int, B: int, H: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    weight = (normal(3 * H, H) / H**0.5).to(dtype)
    return normal(T, B, 3 * H), normal(B, H), weight, 0.5 * normal(3 * H)


def leaves(inputs: Inputs) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in inputs]


def test_reference_passes_gradcheck():
    options = GatedOptions(head_size=3, rotated_units=4)
    lengths = torch.tensor([3, 1])
    assert gradcheck(
        lambda *inputs: gated_scan(*inputs, lengths, options=options, backend="reference"), leaves(draw(3, 2, 5))
    )


def test_without_rotated_units_it_is_torch_gru():
    xp, h0, weight_hh, bias_hh = inputs = leaves(draw(7, 3, 5))
    gru = torch.nn.GRU(15, 5, dtype=torch.float64)
    with torch.no_grad():
        for name, value in {"weight_ih": torch.eye(15), "bias_ih": torch.zeros(15)}.items():
            getattr(gru, f"{name}_l0").copy_(value)
        gru.weight_hh_l0.copy_(weight_hh)
        gru.bias_hh_l0.copy_(bias_hh)
    want, _ = gru(xp, h0.unsqueeze(0))
    found = gated_scan(*inputs, options=GatedOptions(), backend="reference")
    torch.testing.assert_close(found, want, **TOL[torch.float64])
    probe = torch.randn_like(want)
    grads = torch.autograd.grad((found * probe).sum(), inputs)
    wanted = torch.autograd.grad((want * probe).sum(), [xp, h0, gru.weight_hh_l0, gru.bias_hh_l0])
    assert_same(grads, wanted, **DEEP[torch.float64])


def test_rotated_units_turn_in_heads_by_dense_matrices():
    (x,), (h,), weight_hh, bias_hh = inputs = draw(1, 1, 7)
    (found,) = gated_scan(*inputs, options=GatedOptions(head_size=3, rotated_units=5), backend="reference")[0]
    gates = weight_hh @ h[:] + bias_hh
    r, u = torch.sigmoid(x[0, :7] + gates[:7]), torch.sigmoid(x[0, 7:14] + gates[7:14])
    eps, tau = x[0, 14:], gates[14:]
    rotation = torch.zeros(7, 7, dtype=torch.float64)
    for head in (slice(0, 3), slice(3, 5)):
        rotation[head, head] = rotation_matrix(eps[head], tau[head])
    candidate = torch.tanh(eps + r * (tau + rotation @ h))
    torch.testing.assert_close(found, u * h + (1 - u) * candidate, **TOL[torch.float64])


def test_rows_past_their_length_keep_their_state():
    inputs = draw(4, 3, 6)
    options = GatedOptions(head_size=2, rotated_units=4)
    found = gated_scan(*inputs, torch.tensor([4, 0, 2]), options=options, backend="reference")
    whole = gated_scan(*inputs, options=options, backend="reference")
    torch.testing.assert_close(found[:, 0], whole[:, 0])
    torch.testing.assert_close(found[:, 1], inputs[1][1].expand(4, 6))
    torch.testing.assert_close(found[:, 2], torch.cat((whole[:2, 2], whole[1:2, 2].expand(2, 6))))


def test_zoneout_draws_masks_in_training_and_mixes_otherwise():
    inputs, seed = draw(1, 40, 50), torch.tensor(3)
    _, h0, *_ = inputs
    new = gated_scan(*inputs, options=GatedOptions(), backend="reference")[0]
    mixed = gated_scan(*inputs, options=GatedOptions(zoneout=0.3), backend="reference")[0]
    torch.testing.assert_close(mixed, 0.7 * new + 0.3 * h0)
    drawn = gated_scan(*inputs, options=GatedOptions(zoneout=0.3, training=True), seed=seed, backend="reference")[0]
    kept = drawn == h0
    torch.testing.assert_close(drawn[~kept], new[~kept])
    assert 0.25 < kept.double().mean() < 0.35


@pytest.mark.parametrize("wrong", [{"head_size": 0}, {"rotated_units": -1}, {"zoneout": 1.0}, {"training": 1}], ids=str)
def test_options_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GatedOptions(**wrong)


def assert_same(found: list[Tensor], wanted: list[Tensor], **tolerance: float) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def outputs_and_gradients(inputs: Inputs, lengths: Tensor | None, **how) -> list[Tensor]:
    """Of all four inputs; without steps the reference uses only one of them."""
    given = leaves(inputs)
    out = gated_scan(*given, lengths, **how)
    return [out.detach(), *torch.autograd.grad(out, given, draw_grad(out), materialize_grads=True)]


def draw_grad(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)


def assert_accurate(found: list[Tensor], inputs: Inputs, lengths: Tensor | None, **how) -> None:
    """Outputs and all gradients against the reference in float64.

    Where tau comes close to pointing against eps the rotation is badly conditioned, and the reference itself loses
    digits: other dtypes than float64 may be three times as far off as it is.
    """
    dtype, exact = inputs[0].dtype, tuple(part.double() for part in inputs)
    wanted = outputs_and_gradients(exact, lengths, **how, backend="reference")
    if dtype == torch.float64:
        assert_same(found, wanted, **DEEP[dtype])
        return
    rounded = outputs_and_gradients(inputs, lengths, **how, backend="reference")
    for mine, theirs, other in zip(found, wanted, rounded, strict=True):
        assert mine.dtype == dtype
        allowed = NORM_ERROR[dtype] * theirs.norm() + 3 * (other - theirs).norm()
        assert (mine - theirs).norm() <= allowed


def compare(backend: str, inputs: Inputs, options: GatedOptions, lengths: Tensor | None = None) -> None:
    how = {"options": options, "seed": torch.tensor(5, device=inputs[0].device)}
    found = outputs_and_gradients(inputs, lengths, **how, backend=backend)
    with torch.no_grad():
        assert_same([gated_scan(*inputs, lengths, **how, backend=backend)], found[:1], **TOL[inputs[0].dtype])
    assert_accurate(found, inputs, lengths, **how)


@pytest.mark.parametrize("head_size", [1, 3, 8, 16])
@pytest.mark.parametrize("H", [1, 3, 8, 20, 63, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_matches_reference(backend, H, head_size):
    for rotated in sorted({0, H // 2 // head_size * head_size, H}):
        for dtype in (torch.float64, torch.float32):
            options = GatedOptions(head_size=head_size, rotated_units=rotated)
            compare(backend, draw(4, 3, H, dtype), options)
            compare(backend, draw(1, 1, H, dtype), options)
    compare(backend, draw(0, 2, H), GatedOptions(head_size=head_size))
    compare(backend, draw(2, 0, H), GatedOptions(head_size=head_size))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("zoneout", [0.0, 0.3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_matches_reference_with_zoneout_and_lengths(backend, zoneout, training):
    options = GatedOptions(rotated_units=16, zoneout=zoneout, training=training)
    for lengths in (None, torch.tensor([5, 0, 2, 4, 5])):
        compare(backend, draw(5, 5, 20), options, lengths)


def test_backend_matches_reference_at_a_size_that_takes_threads():
    compare("auto", draw(9, 35, 150), GatedOptions(rotated_units=72), torch.arange(35) % 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_matches_reference_in_16_bit(backend, dtype):
    compare(backend, draw(3, 4, 20, dtype), GatedOptions(rotated_units=16))


def degenerate(head_size: int, dtype: torch.dtype) -> Inputs:
    """Heads without eps or without tau, with opposite and parallel ones, with squares that overflow in float32."""
    xp, h0, weight_hh, bias_hh = draw(2, 6, 24, dtype)
    xp[0, 0, 48:] = 0
    xp[0, 1, 48:56] = 0
    weight_hh[48:] = 0
    bias_hh[48 : 48 + head_size] = 0
    xp[:, 2:4, 48 + head_size :] = -2 * bias_hh[48 + head_size :]
    xp[:, 4, 48 + head_size :] = 3 * bias_hh[48 + head_size :]
    xp[:, 5, 48 + head_size : 48 + 2 * head_size] *= 1e18
    return xp, h0, weight_hh, bias_hh


@pytest.mark.parametrize("head_size", [3, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_matches_reference_at_zero_and_opposite_vectors(backend, dtype, head_size):
    compare(backend, degenerate(head_size, dtype), GatedOptions(head_size=head_size, rotated_units=24))


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixing_keeps_the_state_where_the_gate_is_open(backend):
    xp, h0, weight_hh, bias_hh = draw(3, 2, 16, torch.float32)
    xp[..., 16:32] = 200.0  # u = 1
    found = gated_scan(xp, 1e-3 * h0, weight_hh, bias_hh, options=GatedOptions(rotated_units=8), backend=backend)
    assert torch.equal(found, (1e-3 * h0).expand(3, 2, 16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_need_not_be_contiguous_and_there_may_be_no_steps_or_rows(backend):
    options = GatedOptions(rotated_units=8)
    xp, h0, weight_hh, bias_hh = inputs = draw(4, 3, 16)
    strided = (xp.transpose(0, 1).contiguous().transpose(0, 1), h0.t().contiguous().t(), weight_hh.t().contiguous().t())
    wanted = gated_scan(*inputs, options=options, backend="reference")
    torch.testing.assert_close(gated_scan(*strided, bias_hh, options=options, backend=backend), wanted)
    first = gated_scan(xp, h0[:1].expand(3, 16), weight_hh, options=options, backend=backend)
    torch.testing.assert_close(
        first, gated_scan(xp, h0[:1].expand(3, 16), weight_hh, options=options, backend="reference")
    )
    for T, B in ((0, 3), (4, 0)):
        out, grad_xp, grad_h0, *others = outputs_and_gradients(draw(T, B, 16), None, options=options, backend=backend)
        assert out.shape == (T, B, 16) and grad_xp.shape == (T, B, 48) and grad_h0.shape == (B, 16)
        assert all(part.eq(0).all() for part in (grad_h0, *others))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_needs_neither_bias_nor_a_gradient_of_every_input(backend):
    xp, h0, weight_hh, _ = leaves(draw(3, 2, 8))
    options = GatedOptions(rotated_units=8)
    for wanted in ([xp], [h0], [weight_hh], [xp, weight_hh]):
        given = [part if any(part is other for other in wanted) else part.detach() for part in (xp, h0, weight_hh)]
        sums = [gated_scan(*given, options=options, backend=name).sin().sum() for name in (backend, "reference")]
        assert_same(*(list(torch.autograd.grad(value, wanted)) for value in sums), **DEEP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_of_every_order_and_direction(backend):
    options = GatedOptions(head_size=3, rotated_units=4)
    xp, *fixed = draw(2, 1, 4)

    def scan(*inputs):
        return gated_scan(*inputs, options=options, backend=backend)

    assert gradcheck(scan, leaves((xp, *fixed)))
    assert gradgradcheck(scan, leaves((xp, *fixed)), fast_mode=True)
    assert gradgradcheck(scan, leaves((xp, *fixed))[:3], fast_mode=True)

    def loss(name):
        return lambda xp: gated_scan(xp, *fixed, options=options, backend=name).sin().sum()

    def second(name):
        return grad(lambda xp: grad(loss(name))(xp).sin().sum())

    many = torch.stack((xp, 2 * xp))
    for transform in (
        lambda name: grad(loss(name))(xp),
        lambda name: vmap(loss(name))(many),
        lambda name: vmap(grad(loss(name)))(many),
        lambda name: vmap(second(name))(many),
        lambda name: jacrev(grad(loss(name)))(xp),
    ):
        torch.testing.assert_close(transform(backend), transform("reference"))
    torch.testing.assert_close(jvp(loss("auto"), (xp,), (xp,)), jvp(loss("reference"), (xp,), (xp,)))


class Scan(torch.nn.Module):
    """The scan with a weight and a bias of its own."""

    def __init__(self, H: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        _, _, weight, bias = draw(1, 1, H, dtype)
        self.weight, self.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)

    def forward(self, xp: Tensor, h0: Tensor) -> Tensor:
        return gated_scan(xp, h0, self.weight, self.bias, options=GatedOptions(rotated_units=8)).sin().sum()


def assert_same_values_and_gradients(other, scan: Scan) -> None:
    for T, B in ((9, 4), (1, 1)):
        xp, h0, *_ = leaves(draw(T, B, 12))
        found, wanted = other(xp, h0), scan(xp, h0)
        torch.testing.assert_close(found, wanted)
        mine = torch.autograd.grad(found, [xp, h0, *other.parameters()])
        assert_same(mine, torch.autograd.grad(wanted, [xp, h0, *scan.parameters()]))


def test_export_holds_the_operator_at_any_length_and_batch():
    scan, dims = Scan(12), {0: torch.export.Dim("T"), 1: torch.export.Dim("B")}
    xp, h0, *_ = draw(5, 3, 12)
    program = torch.export.export(scan, (xp, h0), dynamic_shapes=(dims, {0: dims[1]}))
    assert "torchrum.gated_scan" in str(program.graph)
    assert_same_values_and_gradients(program.module(), scan)


def test_compile_takes_the_scan_whole():
    scan = Scan(12)
    assert_same_values_and_gradients(torch.compile(scan, fullgraph=True, backend="aot_eager"), scan)


def test_operator_passes_the_checks_of_torch():
    inputs = leaves(draw(3, 2, 8))
    args = (*inputs, torch.tensor([3, 1]), torch.tensor(7), 4, 8, 0.1, True, "torch", True)
    torch.library.opcheck(torch.ops.torchrum.gated_scan, args)


def test_flops_are_those_of_the_matmuls():
    xp, h0, weight_hh, bias_hh = leaves(draw(5, 3, 8))
    with FlopCounterMode(display=False) as counter:
        out = gated_scan(xp, h0, weight_hh, bias_hh, options=GatedOptions(rotated_units=8))
    assert counter.get_total_flops() == 5 * 3 * 2 * 24 * 8
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 5 * 3 * 2 * 24 * 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_have_the_dtypes_of_their_tensors(backend):
    xp, h0, weight_hh, bias_hh = leaves(draw(3, 2, 8, torch.bfloat16))
    h0 = h0.detach().float().requires_grad_()
    out = gated_scan(xp, h0, weight_hh, bias_hh, options=GatedOptions(rotated_units=8), backend=backend)
    assert [part.dtype for part in torch.autograd.grad(out.sum(), [xp, h0])] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_autocast_takes_the_dtype_of_the_projected_input(backend):
    inputs = draw(3, 2, 16, torch.bfloat16)
    options = GatedOptions(rotated_units=8)
    wanted = gated_scan(*inputs, options=options, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gated_scan(*inputs[:2], *(part.float() for part in inputs[2:]), options=options, backend=backend)
    assert torch.equal(found, wanted)
    wider = gated_scan(*inputs[:2], *(part.double() for part in inputs[2:]), options=options, backend=backend)
    assert torch.equal(wider, wanted)


@pytest.mark.parametrize(
    "place, wrong, message",
    [
        (0, torch.zeros(2, 3, 8), "xp has shape"),
        (1, torch.zeros(4), "h0 has shape"),
        (2, torch.zeros(8, 4), "weight_hh has shape"),
        (3, torch.zeros(4), "bias_hh has shape"),
        (4, torch.tensor([1]), "lengths has shape"),
    ],
)
def test_shapes_are_checked(place, wrong, message):
    inputs = [*draw(2, 3, 4, torch.float32), None]
    inputs[place] = wrong
    with pytest.raises(ValueError, match=message):
        gated_scan(*inputs, options=GatedOptions())


def test_more_rotated_units_than_units_are_an_error():
    with pytest.raises(ValueError, match="there are only 4 units"):
        gated_scan(*draw(2, 3, 4), options=GatedOptions(rotated_units=8))


def test_choice_says_why():
    xp = torch.zeros(2, 3, 12)
    assert gated_scan_choice(xp, GatedOptions(), backend="torch") == ("torch", "it was asked for")
    with pytest.raises(ValueError, match="backend='lam1' cannot run"):
        gated_scan_choice(xp, GatedOptions(), backend="lam1")


STEPWISE = [
    (3, 2, 5, {"head_size": 3, "rotated_units": 3}),
    (2, 1, 1, {"rotated_units": 1}),
    (3, 2, 20, {"rotated_units": 20}),
    (2, 2, 9, {"head_size": 1, "rotated_units": 9}),
    (2, 2, 150, {"rotated_units": 72}),
    (3, 2, 6, {}),
    (3, 2, 20, {"rotated_units": 8, "zoneout": 0.3}),
    (3, 2, 20, {"rotated_units": 8, "zoneout": 0.3, "training": True}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T, B, H, options", STEPWISE, ids=str)
def test_kernels_match_reference_in_the_interpreter(T, B, H, options, dtype):
    compare_kernels(draw(T, B, H, dtype), GatedOptions(**options))
    compare_kernels(draw(T, B, H, dtype), GatedOptions(**options), torch.tensor([T, 1][:B]))


@pytest.mark.parametrize("head_size", [3, 8])
def test_kernels_match_reference_at_zero_and_opposite_vectors(head_size):
    inputs = degenerate(head_size, torch.float32)
    compare_kernels(inputs, GatedOptions(head_size=head_size, rotated_units=24))


def compare_kernels(inputs: Inputs, options: GatedOptions, lengths: Tensor | None = None) -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    from torchrum.ops.gated_scan import stepwise_triton

    device, seed = "cuda" if torch.cuda.is_available() else "cpu", torch.tensor(5)
    moved = [None if part is None else part.to(device) for part in (*inputs, lengths, seed)]
    given = GatedInputs(*moved)
    out, gates = stepwise_triton.forward(given, options, True)
    grads = stepwise_triton.backward(draw_grad(out), given, out, gates, options)
    assert_accurate([part.cpu() for part in (out, *grads)], inputs, lengths, options=options, seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["fused", "torch", "auto"])
def test_backend_matches_reference_on_the_gpu(backend, dtype):
    if backend == "fused" and dtype == torch.float64:
        pytest.skip("the kernels compute in float32")
    torch.set_float32_matmul_precision("highest")
    for T, B, H in (
        (0, 2, 8),
        (2, 0, 8),
        (1, 1, 1),
        (7, 3, 20),
        (21, 64, 100),
        (40, 5, 257),
        (20, 200, 512),
    ):  # graphs from 4 steps on
        for rotated, more in ((H // 2 // 8 * 8, {}), (H, {"zoneout": 0.2, "training": True}), (0, {"zoneout": 0.2})):
            inputs = tuple(part.cuda() for part in draw(T, B, H, dtype))
            options = GatedOptions(rotated_units=rotated, **more)
            lengths = torch.arange(B, device="cuda") % (T + 1)
            compare(backend, inputs, options)
            compare(backend, inputs, options, lengths)  # a second call takes the graphs of the first


@pytest.mark.gpu
def test_gpu_takes_the_fused_backend():
    xp = torch.zeros(2, 3, 12, device="cuda")
    assert gated_scan_choice(xp, GatedOptions()).backend == "fused"
    assert gated_scan_choice(xp.double(), GatedOptions()).backend == "torch"


@pytest.mark.gpu
def test_compiled_and_captured_scans_match_plain_ones_on_the_gpu():
    scan = Scan(12).cuda().float()
    xp, h0, *_ = (part.cuda() for part in draw(9, 4, 12, torch.float32))
    wanted = scan(xp, h0)
    torch.testing.assert_close(torch.compile(scan, fullgraph=True)(xp, h0), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        scan(xp, h0)  # kernels cannot be loaded while capturing
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = scan(xp, h0)
    graph.replay()
    torch.testing.assert_close(captured, wanted.detach())
