"""The lam = 1 kernels against the reference in float64: on the CPU through an emulator, on the GPU as they are."""

import ctypes
import hashlib
import itertools
import os
import shutil
import subprocess
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

from grids import thinned
from torchrum.ops.rotation import rotation_matrix
from torchrum.ops.rum_scan import fused as fused_backend
from torchrum.ops.rum_scan.fused import lam1, nvrtc
from torchrum.ops.rum_scan.fused.nvrtc import Argument, load_kernel, pack
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.reference import rum_scan_reference

REL_ERROR = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # |x - ref| / |ref| of each tensor
EMULATOR = Path(__file__).parent / "lam1_emulator.cpp"
NAMES = ("out", "R_n", "grad_xp", "grad_h0", "grad_R0", "grad_weight_hh", "grad_ln_weight", "grad_ln_bias")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is built with g++")


class EmulatedKernel:
    """Stands in for ``nvrtc.Kernel``: the same source as plain C++, one fiber for each CUDA thread."""

    def __init__(self, library: Path) -> None:
        self._emulate = ctypes.CDLL(str(library)).emulate

    def launch(self, blocks: int, threads: int, shared_bytes: int, args: Sequence[Argument]) -> None:
        values, pointers = pack(args)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        given = [arg.clone() for arg in tensors]  # some are read and written over
        for backwards in (0, 1):  # both schedules must write the same; the second one's results stay
            for arg, before in zip(tensors, given, strict=True):
                arg.copy_(before)
            assert self._emulate(blocks, threads, shared_bytes, pointers, backwards) == 0, "threads wait for ever"
            written = [arg.clone() for arg in tensors]
            if backwards == 0:
                first = written
        for a, b in zip(first, written, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        del values


@pytest.fixture(scope="session")
def emulated_loader(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EmulatedKernel]:
    @cache
    def load(source: str, name: str, macros: tuple[tuple[str, int], ...], device: int) -> EmulatedKernel:
        folder = tmp_path_factory.mktemp(name)
        (folder / "kernel.cu").write_text(source)
        command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{folder}", f"-DKERNEL={name}"]
        command += [f"-D{key}={value}" for key, value in macros]
        subprocess.run([*command, str(EMULATOR), "-o", str(folder / "kernel.so")], check=True)
        return EmulatedKernel(folder / "kernel.so")

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


def draw(case: Case, seed: int = 0) -> dict[str, Tensor | None]:
    """Inputs and the gradients of the outputs, on the CPU, exactly representable in the case's dtype."""
    options, gen = case.rum_options(), torch.Generator().manual_seed(seed)
    N, B = case.N, case.B

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=gen) * scale).to(case.dtype)

    xp = normal(case.T, B, options.num_inputs * N)
    if case.edit is not None:
        case.edit(xp, N)
    ln = options.num_inputs * N if options.layer_norm else 0
    R0 = torch.linalg.qr(torch.randn(B, N, N, generator=gen))[0]  # the kernel pulls R back to orthogonality
    return {
        "xp": xp,
        "h0": normal(B, N),
        "R0": R0 if case.with_r0 else None,
        "weight_hh": normal(options.num_gates * N, N, scale=N**-0.5),
        "ln_weight": 1 + normal(ln, scale=0.2) if ln else None,
        "ln_bias": normal(ln, scale=0.2) if ln else None,
        "grad_out": normal(case.T, B, N),
        "grad_R_n": torch.randn(B, N, N, generator=gen) if case.with_grad_r else None,
    }


