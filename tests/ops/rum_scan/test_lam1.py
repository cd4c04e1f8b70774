"""The lam = 1 kernels against the reference in float64: on the CPU through an emulator, on the GPU as they are."""

import ctypes
import hashlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
from tolerances import NORM_ERROR
from torchrum import RUM
from torchrum.ops.kernels import cuda
from torchrum.ops.kernels.cuda import Argument, load_kernel, pack
from torchrum.ops.rotation import rotation_matrix
from torchrum.ops.rum_scan import RumOptions, ScanInputs, lam1
from torchrum.ops.rum_scan.op import make_flags

EMULATOR = Path(__file__).parent / "lam1_emulator.cpp"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is built with g++")


class EmulatedKernel:
    """Stands in for ``cuda.Kernel``: the same source as plain C++, one fiber for each CUDA thread."""

    def __init__(self, library: Path) -> None:
        self._emulate = ctypes.CDLL(str(library)).emulate

    def launch(self, blocks: int, threads: int, shared_bytes: int, args: Sequence[Argument]) -> None:
        packed = pack(args)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        given = [arg.clone() for arg in tensors]  # some are read and written over
        for backwards in (0, 1):  # both schedules must write the same; the second one's results stay
            for arg, before in zip(tensors, given, strict=True):
                arg.copy_(before)
            assert self._emulate(blocks, threads, shared_bytes, packed.addresses, backwards) == 0, (
                "threads wait for ever"
            )
            written = [arg.clone() for arg in tensors]
            if backwards == 0:
                first = written
        for a, b in zip(first, written, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        packed.give_back()


@pytest.fixture(scope="session")
def emulated_loader(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EmulatedKernel]:
    @cache
    def load(source: str, name: str, macros: tuple[tuple[str, int], ...], device: int) -> EmulatedKernel:
        stem = "_".join([name, *(str(value) for _, value in macros)])
        library = shared_folder(tmp_path_factory, "lam1 emulated") / f"{stem}.so"
        whole = EMULATOR.read_text().replace('#include "kernel.cu"', source)
        return EmulatedKernel(compile_cpp(library, whole, macros, f"-DKERNEL={name}"))

    return load


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, emulated_loader: Callable[..., EmulatedKernel]) -> None:
    monkeypatch.setattr(lam1, "load_kernel", emulated_loader)
    monkeypatch.setattr(lam1, "CHECKPOINT_EVERY", 3)
    monkeypatch.setattr(lam1, "GATE_BLOCKS", 3)  # so that a block has several rows


@dataclass
class Case:
    N: int
    B: int = 2
    T: int = 7
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    lengths: list[int] | None = None
    with_r0: bool = True
    with_grad_r: bool = True
    edit: Callable[[Tensor, int], None] | None = None  # changes xp (T, B, G*N) in place

    def __str__(self) -> str:
        options = "-".join(f"{key}={value}" for key, value in self.options.items())
        return f"N{self.N}-B{self.B}-T{self.T}-{str(self.dtype)[6:]}-{options}"

    def rum_options(self) -> RumOptions:
        return RumOptions(lam=1.0, **self.options)


Drawn = tuple[ScanInputs, Tensor, Tensor | None]


def draw(case: Case, seed: int = 0) -> Drawn:
    """Inputs and the gradients of both results, on the CPU, exactly representable in the case's dtype."""
    options, gen = case.rum_options(), torch.Generator().manual_seed(seed)
    N, B = case.N, case.B

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=gen) * scale).to(case.dtype)

    xp = normal(case.T, B, options.num_inputs * N)
    if case.edit is not None:
        case.edit(xp, N)
    ln = options.num_inputs * N if options.layer_norm else 0
    R0 = torch.linalg.qr(torch.randn(B, N, N, generator=gen))[0]  # the kernel pulls R back to orthogonality
    inputs = ScanInputs(
        xp,
        normal(B, N),
        R0 if case.with_r0 else None,
        normal(options.num_gates * N, N, scale=N**-0.5),
        1 + normal(ln, scale=0.2) if ln else None,
        normal(ln, scale=0.2) if ln else None,
        None if case.lengths is None else torch.tensor(case.lengths),
        torch.tensor(1234),
    )
    return inputs, normal(case.T, B, N), torch.randn(B, N, N, generator=gen) if case.with_grad_r else None


