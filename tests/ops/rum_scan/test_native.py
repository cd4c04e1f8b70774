"""The native scan as a compiled library: threads, forks and signals, and every way in which it can fail to be built.

tests/ops/rum_scan/test_torch_scan.py holds it to the reference, option by option.
"""

import errno
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops.rum_scan.native_grid import CHOICES
from tolerances import NORM_ERROR
from torchrum import RUM
from torchrum.cells import rum as rum_cell
from torchrum.ops.rum_scan import RumOptions, ScanInputs, designs, native, op, rum_scan
from torchrum.ops.rum_scan.native import build

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), reason="there is no C compiler"
)
SOURCES = Path(native.__file__).parent


def draw(options: RumOptions, T: int, B: int, H: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    inputs = {
        "xp": torch.randn(T, B, options.num_inputs * H),
        "h0": torch.randn(B, H),
        "R0": torch.linalg.qr(torch.randn(B, H, H, dtype=torch.float64))[0] if options.lam == 1 else None,
        "weight_hh": torch.randn(options.num_gates * H, H) / H**0.5,
        "ln_weight": torch.randn(options.num_inputs * H) if options.layer_norm else None,
        "ln_bias": torch.randn(options.num_inputs * H) if options.layer_norm else None,
    }
    return {name: None if part is None else part.to(dtype) for name, part in inputs.items()}


def gradients(inputs, options, backend, **more) -> dict[str, Tensor]:
    """States and gradients of a projection of them; their length, which eta fixes, would have none."""
    leaves = {name: None if part is None else part.clone().requires_grad_() for name, part in inputs.items()}
    out, R = rum_scan(ScanInputs(**leaves, **more), options, backend=backend)
    given = {name: part for name, part in leaves.items() if part is not None}
    loss = sum((part * torch.arange(part.numel()).cos().view_as(part)).sum() for part in (out, R) if part is not None)
    grads = torch.autograd.grad(loss, list(given.values()))
    return {"out": out.detach(), **dict(zip(given, grads, strict=True))}


@pytest.fixture
def threads(monkeypatch):
    """Sets torch's number of threads, which C uses however little there is to do, and gives back the one before."""
    monkeypatch.setattr(native, "SMALL", 0)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("lam", [0.0, 1.0])
@pytest.mark.parametrize("B, H", [(1, 16), (7, 15), (16, 17), (19, 33), (40, 100), (3, 130)])
def test_blocks_and_threads_match_reference(B, H, lam, threads):
    """Odd sizes around whole vectors, tiles and blocks; the thread that takes a row does not matter to a bit of it."""
    options = RumOptions(lam=lam, eta=0.8, activation="tanh")
    inputs = draw(options, 4, B, H, torch.float64)
    wanted = gradients(inputs, options, "reference")
    threads(1)
    alone = gradients(inputs, options, "native")
    threads(3)
    together = gradients(inputs, options, "native")
    for name, want in wanted.items():
        torch.testing.assert_close(alone[name], want, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(alone[name], together[name]), name


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_options_match_the_reference_in_float64(lam, dtype):
    """Outputs and every gradient for every combination of options, several vectors wide."""
    for case, (_, eta, gate, norm, zoneout) in enumerate(choice for choice in CHOICES if choice[0] == lam):
        if norm.get("ln_order") == "authors" and not gate:
            continue
        activation = ("tanh", "sigmoid", "softsign")[case % 3]  # relu, whose gradient jumps, is compared in float64
        options = RumOptions(lam=lam, eta=eta, update_gate=gate, activation=activation, **norm, **zoneout)
        inputs = draw(options, 5, 9, (50, 29, 16)[case % 3], dtype)
        if inputs["R0"] is not None:
            inputs["R0"] = inputs["R0"].float()
        more = dict(lengths=torch.tensor([5, 1, 0, 3, 5, 2, 4, 5, 5]) if case % 2 else None, seed=torch.tensor(11))
        exact = {name: None if part is None else part.double() for name, part in inputs.items()}
        wanted = gradients(exact, options, "reference", **more)
        for name, found in gradients(inputs, options, "native", **more).items():
            error = (found.double() - wanted[name]).norm() / wanted[name].norm()
            assert error < NORM_ERROR[dtype], f"{name} of {options}: {error:.1e}"


@needs_compiler
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_layer_norm_gradients_of_many_blocks(lam, threads):
    threads(2)
    options = RumOptions(lam=lam, layer_norm=True, activation="tanh")
    inputs, lengths = draw(options, 3, 37, 12, torch.float64), torch.randint(0, 4, (37,))
    wanted = gradients(inputs, options, "reference", lengths=lengths)
    for name, found in gradients(inputs, options, "native", lengths=lengths).items():
        torch.testing.assert_close(found, wanted[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@needs_compiler
@pytest.mark.parametrize("T, B", [(0, 2), (3, 0)])
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_empty_input(T, B, lam):
    options = RumOptions(lam=lam, layer_norm=True)
    inputs = draw(options, T, B, 5)
    scan = ScanInputs(**inputs)
    results = native.forward(scan, options)
    assert results.out.shape == (T, B, 5)
    assert results.R is None or torch.equal(results.R, inputs["R0"])
    grads = native.backward(torch.zeros_like(results.out), None, scan, results, options, False)
    for name in ("xp", "h0", "weight_hh", "ln_weight", "ln_bias"):
        grad = getattr(grads, name)
        assert grad.shape == inputs[name].shape and grad.count_nonzero() == 0, name


@needs_compiler
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_a_row_that_is_not_a_number_stays_alone(lam):
    """Rows share tiles, buffers and padding; none of it may carry a NaN to another row, or hide it from its own."""
    options = RumOptions(lam=lam, eta=1.0)
    inputs = draw(options, 4, 21, 19)
    whole = gradients(inputs, options, "native")
    inputs["h0"][3] = float("nan")
    inputs["xp"][1, 8, 0] = float("inf")
    found = gradients(inputs, options, "native")
    others = [row for row in range(21) if row not in (3, 8)]
    for name in ("out", "xp"):
        assert torch.equal(found[name][:, others], whole[name][:, others]), name
    assert found["out"][:, 3].isnan().all()
    assert found["out"][1:, 8].isnan().all()


@needs_compiler
def test_lengths_of_vectors_that_overflow_when_squared():
    """eps and tau of 1e25 have a direction in float32 too, though their squares do not fit."""
    options = RumOptions(activation="tanh")
    inputs = draw(options, 2, 3, 8)
    inputs["weight_hh"].zero_()
    inputs["xp"][..., :8] *= 1e25
    wide = {name: None if part is None else part.double() for name, part in inputs.items()}
    wanted, found = gradients(wide, options, "reference"), gradients(inputs, options, "native")
    torch.testing.assert_close(found["out"].double(), wanted["out"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["h0"].double(), wanted["h0"], rtol=1e-4, atol=1e-4)


@needs_compiler
def test_calls_from_several_threads_at_once(threads):
    options = RumOptions(lam=1.0, eta=1.0)
    cases = [draw(options, 6, 5, 20) for _ in range(6)]
    wanted = [gradients(case, options, "native") for case in cases]
    found: list[dict[str, Tensor]] = [{} for _ in cases]

    def work(place: int) -> None:
        for _ in range(10):
            found[place] = gradients(cases[place], options, "native")

    workers = [threading.Thread(target=work, args=(place,)) for place in range(len(cases))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for want, got in zip(wanted, found, strict=True):
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-6)


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # a fork beside other threads is the point
def test_after_a_fork(threads):
    """A child made after the parent's threads have run starts its own, and waits for no pool of its parent's."""
    threads(2)
    options = RumOptions(lam=1.0)
    inputs = draw(options, 5, 8, 24)
    before = native.forward(ScanInputs(**inputs), options).out
    child = os.fork()
    if child == 0:  # whatever happens here, the child must not return to pytest
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        again = native.forward(ScanInputs(**inputs), options).out
        os._exit(0 if again.tolist() == before.tolist() else 3)
    again = native.forward(ScanInputs(**inputs), options).out
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(again, before)


@needs_compiler
@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
def test_under_signals(threads):
    """Signals in the middle of a scan reach Python's handler, in Python's thread, and change nothing."""
    threads(2)
    options = RumOptions(lam=1.0)
    inputs = draw(options, 40, 16, 40)
    wanted = gradients(inputs, options, "native")
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(threading.get_ident()))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    found = [gradients(inputs, options, "native") for _ in range(5)]
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert heard
    assert set(heard) == {threading.main_thread().ident}
    for each in found:
        assert all(torch.equal(each[name], want) for name, want in wanted.items())


@needs_compiler
@pytest.mark.parametrize("lam", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_keeps_nothing_and_gives_the_same(lam, dtype):
    options = RumOptions(lam=lam, eta=1.0)
    inputs = draw(options, 6, 5, 20)
    inputs = {name: part if part is None or name == "R0" else part.to(dtype) for name, part in inputs.items()}
    lengths = torch.tensor([6, 0, 3, 6, 1])
    scan = ScanInputs(**inputs, lengths=lengths)
    kept, bare = (native.forward(scan, options, save) for save in (True, False))
    assert bare.residuals == (None, None)
    assert torch.equal(kept[0], bare[0])
    assert lam == 0 or torch.equal(kept[1], bare[1])
    flags = op.make_flags(options, "native")
    assert [
        part.numel() for part in torch.ops.torchrum.rum_scan(*inputs.values(), lengths, None, *flags, False)[2:]
    ] == [0, 0]


@needs_compiler
@pytest.mark.parametrize("lam", [0, 1])
@pytest.mark.parametrize(
    "words",
    [
        dict(),
        dict(update_gate=False, embed_bias=False, activation="tanh"),
        dict(layer_norm=True, zoneout=0.2, eta=1.0),
        dict(num_layers=2, bidirectional=True, bias=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("T, B", [(1, 1), (1, 4), (3, 2), (9, 7)])  # single steps read the weights unpacked
def test_inference_projects_its_input_itself(lam, words, T, B, monkeypatch):
    rum, x = (
        RUM(5, 18, form="paper", lam=lam, dtype=torch.float64, **words).eval(),
        torch.randn(T, B, 5, dtype=torch.float64),
    )
    hx = rum(torch.randn(2, B, 5, dtype=torch.float64))[1]
    hx = tuple(part.detach() for part in hx) if lam else hx.detach()
    lengths = torch.randint(1, T + 1, (B,))
    for more in (dict(), dict(hx=hx), dict(lengths=lengths)):
        wanted = rum(x, **more)
        with torch.no_grad(), monkeypatch.context() as patch:
            patch.setattr(rum_cell, "scan_rum", None)  # whoever called it would fail
            torch.testing.assert_close(rum(x, **more), wanted, rtol=1e-11, atol=1e-12)


@needs_compiler
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_a_tracer_sees_the_operator():
    """Nothing passes torch's dispatcher by while somebody records what it does."""
    rum, x = RUM(3, 6, form="paper"), torch.randn(4, 2, 3)
    with torch.no_grad():
        traced = torch.jit.trace(rum, x)
        again = torch.randn(4, 2, 3)
        torch.testing.assert_close(traced(again)[0], rum(again)[0])
    assert "rum_scan" in str(traced.graph)


def test_an_exported_program_runs_where_native_cannot(monkeypatch):
    """The choice is written into a program; on another machine or device the torch backend stands in for it."""

    def runs(backend: str, device: str = "cpu", lam: float = 0.0) -> str:
        designs.clear_design_cache()
        inputs = ScanInputs.shaped_like(torch.randn(3, 2, 12, device=device), RumOptions(lam=lam))
        return designs.choose_design(inputs, RumOptions(lam=lam), backend, strict=False)[0].name

    monkeypatch.setattr(native, "build_obstacle", lambda double: "no C compiler was found")
    assert runs("native") == runs("native", "meta") == runs("fused") == runs("stepwise") == "torch"
    monkeypatch.setattr(native, "build_obstacle", lambda double: None)
    assert runs("native") == runs("fused") == runs("persistent", lam=1.0) == "native"
    assert runs("torch") == "torch"


@pytest.fixture(scope="module")
def library() -> Path:
    """The object that this machine's own cache holds."""
    return Path(native.load_library(False)._name)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, and flags that compile fast."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "FLAGS", build.FLAGS.replace("-O3", "-O0"))
    return tmp_path / "cache" / "torchrum" / "native"


def compiler_that(monkeypatch, tmp_path, script: str) -> None:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def build_anew() -> object:
    return build.load_library.__wrapped__(False)


@needs_compiler
def test_the_object_is_built_once_and_only_its_owner_can_write_it(cache):
    assert not isinstance(build_anew(), str)
    (path,) = cache.iterdir()  # nothing else is left behind
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made = path.stat().st_mtime_ns
    assert not isinstance(build_anew(), str)
    assert path.stat().st_mtime_ns == made


@needs_compiler
@pytest.mark.parametrize("content", [b"", b"not an object", None], ids=["empty", "foreign", "cut short"])
def test_a_file_that_is_not_what_was_built_is_built_anew(cache, content):
    build_anew()
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.unlink()  # the loaded one keeps its pages
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    path.chmod(0o600)
    assert not isinstance(build_anew(), str)
    assert path.read_bytes() == whole


@needs_compiler
def test_a_file_that_others_may_write_is_not_loaded(cache):
    build_anew()
    (path,) = cache.iterdir()
    path.chmod(0o666)
    assert not build.is_intact(path)
    link = cache / f"{'0' * 32}-{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}.so"
    link.symlink_to(path)
    path.chmod(0o600)
    assert build.is_intact(path)
    assert not build.is_intact(link)


@pytest.mark.parametrize("which", [".", "..", "../.."], ids=["folder", "parent", "cache"])
def test_a_cache_that_others_may_write_is_not_used(cache, which):
    cache.mkdir(parents=True, mode=0o700)
    (cache / which).resolve().chmod(0o777)
    found = build_anew()
    assert isinstance(found, str)
    assert "others may write to" in found
    assert not list(cache.iterdir())


def test_sticky_and_private_groups_are_fine(tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    found = (tmp_path / "shared").stat()
    assert not build.others_may_write(found, leaf=False)
    assert build.others_may_write(found, leaf=True)
    (tmp_path / "shared").chmod(0o770)
    for own in (True, False):
        monkeypatch.setattr(build, "is_own_group", lambda gid, own=own: own)
        assert build.others_may_write((tmp_path / "shared").stat(), leaf=False) != own


def test_a_cache_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = build_anew()
    assert isinstance(found, str)
    assert found.startswith("the cache folder cannot be used:")


@needs_compiler
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_cache_that_takes_no_files(cache, monkeypatch, number):
    """Read-only, full, or over its quota: the reason stands in words, and nothing is left behind."""

    def refuse(**words):
        raise OSError(number, os.strerror(number), str(cache))

    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", refuse)
    found = build_anew()
    assert isinstance(found, str)
    assert os.strerror(number) in found
    assert not list(cache.iterdir())


def test_no_compiler(cache, tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_anew() == "no C compiler was found: cc, gcc or clang is not on the PATH"
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert build_anew() == "no C compiler was found: 'no-such-compiler', which CC names, is not on the PATH"


@pytest.mark.parametrize(
    "script, words",
    [
        ("echo 'scan.c:1: it is too hot' >&2; exit 1", "could not compile it: scan.c:1: it is too hot"),
        ("echo 'error writing scan.o: No space left on device' >&2; exit 1", "No space left on device"),
        ("exit 3", "exit code 3"),
        ("exit 0", "exit code 0"),
        ('for last; do :; done; echo nonsense > "$last"', "what was compiled cannot be loaded"),
        ("exec sleep 60", "it did not end within 0.2 seconds"),
        ("sleep 60 & wait", "it did not end within 0.2 seconds"),
        ("kill -9 $$", "it was killed by signal 9"),
        (r"printf 'too \377 hot\033[2J' >&2; exit 1", "could not compile it: too \ufffd hot?[2J"),
    ],
    ids=["broken", "disk full", "silent", "idle", "nonsense", "hanging", "hanging child", "killed", "not UTF-8"],
)
def test_a_compiler_that_fails(cache, tmp_path, monkeypatch, script, words):
    monkeypatch.setattr(build, "SECONDS", 0.2 if "sleep" in script else 60)
    compiler_that(monkeypatch, tmp_path, script)
    start = time.monotonic()
    found = build_anew()
    assert isinstance(found, str)
    assert words in found
    assert not list(cache.iterdir())  # neither a bad object nor a part of one is left
    assert time.monotonic() - start < 30


def test_a_compiler_has_a_minute_for_all_tries():
    assert build.SECONDS <= 60


@pytest.mark.parametrize("command", ["cc 'open", 'cc "open', "cc \\"], ids=["quote", "double quote", "backslash"])
def test_a_compiler_command_that_cannot_be_split(monkeypatch, command):
    monkeypatch.setenv("CC", command)
    found = build_anew()
    assert isinstance(found, str)
    assert found.startswith(f"CC={command!r} is not a command: No ")


@needs_compiler
@pytest.mark.parametrize("part", ["1 / 8", "1 / 2", "9 / 10"])
def test_an_object_that_was_cut_short_does_not_enter_the_cache(library, cache, tmp_path, monkeypatch, part):
    """Loading such an object can end the process by a signal, so that only a child process tries it."""
    cut = f"head -c $(({library.stat().st_size} * {part})) '{library}'"
    compiler_that(monkeypatch, tmp_path, f'for made; do :; done; {cut} > "$made"')
    found = build_anew()
    assert isinstance(found, str)
    assert "what was compiled cannot be loaded" in found
    assert not list(cache.iterdir())


@pytest.mark.parametrize("quoted", [False, True], ids=["fails", "open quote"])
def test_without_a_library_the_torch_backend_runs_and_says_why(cache, tmp_path, monkeypatch, quoted):
    """Nothing is lost but speed: the layer runs, and says what was in the way."""
    compiler_that(monkeypatch, tmp_path, "echo 'it is too hot' >&2; exit 1")
    if quoted:
        monkeypatch.setenv("CC", "cc 'open")
    monkeypatch.setattr(native, "load_library", lambda double: build_anew())
    rum, x = RUM(4, 6, form="paper"), torch.randn(5, 3, 4)
    backend, reason = rum.explain_backend(x)
    assert backend == "torch"
    assert reason.startswith("fused cannot run: the input is on cpu; native cannot run: ")
    assert reason.endswith("No closing quotation" if quoted else "could not compile it: it is too hot")
    output, _ = rum(x)
    output.sum().backward()
    rum.backend = "torch"
    assert torch.equal(rum(x)[0], output)


@needs_compiler
def test_several_processes_build_at_once(tmp_path):
    code = (
        "import build; build.FLAGS = build.FLAGS.replace('-O3', '-O0')\n"  # by itself: torch takes seconds
        "raise SystemExit(isinstance(build.load_library(False), str))"
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "XDG_CACHE_HOME": str(tmp_path)}
    runs = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(20)]
    assert [run.wait(timeout=120) for run in runs] == [0] * 20
    (path,) = (tmp_path / "torchrum" / "native").iterdir()
    assert build.is_intact(path)


@needs_compiler
def test_a_process_does_not_wait_forever_for_another_one(cache, monkeypatch):
    monkeypatch.setattr(build, "SECONDS", 0.2)
    with build.one_at_a_time(build.private_folder(), deadline=0.0):
        assert build_anew() == "another process compiles it, for more than 0.2 seconds"


@needs_compiler
def test_training_wakes_none_of_torchs_threads():
    """They would spin for milliseconds on the cores that the next scan needs; a fresh process has none yet."""
    code = """
import os, torch
from torchrum import RUM
def train(rum, threads):
    torch.set_num_threads(threads)
    x = torch.empty(40, 64, 36, requires_grad=True)
    output, _ = rum(x)
    output.backward(torch.empty_like(output))
    return len(os.listdir("/proc/self/task"))
torch.set_num_threads(1)
rums = [RUM(36, 64, form="paper", lam=lam, backend="native") for lam in (0, 1)]  # the QR of their start takes threads
print(train(rums[0], 1), train(rums[0], 3), train(rums[1], 3))
"""
    if not Path("/proc/self/task").is_dir():
        pytest.skip("the system does not list a process's threads")
    env = {**os.environ, "PYTHONPATH": str(SOURCES.parents[3])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert len(set(done.stdout.split())) == 1, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the sanitizers are preloaded as Linux does it")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_under_sanitizers(tmp_path):
    """2,000 random configurations at -O3 with an object that stops at a bad address and at undefined behaviour."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    lines = [subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in names]
    if not all(map(os.path.isabs, lines)):
        pytest.skip("gcc comes without the libraries of its sanitizers")
    env = {
        **os.environ,
        "PYTHONPATH": str(SOURCES.parents[3]),
        "XDG_CACHE_HOME": str(tmp_path),
        "CC": "gcc -fsanitize=address,undefined -fno-sanitize-recover=all -g",
        "LD_PRELOAD": " ".join(lines),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }
    script = Path(__file__).parent / "native_grid.py"
    command = [sys.executable, str(script), "0", "2000"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0 and done.stdout == "done\n", done.stdout[-1000:] + done.stderr[-4000:]


@needs_compiler
def test_a_prebuilt_object_is_taken_where_it_fits(tmp_path, monkeypatch):
    """Without compiler and cache, from a folder as a wheel has it; not for another source or another CPU."""
    monkeypatch.setattr(build, "FLAGS", build.FLAGS.replace("-O3", "-O0"))
    levels = build.LEVELS.get(platform.machine())
    if levels is None:
        pytest.skip(f"no wheel carries objects for {platform.machine()}")
    last = list(levels)[-1]
    monkeypatch.setattr(build, "LEVELS", {platform.machine(): {last: levels[last]}})
    made = build.prebuild(tmp_path / "prebuilt")
    assert [path.name.split("-")[:2] for path in made] == [[last, "float32"], [last, "float64"]]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "")
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    assert not isinstance(build_anew(), str)
    monkeypatch.setattr(build, "cpu_features", lambda: "something else")
    assert "no C compiler" in build_anew()
    monkeypatch.undo()
    assert not set(build.prebuilt_paths(tmp_path / "prebuilt", False, build.cpu_features())) & set(made)  # other flags


@pytest.mark.parametrize("level, missing", [("v4", None), ("v3", "avx512vl"), ("v2", "fma"), (None, "popcnt")])
def test_the_best_level_that_a_cpu_has(level, missing, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    words = {word for _, needs in build.LEVELS["x86_64"].values() for word in needs.split()}
    drop = {"avx512vl": {"avx512vl"}, "fma": {"avx512vl", "fma"}, "popcnt": {"avx512vl", "fma", "popcnt"}, None: set()}
    paths = build.prebuilt_paths(Path(), False, "flags : " + " ".join(words - drop[missing]))
    assert [path.name.split("-")[0] for path in paths[:1]] == ([] if level is None else [level])


@pytest.mark.slow
@needs_compiler
def test_a_release_wheel_carries_the_objects(tmp_path):
    pytest.importorskip("hatchling", reason="building needs: pip install --group test")
    env = {**os.environ, "HATCH_BUILD_HOOK_ENABLE_CUSTOM": "1"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[3], env=env, check=True, timeout=600, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    assert "any" not in wheel.stem.split("-")[-1]
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    code = (
        "import torch; from torchrum import RUM; print(*RUM(3, 4).explain_backend(torch.randn(2, 2, 3)))\n"
        "RUM(3, 4)(torch.randn(2, 2, 3))[0].sum().backward()"
    )
    env = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "XDG_CACHE_HOME": "/dev/null", "HOME": "/dev/null"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "native fused cannot run: the input is on cpu\n", done.stderr
