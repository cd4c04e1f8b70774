"""The Fast-Slow scan: its reference against the cells, its kernels against the reference in float64."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton")


from composing import assert_composes
from grids import thinned
from oracle import assert_close, capture
from tolerances import DEEP, NORM_ERROR
from torchrum.cells.fast_slow import FastSlowCell, fast_slow
from torchrum.cells.lstm import GRUCell, LSTMCell
from torchrum.cells.rum import RUMCell
from torchrum.ops import fast_slow_scan as fast_slow_scan_module
from torchrum.ops.fast_slow_scan import (
    CellWeights,
    FastSlowInputs,
    FastSlowOptions,
    fast_slow_scan,
    fast_slow_scan_choice,
    kernel_obstacle,
)
from torchrum.ops.fast_slow_scan.fused import fast_slow_plans, fast_slow_scan_fused
from torchrum.ops.fast_slow_scan.reference import fast_slow_scan_reference
from torchrum.ops.gated_scan import GatedOptions
from torchrum.ops.kernels import matmul
from torchrum.ops.kernels.chain import BackwardChain, Chain, ChainInputs, ForwardChain, chain_backward, chain_forward
from torchrum.ops.kernels.masks import CELL_STREAMS, keep_mask, stream_seeds
from torchrum.ops.kernels.triton_launch import clear_graphs
from torchrum.ops.lstm_scan import LstmOptions
from torchrum.ops.rum_scan.options import RumOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_options(
    *,
    slow: str = "rum",
    fast: str = "lstm",
    k: int = 2,
    layer_norm: bool = True,
    zoneout: float = 0.0,
    dropout: float = 0.0,
    slow_dropout: float | None = None,
    slow_zoneout: float | None = None,
    training: bool = False,
    **rum: object,
) -> FastSlowOptions:
    shared = {"layer_norm": layer_norm, "zoneout": zoneout, "training": training}
    lstm = LstmOptions(**shared, zoneout_cell=min(1.5 * zoneout, 0.9))
    turning = replace(lstm, rotational=True)
    if slow == "rum":
        cell = RumOptions(**shared, **{"eta": 1.0, **rum})
    elif slow == "rum-gated":
        cell = GatedOptions(zoneout=zoneout, training=training, **{"head_size": 3, "rotated_units": 6, **rum})
    else:
        cell = lstm if slow == "lstm" else turning
    if fast == "rotational_lstm":
        lstm = turning
    if slow_zoneout is not None:
        cell = replace(cell, zoneout=slow_zoneout)
    drops = {"dropout": dropout, "slow_dropout": slow_dropout}
    return FastSlowOptions(fast=(lstm,) * k, slow=cell, training=training, **drops)


PENN = make_options(zoneout=0.1, dropout=0.35, training=True)  # near the Penn Treebank recipe
GRID = [
    make_options(slow=slow, k=k, layer_norm=norm, zoneout=zoneout, dropout=dropout, training=training)
    for slow, k, norm, (zoneout, dropout, training) in itertools.product(
        ("rum", "lstm"), (2, 3), (True, False), ((0.0, 0.0, True), (0.3, 0.35, True), (0.3, 0.35, False))
    )
]
GRID += [make_options(ln_order="authors"), make_options(update_gate=False, eta=None, activation="tanh")]
GRID += [make_options(slow=slow, dropout=0.35, slow_dropout=0.0, training=True) for slow in ("rum", "lstm")]
GRID += [make_options(slow=slow, zoneout=0.3, slow_zoneout=0.0, training=True) for slow in ("rum", "lstm")]
GRID += [make_options(slow_dropout=0.5, slow_zoneout=0.5, training=True)]


class Case:
    """Random inputs of a scan, as one flat list of tensors with names."""

    def __init__(
        self,
        T: int,
        B: int,
        H: int,
        S: int,
        options: FastSlowOptions,
        dtype: torch.dtype = torch.float32,
        masked: Sequence[int] = (),
    ):
        def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
            return (mean + std * torch.randn(shape, device=DEVICE)).to(dtype)

        self.options = options
        self.tensors: dict[str, Tensor] = {"xp": normal(T, B, options.fast[0].blocks * H)}
        self.tensors |= {"fast_h": normal(B, H), "fast_c": normal(B, H)}
        self.tensors["slow_h"] = normal(B, S)
        if isinstance(options.slow, LstmOptions):
            self.tensors["slow_c"] = normal(B, S)
        for number, cell in enumerate(options.cells):
            N, reads = (S, H) if number == 1 else (H, S if number == 2 else 0)
            blocks, norms = cell.blocks, cell.norms
            gates = 4 if isinstance(cell, LstmOptions) else 3 if isinstance(cell, GatedOptions) else cell.num_gates
            if reads:
                self.tensors[f"weight_ih{number}"] = normal(blocks * N, reads, std=reads**-0.5)
            self.tensors[f"weight_hh{number}"] = normal(gates * N, N, std=N**-0.5)
            if number:
                self.tensors[f"bias{number}"] = normal(blocks * N, std=0.5)
            if norms:
                self.tensors[f"ln_weight{number}"] = normal(norms * N, mean=1.0, std=0.2)
                self.tensors[f"ln_bias{number}"] = normal(norms * N, std=0.2)
        self.grads = [normal(T, B, H), *(torch.randn_like(v) for n, v in self.tensors.items() if n[4:] in ("_h", "_c"))]
        self.seed = torch.randint(2**31 - 1, (), device=DEVICE) if options.draws else None
        sizes = [S if number == 1 else H for number in range(len(options.cells))]
        self.masks = [
            torch.nn.functional.dropout(torch.ones(B, N, device=DEVICE), 0.4) if number in masked else None
            for number, N in enumerate(sizes)
        ]

    def inputs(self, x: dict[str, Tensor] | None = None) -> FastSlowInputs:
        x = self.tensors if x is None else x
        slow = tuple(x[name] for name in ("slow_h", "slow_c") if name in x)
        weights = [
            CellWeights(*(x.get(f"{name}{number}") for name in CellWeights._fields))
            for number in range(len(self.options.cells))
        ]
        return FastSlowInputs(x["xp"], (x["fast_h"], x["fast_c"]), slow, weights, self.seed, self.masks)

    def chain_inputs(self) -> ChainInputs:
        """The inputs as the chain of kernels takes them."""
        xp, fast, slow, weights, seed, masks = self.inputs()
        return ChainInputs(xp, (*fast, *slow), weights, stream_seeds(seed, CELL_STREAMS * len(weights)), None, masks)

    def gradients(self, scan, dtype: torch.dtype) -> dict[str, Tensor]:
        """Results and gradients of ``scan`` computed in ``dtype``."""
        x = {name: v.detach().to(dtype).requires_grad_() for name, v in self.tensors.items()}
        out, fast, slow = scan(self.inputs(x), self.options)
        results = [out, *fast, *slow]
        grads = torch.autograd.grad(results, list(x.values()), [g.to(dtype) for g in self.grads])
        found = {f"result{number}": part.detach() for number, part in enumerate(results)}
        return {**found, **{f"d{name}": grad for name, grad in zip(x, grads, strict=True)}}


def check(
    T: int,
    B: int,
    H: int,
    S: int,
    options: FastSlowOptions,
    dtype: torch.dtype = torch.float32,
    error: float = 0.0,
    masked: Sequence[int] = (),
) -> None:
    case = Case(T, B, H, S, options, dtype, masked)
    wanted = case.gradients(fast_slow_scan_reference, torch.float64)
    assert_close(case.gradients(fast_slow_scan_fused, dtype), wanted, error or NORM_ERROR[dtype])


def smooth(options: FastSlowOptions) -> FastSlowOptions:
    """With tanh for relu: rounding to a 16-bit dtype sends some of relu's units to its other side, see below."""
    if isinstance(options.slow, RumOptions):
        return replace(options, slow=replace(options.slow, activation="tanh"))
    return options


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20)
    torch.set_float32_matmul_precision("highest")


