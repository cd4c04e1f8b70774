"""The stepwise design of lam = 0 against float64: in Triton's interpreter on the CPU, and compiled on the GPU."""

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton")

from grids import thinned
from oracle import assert_close, assert_rows_close, draw_inputs, exact_scan, run_design
from tolerances import NORM_ERROR, TF32_ERROR
from torchrum.ops.kernels import machine, matmul, rum_step_backward, triton_launch
from torchrum.ops.kernels.masks import keep_mask
from torchrum.ops.kernels.rum_step_backward import STATS
from torchrum.ops.kernels.triton_launch import LARGEST_CHUNK, chunk_lengths, clear_graphs, padded
from torchrum.ops.rum_scan import RumOptions, ScanInputs, rum_scan, stepwise
from torchrum.ops.rum_scan.stepwise_triton import BackwardSteps, ForwardSteps, stepwise_forward_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTIVATIONS = ("relu", "tanh", "sigmoid", "softsign")
LAYER_NORMS = ({}, {"layer_norm": True}, {"layer_norm": True, "ln_order": "authors"})
ZONEOUTS = ({}, {"zoneout": 0.3}, {"zoneout": 0.3, "training": True})
GRID = [
    {"eta": eta, "update_gate": gate, **norm, **zoneout}
    for eta, gate, norm, zoneout in itertools.product((None, 1.0, 0.3), (True, False), LAYER_NORMS, ZONEOUTS)
]


def draw(T: int, B: int, H: int, options: RumOptions, dtype: torch.dtype = torch.float32) -> ScanInputs:
    return draw_inputs(T, B, H, options, dtype, DEVICE)._replace(seed=torch.zeros((), dtype=torch.int64, device=DEVICE))


def run(case: ScanInputs, options: RumOptions, grad_out: Tensor) -> dict[str, Tensor]:
    return run_design(stepwise, case, options, grad_out)


def check(
    T: int, B: int, H: int, options: RumOptions, dtype: torch.dtype = torch.float32, lengths: bool = False
) -> None:
    case = draw(T, B, H, options, dtype)
    grad_out = torch.randn(T, B, H, device=DEVICE).to(dtype)
    rows = torch.randint(0, T + 1, (B,), device=DEVICE) if lengths else None
    case = case._replace(lengths=rows, seed=torch.randint(2**31 - 1, (), device=DEVICE))
    error = NORM_ERROR[dtype]
    if dtype != torch.float32 and B * H < 32:
        error *= 2  # a norm over a handful of numbers does not average their roundings out
    elif dtype != torch.float32 and options.activation == "relu" and T * B * H < 32_000:
        # one unit whose sign the rounding of a stored gate turns over: float64 with such gates errs up to 4e-2 at
        # 7x40x72 units in bfloat16 and 5e-3 in float16, where tanh errs by 5e-3 and 9e-4
        error *= 2.5
    assert_close(run(case, options, grad_out), exact_scan(case, options, grad_out), error)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("number", thinned(range(len(GRID)), 7))
def test_options_match_reference(number):
    options = RumOptions(**GRID[number], activation=ACTIVATIONS[number % 4])
    check(3, 2, 9, options, lengths=number % 3 == 0)


@pytest.mark.parametrize("activation", thinned(ACTIVATIONS, 2))
@pytest.mark.parametrize("norm", LAYER_NORMS, ids=str)
def test_activations_match_reference(activation, norm):
    check(2, 2, 8, RumOptions(activation=activation, **norm))


@pytest.mark.parametrize(
    "T, B, H", thinned([(1, 1, 1), (3, 2, 1), (1, 3, 2), (4, 1, 3), (2, 2, 50), (2, 2, 65), (2, 1, 100)], 3)
)
@pytest.mark.parametrize("options", [RumOptions(), RumOptions(eta=1.0, layer_norm=True)], ids=["plain", "eta-ln"])
def test_shapes_match_reference(T, B, H, options):
    check(T, B, H, options, lengths=T > 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [RumOptions(eta=1.0), RumOptions(layer_norm=True, activation="tanh")], ids=["eta", "ln"]
)
def test_16bit_dtypes_match_reference(dtype, options):
    check(4, 3, 48, options, dtype)