def reference(case: Case, given: dict[str, Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    leaves = {k: None if x is None else x.to(dtype, copy=True).requires_grad_() for k, x in given.items()}
    lengths = None if case.lengths is None else torch.tensor(case.lengths)
    inputs = [leaves[k] for k in ("xp", "h0", "R0", "weight_hh", "ln_weight", "ln_bias")]
    out, R_n = rum_scan_reference(*inputs, lengths, torch.tensor(1234), case.rum_options())
    loss = (out * given["grad_out"].to(dtype)).sum()
    if given["grad_R_n"] is not None:
        loss = loss + (R_n * given["grad_R_n"].to(dtype)).sum()
    loss.backward()
    return [out.detach(), R_n.detach(), *(None if x is None else x.grad for x in inputs)]


def fused(case: Case, given: dict[str, Tensor | None], device: str) -> list[Tensor | None]:
    given = {k: None if x is None else x.to(device) for k, x in given.items()}
    lengths = None if case.lengths is None else torch.tensor(case.lengths, device=device)
    inputs = [given[k] for k in ("xp", "h0", "R0", "weight_hh", "ln_weight", "ln_bias")]
    inputs += [lengths, torch.tensor(1234, device=device)]
    options = case.rum_options()
    out, R_n, ckpt = lam1.lam1_forward(*inputs, options)
    grads = lam1.lam1_backward(given["grad_out"], given["grad_R_n"], *inputs, out, R_n, ckpt, options)
    return [out, R_n, *grads]


def moved_by_a_rounding(given: dict[str, Tensor | None], seed: int) -> dict[str, Tensor | None]:
    """Inputs in float64, each off by up to half a unit in the last place of float32."""
    gen = torch.Generator().manual_seed(seed)

    def move(x: Tensor) -> Tensor:
        return x.double() * (1 + 2**-24 * (2 * torch.rand(x.shape, generator=gen, dtype=torch.float64) - 1))

    return {name: None if x is None else move(x) for name, x in given.items()}


def assert_matches(case: Case, device: str = "cpu") -> None:
    """Each tensor's relative error is within its dtype's tolerance, or within ten times of what float32 can keep there.

    Some draws are badly conditioned: near opposite vectors gradients grow as 1/|u + w|, and layer norm divides by the
    spread of its row, which two units or gates near saturation may leave without any. There no float32 computation
    has five digits. What it can keep is taken from the reference: the largest of its own error in float32 and of the
    changes, in float64, when each input moves by one rounding. One sample alone can be lucky by a factor of ten.
    """
    given = draw(case)
    exact, found = reference(case, given, torch.float64), fused(case, given, device)
    samples = [reference(case, given, torch.float32)]
    samples += [reference(case, moved_by_a_rounding(given, seed), torch.float64) for seed in range(3)]
    floor = 0.01 * float(given["grad_out"].double().norm())  # what cancels to less than this has lost its digits
    for name, got, want, *others in zip(NAMES, found, exact, *samples, strict=True):
        if want is None:
            assert got is None, name
            continue
        assert got is not None, name
        assert got.shape == want.shape, name
        error, *unavoidable = (
            float((x.cpu().double() - want).norm() / want.norm().clamp(min=floor)) for x in (got, *others)
        )
        allowed = max(REL_ERROR[case.dtype], 10 * max(unavoidable))
        assert error <= allowed, f"{name}: relative error {error:.2e} over {allowed:.0e}"


def zero_eps(xp: Tensor, N: int) -> None:
    xp[1, :, -N:] = 0
    xp[4, 0, -N:] = 0


LN = {"layer_norm": True}
EMULATED = [
    Case(5, options={}),
    Case(1, B=1, T=1),
    Case(2, B=3, T=13, options={"eta": 1.0}),  # has nearly opposite vectors
    Case(3, T=4, options={"update_gate": False, "activation": "tanh"}, lengths=[2, 0]),
    Case(20, options={"eta": 1.5, "zoneout": 0.3, "training": True, "activation": "softsign"}, lengths=[4, 7]),
    Case(9, options={**LN, "activation": "sigmoid", "zoneout": 0.2}, with_r0=False, with_grad_r=False),
    Case(9, options={**LN, "ln_order": "authors", "eta": 1.0, "target_activation": "tanh"}, lengths=[6, 3]),
    Case(9, options={**LN, "update_gate": False}, edit=zero_eps),
    Case(66, B=1, T=5, options={"eta": 1.0}),
    Case(10, dtype=torch.bfloat16, T=5, options={"activation": "tanh"}),  # rounding moves units over relu's kink
    Case(10, dtype=torch.float16, T=5, options={"activation": "tanh"}),
]


@needs_compiler
@pytest.mark.parametrize("case", thinned(EMULATED, 3), ids=str)
@pytest.mark.usefixtures("emulated")
def test_emulated_kernel_matches_reference(case: Case) -> None:
    assert_matches(case)


def gates_case(device: str, case: Case) -> None:
    """The recomputed raw gates are what the formula says, row by row, and what else stands in grad_xp is left alone."""
    given, options = draw(case), case.rum_options()
    xp, h0, weight = (given[k] for k in ("xp", "h0", "weight_hh"))
    assert xp is not None
    assert h0 is not None
    assert weight is not None
    out = torch.randn(case.T, case.B, case.N).to(case.dtype)
    G = options.num_gates * case.N
    for start in (h0.float() + 1e-3, None):  # which is not representable in half precision, and enters rounded
        first = torch.zeros_like(out[:1]) if start is None else start.to(case.dtype).unsqueeze(0)
        states = torch.cat((first, out[:-1])).double()
        want = xp[..., :G].double() + states @ weight.double().mT
        grad_xp = torch.full_like(xp, 7.0)
        moved = [None if x is None else x.to(device) for x in (xp, start, weight.float(), out, grad_xp)]
        got = lam1._gates(*moved, options).cpu()
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
    xp, h0, weight = torch.randn(5, 2, 12), torch.randn(2, 4), torch.randn(8, 4)
    options = RumOptions(lam=1.0)
    found = fused_backend.forward(xp, h0, None, weight, None, None, None, None, options)
    room = fused_backend.empty_results(xp, 4, options)
    assert [part.shape for part in found] == [part.shape for part in room]
    assert found[2].numel() == 0


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
    inputs = (*given, None, None, None, None)
    out, R_n, ckpt = lam1.lam1_forward(*inputs, options)
    grads = lam1.lam1_backward(grad_out.to(device), grad_R.to(device), *inputs, out, R_n, ckpt, options)

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
        inputs = (torch.zeros(T, B, 12), torch.ones(B, 4), None, torch.zeros(8, 4), None, None, None, None)
        out, R_n, ckpt = lam1.lam1_forward(*inputs, options)
        assert out.shape == (T, B, 4)
        assert R_n.shape == (B, 4, 4)
        grads = lam1.lam1_backward(torch.zeros(T, B, 4), None, *inputs, out, R_n, ckpt, options)
        assert grads[0].shape == (T, B, 12)
        assert grads[3].shape == (8, 4)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"lam": 0.5}, "lam is 0.5"),
        ({"dtype": torch.float64}, "float64"),
        ({"activation": torch.sin}, "no activation"),
        ({"activation": "gelu"}, "no activation 'gelu'"),
        ({"hidden": 129}, "up to 128"),
        ({}, "on cpu"),
    ],
)
def test_obstacle_names_the_reason(given: dict[str, Any], words: str) -> None:
    options = RumOptions(lam=given.get("lam", 1.0), activation=given.get("activation", "relu"))
    xp = torch.zeros(2, 3, 3 * given.get("hidden", 8), dtype=given.get("dtype", torch.float32))
    assert words in str(lam1.lam1_obstacle(xp, options))


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
        """What ``nvrtc._compile`` returns for these arguments."""
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
    capability, root = torch.cuda.get_device_capability(0), tmp_path_factory.getbasetemp()
    folder = CubinFolder((root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "lam1", nvrtc._compile)
    folder.path.mkdir(exist_ok=True)
    wanted = {
        (lam1._source(kind), f"lam1_{kind}", layout.macros, capability): None  # in order, unlike a set
        for case in SIZE_CASES + OPTION_CASES
        for kind in ("forward", "gates", "backward", "replay")
        for layout in [lam1._layout(kind, case.N, case.dtype, case.rum_options(), lam1.rows_per_thread(case.N), 8)]
    }
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(16) as pool:
        patch.setattr(nvrtc, "_compile", folder.cubin)
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
    _, R_n, _ = lam1.lam1_forward(xp, None, None, weight, None, None, None, None, options, save=False)
    assert (R_n @ R_n.mT - torch.eye(N, device="cuda")).abs().max() <= 1e-5


@pytest.mark.gpu
def test_backward_is_deterministic_and_graph_capture_agrees() -> None:
    case = Case(50, B=7, T=20, options={"eta": 1.0}, with_r0=False)
    given = draw(case)
    first = fused(case, given, "cuda")
    again = fused(case, given, "cuda")
    on_gpu = {k: None if x is None else x.cuda() for k, x in given.items()}
    inputs = [on_gpu[k] for k in ("xp", "h0", "R0", "weight_hh", "ln_weight", "ln_bias")] + [None, None]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, R_n, ckpt = lam1.lam1_forward(*inputs, case.rum_options())
        grads = lam1.lam1_backward(on_gpu["grad_out"], on_gpu["grad_R_n"], *inputs, out, R_n, ckpt, case.rum_options())
    graph.replay()
    for a, b, c in zip(first, again, [out, R_n, *grads], strict=True):
        if a is not None and b is not None and c is not None:
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_kernels_are_compiled_once() -> None:
    case = Case(12, B=2, T=3)
    fused(case, draw(case), "cuda")
    before = load_kernel.cache_info().misses
    for B, T in ((5, 4), (1, 9)):
        other = Case(12, B=B, T=T)
        fused(other, draw(other), "cuda")
    assert load_kernel.cache_info().misses == before