# ---- the reference


@pytest.mark.parametrize("slow", ["rum", "lstm", "rotational_lstm", "rum-gated"])
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("training", [False, True])
def test_reference_is_the_cell_step_by_step(slow, k, training):
    """With all randomness off: in training without zoneout, in evaluation with its expectation."""
    T, B, H, S = 3, 2, 5, 4
    p = 0.0 if training else 0.2
    words = {"eta": 0.7} if slow == "rum" else {}
    cell = fast_slow(
        3,
        H,
        slow_size=S,
        num_fast=k,
        slow=slow,
        zoneout=p,
        zoneout_cell=p,
        cell_dropout=p,
        dtype=torch.float64,
        **words,
    ).train(training)
    for parameter in cell.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(T, B, 3).double()
    state = cell.initial_state(B, device="cpu", dtype=torch.float64)
    expected, last = torch.zeros(T, B, H).double(), state
    for t in range(T):
        expected[t], last = cell(x[t], last)
    out, fast, slow_state = fast_slow_scan_reference(cell.scan_inputs(x, state), cell.scan_options())
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close((*fast, *slow_state), last, rtol=1e-11, atol=1e-11)


def test_reference_masks_are_those_of_their_streams():
    """Dropout zeroes where its stream says, and zoneout keeps where its own does."""
    T, B, H, S = 2, 3, 20, 12
    options = make_options(zoneout=0.3, dropout=0.4, training=True)
    case = Case(T, B, H, S, options)
    out, fast, _ = fast_slow_scan_reference(case.inputs(), options)
    seeds = stream_seeds(case.seed, 3 * CELL_STREAMS)
    for t in range(T):
        assert torch.equal(out[t] == 0, ~keep_mask(seeds[8], t, B, H, 0.4))
    kept = keep_mask(seeds[8], T - 1, B, H, 0.4)
    torch.testing.assert_close(out[-1][kept], fast[0][kept] / 0.6)