@pytest.mark.parametrize("eta", [None, 1.0])
def test_degenerate_rotations_match_reference(eta):
    """tau = x_tau exactly, so that zero, parallel and opposite pairs can be given."""
    H, options = 12, RumOptions(eta=eta)
    case = draw(2, 8, H, options)
    case.weight_hh.zero_()
    eps = case.xp[..., 2 * H :]
    tau = case.xp[..., :H]
    eps[:, 0], tau[:, 1] = 0.0, 0.0  # no direction
    tau[:, 2], eps[:, 2] = 0.0, 0.0
    tau[:, 3] = 2.0 * eps[:, 3]  # parallel: the smooth limit
    tau[:, 4] = -2.0 * eps[:, 4]  # opposite: a half turn
    tau[:, 5] = -eps[:, 5] + 0.05 * tau[:, 5]  # near opposite, where 1 + cos cancels
    eps[:, 6] *= 1e-14  # too short to have a direction
    grad_out = torch.randn(2, 8, H, device=DEVICE)
    # in float64 1e-14 still has a direction: compare with the policy for float32 by making it zero
    exact = case._replace(xp=case.xp.clone())
    exact.xp[:, 6, 2 * H :] = 0.0
    wanted = exact_scan(exact, options, grad_out)
    found = run(case, options, grad_out)
    assert all(v.isfinite().all() for v in found.values())
    assert_rows_close(found, wanted)


def test_layer_norm_of_a_large_mean_keeps_its_digits():
    options = RumOptions(layer_norm=True)
    case = draw(1, 2, 16, options)
    case.xp.add_(64.0)  # the variance as a difference of squares would lose four digits
    grad_out = torch.randn(1, 2, 16, device=DEVICE)
    wanted = exact_scan(case, options, grad_out)
    assert_close(run(case, options, grad_out), wanted, NORM_ERROR[torch.float32])


def fixed_tau(H: int, eps: Tensor, h0: Tensor, options: RumOptions) -> ScanInputs:
    """One step whose tau is layer norm's shift: its gain is 0."""
    case = draw(1, len(eps), H, options)
    case.ln_weight[:H] = 0.0
    case.xp[0, :, -H:] = eps
    return case._replace(h0=h0)


@pytest.mark.parametrize("eta", [None, 1.0])
@pytest.mark.parametrize("order", ["before", "authors"])
def test_degenerate_rotations_behind_layer_norm(eta, order):
    """The candidate's moments and the gradients of layer norm are made of the rotation's scalars."""
    H, options = 12, RumOptions(eta=eta, layer_norm=True, ln_order=order)
    case = fixed_tau(H, torch.randn(6, H, device=DEVICE), torch.randn(6, H, device=DEVICE), options)
    tau, eps = case.ln_bias[:H], case.xp[0, :, 2 * H :]
    eps[0] = 0.0  # no direction
    eps[1] = 2.0 * tau  # parallel: the smooth limit
    eps[2] = -2.0 * tau  # opposite: a half turn
    eps[3] = -tau + 0.05 * tau.norm() * H**-0.5 * eps[3]  # near opposite, where 1 + cos cancels
    grad_out = torch.randn(1, 6, H, device=DEVICE)
    wanted = exact_scan(case, options, grad_out)
    found = run(case, options, grad_out)
    assert_rows_close(found, wanted)


def test_no_direction_behind_layer_norm_leaves_the_state():
    """tau = 0 with eps and the state far from orthogonal: `eps.h` is the candidate's, not the rotation's."""
    H, options = 12, RumOptions(layer_norm=True, activation="tanh")
    eps = torch.randn(3, H, device=DEVICE)
    case = fixed_tau(H, eps, 0.9 * eps, options)
    case.ln_bias[:H] = 0.0
    grad_out = torch.randn(1, 3, H, device=DEVICE)
    wanted = exact_scan(case, options, grad_out)
    assert_close(run(case, options, grad_out), wanted, NORM_ERROR[torch.float32])


