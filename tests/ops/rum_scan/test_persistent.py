"""The persistent lam=0 kernels: their CUDA source runs on the CPU in an emulator, and on the GPU where there is one."""

import ctypes
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from emulation import compile_cpp
from grids import thinned
from oracle import (
    assert_bias_is_added,
    assert_copies_are_the_results,
    assert_plain_calls_match,
    draw_inputs,
    exact_scan,
    plain_calls_by,
    relative_error,
    run_design,
)
from sharing import shared_folder
from tolerances import NORM_ERROR, TF32_ERROR
from torchrum import RUM
from torchrum.ops.kernels.cuda import Fill
from torchrum.ops.kernels.linear import recurrent_weight_gradient
from torchrum.ops.rum_scan import RumOptions, ScanInputs, designs, persistent, plain
from torchrum.ops.rum_scan.types import NO_COPIES, Residuals, Results, ScanFromZero

EMULATOR = Path(__file__).with_name("persistent_emulator.h")
BF16, FP32 = NORM_ERROR[torch.bfloat16], NORM_ERROR[torch.float32]
PRECISIONS = {  # the dtype, how float32 is multiplied, and the error
    "bfloat16": (torch.bfloat16, "highest", BF16),
    "float16": (torch.float16, "highest", BF16),  # here the mailboxes hold 16-bit numbers, whatever their format
    "float32": (torch.float32, "highest", FP32),
    "tf32": (torch.float32, "high", TF32_ERROR),
}
SHARED_MEMORY = 227 * 1024  # of a block


class Emulator:
    """Stands in for the GPU: compiles the kernel's source as C++ and runs every thread as a coroutine."""

    def __init__(self, folder: Path, blocks: int, mailboxes: Tensor | None = None) -> None:
        self.folder, self.count, self.kept = folder, blocks, mailboxes

    def blocks(self, device: torch.device) -> int:
        return self.count

    def kernel(self, name: str, plan: persistent.Plan, device: torch.device) -> "EmulatedKernel":
        stem = self.folder / "_".join([name, *(str(value) for _, value in plan.macros(name))])
        struct_name = f"{name.capitalize()}Args"
        entry = (
            f"static const {struct_name}* given;\nstatic void kernel() {{ rum_persistent_{name}(*given); }}\n"
            f'extern "C" int run(int grid, long shared, const {struct_name}* args) {{'
            " given = args; return emulator::run(grid, shared, kernel); }"
        )
        source = f'#include "{EMULATOR}"\n{persistent.kernel_source(name, plan)}\n{entry}\n'
        return EmulatedKernel(compile_cpp(stem.with_suffix(".so"), source, plan.macros(name)))

    def mailboxes(self, xp: Tensor, words: int) -> Tensor | None:
        return self.kept


class EmulatedKernel:
    """Stands in for ``nvrtc.Kernel``."""

    def __init__(self, library: Path) -> None:
        self._run = ctypes.CDLL(str(library)).run

    def launch(
        self,
        blocks: int,
        threads: int,
        shared_bytes: int,
        args: list[bytes],
        *,
        cooperative: bool,
        fills: Sequence[Fill],
    ) -> None:
        assert cooperative and threads == persistent.THREADS
        for address, word, count in fills:
            ctypes.memmove(address, struct.pack("I", word) * count, 4 * count)
        (structure,) = args
        code = self._run(blocks, ctypes.c_long(shared_bytes), ctypes.create_string_buffer(structure, len(structure)))
        assert code == 0, "the blocks wait for each other"


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    return shared_folder(tmp_path_factory, "persistent")


Emulate = Callable[..., None]


@pytest.fixture
def emulate(builds: Path, monkeypatch: pytest.MonkeyPatch) -> Emulate:
    """Runs the kernels in the emulator, on so many blocks and with the mailboxes that are given."""
    return lambda *words: monkeypatch.setattr(persistent, "machine", Emulator(builds, *words))


@pytest.fixture(autouse=True)
def exact_matmuls() -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