def test_what_the_slow_cell_reads_has_a_dropout_of_its_own():
    T, B, H, S = 2, 3, 20, 12
    options = make_options(slow_dropout=1.0, training=True)
    case = Case(T, B, H, S, options)
    changed = {**case.tensors, "weight_ih1": 2 * case.tensors["weight_ih1"]}  # of what is all zeros
    assert torch.equal(*(fast_slow_scan_reference(case.inputs(x), options)[0] for x in (case.tensors, changed)))
    plain = replace(options, slow_dropout=0.0)
    outputs = [fast_slow_scan_reference(case.inputs(x), plain)[0] for x in (case.tensors, changed)]
    assert not torch.allclose(*outputs)


# ---- the kernels


@pytest.mark.parametrize("number", thinned(range(len(GRID)), 5))
def test_options_match_reference(number):
    check(2, 2, 9, 7, GRID[number])


@pytest.mark.parametrize(
    "T, B, H, S", thinned([(1, 1, 1, 2), (3, 1, 2, 1), (1, 3, 5, 70), (2, 2, 65, 3), (5, 1, 40, 33)], 2)
)
@pytest.mark.parametrize("slow", ["rum", "lstm"])
def test_shapes_match_reference(T, B, H, S, slow):
    check(T, B, H, S, make_options(slow=slow, zoneout=0.1, dropout=0.35, training=True))


@pytest.mark.parametrize("dtype", thinned([torch.bfloat16, torch.float16], 2), ids=str)
@pytest.mark.parametrize("options", thinned([PENN, make_options(slow="lstm")], 2), ids=["rum", "lstm"])
def test_16bit_dtypes_match_reference(dtype, options):
    check(3, 3, 48, 40, options, dtype)


@pytest.mark.parametrize(
    "slow, fast", [("rotational_lstm", "lstm"), ("rotational_lstm", "rotational_lstm"), ("rum", "rotational_lstm")]
)
@pytest.mark.parametrize("training", [False, True])
def test_rotational_cells_match_reference(slow, fast, training):
    check(3, 2, 9, 7, make_options(slow=slow, fast=fast, k=3, zoneout=0.2, dropout=0.3, training=training))