def test_layer_norm_of_a_candidate_that_cancels_keeps_its_digits():
    """z = -eps up to 1 in 300: its moments from the lengths of both would lose five digits."""
    H, options = 16, RumOptions(layer_norm=True, activation="tanh")
    eps = torch.randn(1, H, device=DEVICE).expand(3, H) * 4.0
    case = fixed_tau(H, eps, -eps + 0.0125 * torch.randn(3, H, device=DEVICE), options)
    case.ln_bias[:H] = eps[0]
    exact = exact_scan(case, options, torch.randn(1, 3, H, device=DEVICE))
    out = stepwise.forward(case, options).out
    assert (out.double() - exact["out"]).norm() <= 1e-4 * exact["out"].norm()  # what eps + z itself has


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("order", ["before", "authors"])
def test_layer_norm_gradients_are_summed_over_all_rows_and_columns(monkeypatch, order, gate):
    """Each program sums several rows of its columns; none of both numbers is a multiple of what a program takes."""
    monkeypatch.setattr(rum_step_backward, "NORM_PROGRAMS", 6)
    monkeypatch.setattr(rum_step_backward, "NORM_BLOCK", 32)
    options = RumOptions(layer_norm=True, ln_order=order, update_gate=gate, eta=0.5, zoneout=0.2, training=True)
    check(5, 2, 50, options, lengths=True)


def test_zoneout_takes_the_reference_masks():
    options = RumOptions(zoneout=0.4, training=True)
    seed = torch.tensor(2**31 - 5, device=DEVICE)
    case = draw(3, 2, 20, options)._replace(seed=seed)
    out = stepwise.forward(case, options).out
    before = torch.cat([case.h0[None], out[:-1]])
    for t in range(3):
        assert torch.equal(out[t] == before[t], ~keep_mask(seed, t, 2, 20, options.zoneout))


def test_no_gradient_beyond_the_length():
    options = RumOptions()
    case = draw(3, 2, 6, options)._replace(lengths=torch.tensor([0, 2], device=DEVICE))
    found = run(case, options, torch.ones(3, 2, 6, device=DEVICE))
    assert found["dxp"][:, 0].count_nonzero() == 0
    assert found["dxp"][2, 1].count_nonzero() == 0
    assert torch.equal(found["dh0"][0], torch.full((6,), 3.0, device=DEVICE))


@pytest.mark.parametrize("T, B", [(0, 2), (3, 0)])
def test_empty_input(T, B):
    options = RumOptions(layer_norm=True)
    case = draw(T, B, 5, options)
    found = run(case, options, torch.zeros(T, B, 5, device=DEVICE))
    for name in ("xp", "h0", "weight_hh", "ln_weight", "ln_bias"):
        value = getattr(case, name)
        assert found[f"d{name}"].shape == value.shape
        assert found[f"d{name}"].count_nonzero() == 0


def test_strided_input():
    options = RumOptions(eta=1.0)
    case = draw(2, 3, 7, options)
    grad_out = torch.randn(2, 3, 7, device=DEVICE)
    wanted = run(case, options, grad_out)
    strided = ScanInputs(*(v.mT.contiguous().mT if v is not None and v.dim() > 1 else v for v in case))
    found = run(strided, options, grad_out.mT.contiguous().mT)
    for name, want in wanted.items():
        assert torch.equal(found[name], want), name