def fused(case: Case, given: Drawn, device: str) -> dict[str, Tensor]:
    inputs, grad_out, grad_R = on_device(given, device)
    return run_design(lam1, inputs, case.rum_options(), grad_out, grad_R)


def on_device(given: Drawn, device: str) -> Drawn:
    inputs, *grads = given
    moved, (grad_out, grad_R) = ([None if x is None else x.to(device) for x in part] for part in (inputs, grads))
    return ScanInputs(*moved), grad_out, grad_R


def moved_by_a_rounding(given: Drawn, seed: int) -> Drawn:
    """Inputs in float64, each off by up to half a unit in the last place of float32."""
    gen = torch.Generator().manual_seed(seed)

    def move(x: Tensor | None) -> Tensor | None:
        if x is None or not x.is_floating_point():
            return x
        return x.double() * (1 + 2**-24 * (2 * torch.rand(x.shape, generator=gen, dtype=torch.float64) - 1))

    inputs, grad_out, grad_R = given
    return ScanInputs(*map(move, inputs)), move(grad_out), move(grad_R)


def assert_matches(case: Case, device: str = "cpu") -> None:
    """Each tensor's relative error is within its dtype's tolerance, or within ten times of what float32 can keep there.

    Some draws are badly conditioned: near opposite vectors gradients grow as 1/|u + w|, and layer norm divides by the
    spread of its row, which two units or gates near saturation may leave without any. There no float32 computation
    has five digits. What it can keep is taken from the reference: the largest of its own error in float32 and of the
    changes, in float64, when each input moves by one rounding. One sample alone can be lucky by a factor of ten.
    """
    given, options = draw(case), case.rum_options()

    def reference(given: Drawn, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        inputs, grad_out, grad_R = given
        return exact_scan(inputs, options, grad_out, grad_R, dtype)

    exact, found = reference(given), fused(case, given, device)
    samples = [reference(given, torch.float32), *(reference(moved_by_a_rounding(given, seed)) for seed in range(3))]
    floor = 0.01 * float(given[1].double().norm())  # what cancels to less than this has lost its digits
    assert found.keys() == exact.keys()
    for name, want in exact.items():
        assert found[name].shape == want.shape, name
        error = relative_error(found[name].cpu(), want, floor)
        allowed = max(NORM_ERROR[case.dtype], *(10 * relative_error(sample[name], want, floor) for sample in samples))
        assert error <= allowed, f"{name}: relative error {error:.2e} over {allowed:.0e}"


def zero_eps(xp: Tensor, N: int) -> None:
    xp[1, :, -N:] = 0
    xp[4, 0, -N:] = 0


LN = {"layer_norm": True}
EMULATED = [
    Case(5, options={}),
    Case(1, B=1, T=1),
    Case(2, B=3, T=13, options={"eta": 1.0}),  # has nearly opposite vectors
    Case(6, T=4, options={"update_gate": False, "activation": "tanh"}, lengths=[2, 0]),
    Case(20, options={"eta": 1.5, "zoneout": 0.3, "training": True, "activation": "softsign"}, lengths=[4, 7]),
    Case(9, options={**LN, "activation": "sigmoid", "zoneout": 0.2}, with_r0=False, with_grad_r=False),
    Case(9, options={**LN, "ln_order": "authors", "eta": 1.0}, lengths=[6, 3]),
    Case(9, options={**LN, "update_gate": False}, edit=zero_eps),
    Case(66, B=1, T=5, options={"eta": 1.0}),
    Case(10, dtype=torch.bfloat16, T=5, options={"activation": "tanh"}),  # rounding flips signs of ReLU units
    Case(10, dtype=torch.float16, T=5, options={"activation": "tanh"}),
]


@needs_compiler
@pytest.mark.parametrize("case", thinned(EMULATED, 3), ids=str)
@pytest.mark.usefixtures("emulated")
def test_emulated_kernel_matches_reference(case: Case) -> None:
    assert_matches(case)


def gates_case(device: str, case: Case) -> None:
    """The recomputed raw gates are what the formula says, row by row, and what else stands in grad_xp is left alone."""
    options = case.rum_options()
    xp, h0, _, weight, *_ = draw(case)[0]
    out = torch.randn(case.T, case.B, case.N).to(case.dtype)
    G = options.num_gates * case.N
    start = h0.float() + 1e-3  # which is not representable in half precision, and enters rounded
    states = torch.cat((start.to(case.dtype).unsqueeze(0), out[:-1])).double()
    want = xp[..., :G].double() + states @ weight.double().mT
    grad_xp = torch.full_like(xp, 7.0)
    read, *others = (x.to(device) for x in (xp, start, weight.float(), out, grad_xp))
    got = lam1._gates(read, None, *others, options).cpu()
    assert got.dtype == torch.float32
    assert (got[..., :G].double() - want).norm() <= 3e-7 * want.norm()
    assert torch.equal(got[..., G:], torch.full_like(got[..., G:], 7.0))


GATE_CASES = [
    Case(1, B=1, T=1),
    Case(5, B=3, T=7),
    Case(20, B=2, T=4, options={"update_gate": False}),
    Case(70, B=1, T=5, dtype=torch.bfloat16),
    Case(33, B=2, T=3, dtype=torch.float16),
]


@needs_compiler
@pytest.mark.parametrize("case", thinned(GATE_CASES, 2), ids=str)
@pytest.mark.usefixtures("emulated")
def test_emulated_gates(case: Case) -> None:
    gates_case("cpu", case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*GATE_CASES, Case(100, B=64, T=50), Case(128, B=9, T=77)], ids=str)
