"""The LSTM scan: its reference against the cell, its kernels against the reference in float64."""

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton")

from composing import assert_composes
from grids import thinned
from oracle import assert_close, capture
from tolerances import NORM_ERROR, TOL
from torchrum.cells.lstm import LSTMCell
from torchrum.ops import lstm_scan as lstm_scan_module
from torchrum.ops.kernels.chain import (
    BackwardChain,
    Chain,
    ChainInputs,
    ForwardChain,
    Saved,
    chain_backward,
    chain_forward,
)
from torchrum.ops.kernels.masks import CELL_STREAMS, keep_mask, stream_seeds
from torchrum.ops.kernels.triton_launch import clear_graphs
from torchrum.ops.lstm_scan import (
    CellWeights,
    LstmInputs,
    LstmOptions,
    kernel_obstacle,
    lstm_plans,
    lstm_scan,
    lstm_scan_choice,
    lstm_scan_fused,
    lstm_scan_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("xp", "h0", "c0", "weight_hh", "ln_weight", "ln_bias")
GRID = [
    {"layer_norm": norm, "training": training, "zoneout": h, "zoneout_cell": c}
    for norm, training, h, c in itertools.product((True, False), (True, False), (0.0, 0.3), (0.0, 0.5))
]
ROTATIONAL = [
    {"layer_norm": norm, "training": training, "zoneout": 0.3, "zoneout_cell": 0.5, "rotational": True}
    for norm, training in itertools.product((True, False), (True, False))
]


def draw(T: int, B: int, H: int, options: LstmOptions, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return (mean + std * torch.randn(shape, device=DEVICE)).to(dtype)

    N = options.norms * H
    norms = (normal(N, mean=1.0, std=0.2), normal(N, std=0.2)) if options.layer_norm else (None, None)
    tensors = (normal(T, B, options.blocks * H), normal(B, H), normal(B, H), normal(4 * H, H, std=H**-0.5), *norms)
    return dict(zip(NAMES, tensors, strict=True))


def gradients(scan, case: dict[str, Tensor | None], grads: tuple[Tensor, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Results and gradients of ``scan`` computed in ``dtype``."""
    x = {name: None if v is None else v.detach().to(dtype).requires_grad_() for name, v in case.items()}
    results = scan(*x.values())
    wanted = {name: v for name, v in x.items() if v is not None}
    found = torch.autograd.grad(
        results, list(wanted.values()), [g.to(r.dtype) for g, r in zip(grads, results, strict=True)]
    )
    named = dict(zip(("out", "h_n", "c_n"), (r.detach() for r in results), strict=True))
    return {**named, **{f"d{name}": g for name, g in zip(wanted, found, strict=True)}}


def by_reference(lengths: Tensor | None, seed: Tensor | None, options: LstmOptions, mask: Tensor | None = None):
    return lambda *x: lstm_scan_reference(LstmInputs(*x, lengths, seed, mask), options)


def by_kernels(lengths: Tensor | None, seed: Tensor | None, options: LstmOptions, mask: Tensor | None = None):
    return lambda *x: lstm_scan_fused(LstmInputs(*x, lengths, seed, mask), options)


def chain_inputs(case: dict[str, Tensor], seeds: Tensor | None = None, lengths: Tensor | None = None) -> ChainInputs:
    weights = [CellWeights(None, case["weight_hh"], None, case["ln_weight"], case["ln_bias"])]
    return ChainInputs(case["xp"], (case["h0"], case["c0"]), weights, seeds, lengths)


def draw_grads(T: int, B: int, H: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, device=DEVICE).to(dtype) for shape in ((T, B, H), (B, H), (B, H)))


def check(
    T: int,
    B: int,
    H: int,
    options: LstmOptions,
    dtype: torch.dtype = torch.float32,
    lengths: bool = False,
    mask: Tensor | None = None,
) -> None:
    case, grads = draw(T, B, H, options, dtype), draw_grads(T, B, H, dtype)
    rows = torch.randint(0, T + 1, (B,), device=DEVICE) if lengths else None
    seed = torch.randint(2**31 - 1, (), device=DEVICE) if options.draws else None
    more = (rows, seed, options, mask)
    wanted = gradients(by_reference(*more), case, grads, torch.float64)
    found = gradients(by_kernels(*more), case, grads, dtype)
    assert_close(found, wanted, NORM_ERROR[dtype])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20)
    torch.set_float32_matmul_precision("highest")


# ---- the reference and the masks


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_reference_is_the_cell_step_by_step(layer_norm, training):
    T, B, H = 4, 3, 5
    words = {"layer_norm": layer_norm, "forget_bias": 0.7, "zoneout": 0.0 if training else 0.2}
    words["zoneout_cell"] = words["zoneout"] * 2
    cell = LSTMCell(2, H, **words, dtype=torch.float64).train(training)
    for parameter in cell.parameters():
        torch.nn.init.normal_(parameter)
    x, state = torch.randn(T, B, 2).double(), (torch.randn(B, H).double(), torch.randn(B, H).double())
    norms = (None, None)
    if layer_norm:
        norms = torch.cat((cell.ln_weight, cell.ln_weight_c)), torch.cat((cell.ln_bias, cell.ln_bias_c))
    options = LstmOptions(training=training, **words)
    out, h, c = lstm_scan_reference(LstmInputs(cell.project(x), *state, cell.weight_hh, *norms), options)
    for t in range(T):
        output, state = cell(x[t], state)
        torch.testing.assert_close(out[t], output, **TOL[torch.float64])
    torch.testing.assert_close((h, c), state, **TOL[torch.float64])


def test_masks_keep_with_their_chance_and_streams_differ():
    seeds = stream_seeds(torch.tensor(7), 4)
    assert len(set(seeds.tolist())) == 4
    assert ((seeds >= 0) & (seeds < 2**31)).all()
    masks = [keep_mask(seed, 3, 100, 50, 0.3) for seed in seeds]
    for mask in masks:
        assert abs(mask.float().mean().item() - 0.7) < 0.03
    for one, other in itertools.combinations(masks, 2):
        assert abs((one & other).float().mean().item() - 0.49) < 0.03
    assert not keep_mask(seeds[0], 3, 9, 9, 1.0).any()
    assert keep_mask(seeds[0], 3, 9, 9, 0.0).all()


# ---- the kernels


@pytest.mark.parametrize("number", thinned(range(len(GRID)), 3))
def test_options_match_reference(number):
    check(3, 2, 9, LstmOptions(**GRID[number], forget_bias=number % 2), lengths=number % 3 == 0)


@pytest.mark.parametrize(
    "T, B, H", thinned([(1, 1, 1), (3, 2, 1), (1, 3, 2), (4, 1, 3), (2, 2, 50), (2, 2, 65), (2, 1, 100)], 3)
)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_shapes_match_reference(T, B, H, layer_norm):
    check(T, B, H, LstmOptions(layer_norm=layer_norm), lengths=T > 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_16bit_dtypes_match_reference(dtype, layer_norm):
    check(4, 3, 48, LstmOptions(layer_norm=layer_norm, zoneout=0.1, zoneout_cell=0.5, training=True), dtype)


@pytest.mark.parametrize("gate", range(4))
def test_layer_norm_of_a_large_mean_keeps_its_digits(gate):
    options = LstmOptions(layer_norm=True)
    case, grads = draw(1, 2, 16, options), draw_grads(1, 2, 16)
    case["xp"].unflatten(-1, (4, 16))[:, :, gate] += 64.0  # a difference of squares would lose four digits
    wanted = gradients(by_reference(None, None, options), case, grads, torch.float64)
    found = gradients(by_kernels(None, None, options), case, grads, torch.float32)
    assert_close(found, wanted, NORM_ERROR[torch.float32])


def test_zoneout_takes_the_reference_masks():
    options = LstmOptions(zoneout=0.4, zoneout_cell=0.6, training=True)
    case, seed = draw(3, 2, 20, options), torch.tensor(2**31 - 5, device=DEVICE)
    seeds = stream_seeds(seed, CELL_STREAMS)
    out, _, (saved,) = chain_forward(lstm_plans(20, options), chain_inputs(case, seeds))
    before = torch.cat([case["h0"][None], out[:-1]])
    for t in range(3):
        assert torch.equal(out[t] == before[t], ~keep_mask(seeds[0], t, 2, 20, 0.4))
        if t < 2:
            kept = saved.cells[t + 1] == saved.cells[t]
            assert torch.equal(kept, ~keep_mask(seeds[1], t, 2, 20, 0.6))


def test_rows_past_their_length_rest():
    options = LstmOptions(layer_norm=True)
    case, lengths = draw(3, 2, 6, options), torch.tensor([0, 2], device=DEVICE)
    found = gradients(
        by_kernels(lengths, None, options),
        case,
        (torch.ones(3, 2, 6, device=DEVICE), torch.zeros(2, 6, device=DEVICE), torch.ones(2, 6, device=DEVICE)),
        torch.float32,
    )
    assert found["dxp"][:, 0].count_nonzero() == 0
    assert found["dxp"][2, 1].count_nonzero() == 0
    assert torch.equal(found["dh0"][0], torch.full((6,), 3.0, device=DEVICE))
    assert torch.equal(found["dc0"][0], torch.ones(6, device=DEVICE))
    assert torch.equal(found["c_n"][0], case["c0"][0])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_result_alone_has_a_gradient(which):
    options = LstmOptions(layer_norm=True)
    case, grad = draw(3, 2, 7, options), draw_grads(3, 2, 7)[which]

    def alone(scan, dtype) -> dict[str, Tensor]:
        x = {name: v.to(dtype).requires_grad_() for name, v in case.items()}
        result = scan(LstmInputs(**x), options)[which]
        return dict(zip(x, torch.autograd.grad(result, list(x.values()), grad.to(dtype)), strict=True))

    assert_close(
        alone(lstm_scan_fused, torch.float32), alone(lstm_scan_reference, torch.float64), NORM_ERROR[torch.float32]
    )


@pytest.mark.parametrize("T, B", [(0, 2), (3, 0)])
def test_empty_input(T, B):
    options = LstmOptions(layer_norm=True)
    case = draw(T, B, 5, options)
    found = gradients(by_kernels(None, None, options), case, draw_grads(T, B, 5), torch.float32)
    assert found["out"].shape == (T, B, 5)
    assert torch.equal(found["h_n"], case["h0"])
    for name in ("weight_hh", "ln_weight", "ln_bias"):
        assert found[f"d{name}"].count_nonzero() == 0


@pytest.mark.parametrize("options", ROTATIONAL, ids=str)
def test_rotational_cell_matches_reference(options):
    check(3, 2, 9, LstmOptions(**options, forget_bias=0.3), lengths=options["training"])


@pytest.mark.parametrize("T, B, H", [(1, 1, 1), (3, 1, 2), (2, 2, 65)])
def test_shapes_of_a_rotational_cell_match_reference(T, B, H):
    check(T, B, H, LstmOptions(layer_norm=True, rotational=True))


@pytest.mark.parametrize("layer_norm", [False, True])
def test_opposite_and_zero_vectors_of_a_rotational_cell(layer_norm):
    """Where the plane is not given by eps and tau: a half turn, and none."""
    options, H = LstmOptions(layer_norm=layer_norm, rotational=True), 8
    case, grads = draw(2, 3, H, options), draw_grads(2, 3, H)
    case["weight_hh"] = torch.zeros_like(case["weight_hh"])  # tau is that of the input
    tau = torch.tensor([1.0, -1.0] * (H // 2), device=DEVICE)  # layer norm only scales it
    if layer_norm:
        case["ln_weight"], case["ln_bias"] = torch.ones_like(case["ln_weight"]), torch.zeros_like(case["ln_bias"])
    for row, eps in enumerate((-2 * tau, 0 * tau, 3 * tau)):
        case["xp"][:, row, H : 2 * H], case["xp"][:, row, 4 * H :] = tau, eps
    wanted = gradients(by_reference(None, None, options), case, grads, torch.float64)
    found = gradients(by_kernels(None, None, options), case, grads, torch.float32)
    assert_close(found, wanted, NORM_ERROR[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16bit_dtypes_of_a_rotational_cell_match_reference(dtype):
    options = LstmOptions(layer_norm=True, zoneout=0.1, zoneout_cell=0.5, rotational=True, training=True)
    check(4, 3, 48, options, dtype)


@pytest.mark.parametrize("lengths, rotational", [(False, False), (True, False), (True, True)])
def test_state_dropout_matches_reference(lengths, rotational):
    options = LstmOptions(layer_norm=True, zoneout=0.3, zoneout_cell=0.4, rotational=rotational, training=True)
    mask = torch.nn.functional.dropout(torch.ones(3, 7, device=DEVICE), 0.4)
    check(4, 3, 7, options, lengths=lengths, mask=mask)


def test_second_derivatives_go_through_the_reference():
    options = LstmOptions(layer_norm=True, zoneout=0.2, training=True)
    case, seed = draw(3, 2, 4, options), torch.tensor(3, device=DEVICE)

    def penalty(scan, dtype) -> list[Tensor]:
        x = [v.to(dtype).requires_grad_() for v in case.values()]
        out, _, c = scan(LstmInputs(*x, None, seed), options)
        first = torch.autograd.grad(out.square().sum() + c.sum(), x, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), x))

    found, wanted = penalty(lstm_scan_fused, torch.float32), penalty(lstm_scan_reference, torch.float64)
    assert_close(dict(zip(NAMES, found, strict=True)), dict(zip(NAMES, wanted, strict=True)), 1e-4)


@pytest.mark.parametrize("rotational", [False, True])
def test_steps_through_the_table_match_direct_ones(rotational):
    """Graphs replay in chunks that read the step and the addresses from the table; here without a graph."""
    options = LstmOptions(layer_norm=True, zoneout=0.3, zoneout_cell=0.4, rotational=rotational, training=True)
    T, B, H = 5, 2, 6
    mask = torch.nn.functional.dropout(torch.ones(B, H, device=DEVICE), 0.4) if rotational else None
    case, grads = draw(T, B, H, options), draw_grads(T, B, H)
    seed, lengths = torch.tensor(5, device=DEVICE), torch.tensor([5, 3], device=DEVICE)
    seeds = stream_seeds(seed, CELL_STREAMS)
    wanted = gradients(by_reference(lengths, seed, options, mask), case, grads, torch.float64)
    plans, inputs = lstm_plans(H, options, mask is not None), chain_inputs(case, seeds, lengths)._replace(masks=[mask])
    _, _, (saved,) = chain_forward(plans, inputs)  # for tensors of the right shapes
    saved = [Saved(*(torch.full_like(part, float("nan")) for part in saved if part is not None))]
    out, dgates = torch.empty(T, B, H, device=DEVICE), [torch.empty_like(saved[0].gates)]

    def run(chain: Chain) -> None:
        for chunk in (4, 1):
            for t in range(chunk):
                for launch in chain.launches(t):
                    launch()
            chain.table[:1].add_(chain.stride * chunk)

    forward = ForwardChain(plans, inputs, graphed=True)
    forward.begin(inputs, saved, out)
    run(forward)
    backward = BackwardChain(plans, inputs, graphed=True)
    backward.begin(inputs, saved, grads, dgates)
    run(backward)
    (dh0, dc0), (norms,) = backward.finish()
    found = {"out": out, "c_n": forward.states[1], "dxp": dgates[0], "dh0": dh0, "dc0": dc0}
    found |= {"dln_weight": norms[0], "dln_bias": norms[1]}
    assert_close(found, {name: wanted[name] for name in found}, NORM_ERROR[torch.float32])


# ---- the choice


@pytest.mark.skipif(DEVICE == "cuda", reason="the choice on a machine without a GPU")
def test_choice_says_why():
    choice = lstm_scan_choice(torch.empty(2, 2, 12), LstmOptions())
    assert choice.backend == "torch"
    assert "cpu" in choice.reason
    with pytest.raises(ValueError, match="the input is on cpu"):
        lstm_scan_choice(torch.empty(2, 2, 12), LstmOptions(), backend="fused")


def test_obstacles():
    assert kernel_obstacle(torch.empty(2, 2, 12, device=DEVICE), LstmOptions()) is None
    assert "float64" in kernel_obstacle(torch.empty(2, 2, 12, dtype=torch.float64, device=DEVICE), LstmOptions())
    assert "8192" in kernel_obstacle(torch.empty(1, 1, 4 * 8193, device=DEVICE), LstmOptions())
    turns = LstmOptions(rotational=True)
    assert kernel_obstacle(torch.empty(1, 1, 5 * 8192, device=DEVICE), turns) is None
    seen = torch.func.vmap(lambda x: torch.tensor(kernel_obstacle(x, LstmOptions()) is not None))(
        torch.empty(2, 1, 1, 4, device=DEVICE)
    )
    assert seen.all()


# ---- the cell


@pytest.mark.parametrize("lengths", [None, [4, 2, 0]])
def test_cell_takes_the_kernels_where_they_can_run(monkeypatch, lengths):
    monkeypatch.setattr(lstm_scan_module, "fused_obstacle", kernel_obstacle)  # which lets the interpreter run
    words = {"layer_norm": True, "zoneout": 0.1, "zoneout_cell": 0.5}
    cell = LSTMCell(4, 6, **words, device=DEVICE).eval()
    exact = LSTMCell(4, 6, **words, device=DEVICE, dtype=torch.float64, backend="reference").eval()
    exact.load_state_dict(cell.state_dict())
    x = torch.randn(4, 3, 4, device=DEVICE)
    rows = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    assert cell.explain_backend(x).backend == "fused"
    assert exact.explain_backend(x.double()).backend == "reference"
    for part, dtype in ((cell, torch.float32), (exact, torch.float64)):
        _, (h, c) = part.scan(x.to(dtype), part.initial_state(3, device=DEVICE, dtype=dtype), rows)
        (h.square().sum() + c.sum()).backward()
    found = {name: parameter.grad for name, parameter in cell.named_parameters()}
    assert_close(
        found, {name: parameter.grad for name, parameter in exact.named_parameters()}, NORM_ERROR[torch.float32]
    )


def test_cell_draws_new_masks_for_each_sequence(monkeypatch):
    monkeypatch.setattr(lstm_scan_module, "fused_obstacle", kernel_obstacle)
    cell = LSTMCell(2, 30, zoneout=0.5, device=DEVICE)
    x, state = torch.randn(1, 2, 2, device=DEVICE), cell.initial_state(2, device=DEVICE, dtype=torch.float32)
    one, other = (cell.scan(x, state)[0] for _ in range(2))
    assert not torch.equal(one == 0, other == 0)
    torch.manual_seed(3)
    one, _ = cell.scan(x, state)
    torch.manual_seed(3)
    assert torch.equal(one, cell.scan(x, state)[0])


def test_cell_can_be_compiled_around_checkpointed_and_differentiated_by_func(monkeypatch):
    monkeypatch.setattr(lstm_scan_module, "fused_obstacle", kernel_obstacle)
    cell = LSTMCell(3, 6, layer_norm=True, zoneout=0.3, device=DEVICE)
    x, state = torch.randn(2, 2, 3, device=DEVICE), cell.initial_state(2, device=DEVICE, dtype=torch.float32)
    assert_composes(cell, x, state)


def test_cell_explains_its_backend():
    x = torch.zeros(2, 1, 3)
    assert LSTMCell(3, 4).explain_backend(x) == ("torch", "fused cannot run: the input is on cpu")
    with pytest.raises(ValueError, match="the input is on cpu"):
        LSTMCell(3, 4, backend="fused").scan(x, (torch.zeros(1, 4),) * 2)
    with pytest.raises(ValueError, match="Did you mean 'fused'"):
        LSTMCell(3, 4, backend="fuse")


# ---- on the GPU: compiled kernels, own graphs and captures


gpu = pytest.mark.gpu
FULL = LstmOptions(layer_norm=True, zoneout=0.1, zoneout_cell=0.5, training=True)


@gpu
@pytest.mark.parametrize("number", range(len(GRID)))
def test_gpu_options(number):
    check(7, 5, 72, LstmOptions(**GRID[number]), list(NORM_ERROR)[number % 3], lengths=number % 2 == 0)


@gpu
@pytest.mark.parametrize(
    "T, B, H",
    [
        (1, 1, 1),
        (9, 1, 3),
        (6, 3, 65),
        (130, 3, 33),
        (40, 128, 256),
        (5, 128, 700),
        (5, 3, 1000),
        (4, 2, 2048),
        (4, 1, 5000),
    ],
)
def test_gpu_shapes(T, B, H):
    check(T, B, H, FULL, lengths=H % 2 == 0)
    if H > 3:  # layer norm over a few units magnifies the roundings of a 16-bit dtype
        check(T, B, H, FULL, torch.bfloat16, lengths=H % 2 == 0)


@gpu
def test_gpu_outer_capture_gives_the_same():
    case, seeds = draw(20, 4, 96, FULL), torch.tensor([77, 5, 3], device="cuda")
    grads, plans = draw_grads(20, 4, 96), lstm_plans(96, FULL)

    def both(T: int = 20) -> list[Tensor]:
        inputs = chain_inputs({**case, "xp": case["xp"][:T]}, seeds)
        out, (_, c), saved = chain_forward(plans, inputs)
        dxp, dstates, ((_, dweight, _, *dnorms),) = chain_backward(plans, inputs, saved, (grads[0][:T], *grads[1:]))
        return [out, c, dxp, *dstates, dweight, *dnorms]

    wanted = [part.clone() for part in both()]
    graph, found = capture(both, warm_up=lambda: both(2))
    case["xp"].mul_(2.0)
    graph.replay()
    case["xp"].div_(2.0)
    graph.replay()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@gpu
def test_gpu_public_op_takes_the_kernels_and_its_backward_runs_in_autograds_thread():
    case, grads, seed = draw(20, 4, 96, FULL), draw_grads(20, 4, 96), torch.tensor(9, device="cuda")
    assert lstm_scan_choice(case["xp"], FULL).backend == "fused"
    clear_graphs()
    with torch.inference_mode():
        lstm_scan(LstmInputs(**case, seed=seed), FULL)
    x = {name: v.clone().requires_grad_() for name, v in case.items()}
    results = lstm_scan(LstmInputs(**x, seed=seed), FULL)
    torch.autograd.backward(results, grads)
    found = dict(zip(("out", "h_n", "c_n"), (r.detach() for r in results), strict=True))
    found |= {f"d{name}": v.grad for name, v in x.items()}
    wanted = gradients(by_reference(None, seed, FULL), case, grads, torch.float64)
    assert_close(found, wanted, NORM_ERROR[torch.float32])