def draw(T: int, B: int, N: int, options: RumOptions, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(T * 1000 + B * 100 + N)
    make = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    tensors = {
        "xp": make(T, B, options.num_inputs * N),
        "h0": make(B, N) * 0.5,
        "weight_hh": make(options.num_gates * N, N) / N**0.5,
        "grad_out": make(T, B, N),
    }
    return {name: x.to(dtype).to(device) for name, x in tensors.items()}


def scan(given: dict[str, Tensor], lengths: Tensor | None, seed: Tensor) -> ScanInputs:
    return ScanInputs(given["xp"], given["h0"], None, given["weight_hh"], lengths=lengths, seed=seed)


def fused(given: dict[str, Tensor], lengths: Tensor | None, seed: Tensor, options: RumOptions) -> dict[str, Tensor]:
    return run_design(persistent, scan(given, lengths, seed), options, given["grad_out"])


def assert_close(
    given: dict[str, Tensor], lengths: Tensor | None, options: RumOptions, device: str = "cpu", most: float = BF16
) -> None:
    seed = torch.tensor(1234567, device=device)
    ours, exact = (
        fused(given, lengths, seed, options),
        exact_scan(scan(given, lengths, seed), options, given["grad_out"]),
    )
    errors = {name: relative_error(ours[name], exact[name]) for name in exact}
    assert all(e <= most for e in errors.values()), errors


CASES = {
    "plain": (3, 8, 64, RumOptions(), None),
    "eta": (3, 8, 64, RumOptions(eta=1.0), None),
    "odd": (3, 5, 35, RumOptions(eta=1.0, activation="tanh"), None),
    "two row blocks": (2, 13, 64, RumOptions(eta=2.0, activation="softsign"), None),
    "three row blocks": (2, 20, 50, RumOptions(eta=1.0), None),
    "four row blocks": (2, 30, 64, RumOptions(eta=1.0), None),
    "two tiles after another": (2, 40, 64, RumOptions(eta=1.0), None),
    "no gate": (3, 6, 100, RumOptions(eta=1.0, update_gate=False), None),
    "no gate, sigmoid": (3, 6, 100, RumOptions(update_gate=False, activation="sigmoid"), None),
    "lengths": (4, 6, 40, RumOptions(eta=1.0), [4, 1, 0, 3, 2, 4]),
    "zoneout": (3, 7, 64, RumOptions(zoneout=0.3, training=True), None),
    "zoneout, eta, lengths": (4, 6, 64, RumOptions(eta=1.0, zoneout=0.3, training=True), [4, 1, 2, 3, 4, 4]),
    "zoneout's mean": (3, 6, 64, RumOptions(eta=1.0, zoneout=0.3, activation="tanh"), None),
}


EMULATED = [
    *((case, "bfloat16") for case in CASES),
    *((case, "float32") for case in CASES),
    *((case, "tf32") for case in ("eta", "odd", "three row blocks", "no gate")),
]


@pytest.mark.parametrize(("case", "precision"), thinned(EMULATED, 7))
def test_emulated_kernels_match_float64(case: str, precision: str, emulate: Emulate) -> None:
    T, B, N, options, lengths = CASES[case]
    dtype, matmuls, most = PRECISIONS[precision]
    torch.set_float32_matmul_precision(matmuls)
    few = {"two row blocks", "three row blocks", "four row blocks", "two tiles after another"}
    emulate(2 if case in few else 4)
    given = draw(T, B, N, options, dtype)
    assert_close(given, None if lengths is None else torch.tensor(lengths), options, most=most)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_emulated_weights_in_shared_memory(precision: str, builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "RESIDENT", {"forward": 1, "backward": 1})
    monkeypatch.setattr(persistent, "WIDE_RESIDENT", {"forward": (1,) * 4, "backward": (1,) * 4})
    folder = builds / f"few resident, {precision}"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(persistent, "machine", Emulator(folder, 4))
    options, (dtype, _, most) = RumOptions(eta=1.0), PRECISIONS[precision]
    assert_close(draw(2, 4, 128, options, dtype), None, options, most=most)


@pytest.mark.parametrize("precision", thinned(["bfloat16", "float32"], 2))
def test_emulated_wide_group(precision: str, emulate: Emulate) -> None:
    """Eighteen blocks: the gathered state comes in two stages, and a warpgroup reads the boards in two passes."""
    emulate(18)
    options, (dtype, _, most) = RumOptions(eta=1.0, activation="tanh"), PRECISIONS[precision]
    assert_close(draw(2, 8, 576, options, dtype), None, options, most=most)


def test_emulated_single_block(emulate: Emulate) -> None:
    """The fewest units: a group of one block, which float32 has and 16-bit dtypes pad to two."""
    emulate(4)
    options = RumOptions(eta=1.0)
    assert_close(draw(3, 9, 32, options, torch.float32), None, options, most=FP32)


@pytest.mark.parametrize("options", [RumOptions(activation="tanh"), RumOptions(eta=1.0, activation="tanh")], ids=str)
def test_emulated_nearly_opposite_vectors(options: RumOptions, emulate: Emulate) -> None:
    """Row 1 has tau at an angle of about 0.03 from -eps, where 1 + cos has lost five digits; row 2 at 0.3."""
    emulate(4)
    given = draw(3, 4, 64, options, torch.float32)
    given["weight_hh"][:64] *= 1e-3
    for row, angle in ((1, 0.03), (2, 0.3)):
        given["xp"][:, row, :64] = angle * given["xp"][:, row, :64] - given["xp"][:, row, 128:]
    assert_close(given, None, options, most=FP32)


def test_emulated_tanh_of_small_numbers(emulate: Emulate) -> None:
    """Where everything is small, the activation's digits count from its own size."""
    emulate(4)
    options = RumOptions(activation="tanh", update_gate=False)
    given = draw(2, 3, 64, options, torch.float32)
    given["xp"] *= 1e-5
    given["h0"] *= 1e-5
    assert_close(given, None, options, most=FP32)


def test_emulated_float16(emulate: Emulate) -> None:
    emulate(4)
    options = RumOptions(eta=1.0, activation="tanh")
    assert_close(draw(2, 4, 64, options, torch.float16), None, options)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_emulated_degenerate_rotations(precision: str, emulate: Emulate) -> None:
    """Row 0 has eps = 0, row 1 tau = 0, row 2 tau opposite to eps: no turn, no turn, half turn."""
    emulate(4)
    options, (dtype, _, most) = RumOptions(activation="tanh"), PRECISIONS[precision]
    given = draw(2, 3, 64, options, dtype)
    given["weight_hh"][:64] = 0  # tau is its input alone
    given["xp"][:, 0, 128:] = 0
    given["xp"][:, 1, :64] = 0
    given["xp"][:, 2, :64] = -2 * given["xp"][:, 2, 128:]
    assert_close(given, None, options, most=most)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_emulated_kernels_read_no_state_as_zeros(dtype: torch.dtype, emulate: Emulate) -> None:
    """Also where eps and tau are opposite, as in row 2; and a forward that saves nothing writes the same states."""
    emulate(4)
    options = RumOptions(activation="tanh")
    given = draw(2, 3, 64, options, dtype)
    given["xp"][:, 2, :64] = -2 * given["xp"][:, 2, 128:]
    given["h0"].zero_()
    inputs = scan(given, None, torch.tensor(1))
    from_zero = ScanFromZero(*inputs)._replace(h0=inputs.h0.to("meta"))
    wanted, found = (run_design(persistent, part, options, given["grad_out"]) for part in (inputs, from_zero))
    assert "dh0" in wanted and "dh0" not in found
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    unsaved = persistent.forward(from_zero, options, save=False)
    assert unsaved.residuals == Residuals()
    assert torch.equal(unsaved.out, wanted["out"])


@pytest.mark.parametrize(
    ("case", "precision"), [("odd", "bfloat16"), ("two tiles after another", "float32"), ("plain", "float32")]
)
def test_emulated_kernels_leave_mail_as_they_found_it(case: str, precision: str, emulate: Emulate) -> None:
    """The emulator stops at a word that is written twice; nearly opposite vectors use the last of the boxes."""
    (T, B, N, options, _), seed = CASES[case], torch.tensor(1)
    given = draw(T, B, N, options, PRECISIONS[precision][0])
    given["xp"][:, 1, :N] = 0.03 * given["xp"][:, 1, :N] - given["xp"][:, 1, -N:]
    blocks = 4 if case == "plain" else 2
    emulate(blocks)
    wanted = fused(given, None, seed, options)
    mailboxes = torch.full((2**18,), -1, dtype=torch.int32)
    emulate(blocks, mailboxes)
    for _ in range(2):
        found = fused(given, None, seed, options)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert (mailboxes == -1).all()


@pytest.mark.parametrize("precision", ["bfloat16", "float32", "tf32"])
def test_emulated_nan_stays_in_its_row(precision: str, emulate: Emulate) -> None:
    """NaN is no empty mailbox: the blocks go on, the row shows it and the others do not."""
    emulate(4)
    options, (dtype, matmuls, _) = RumOptions(eta=1.0), PRECISIONS[precision]
    torch.set_float32_matmul_precision(matmuls)
    given = draw(2, 3, 64, options, dtype)
    given["xp"][1, 1, 5] = float("nan")
    if dtype == torch.float32:
        given["h0"].view(torch.int32)[1, 3] = -1  # a NaN of the very bits that mean "not yet"
    found = fused(given, None, torch.tensor(1), options)
    assert found["out"][1, 1].isnan().all()
    assert found["dxp"][:, 1].isnan().any()
    for row in (0, 2):
        assert found["out"][:, row].isfinite().all()
        assert found["dxp"][:, row].isfinite().all()


def test_emulated_zero_state_stays_zero(emulate: Emulate) -> None:
    """Nothing to normalise: eta leaves a zero state and gives it no gradient."""
    emulate(4)
    options = RumOptions(eta=1.0)
    given = draw(2, 3, 64, options, torch.bfloat16)
    given["xp"][0, 1, 128:] = -given["xp"][0, 1, 128:].abs()  # relu closes every unit
    given["h0"][1] = 0
    found = fused(given, None, torch.tensor(1), options)
    exact = exact_scan(scan(given, None, torch.tensor(1)), options, given["grad_out"])
    assert (found["out"][0, 1] == 0).all()
    assert relative_error(found["dxp"], exact["dxp"]) <= BF16
    assert relative_error(found["dh0"], exact["dh0"]) <= BF16


def test_obstacle_says_why() -> None:
    def why(xp: Tensor, options: RumOptions) -> str:
        return str(persistent.shape_obstacle(ScanInputs.shaped_like(xp, options), options))

    xp = torch.zeros(2, 3, 3 * 64, dtype=torch.bfloat16)
    assert persistent.obstacle(ScanInputs.shaped_like(xp, RumOptions()), RumOptions()) == "the input is on cpu"
    assert why(xp, RumOptions()) == why(xp.float(), RumOptions()) == "None"
    assert "float64" in why(xp.double(), RumOptions())
    assert "layer norm" in why(xp, RumOptions(layer_norm=True))
    assert "lam=0" in why(xp, RumOptions(lam=1.0))
    assert "not 2000" in why(torch.zeros(1, 1, 6000).bfloat16(), RumOptions())
    assert "512 hidden units of torch.float32, not 513" in why(torch.zeros(1, 1, 3 * 513), RumOptions())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_order_in_memory_does_not_matter(dtype: torch.dtype, emulate: Emulate) -> None:
    """vmap and transposed inputs bring tensors whose batch lies before their time."""
    emulate(4)
    options, seed = RumOptions(eta=1.0), torch.tensor(1)
    given = draw(3, 8, 64, options, dtype)
    wanted = fused(given, None, seed, options)

    def turned(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    inputs = ScanInputs(turned(given["xp"]), given["h0"], None, turned(given["weight_hh"]), seed=seed)
    out, _, kept = persistent.forward(inputs, options)
    results = Results(turned(out), None, Residuals(*map(turned, kept)))
    grads = persistent.backward(turned(given["grad_out"]), None, inputs, results, options, False)
    found = {"out": out, "dxp": grads.xp, "dh0": grads.h0, "dweight_hh": grads.weight_hh}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_the_kernels_cannot_read_is_copied(dtype: torch.dtype) -> None:
    kept = torch.randn(4, 6).to(dtype)
    given = [kept, kept[2:], kept.t(), kept.flatten()[1:], kept.double()]
    found = persistent._readable(dtype, *given)
    assert [x is y for x, y in zip(given, found, strict=True)] == [True, True, False, False, False]
    for x, y in zip(given, found, strict=True):
        assert y.dtype is dtype and y.is_contiguous() and y.data_ptr() % (2 * dtype.itemsize) == 0
        assert torch.equal(y, x.to(dtype))


@pytest.mark.parametrize("by_kernels", ["nothing", "bias", "projection"])
@pytest.mark.parametrize("start", ["given", "zeros"])
def test_a_plain_call_of_a_layer(
    start: str, by_kernels: str, monkeypatch: pytest.MonkeyPatch, emulate: Emulate
) -> None:
    """Projection, kernels and the gradients of all weights in one node; without gradients the same states."""
    emulate(4)
    monkeypatch.setattr(plain, "adds_bias_separately", lambda *_: by_kernels != "nothing")
    monkeypatch.setattr(plain, "kernel_projects", lambda *_: by_kernels == "projection")
    layer, x, hx = (
        RUM(7, 40, form="paper", eta=None),
        torch.randn(5, 3, 7),
        torch.randn(1, 3, 40) if start == "given" else None,
    )
    with plain_calls_by(persistent):
        output = layer(x, hx)[0]
        assert output.grad_fn is not None and "PlainScan" in output.grad_fn.name()
        assert_plain_calls_match(layer, x, hx, FP32)


@pytest.mark.parametrize("case", ["odd", "no gate", "zoneout, eta, lengths"])
def test_the_kernels_add_a_bias(case: str, emulate: Emulate) -> None:
    """Also where eps and tau are opposite with it, as in the last row."""
    T, B, N, options, lengths = CASES[case]
    emulate(4)
    given, seed = draw(T, B, N, options, torch.float32), torch.tensor(1)
    bias = torch.randn(options.num_inputs * N)
    given["weight_hh"][:N] = 0
    given["xp"][:, -1, :N] = -2 * (given["xp"][:, -1, -N:] + bias[-N:]) - bias[:N]
    inputs = scan(given, None if lengths is None else torch.tensor(lengths), seed)
    assert_bias_is_added(persistent, inputs, bias, options)


@pytest.mark.parametrize(
    ("case", "blocks"), [("odd", 4), ("no gate", 4), ("two tiles after another", 2), ("three row blocks", 6)]
)
def test_the_forward_projects_an_input(case: str, blocks: int, emulate: Emulate) -> None:
    """Of more features than lanes share, and not contiguous; opposite eps and tau read what other blocks projected."""
    (T, B, N, options, _), seed = CASES[case], torch.tensor(1)
    emulate(blocks)
    given = draw(T, B, N, options, torch.float32)
    x, weight = torch.randn(B, T, 9).transpose(0, 1), torch.randn(options.num_inputs * N, 9)
    weight[:N] = -2 * weight[-N:]
    given["weight_hh"][:N] = 0
    wanted = torch.nn.functional.linear(x.double(), weight.double())
    given["xp"] = torch.full_like(given["xp"], torch.nan)
    bias = torch.zeros(options.num_inputs * N)
    inputs = scan(given, None, seed)
    found = persistent.forward(inputs, options, True, NO_COPIES, bias, x, weight)
    torch.testing.assert_close(inputs.xp.double(), wanted, rtol=1e-5, atol=1e-5)
    again = persistent.forward(inputs, options)
    assert torch.equal(found.out, again.out) and torch.equal(found.residuals.kept, again.residuals.kept)
    assert (found.residuals.kept[..., 2] <= 1e-8).all()  # |eps/|eps| + tau/|tau||^2: half turns


BIASED = [
    ("odd", 4, 1, torch.bfloat16),
    ("odd", 4, 1, torch.float32),
    ("no gate", 4, 1, torch.float32),
    ("no gate", 4, 1, torch.bfloat16),
    ("two tiles after another", 2, 1, torch.float32),
    ("two tiles after another", 2, 1, torch.bfloat16),
    ("three row blocks", 6, 3, torch.bfloat16),
    ("three row blocks", 6, 3, torch.float32),
]


@pytest.mark.parametrize(("case", "blocks", "groups", "dtype"), thinned(BIASED, 2), ids=str)
def test_the_backward_sums_the_gradient_of_the_bias(
    case: str, blocks: int, groups: int, dtype: torch.dtype, emulate: Emulate
) -> None:
    """Over rows, steps, tiles and groups of blocks, and leaves the mailboxes of all of them empty."""
    (T, B, N, options, _), seed = CASES[case], torch.tensor(1)
    mailboxes = torch.full((2**18,), -1, dtype=torch.int32)
    emulate(blocks, mailboxes)
    given = draw(T, B, N, options, dtype)
    inputs = scan(given, torch.tensor([T, 1, *[T - 1] * (B - 2)]) if case == "odd" else None, seed)
    plan = persistent.find_plan(inputs, options)
    assert plan.sums_bias and plan.groups == groups
    results = persistent.forward(inputs, options)
    found, again = (
        persistent.backward(given["grad_out"], None, inputs, results, options, False, None, True) for _ in range(2)
    )
    assert found.bias.dtype is dtype
    assert relative_error(found.bias, found.xp.double().sum((0, 1))) <= PRECISIONS[str(dtype)[6:]][2]
    assert torch.equal(found.bias, again.bias)
    assert (mailboxes == -1).all()
    assert persistent.backward(given["grad_out"], None, inputs, results, options, False).bias is None


def test_wide_weights_leave_no_registers_for_the_gradient_of_the_bias(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(persistent, "machine", Emulator(tmp_path, 132))

    def sums(N: int, dtype: torch.dtype) -> bool:
        return persistent.find_plan(draw_inputs(1, 8, N, RumOptions(), dtype), RumOptions()).sums_bias

    assert sums(128, torch.float32) and sums(320, torch.float32) and sums(512, torch.bfloat16)
    assert not sums(352, torch.float32) and not sums(640, torch.bfloat16)


def test_a_batched_backward_knows_the_bias_that_the_kernels_added(
    monkeypatch: pytest.MonkeyPatch, emulate: Emulate
) -> None:
    emulate(4)
    monkeypatch.setattr(plain, "adds_bias_separately", lambda *_: True)
    layer, x, grads = RUM(7, 40, form="paper", eta=None), torch.randn(5, 3, 7), torch.randn(2, 5, 3, 40)
    weights = list(layer.parameters())
    with plain_calls_by(persistent):
        output = layer(x)[0]
        found = torch.autograd.grad(output, weights, grads, retain_graph=True, is_grads_batched=True)
        wanted = [torch.autograd.grad(output, weights, grad, retain_graph=True) for grad in grads]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*wanted, strict=True))), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [RumOptions(eta=1.0, activation="tanh"), RumOptions()], ids=["eta", "no eta"])