def test_gates_on_the_gpu(case: Case) -> None:
    gates_case("cuda", case)


@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_forward_keeps_no_gates() -> None:
    inputs = ScanInputs(torch.randn(5, 2, 15), torch.randn(2, 5), None, torch.randn(10, 5))
    options = RumOptions(lam=1.0)
    found, empty = lam1.forward(inputs, options), lam1.empty_results(inputs, options)
    assert (found.out.shape, found.R.shape) == (empty.out.shape, empty.R.shape)
    assert found.residuals.kept.shape == empty.residuals.kept.shape
    assert found.residuals.gates is empty.residuals.gates is None
    assert lam1.forward(inputs, options, save=False).residuals.kept is None


@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("T", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_returns_what_a_compiler_is_told_of(T: int, dtype: torch.dtype) -> None:
    """With two steps there is no checkpoint of R, and the design leaves it out."""
    options = RumOptions(lam=1.0)
    inputs = draw_inputs(T, 2, 5, options, dtype)
    with plain_calls_by(lam1):
        found = torch.ops.torchrum.rum_scan(*inputs, *make_flags(options, "lam1"), True)
    out, R, (_, kept) = lam1.empty_results(inputs, options)
    told = (out, R, inputs.xp.new_empty(0), kept)
    assert [(part.shape, part.dtype) for part in found] == [(part.shape, part.dtype) for part in told]
    assert (lam1.forward(inputs, options).residuals.kept is None) == (T == 2)


@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("with_state", [False, True])
def test_a_plain_call_of_a_layer(with_state: bool) -> None:
    """Projection, kernels and the gradients of all weights in one node; without gradients the same states."""
    layer, x = RUM(3, 9, lam=1, eta=1.0, activation="tanh"), torch.randn(5, 2, 3)
    rotation = torch.linalg.qr(torch.randn(1, 2, 9, 9)).Q
    hx = (torch.randn(1, 2, 9), rotation) if with_state else None
    with plain_calls_by(lam1):
        assert "PlainScan" in layer(x, hx)[0].grad_fn.name()
        assert_plain_calls_match(layer, x, hx, NORM_ERROR[torch.float32])


@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("layer_norm", [False, True])
def test_the_kernels_add_a_bias(layer_norm: bool) -> None:
    """All four of them: the gradient of R0 takes the replay."""
    options = RumOptions(lam=1.0, activation="tanh", layer_norm=layer_norm)
    inputs = draw_inputs(4, 3, 9, options)
    inputs = inputs._replace(R0=torch.linalg.qr(torch.randn(3, 9, 9)).Q)
    assert_bias_is_added(lam1, inputs, torch.randn(27), options)


@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_copies_are_the_results() -> None:
    options = RumOptions(lam=1.0, eta=1.0, activation="tanh")
    assert_copies_are_the_results(lam1, draw_inputs(5, 3, 9, options), options)


def rotation_case(device: str) -> None:
    """Without recurrent weights tau can be zero, equal or opposite to eps; the oracle is the dense matrix."""
    T, B, N = 6, 2, 6
    gen = torch.Generator().manual_seed(3)
    xp = torch.randn(T, B, 2 * N, generator=gen)
    xp[1, :, :N] = 0  # tau = 0
    xp[2, :, N:] = 0  # eps = 0
    xp[3, :, :N] = -2 * xp[3, :, N:]  # half turn
    xp[4, :, :N] = 3 * xp[4, :, N:]  # no turn, smoothly
    h0, grad_out = torch.randn(B, N, generator=gen), torch.randn(T, B, N, generator=gen)
    grad_R = torch.randn(B, N, N, generator=gen)
    options = RumOptions(lam=1.0, activation="tanh", update_gate=False)
    given = [x.to(device) for x in (xp, h0, torch.eye(N).expand(B, N, N).contiguous(), torch.zeros(N, N))]
    results = lam1.forward(ScanInputs(*given), options)
    out, R_n, _ = results
    grads = lam1.backward(grad_out.to(device), grad_R.to(device), ScanInputs(*given), results, options, True)

    leaf, start = xp.double().requires_grad_(), h0.double().requires_grad_()
    h, R, states = start, torch.eye(N, dtype=torch.float64).expand(B, N, N), []
    for x in leaf:
        tau, eps = x[:, :N], x[:, N:]
        R = R @ rotation_matrix(eps, tau)
        h = torch.tanh(eps + (R @ h.unsqueeze(-1)).squeeze(-1))
        states.append(h)
    loss = (torch.stack(states) * grad_out.double()).sum() + (R * grad_R.double()).sum()
    loss.backward()
    torch.testing.assert_close(out.cpu(), torch.stack(states).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(R_n.cpu(), R.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[0].cpu(), leaf.grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads[1].cpu(), start.grad.float(), rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_emulated_degenerate_rotations() -> None:
    rotation_case("cpu")


@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_no_rows_and_no_steps() -> None:
    options = RumOptions(lam=1.0)
    for T, B in ((3, 0), (0, 2)):
        inputs = ScanInputs(torch.zeros(T, B, 12), torch.ones(B, 4), None, torch.zeros(8, 4))
        results = lam1.forward(inputs, options)
        assert results.out.shape == (T, B, 4)
        assert results.R.shape == (B, 4, 4)
        grads = lam1.backward(torch.zeros(T, B, 4), None, inputs, results, options, False)
        assert grads.xp.shape == (T, B, 12)
        assert grads.weight_hh.shape == (8, 4)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"lam": 0.5}, "lam is 0.5"),
        ({"dtype": torch.float64}, "float64"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
        ({"hidden": 129}, "up to 128"),
    ],
)
def test_obstacle_names_the_reason(given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RumOptions(lam=given.get("lam", 1.0), activation=given.get("activation", "relu"))
    xp = torch.zeros(2, 3, 3 * given.get("hidden", 8), dtype=given.get("dtype", torch.float32))
    inputs = ScanInputs.shaped_like(xp, options)
    assert lam1.obstacle(inputs, options) == "the input is on cpu"
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    assert words in str(lam1.obstacle(inputs, options))


SIZES = [1, 2, 3, 31, 50, 64, 65, 96, 100, 127, 128]
SIZE_CASES = [
    Case(N, B=B, T=T, options=options)
    for N in SIZES
    for B, T, options in ((1, 1, LN), (3, 13, {"eta": 1.0}), (5, 16, LN))
] + [
    # not fewer units: of three, opposite directions are common, and a state of eight bits leaves 3e-2 of error there
    Case(N, B=3, T=13, dtype=dtype, options={**LN, "activation": "tanh"})
    for N in (9, 65, 100)
    for dtype in (torch.bfloat16, torch.float16)
]
OPTION_CASES = [
    Case(
        10, B=3, T=17, options={"eta": eta, "update_gate": gate, "activation": act, **norm, **zone}, lengths=[17, 4, 0]
    )
    for eta, gate, act, norm, zone in itertools.product(
        (None, 1.3),
        (True, False),
        ("relu", "tanh", "sigmoid", "softsign"),
        ({}, LN, {**LN, "ln_order": "authors"}),
        ({}, {"zoneout": 0.3, "training": True}, {"zoneout": 0.3}),
    )
]


@dataclass
class CubinFolder:
    """Compiled kernels that xdist's workers share, so that each is compiled by one of them."""

    path: Path
    compile: Callable[..., bytes]

    def cubin(self, *key: Any) -> bytes:
        """What ``cuda.compile_source`` returns for these arguments."""
        file = self._file(key)
        if not file.exists():
            part = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            part.write_bytes(self.compile(*key))
            part.replace(file)  # whole or not there
        return file.read_bytes()

    def compile_ahead(self, *key: Any) -> None:
        """Compile the kernel, unless a worker has begun to."""
        with suppress(FileExistsError):
            self._file(key).with_suffix(".begun").touch(exist_ok=False)
            self.cubin(*key)

    def _file(self, key: tuple[Any, ...]) -> Path:
        return self.path / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.cubin"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every kernel of the two lists above, compiled side by side: one after the other they take minutes."""
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(0))
    folder = CubinFolder(shared_folder(tmp_path_factory, "lam1"), cuda.compile_source)
    wanted = {
        (lam1._source(kind), f"lam1_{kind}", layout.macros, architecture, ()): None  # in order, unlike a set
        for case in SIZE_CASES + OPTION_CASES
        for kind in ("forward", "gates", "backward", "replay")
        for layout in [lam1._make_layout(kind, case.N, case.dtype, case.rum_options(), lam1.rows_per_thread(case.N), 8)]
    }
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(16) as pool:
        patch.setattr(cuda, "compile_source", folder.cubin)
        list(pool.map(lambda key: folder.compile_ahead(*key), wanted))
        yield