def test_steps_through_the_table_match_direct_ones():
    """Graphs replay in chunks that read the step and the addresses from the table; here without a graph."""
    options = RumOptions(eta=1.0, zoneout=0.3, training=True, layer_norm=True)
    T, B, H = 5, 2, 6
    seed, lengths = torch.tensor(5, device=DEVICE), torch.tensor([5, 3], device=DEVICE)
    case = draw(T, B, H, options)._replace(lengths=lengths, seed=seed)
    grad_out = torch.randn(T, B, H, device=DEVICE)
    wanted = exact_scan(case, options, grad_out)
    out, gates = torch.empty(T, B, H, device=DEVICE), torch.empty(T, B, 2 * H, device=DEVICE)
    dxp, stats = torch.empty_like(case.xp), torch.empty(T, B, STATS.value, device=DEVICE)

    def take_steps(steps: ForwardSteps | BackwardSteps) -> None:
        for chunk in (4, 1):
            for t in range(chunk):
                for launch in steps.launches(t):
                    launch()
            steps.table[:1].add_(steps.stride * chunk)

    forward = ForwardSteps(case, options, graphed=True)
    forward.begin(case, out, gates)
    take_steps(forward)
    backward = BackwardSteps(case, options, graphed=True)
    backward.begin(case, out, gates, stats, grad_out, dxp)
    take_steps(backward)
    dh0, ln_grads = backward.finish()
    found = {"out": out, "dxp": dxp, "dh0": dh0, "dln_weight": ln_grads[0], "dln_bias": ln_grads[1]}
    assert_close(found, {name: wanted[name] for name in found}, NORM_ERROR[torch.float32])


def take(monkeypatch: pytest.MonkeyPatch, kind: str, block: int = 0, warps: int = 4) -> None:
    """Have both directions' matmuls made by ``kind``: cublas, split or first (the weight before the state)."""
    tuning = {"SPLIT_K": kind == "split", "WEIGHT_FIRST": kind == "first", "BLOCK": block, "WARPS": warps}
    for name, value in tuning.items():
        monkeypatch.setattr(matmul, name, dict.fromkeys(("forward", "backward"), value))
    clear_graphs()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("B, H", thinned([(3, 40), (2, 130)], 2))
def test_split_k_matches_reference(monkeypatch, B, H, dtype):
    take(monkeypatch, "split")
    check(3, B, H, RumOptions(eta=1.0), dtype)