def test_copies_are_the_results(options: RumOptions, emulate: Emulate) -> None:
    """With eta a state is known one step later; an odd number of units is stored one by one."""
    emulate(4)
    assert_copies_are_the_results(persistent, draw_inputs(5, 3, 33, options), options)


def test_gradients_of_each_sample_through_the_persistent_kernels(
    monkeypatch: pytest.MonkeyPatch, emulate: Emulate
) -> None:
    """vmap folds unbatched samples into the batch: a batch of one, whose order in memory is not the kernels'."""
    emulate(4)
    monkeypatch.setattr(persistent, "obstacle", lambda *_: None)
    layer = RUM(7, 40, form="paper", eta=None, backend="fused")
    reference = RUM(7, 40, form="paper", eta=None, backend="reference")
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, 7)

    def of_each_sample(layer: RUM) -> dict[str, Tensor]:
        weights = {name: weight.detach() for name, weight in layer.named_parameters()}

        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(layer, weights, (x,))[0].square().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 1))(weights, x)

    found, wanted = of_each_sample(layer), of_each_sample(reference)
    assert all(relative_error(found[name], wanted[name].double()) <= FP32 for name in wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("update_gate", [True, False])
def test_every_plan_fits_shared_memory(dtype: torch.dtype, update_gate: bool) -> None:
    options = RumOptions(update_gate=update_gate)
    for N in range(persistent.MIN_HIDDEN, persistent.MAX_HIDDEN[dtype] + 1):
        for B in (1, 32, 64, 96, 128, 160, 192, 224, 256, 2048):
            plan = persistent.make_plan(B, N, dtype, options, False, 132, False)
            for name in ("forward", "backward"):
                assert plan.shared_bytes(name, options.num_gates) <= SHARED_MEMORY, (plan, name)


def test_a_symbolic_batch_has_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a program that is compiled or exported for any batch."""
    monkeypatch.setattr(persistent, "machine", Emulator(tmp_path, 132))
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    xp = mode.from_tensor(
        torch.zeros(3, 40, 3 * 64), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 3)
    )
    assert not isinstance(xp.shape[1], int)
    with mode:
        inputs = ScanInputs(xp, xp.new_empty(xp.shape[1], 64), None, torch.zeros(128, 64))
        found = persistent.find_plan(inputs, RumOptions())
    assert found == persistent.find_plan(draw_inputs(3, 40, 64, RumOptions()), RumOptions())


@pytest.mark.parametrize("T", [1, 3])
def test_autocast_does_not_round_the_weight_gradient(T: int) -> None:
    given = draw(T, 4, 40, RumOptions(), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = recurrent_weight_gradient(given["xp"], 80, given["h0"], given["grad_out"])
    before = torch.cat([given["h0"][None], given["grad_out"][:-1]]).double()
    assert relative_error(found, torch.einsum("tbg,tbn->gn", given["xp"][..., :80].double(), before)) <= 1e-6


def test_precision_is_compiled_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(persistent, "machine", Emulator(tmp_path, 132))

    def defines(dtype: torch.dtype) -> tuple[int, int, int]:
        plan = persistent.find_plan(draw_inputs(1, 8, 64, RumOptions(), dtype), RumOptions())
        forward, backward = dict(plan.macros("forward")), dict(plan.macros("backward"))
        return forward["WIDE"], forward["TF32X3"], backward["TF32X3"]

    assert defines(torch.bfloat16) == (0, 0, 0)
    assert defines(torch.float32) == (1, 1, 1)
    torch.set_float32_matmul_precision("high")
    assert defines(torch.float32) == (1, 1, 0)
    assert defines(torch.float16) == (0, 0, 0)


# Over many steps rounding puts some units on the other side of the ReLU threshold, whose gradient is then off by all
# of it: a property of 16-bit dtypes, not of a kernel. The larger cases take a smooth activation.
SMOOTH = RumOptions(eta=1.0, activation="tanh")
HALF_CASES = {
    "256": (20, 128, 256, SMOOTH, None),
    "250": (20, 128, 250, SMOOTH, None),
    "512": (20, 128, 512, SMOOTH, None),
    "704": (20, 128, 704, SMOOTH, None),
    "1000": (20, 128, 1000, SMOOTH, None),
    "1024": (20, 128, 1024, SMOOTH, None),
    "1023, no gate": (5, 77, 1023, replace(SMOOTH, update_gate=False), None),
    "1024, two passes": (5, 200, 1024, replace(SMOOTH, eta=None), None),
    "700, zoneout": (9, 100, 700, replace(SMOOTH, zoneout=0.2, training=True), None),
    "one row": (1, 1, 33, SMOOTH, None),
}
FLOAT32_CASES = {
    "32": (7, 5, 32, SMOOTH, None),
    "33, one row": (9, 1, 33, SMOOTH, None),
    "one step": (1, 1, 50, SMOOTH, None),
    "50": (20, 200, 50, replace(SMOOTH, activation="softsign"), None),
    "100, no gate": (20, 128, 100, replace(SMOOTH, update_gate=False), None),
    "250": (20, 128, 250, SMOOTH, None),
    "250, two row blocks": (20, 200, 250, replace(SMOOTH, activation="sigmoid", eta=None), None),
    "256": (20, 128, 256, SMOOTH, None),
    "256, three row blocks": (5, 300, 256, replace(SMOOTH, update_gate=False), None),
    "250, zoneout, lengths": (4, 6, 250, replace(SMOOTH, zoneout=0.2, training=True), [4, 1, 0, 3, 2, 4]),
    "500": (20, 128, 500, SMOOTH, None),
    "500, four row blocks": (5, 200, 500, replace(SMOOTH, zoneout=0.2), None),
    "512": (20, 128, 512, SMOOTH, None),
    "511, no gate": (9, 5, 511, replace(SMOOTH, eta=None, update_gate=False), None),
    "512, four row blocks": (5, 256, 512, SMOOTH, None),
    "512, two passes": (3, 300, 512, SMOOTH, None),
}
GPU_RUNS = [
    *((case, "bfloat16") for case in (*CASES, *HALF_CASES)),
    *((case, "float16") for case in ("256", "704")),
    *((case, precision) for case in (*CASES, *FLOAT32_CASES) for precision in ("float32", "tf32")),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("case", "precision"), GPU_RUNS)
def test_kernels_match_float64(case: str, precision: str) -> None:
    dtype, matmuls, most = PRECISIONS[precision]
    wider = FLOAT32_CASES if dtype == torch.float32 else HALF_CASES
    T, B, N, options, lengths = {**CASES, **wider}[case]
    torch.set_float32_matmul_precision(matmuls)
    given = draw(T, B, N, options, dtype, "cuda")
    rows = None if lengths is None else torch.tensor(lengths, device="cuda")
    inputs = scan(given, rows, torch.tensor(0, device="cuda"))
    assert persistent.shape_obstacle(inputs, options) is None
    assert_close(given, rows, options, "cuda", most)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("eta", [None, 1.0])
def test_float32_near_opposite_vectors(eta: float | None) -> None:
    """Angles from -eps of 1 to 0.01, rows without a direction and half turns, in one batch."""
    options = RumOptions(eta=eta, activation="tanh")
    given = draw(10, 32, 96, options, torch.float32, "cuda")
    given["weight_hh"][:96] = 0  # tau is its input alone
    angles = torch.logspace(0, -2, 24, device="cuda")[:, None]
    given["xp"][:, :24, :96] = angles * given["xp"][:, :24, :96] - given["xp"][:, :24, 192:]
    given["xp"][:, 25, 192:] = 0
    given["xp"][:, 26, :96] = 0
    given["xp"][:, 27, :96] = -2 * given["xp"][:, 27, 192:]
    assert_close(given, None, options, "cuda", FP32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("half_turns", [False, True])
@pytest.mark.parametrize(("T", "B", "features"), [(1, 1, 64), (3, 5, 35), (16, 16, 4), (1, 60, 17)])
def test_a_small_input_is_projected_in_the_launch(T: int, B: int, features: int, half_turns: bool) -> None:
    """A half turn reads all of eps, also where another block has projected it."""
    torch.manual_seed(0)
    layer = RUM(features, 50, form="paper", activation="tanh", device="cuda")
    if half_turns:
        with torch.no_grad():
            layer.weight_hh_l0[:50] = 0
            layer.weight_ih_l0[:50] = -2 * layer.weight_ih_l0[100:]
            layer.bias_ih_l0[:50] = -2 * layer.bias_ih_l0[100:]
    x = torch.randn(T, B, features, device="cuda")
    exact = RUM(features, 50, form="paper", activation="tanh", backend="reference", dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    wanted = exact(x.cpu().double())[0].detach()
    layer(x)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        found = layer(x)[0]
    assert not [event.name for event in profiler.events() if event.name in ("aten::linear", "aten::mm", "aten::addmm")]
    assert relative_error(found.cpu(), wanted) <= FP32
    assert torch.equal(layer(x)[0], found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_float32_takes_the_persistent_kernels() -> None:
    def taken(B: int, N: int, backend: str = "auto") -> str:
        inputs = ScanInputs.shaped_like(torch.zeros(3, B, 3 * N, device="cuda"), RumOptions())
        return designs.choose_design(inputs, RumOptions(), backend)[0].name

    assert taken(128, 250) == "persistent"
    assert taken(128, 250, "stepwise") == "stepwise"
    assert taken(128, 513) == taken(100_000, 250) == "stepwise"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["bfloat16", "float32", "tf32"])
def test_runs_agree_to_the_bit(precision: str) -> None:
    """The order of every sum is fixed, so a difference between two runs is a race."""
    options = RumOptions(eta=1.0)
    dtype, matmuls, _ = PRECISIONS[precision]
    torch.set_float32_matmul_precision(matmuls)
    given = draw(50, 128, 512, options, dtype, "cuda")
    seed = torch.tensor(1, device="cuda")
    first = fused(given, None, seed, options)
    for _ in range(5):
        again = fused(given, None, seed, options)
        assert all(torch.equal(first[name], again[name]) for name in first)