def test_workers_share_what_is_compiled(tmp_path: Path) -> None:
    compiled_by: list[str] = []

    def worker(name: str) -> CubinFolder:
        return CubinFolder(tmp_path, lambda *key: compiled_by.append(f"{name}{key[0]}") or bytes(key))

    one, other = worker("a"), worker("b")
    one.compile_ahead(1, 2)
    other.compile_ahead(1, 2)
    assert other.cubin(1, 2) == bytes((1, 2))
    assert compiled_by == ["a1"]
    (tmp_path / other._file((3,))).with_suffix(".begun").touch()  # begun elsewhere, and wanted before it is there
    assert other.cubin(3) == bytes((3,))
    assert compiled_by == ["a1", "b3"]


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lam1, "CHECKPOINT_EVERY", 8)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled", "short_segments")
@pytest.mark.parametrize("case", SIZE_CASES + OPTION_CASES, ids=str)
def test_kernel_matches_reference(case: Case) -> None:
    assert_matches(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("N", [50, 100, 128])
def test_every_tiling_gives_the_same(N: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lam1, "rows_per_thread", lambda hidden: rows)
    assert_matches(Case(N, B=2, T=9, options={**LN, "eta": 1.0}), "cuda")


@pytest.mark.gpu
def test_degenerate_rotations_on_the_gpu() -> None:
    rotation_case("cuda")


@pytest.mark.gpu
def test_long_sequence_crosses_checkpoints() -> None:
    assert_matches(Case(100, B=4, T=300, options={"eta": 1.0}, with_r0=False), "cuda")


@pytest.mark.gpu
def test_memory_stays_orthogonal() -> None:
    N, options = 50, RumOptions(lam=1.0, eta=1.0)
    gen = torch.Generator("cuda").manual_seed(0)
    xp = torch.randn(10_000, 4, 3 * N, device="cuda", generator=gen)
    weight = torch.randn(2 * N, N, device="cuda", generator=gen) * N**-0.5
    inputs = ScanInputs(xp, xp.new_zeros(4, N), None, weight)
    R_n = lam1.forward(inputs, options, save=False).R
    assert (R_n @ R_n.mT - torch.eye(N, device="cuda")).abs().max() <= 1e-5


@pytest.mark.gpu
def test_backward_is_deterministic_and_graph_capture_agrees() -> None:
    case = Case(50, B=7, T=20, options={"eta": 1.0}, with_r0=False)
    given = draw(case)
    first = fused(case, given, "cuda")
    again = fused(case, given, "cuda")
    graph = torch.cuda.CUDAGraph()
    inputs, grad_out, grad_R = on_device(given, "cuda")
    with torch.cuda.graph(graph):
        captured = run_design(lam1, inputs, case.rum_options(), grad_out, grad_R)
    graph.replay()
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        torch.testing.assert_close(value, captured[name], rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_kernels_are_compiled_once() -> None:
    case = Case(12, B=2, T=3)
    fused(case, draw(case), "cuda")
    before = load_kernel.cache_info().misses
    for B, T in ((5, 4), (1, 9)):
        other = Case(12, B=B, T=T)
        fused(other, draw(other), "cuda")
    assert load_kernel.cache_info().misses == before