@pytest.fixture
def _tf32():
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_tf32")
@pytest.mark.parametrize("kind", ["cublas", "split", pytest.param("first", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "B, H, options",
    thinned([(3, 40, {"eta": 1.0}), (2, 64, {"update_gate": False}), (1, 130, {"layer_norm": True}), (5, 1, {})], 3),
)
def test_tf32_goes_forward_as_bf16x3_matmuls(monkeypatch, kind, B, H, options):
    """Far closer to float64 than TF32 (ten bits) or bfloat16 (eight) would be."""
    take(monkeypatch, kind)
    options = RumOptions(activation="tanh", **options)
    case = draw(4, B, H, options)
    grad_out = torch.randn(4, B, H, device=DEVICE)
    found = run(case, options, grad_out)
    wanted = exact_scan(case, options, grad_out)
    assert_close({"out": found["out"]}, {"out": wanted["out"]}, 5e-5)
    assert_close(found, wanted, 2e-3 if DEVICE == "cuda" else 1e-4)  # backwards a GPU rounds to TF32
    steps = ForwardSteps(case, options, graphed=False)
    assert steps.pieces == 3
    assert steps.matmul.out.dtype == torch.float32
    assert steps.matmul.split_k == (kind == "split" or (kind == "first" and matmul.has_weight_first(steps.operand)))
    clear_graphs()  # of other matmuls than usual


@pytest.mark.parametrize("out_dtype, error", [(None, 4e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "B, K, N, block", thinned([(2, 64, 128, 0), (5, 704, 384, 0), (20, 448, 64, 64), (1, 128, 2880, 32)], 2)
)
def test_split_k_adds_up(monkeypatch, B, K, N, block, out_dtype, error):
    take(monkeypatch, "split", block)
    monkeypatch.setattr(matmul, "multiprocessors", lambda x: 24)  # few tiles: the interpreter is slow
    left, right = (torch.randn(size, device=DEVICE).to(torch.bfloat16) for size in ((B, K), (N, K)))
    multiply = matmul.StepMatmul(left, right.t(), pdl=False, direction="forward", out_dtype=out_dtype)
    multiply.prepare()()
    wanted = left.double() @ right.double().t()
    assert multiply.out.dtype == (out_dtype or torch.bfloat16)
    assert (multiply.out.double().sum(0) - wanted).norm() <= error * wanted.norm()


@pytest.mark.parametrize("K, N", [(64, 64), (704, 1408), (1408, 704), (1024, 2048), (2048, 4096), (8192, 16384)])
@pytest.mark.parametrize("size, block", [(4, 0), (2, 0), (2, 64), (4, 128)])
def test_tiles_cover_the_product_in_one_wave(K, N, size, block):
    cut = matmul.tiling(128, K, N, 132, size, block)
    assert cut.tiles * cut.block == N
    assert (cut.parts - 1) * cut.chunks < K // matmul.INNER <= cut.parts * cut.chunks  # no part is empty
    assert cut.tiles * cut.parts <= max(132, N // 32)
    assert cut.block == block or block == 0 or N % block


def test_the_weight_is_fetched_first_only_where_it_fits(monkeypatch):
    """Its share and two blocks of the state in shared memory; elsewhere the matmul is left to cuBLAS."""
    assert matmul.tiling(128, 2048, 4096, 132, 2).stages(200_000) == 4
    assert matmul.tiling(128, 8192, 16384, 132, 2).stages(200_000) < 2
    take(monkeypatch, "first")
    left = torch.zeros(2, 64, dtype=torch.bfloat16)  # on the CPU there is no such kernel
    assert not matmul.StepMatmul(
        left, torch.zeros(64, 64, dtype=torch.bfloat16), pdl=False, direction="forward"
    ).split_k


def test_large_batches_and_float32_are_not_split(monkeypatch):
    take(monkeypatch, "split")
    assert matmul.splits("forward", 128, torch.bfloat16)
    assert not matmul.splits("backward", 129, torch.bfloat16)
    assert not matmul.splits("forward", 8, torch.float32)


def test_chunks_add_up():
    for T in (1, 2, 63, 127, 128, 129, 150, 1020):
        lengths = chunk_lengths(T)
        assert sum(lengths) == T
        assert all(n & (n - 1) == 0 and n <= LARGEST_CHUNK for n in lengths)


def test_padded_is_a_multiple_of_64():
    assert [padded(H) for H in (1, 64, 65, 700)] == [64, 64, 128, 704]


def test_obstacle_says_why():
    def why(options: RumOptions, **shape: Any) -> str | None:
        xp = torch.empty(1, 1, options.num_inputs * shape.pop("H", 4), **{"device": "meta", **shape})
        inputs = ScanInputs.shaped_like(xp, options)
        with pytest.MonkeyPatch.context() as patch:  # wherever the test runs
            patch.setattr(torch.Tensor, "device", torch.device("cuda"))
            return stepwise.obstacle(inputs, options)

    assert "float64" in why(RumOptions(), dtype=torch.float64)
    assert "lam is 1" in why(RumOptions(lam=1.0))
    assert "gelu" in why(RumOptions(activation="gelu"))
    assert "8192" in why(RumOptions(), H=8193)
    assert stepwise.obstacle(draw_inputs(1, 1, 4, RumOptions()), RumOptions()) == "the input is on cpu"


def test_no_obstacle():
    assert machine.row_kernel_obstacle(torch.empty(2, 2, 12, device=DEVICE), 4) is None


# ---- on the GPU: compiled kernels, own graphs and captures


gpu = pytest.mark.gpu
SMALL = [(1, 1, 1), (5, 2, 1), (9, 1, 3), (6, 3, 50), (6, 3, 65), (20, 4, 100), (130, 3, 33)]
LARGE = [(5, 2, 257), (5, 3, 700), (4, 2, 1000), (4, 2, 2000), (4, 2, 2048), (4, 1, 5000), (4, 1, 8192)]


@gpu
@pytest.mark.parametrize("number", range(len(GRID)))
def test_gpu_options(number):
    options = RumOptions(**GRID[number], activation=ACTIVATIONS[number % 4])
    dtype = list(NORM_ERROR)[number // 2 % 3]
    check(7, 5 if dtype == torch.float32 else 40, 72, options, dtype, lengths=number % 3 == 0)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T, B, H", SMALL + LARGE)
def test_gpu_shapes(T, B, H, dtype):
    check(T, B, H, RumOptions(eta=1.0, zoneout=0.2, training=True, layer_norm=H % 2 == 0), dtype, lengths=True)


@gpu
@pytest.mark.parametrize("kind", ["cublas", "split", "first"])
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("T, B, H", [(40, 128, 256), (21, 128, 704), (9, 100, 1000), (5, 128, 2000), (12, 3, 50)])
def test_gpu_tunings(monkeypatch, T, B, H, pdl, kind):
    if (pdl or kind == "first") and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    take(monkeypatch, kind)
    monkeypatch.setattr(triton_launch, "PDL", pdl)
    # without the kernels for a capture around the scan, half of what there is to compile
    monkeypatch.setattr(matmul.ScanSteps, "warm_up", lambda steps: [launch() for launch in steps.launches(0)])
    clear_graphs()
    check(T, B, H, RumOptions(eta=1.0, layer_norm=H == 50), torch.bfloat16)
    clear_graphs()


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "B, K, N", [(128, 2048, 4096), (128, 704, 1408), (100, 1408, 704), (3, 64, 128), (128, 512, 64)]
)
@pytest.mark.parametrize("block, warps", [(0, 4), (128, 8), (64, 4), (32, 4)])
@pytest.mark.parametrize("inner_last", [True, False])
def test_gpu_weight_first_product(monkeypatch, B, K, N, block, warps, inner_last, dtype):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    take(monkeypatch, "first", block=block, warps=warps)
    left, right = torch.randn(B, K, device=DEVICE).to(dtype), torch.randn(K, N, device=DEVICE).to(dtype)
    right_given = right.t().contiguous().t() if inner_last else right
    multiply = matmul.StepMatmul(left, right_given, False, "forward", torch.float32)
    assert multiply.weight_first
    multiply.out.fill_(float("nan"))
    multiply.prepare()()
    wanted = left.double() @ right.double()
    assert (multiply.out.double().sum(0) - wanted).norm() <= 1e-5 * wanted.norm()


@gpu
def test_gpu_dependent_launch_waits(monkeypatch):
    """Many steps, captured and replayed: a kernel that reads ahead of its turn gives other numbers now and then."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    options, T, B, H = RumOptions(eta=1.0), 100, 128, 1000
    case = draw(T, B, H, options, torch.bfloat16)
    grad_out = torch.randn(T, B, H, device="cuda").to(torch.bfloat16)
    take(monkeypatch, "first")
    results = {}
    for pdl in (False, True):
        monkeypatch.setattr(triton_launch, "PDL", pdl)
        clear_graphs()
        results[pdl] = run(case, options, grad_out)
    assert_close(
        results[True], {name: want.double() for name, want in results[False].items()}, NORM_ERROR[torch.bfloat16]
    )
    for _ in range(20):
        found = run(case, options, grad_out)
        for name in ("out", "dxp", "dh0"):
            assert torch.equal(found[name], results[True][name]), name


@gpu
def test_gpu_every_length_and_batch_reuses_the_kernel():
    options = RumOptions(eta=1.0)
    check(5, 3, 40, options)
    compiled = len(next(iter(stepwise_forward_kernel.device_caches.values()))[0])
    for T, B in ((1, 1), (2, 16), (16, 1), (17, 33), (31, 2)):
        check(T, B, 40, options)
    assert len(next(iter(stepwise_forward_kernel.device_caches.values()))[0]) == compiled


def _gpu_case(T: int = 20, B: int = 4, H: int = 96) -> tuple[RumOptions, ScanInputs, Tensor]:
    options = RumOptions(eta=1.0, zoneout=0.1, training=True, layer_norm=True)
    case = draw(T, B, H, options)._replace(seed=torch.tensor(77, device="cuda"))
    return options, case, torch.randn(T, B, H, device="cuda")


@gpu
def test_gpu_outer_capture_gives_the_same():
    options, case, grad_out = _gpu_case()
    wanted = run(case, options, grad_out)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(case._replace(xp=case.xp[:2]), options, grad_out[:2])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(case, options, grad_out)
    case.xp.mul_(2.0)
    graph.replay()
    case.xp.div_(2.0)
    graph.replay()
    assert_close(found, {name: want.double() for name, want in wanted.items()}, 1e-6)


@gpu
def test_gpu_streams_and_threads_do_not_mix():
    options = RumOptions(eta=1.0)
    cases = [draw(40, 4, 128, options) for _ in range(8)]
    grads = [torch.randn(40, 4, 128, device="cuda") for _ in cases]
    wanted = [run(c, options, g) for c, g in zip(cases, grads, strict=True)]
    clear_graphs()
    torch.cuda.synchronize()
    found: dict[int, dict[str, Tensor]] = {}

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found[index] = run(cases[index], options, grads[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for index, want in enumerate(wanted):
        assert_close(found[index], {name: w.double() for name, w in want.items()}, 1e-6)


@gpu
def test_gpu_two_forwards_before_a_backward():
    options, case, grad_out = _gpu_case()
    wanted = run(case, options, grad_out)
    results = stepwise.forward(case, options)
    stepwise.forward(draw(20, 4, 96, options), options)
    grads = stepwise.backward(grad_out, None, case, results, options, False)._asdict()
    found = {"out": results.out, **{f"d{name}": grad for name, grad in grads.items() if grad is not None}}
    assert_close(found, {name: w.double() for name, w in wanted.items()}, 1e-6)


@gpu
def test_gpu_inference_mode_first_then_training():
    options, case, grad_out = _gpu_case(H=104)
    clear_graphs()
    with torch.inference_mode():
        stepwise.forward(case, options)
    wanted = exact_scan(case, options, grad_out)
    assert_close(run(case, options, grad_out), wanted, NORM_ERROR[torch.float32])


@gpu
def test_gpu_unaligned_view():
    options = RumOptions()
    case = draw(7, 3, 5, options)
    grad_out = torch.randn(6, 3, 5, device="cuda")
    case = case._replace(xp=case.xp[1:])  # 45 numbers in: not on a 16-byte boundary
    assert case.xp.data_ptr() % 16
    wanted = exact_scan(case, options, grad_out)
    assert_close(run(case, options, grad_out), wanted, NORM_ERROR[torch.float32])


@gpu
@pytest.mark.parametrize("precision, error", [("highest", NORM_ERROR[torch.float32]), ("high", TF32_ERROR)])
def test_gpu_float32_product_follows_torch(precision, error):
    torch.set_float32_matmul_precision(precision)
    options = RumOptions(eta=1.0)
    case = draw(12, 8, 256, options)
    grad_out = torch.randn(12, 8, 256, device="cuda")
    wanted = exact_scan(case, options, grad_out)
    assert_close(run(case, options, grad_out), wanted, error)
    torch.set_float32_matmul_precision("highest")


@gpu
def test_gpu_public_op_backward_runs_in_autograds_thread():
    options, case, grad_out = _gpu_case()
    names = ("xp", "h0", "weight_hh", "ln_weight", "ln_bias")
    leaves = {name: getattr(case, name).clone().requires_grad_() for name in names}
    out, _ = rum_scan(case._replace(**leaves), options, backend="stepwise")
    out.backward(grad_out)
    found = {"out": out.detach(), **{f"d{name}": v.grad for name, v in leaves.items()}}
    assert_close(found, exact_scan(case, options, grad_out), NORM_ERROR[torch.float32])