@pytest.mark.parametrize(
    "words",
    [{}, {"rotated_units": 0}, {"rotated_units": 7, "head_size": 8}, {"zoneout": 0.3}, {"slow_dropout": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("training", [False, True])
def test_a_slow_gated_rum_matches_reference(words, training):
    check(3, 2, 9, 7, make_options(slow="rum-gated", training=training, **{"dropout": 0.3, **words}))


def test_a_slow_gated_rum_of_several_programs_matches_reference():
    check(2, 2, 5, 300, make_options(slow="rum-gated", rotated_units=296, head_size=8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("slow", ["rum-gated", "rotational_lstm"])
def test_16bit_dtypes_of_further_slow_cells_match_reference(dtype, slow):
    words = {"rotated_units": 40, "head_size": 8} if slow == "rum-gated" else {}
    check(3, 3, 48, 40, make_options(slow=slow, zoneout=0.1, dropout=0.35, training=True, **words), dtype)


@pytest.mark.parametrize("masked", [(1,), (0, 1, 2, 3)])
@pytest.mark.parametrize("slow", ["rum", "lstm", "rotational_lstm", "rum-gated"])
def test_state_dropout_matches_reference(slow, masked):
    """The masks act on what the matmuls read, and on nothing else that needs h: zoneout, the rotation, its gate."""
    check(3, 2, 9, 7, make_options(slow=slow, k=3, zoneout=0.2, dropout=0.3, training=True), masked=masked)


class _RoundedMatmul(torch.autograd.Function):
    """``x @ weight.T`` and its backward with every operand rounded to ``dtype``, everything else as it is."""

    @staticmethod
    def forward(ctx, x, weight, dtype):
        x, weight = x.to(dtype).to(x.dtype), weight.to(dtype).to(x.dtype)
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.to(ctx.dtype).to(x.dtype)
        return grad @ weight, grad.T @ x, None


def largest_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(
        ((found[name].double() - want).norm() / want.norm().clamp_min(0.05)).item() for name, want in wanted.items()
    )


def check_rounding(monkeypatch, T: int, B: int, H: int, S: int, options: FastSlowOptions, dtype: torch.dtype) -> None:
    """The kernels err as the plain loop in float64 does once the operands of its matmuls are rounded.

    Sequences amplify a rounding, so no fixed bound holds for long ones; see the README of the scan. Four times: the
    kernels also round the outputs, the gates and the states that the backward reads, which makes 2.4 in bfloat16.
    """
    case = Case(T, B, H, S, options, dtype)
    wanted = case.gradients(fast_slow_scan_reference, torch.float64)
    found = case.gradients(fast_slow_scan_fused, dtype)
    with monkeypatch.context() as patch:

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            multiplied = _RoundedMatmul.apply(x, weight, dtype)
            return multiplied if bias is None else multiplied + bias

        patch.setattr(torch.nn.functional, "linear", linear)
        rounded = case.gradients(fast_slow_scan_reference, torch.float64)
    floor = largest_error(rounded, wanted)
    assert floor > 0
    assert largest_error(found, wanted) <= 4 * floor


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16bit_dtypes_err_as_rounded_operands_do(monkeypatch, dtype):
    check_rounding(monkeypatch, 10, 2, 16, 12, smooth(PENN), dtype)


def test_split_k_matches_reference(monkeypatch):
    monkeypatch.setattr(matmul, "SPLIT_K", {"forward": True, "backward": True})
    monkeypatch.setattr(matmul, "multiprocessors", lambda x: 12)  # few tiles: the interpreter is slow
    check(2, 3, 40, 70, PENN, torch.bfloat16)


def test_second_derivatives_go_through_the_reference():
    case = Case(2, 2, 4, 3, PENN)

    def penalty(scan, dtype) -> dict[str, Tensor]:
        x = {name: v.to(dtype).requires_grad_() for name, v in case.tensors.items()}
        out, fast, _ = scan(case.inputs(x), PENN)
        loss = out.square().sum() + fast[1].sum()
        first = torch.autograd.grad(loss, list(x.values()), create_graph=True)
        seconds = torch.autograd.grad(sum(g.square().sum() for g in first), list(x.values()))
        return dict(zip(x, seconds, strict=True))

    assert_close(penalty(fast_slow_scan_fused, torch.float32), penalty(fast_slow_scan_reference, torch.float64), 2e-4)


def test_buffers_forget_the_bias_of_another_model():
    inputs = Case(1, 2, 3, 4, PENN).chain_inputs()
    slow, weights = ForwardChain(fast_slow_plans(3, 4, PENN), inputs, graphed=False).cells[1], inputs.weights[1]
    slow.load(weights)
    assert torch.equal(slow.bias, weights.bias)
    slow.load(weights._replace(bias=None))
    assert not slow.bias.any()


@pytest.mark.parametrize("T, B", [(0, 2), (3, 0)])
def test_empty_input(T, B):
    case = Case(T, B, 5, 4, PENN)
    found = case.gradients(fast_slow_scan_fused, torch.float32)
    assert found["result0"].shape == (T, B, 5)
    assert torch.equal(found["result1"], case.tensors["fast_h"])
    assert all(value.count_nonzero() == 0 for name, value in found.items() if name.startswith("dweight"))


@pytest.mark.parametrize("slow", ["rum", "lstm", "rotational_lstm", "rum-gated"])
def test_steps_through_the_table_match_direct_ones(slow):
    """Graphs replay in chunks that read the step and the addresses from the table; here without a graph."""
    options = make_options(slow=slow, k=3, zoneout=0.2, dropout=0.3, training=True)
    T, B, H, S = 5, 2, 6, 7
    case = Case(T, B, H, S, options, masked=(0, 1))
    wanted = case.gradients(fast_slow_scan_reference, torch.float64)
    plans, inputs = fast_slow_plans(H, S, options, (True, True, False, False)), case.chain_inputs()
    _, _, saved = chain_forward(plans, inputs)  # for the shapes
    for parts in saved:
        for part in parts:
            if part is not None:
                part.fill_(float("nan"))
    out, dgates = torch.empty(T, B, H, device=DEVICE), [torch.empty_like(cell.gates) for cell in saved]

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
    backward.begin(inputs, saved, case.grads, dgates)
    run(backward)
    dstates, norms = backward.finish()
    found = {"result0": out, "result2": forward.states[1], "dxp": dgates[0], "dfast_h": dstates[0]}
    found |= {"dfast_c": dstates[1], "dslow_h": dstates[2]}
    for number, norm in enumerate(norms):
        if norm is None:
            continue
        found |= {f"dln_weight{number}": norm[0], f"dln_bias{number}": norm[1]}
    assert_close(found, {name: wanted[name] for name in found}, NORM_ERROR[torch.float32])


# ---- the choice


@pytest.mark.skipif(DEVICE == "cuda", reason="the choice on a machine without a GPU")
def test_choice_says_why():
    choice = fast_slow_scan_choice(torch.empty(2, 2, 12), 4, PENN)
    assert choice.backend == "torch"
    assert "cpu" in choice.reason
    with pytest.raises(ValueError, match="the input is on cpu"):
        fast_slow_scan_choice(torch.empty(2, 2, 12), 4, PENN, backend="fused")


@pytest.mark.parametrize(
    "words, message",
    [
        ({"lam": 1.0}, "lam is 1.0"),
        ({"activation": torch.relu}, "activation"),
        ({"target_activation": "tanh"}, "target_activation"),
    ],
)
def test_obstacles_of_the_slow_cell(words, message):
    x = torch.empty(2, 2, 12, device=DEVICE)
    assert message in kernel_obstacle(x, 4, make_options(**words))


def test_obstacles():
    x = torch.empty(2, 2, 12, device=DEVICE)
    assert kernel_obstacle(x, 4, PENN) is None
    assert "float64" in kernel_obstacle(x.double(), 4, PENN)
    assert "8193" in kernel_obstacle(x, 8193, PENN)


def test_wrong_number_of_cells_is_refused():
    case = Case(1, 1, 2, 2, PENN)
    inputs = case.inputs()
    with pytest.raises(ValueError, match="2 cells of weights and 2 fast cells"):
        fast_slow_scan(inputs._replace(weights=inputs.weights[:2]), PENN)


# ---- the cell


@pytest.mark.parametrize(
    "slow, num_fast", [*thinned([("rum", 2), ("rum", 3), ("lstm", 2)], 2), ("rum-gated", 2), ("rotational_lstm", 2)]
)
def test_cell_takes_the_kernels_where_they_can_run(monkeypatch, slow, num_fast):
    monkeypatch.setattr(fast_slow_scan_module, "fused_obstacle", kernel_obstacle)  # which lets the interpreter run
    words = {"slow_size": 7, "slow": slow, "num_fast": num_fast, "zoneout": 0.1, "cell_dropout": 0.3, "device": DEVICE}
    cell, exact = fast_slow(4, 6, **words).eval(), fast_slow(4, 6, **words, backend="reference").double().eval()
    exact.load_state_dict(cell.state_dict())
    x = torch.randn(3, 2, 4, device=DEVICE)
    assert cell.explain_backend(x).backend == "fused"
    for part, dtype in ((cell, torch.float32), (exact, torch.float64)):
        out, last = part.scan(x.to(dtype), part.initial_state(2, device=DEVICE, dtype=dtype))
        (out.square().sum() + last[1].sum() + last[2].square().sum()).backward()
    found = {name: parameter.grad for name, parameter in cell.named_parameters()}
    assert_close(
        found, {name: parameter.grad for name, parameter in exact.named_parameters()}, NORM_ERROR[torch.float32]
    )


def test_cell_in_training_draws_anew(monkeypatch):
    monkeypatch.setattr(fast_slow_scan_module, "fused_obstacle", kernel_obstacle)
    cell = fast_slow(4, 30, slow="rum", cell_dropout=0.4, device=DEVICE)
    x, state = torch.randn(1, 2, 4, device=DEVICE), cell.initial_state(2, device=DEVICE, dtype=torch.float32)
    one, other = (cell.scan(x, state)[0] for _ in range(2))
    assert not torch.equal(one == 0, other == 0)


@pytest.mark.parametrize("slow", ["rum", "lstm", "rotational_lstm", "rum-gated"])
def test_cell_gives_its_masks_of_state_dropout_to_the_kernels(monkeypatch, slow):
    monkeypatch.setattr(fast_slow_scan_module, "fused_obstacle", kernel_obstacle)
    cell = fast_slow(4, 9, slow_size=7, slow=slow, num_fast=3, state_dropout=0.4, device=DEVICE)
    x, state = torch.randn(3, 2, 4, device=DEVICE), cell.initial_state(2, device=DEVICE, dtype=torch.float32)
    outputs = []
    for backend in ("fused", "reference"):
        cell.backend = backend
        torch.manual_seed(6)
        outputs.append(cell.scan(x, state)[0])
    torch.testing.assert_close(*outputs, **DEEP[torch.float32])
    assert not torch.allclose(cell.scan(x, state)[0], outputs[1])


def test_cell_without_bias_on_eps_and_without_any(monkeypatch):
    monkeypatch.setattr(fast_slow_scan_module, "fused_obstacle", kernel_obstacle)
    for words in ({"bias": False}, {"embed_bias": False}):
        slow = RUMCell(5, 4, form="paper", **words, device=DEVICE)
        cell = FastSlowCell([LSTMCell(3, 5, device=DEVICE), LSTMCell(4, 5, device=DEVICE)], slow)
        x, state = torch.randn(3, 2, 3, device=DEVICE), cell.initial_state(2, device=DEVICE, dtype=torch.float32)
        out, _ = cell.scan(x, state)
        cell.backend = "reference"
        torch.testing.assert_close(out, cell.scan(x, state)[0])


@pytest.mark.slow
def test_cell_can_be_compiled_around_checkpointed_and_differentiated_by_func(monkeypatch):
    monkeypatch.setattr(fast_slow_scan_module, "fused_obstacle", kernel_obstacle)
    cell = fast_slow(3, 6, slow="rum", zoneout=0.3, cell_dropout=0.3, device=DEVICE)
    x, state = torch.randn(2, 2, 3, device=DEVICE), cell.initial_state(2, device=DEVICE, dtype=torch.float32)
    assert_composes(cell, x, state)


def test_cell_explains_its_backend():
    x, lengths = torch.zeros(2, 1, 3), torch.tensor([2])
    cell = fast_slow(3, 4)
    assert cell.explain_backend(x) == ("torch", "fused cannot run: the input is on cpu")
    assert "lengths" in cell.explain_backend(x, lengths).reason
    gru = FastSlowCell([GRUCell(3, 4), GRUCell(4, 4)], LSTMCell(4, 4))
    assert "not all LSTMs" in gru.explain_backend(x).reason
    slow = FastSlowCell([LSTMCell(3, 4), LSTMCell(4, 4)], GRUCell(4, 4))
    assert "slow cell is a GRUCell" in slow.explain_backend(x).reason
    learnt = FastSlowCell([LSTMCell(3, 4), LSTMCell(4, 4)], RUMCell(4, 4, learn_lam=True))
    assert "learnable" in learnt.explain_backend(x).reason
    state = cell.initial_state(1, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="lengths"):
        fast_slow(3, 4, backend="fused").scan(x, state, lengths)


# ---- on the GPU: compiled kernels, own graphs and captures


gpu = pytest.mark.gpu


@pytest.fixture
def never_captured(monkeypatch):
    """Leave out the kernels for a capture around the scan, half of what there is to compile."""
    monkeypatch.setattr(Chain, "warm_up", lambda scan: [launch() for launch in scan.launches(0)])
    clear_graphs()
    yield
    clear_graphs()


@gpu
@pytest.mark.parametrize("number", range(len(GRID)))
def test_gpu_options(number):
    check(7, 5, 72, 40, GRID[number])


@gpu
@pytest.mark.usefixtures("never_captured")
@pytest.mark.parametrize("number", range(24))
def test_gpu_options_in_16bit_dtypes(number):
    check(7, 5, 72, 40, smooth(GRID[number]), (torch.bfloat16, torch.float16)[number // 2 % 2])


@gpu
@pytest.mark.usefixtures("never_captured")
def test_gpu_relu_in_bfloat16():
    """Of relu's arguments about 4e-4 change sign when its operands are rounded to 8 bits, and their slopes are lost or
    gained whole: sqrt(2 * 4e-4) = 3e-2 of the gradient, in any implementation (tanh is checked at 2e-2)."""
    check(5, 128, 700, 1000, PENN, torch.bfloat16, error=6e-2)


@gpu
@pytest.mark.usefixtures("never_captured")
@pytest.mark.parametrize("options", [PENN, smooth(PENN)], ids=["relu", "tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_long_sequences_err_as_rounded_operands_do(monkeypatch, dtype, options):
    check_rounding(monkeypatch, 150, 16, 72, 104, options, dtype)


@gpu
@pytest.mark.parametrize(
    "T, B, H, S",
    [(1, 1, 2, 1), (9, 1, 3, 2), (6, 3, 65, 130), (130, 3, 33, 20), (20, 128, 256, 320), (5, 128, 700, 1000)],
)
def test_gpu_shapes(T, B, H, S):
    check(T, B, H, S, PENN)
    if min(H, S) > 32:
        check(T, B, H, S, smooth(PENN), torch.bfloat16)


@gpu
@pytest.mark.parametrize("split", [False, True])
def test_gpu_split_k(monkeypatch, split):
    monkeypatch.setattr(matmul, "SPLIT_K", {"forward": split, "backward": split})
    check(5, 128, 200, 300, smooth(PENN), torch.bfloat16)


@gpu
def test_gpu_outer_capture_gives_the_same():
    case = Case(20, 4, 96, 80, PENN)
    plans, inputs = fast_slow_plans(96, 80, PENN), case.chain_inputs()
    xp = inputs.xp

    def both(T: int = 20) -> list[Tensor]:
        given = inputs._replace(xp=xp[:T])
        out, _, saved = chain_forward(plans, given)
        grads = chain_backward(plans, given, saved, [case.grads[0][:T], *case.grads[1:]])
        return [out, grads[0], *grads[1], *(part for cell in grads[2] for part in cell if part is not None)]

    wanted = [part.clone() for part in both()]
    graph, found = capture(both, warm_up=lambda: both(2))
    xp.mul_(2.0)
    graph.replay()
    xp.div_(2.0)
    graph.replay()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **DEEP[torch.float32])


@gpu
def test_gpu_cell_takes_the_kernels():
    """From the layer's cell down, with every parameter's gradient, against the plain loop in float64."""
    words = {"slow_size": 80, "slow": "rum", "eta": 1.0, "device": "cuda"}
    cell = fast_slow(12, 96, **words).eval()
    exact = fast_slow(12, 96, **words, backend="reference").double().eval()
    exact.load_state_dict(cell.state_dict())
    x = torch.randn(20, 4, 12, device="cuda")
    clear_graphs()
    for part, dtype in ((cell, torch.float32), (exact, torch.float64)):
        state = part.initial_state(4, device="cuda", dtype=dtype)
        out, last = part.scan(x.to(dtype), state)
        (out.square().sum() + last[1].sum()).backward()
    assert cell.explain_backend(x).backend == "fused"
    found = {name: parameter.grad for name, parameter in cell.named_parameters()}
    assert_close(found, {name: parameter.grad for name, parameter in exact.named_parameters()}, 1e-4)
