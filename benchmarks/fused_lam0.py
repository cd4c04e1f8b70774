"""Time the fused lam = 0 scan (a matmul and a row kernel per step) beside cuDNN's GRU. Needs a CUDA device.

    python benchmarks/fused_lam0.py                               the table: forward, both, errors against float64
    python benchmarks/fused_lam0.py --options ln                  with layer norm, zoneout and eta
    python benchmarks/fused_lam0.py --sweep --seconds 90 out.json the layer under each tuning, captured, beside the GRU

tests/ops/test_fused_lam0.py must be green first. Times are medians in microseconds per step; the input projection is
included everywhere, with as many inputs as units. "own" is the scan's own graphs, "captured" the whole forward and
backward inside one outer capture, as cuDNN's GRU is measured.
"""

import argparse
import contextlib
import fcntl
import gc
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from triton.runtime.jit import JITFunction

import torchrum
from timing import microseconds
from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.ops.kernels import matmul, triton_launch
from torchrum.ops.kernels.rum_step_backward import STATS
from torchrum.ops.kernels.step_graphs import clear_graphs
from torchrum.ops.kernels.weights import recurrent_weight_gradient
from torchrum.ops.rum_scan import RumOptions, ScanInputs, rum_scan, rum_scan_reference
from torchrum.ops.rum_scan.stepwise_triton import BackwardSteps, ForwardSteps

OPTIONS = {
    "eta": RumOptions(eta=1.0),
    "plain": RumOptions(),
    "ln": RumOptions(eta=1.0, layer_norm=True, zoneout=0.1, training=True),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BOTH = ("forward", "backward")


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``run`` inside one CUDA graph, warmed up and captured on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


class Case:
    """A RUM layer written out, so that both the fused op and the float64 reference can run it."""

    def __init__(self, T: int, B: int, N: int, dtype: torch.dtype, options: RumOptions) -> None:
        def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
            return (mean + std * torch.randn(shape, device="cuda")).to(dtype).requires_grad_()

        self.options = options
        self.seed = torch.tensor(11, device="cuda")
        self.leaves = {"x": normal(T, B, N), "w_ih": normal(3 * N, N, std=N**-0.5), "bias": normal(3 * N, std=0.1)}
        self.leaves |= {"w_hh": normal(2 * N, N, std=N**-0.5), "h0": normal(B, N, std=N**-0.5)}
        if options.layer_norm:
            self.leaves |= {"ln_weight": normal(3 * N, std=0.2, mean=1.0), "ln_bias": normal(3 * N, std=0.1)}
        self.grad = torch.randn(T, B, N, device="cuda").to(dtype)

    def forward(self) -> Tensor:
        v = self.leaves
        xp = F.linear(v["x"], v["w_ih"], v["bias"])
        norms = (v.get("ln_weight"), v.get("ln_bias"))
        inputs = ScanInputs(xp, v["h0"], None, v["w_hh"], *norms, seed=self.seed)
        return rum_scan(inputs, self.options, backend="fused")[0]

    def no_grad(self) -> None:
        with torch.no_grad():
            self.forward()

    def both(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None
        self.forward().backward(self.grad)

    def errors(self) -> dict[str, float]:
        """Relative errors of the output and of every gradient against float64."""
        self.both()
        found = {"out": self.forward().detach()}
        found |= {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}
        v = {name: leaf.detach().double().requires_grad_() for name, leaf in self.leaves.items()}
        xp = F.linear(v["x"], v["w_ih"], v["bias"])
        norms = (v.get("ln_weight"), v.get("ln_bias"))
        out, _ = rum_scan_reference(ScanInputs(xp, v["h0"], None, v["w_hh"], *norms, None, self.seed), self.options)
        grads = torch.autograd.grad(out, list(v.values()), self.grad.double())
        wanted = {"out": out.detach(), **dict(zip(v, grads, strict=True))}
        return {name: ((found[name].double() - want).norm() / want.norm()).item() for name, want in wanted.items()}


class LayerRun:
    """A recurrent layer's forward and backward on random data; its outputs and gradients after a run."""

    def __init__(self, layer: nn.Module, T: int, B: int, N: int, dtype: torch.dtype) -> None:
        generator = torch.Generator("cuda").manual_seed(3)
        self.layer = layer
        self.x = torch.randn(T, B, N, device="cuda", generator=generator).to(dtype).requires_grad_()
        self.grad = torch.randn(T, B, N, device="cuda", generator=generator).to(dtype)
        self.out = self.x

    def forward(self) -> None:
        with torch.no_grad():
            self.layer(self.x)

    def both(self) -> None:
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None
        self.out = self.layer(self.x)[0]
        self.out.backward(self.grad)

    def results(self) -> list[Tensor]:
        grads = [self.x.grad, *(parameter.grad for parameter in self.layer.parameters())]
        return [self.out.detach().float(), *(grad.float() for grad in grads if grad is not None)]


def table(T: int, B: int, sizes: list[int], dtype: torch.dtype, options: RumOptions, check: bool) -> None:
    rows = []
    for N in sizes:
        case = Case(T, B, N, dtype, options)
        gru = LayerRun(nn.GRU(N, N, device="cuda", dtype=dtype), T, B, N, dtype)
        runs = (case.no_grad, case.both, captured(case.both).replay, captured(gru.both).replay)
        own_forward, own, whole, cudnn = (time / T for time in microseconds(*runs))
        errors = case.errors() if check else {}
        words = " ".join(f"{name} {error:.1e}" for name, error in errors.items())
        numbers = (own_forward, own, whole, cudnn, own / cudnn, whole / cudnn)
        rows.append(f"{N:5d}" + "".join(f"{number:10.2f}" for number in numbers) + f"  {words}")
        del case, gru, runs
        clear_graphs()
        torch.cuda.empty_cache()
    print(f"us/step  T={T} B={B} {dtype} {options}")
    print("    N   fwd own   f+b own  f+b capt cuDNN GRU own/cuDNN cap/cuDNN  relative errors")
    print("\n".join(rows), flush=True)


# ---- the sweep: each case in a process of its own, so that a bad kernel ends no more than its case


Tuning = dict[str, Any]
NOW: Tuning = {}  # the modules' own constants, which are taken down before anything is changed
FIRST: Tuning = {"first": "fb", "half": "fb", "pdl": True, "lanes": 256}
BEFORE: Tuning = {"split": "b", "pdl": False, "lanes": 128, "first": "", "half": ""}
VARIANTS: dict[str, Tuning] = {
    "before": BEFORE,  # cuBLAS forward, portable split-K matmul backward, no dependent launch
    "first": FIRST,  # the weight fetched ahead of the state, under dependent launch; partial sums in 16 bits
    "first-f32": {**FIRST, "half": ""},
    "first-w8": {**FIRST, "warps": 8},
    "first-l128": {**FIRST, "lanes": 128},
    "first-l128x16": {**FIRST, "lanes": 128, "most_warps": 16},
    "first-wide": {**FIRST, "block": 128},
    "first-narrow": {**FIRST, "block": 64},
    "first-32": {**FIRST, "block": 32},
    "first-cache": {**FIRST, "carveout": False},
    "first-f32-nopdl": {**FIRST, "half": "", "pdl": False},
    "first-back": {**FIRST, "first": "b", "half": "b"},  # cuBLAS forward
    "split-pdl": {**BEFORE, "split": "fb", "pdl": True, "lanes": 256},
    "before-l256": {**BEFORE, "lanes": 256},
    "before-pdl": {**BEFORE, "lanes": 256, "pdl": True},
    "first-two": {**FIRST, "one_tile": False},
    "first-regs": {**FIRST, "registers": 64 * 1024},
    "lanes64": {**BEFORE, "lanes": 64},
}
CASES: dict[str, tuple[int, int, str, str, tuple[str, ...]]] = {  # N, T, dtype, options, variants
    "2000": (2000, 150, "bf16", "eta", ("before", "first", "first-f32", "first-w8", "first-cache", "before-l256")),
    "1024": (1024, 150, "bf16", "eta", ("before", "first", "first-narrow", "first-f32", "first-wide", "first-two")),
    "2000-b": (2000, 150, "bf16", "eta", ("before", "first-l128x16", "first-back", "first-f32-nopdl", "split-pdl")),
    "1024-b": (1024, 150, "bf16", "eta", ("before", "first-l128", "first-cache", "first-back", "split-pdl")),
    "1000": (1000, 150, "bf16", "eta", ("before", "first", "first-narrow", "first-l128", "first-f32")),
    "704": (704, 150, "bf16", "eta", ("before", "first", "first-32", "first-l128", "first-f32", "first-wide")),
    "2000-ln": (2000, 150, "bf16", "ln", ("before", "first", "first-l128x16", "first-regs", "first-f32")),
    "1000-ln": (1000, 150, "bf16", "ln", ("before", "first", "first-l128", "first-f32")),
    "250-fp32": (250, 220, "fp32", "eta", ("before", "before-l256", "lanes64", "before-pdl")),
}


def tune(tuning: Tuning) -> None:
    """Set the modules' constants; what a tuning does not name is as it was at the start."""
    for name, value in NOW.items():
        where, attribute = name.split(".")
        value = dict(value) if isinstance(value, dict) else value
        setattr({"matmul": matmul, "triton_launch": triton_launch}[where], attribute, value)
    letters = {"forward": "f", "backward": "b"}
    for key, constant in (("split", matmul.SPLIT_K), ("first", matmul.WEIGHT_FIRST), ("half", matmul.ROUND_PARTS)):
        if key in tuning:
            constant.update({direction: letters[direction] in tuning[key] for direction in BOTH})
    for key, number in (("block", matmul.BLOCK), ("warps", matmul.WARPS), ("lanes", triton_launch.LANES_PER_WARP)):
        if key in tuning:
            number.update(dict.fromkeys(BOTH, int(tuning[key])))
    for key, module, name in (
        ("pdl", triton_launch, "PDL"),
        ("carveout", triton_launch, "CARVEOUT"),
        ("most_warps", triton_launch, "MOST_WARPS"),
        ("registers", triton_launch, "ROW_REGISTERS"),
        ("one_tile", matmul, "ONE_TILE"),
    ):
        if key in tuning:
            setattr(module, name, tuning[key])
    clear_graphs()


@contextlib.contextmanager
def alone(lock: str, seconds: int) -> Iterator[None]:
    """The device for this process; a run that hangs ends the process."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            yield
            torch.cuda.synchronize()
        finally:
            signal.alarm(0)


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Kernels are compiled and not launched."""
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **rest: run(self, *args, grid=grid, warmup=True, **rest)
    try:
        yield
    finally:
        JITFunction.run = run


class Pieces:
    """The kernels of both directions by themselves."""

    def __init__(self, T: int, B: int, N: int, dtype: torch.dtype, options: RumOptions) -> None:
        def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
            return (std * torch.randn(shape, device="cuda")).to(dtype)

        like = normal(0)
        norms = (torch.ones(3 * N, device="cuda"), torch.zeros(3 * N, device="cuda")) if options.layer_norm else (None,)
        self.xp, self.out, self.gates = normal(T, B, 3 * N), normal(T, B, N, std=N**-0.5), normal(T, B, 2 * N)
        self.stats = normal(T, B, STATS.value, dtype=torch.float32)
        self.loaded = (normal(B, N, std=N**-0.5), normal(2 * N, N, std=N**-0.5), norms[0], norms[-1], None)
        self.seed = torch.tensor(3, device="cuda")
        self.forward = ForwardSteps(like, B, N, options, False, graphed=False)
        self.backward = BackwardSteps(like, B, N, options, False, graphed=False)
        self.forward.given = (self.xp, self.out, self.gates)
        self.dxp, self.grad_out = torch.empty_like(self.xp), normal(T, B, N)
        self.backward.given = (self.xp, self.out, self.gates, self.stats, self.grad_out, self.dxp)

    def compile(self) -> None:
        with compiling_only():
            self.backward.sums(self.xp, self.out, self.gates, self.stats)
            for steps in (self.forward, self.backward):
                steps.row(None, 0)()
                if steps.matmul.split_k:
                    steps.matmul.prepare()()

    def times(self, length: int = 32) -> dict[str, float]:
        """Each kernel in a captured chain of its own, and both of a step in turns."""
        self.forward.begin(self.xp, self.out, self.gates, *self.loaded, self.seed)
        self.backward.begin(*self.backward.given, *self.loaded, self.seed)
        runs = {}
        for steps in (self.forward, self.backward):
            runs[f"{steps.direction} matmul"] = lambda steps=steps: [steps.matmul.prepare()() for _ in range(length)]
            runs[f"{steps.direction} row"] = lambda steps=steps: [steps.row(None, t)() for t in range(length)]
            runs[f"{steps.direction} step"] = lambda steps=steps: [
                launch() for t in range(length) for launch in steps.launches(t)
            ]
        graphs = [captured(run) for run in runs.values()]
        times = microseconds(*(graph.replay for graph in graphs), samples=10)
        return {name: time / length for name, time in zip(runs, times, strict=True)}


def parallel_parts(T: int, B: int, N: int, dtype: torch.dtype) -> float:
    """The projection and its gradients, and the recurrent weight's gradient: all that is not in the loop."""
    x = torch.randn(T, B, N, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(3 * N, N, device="cuda").to(dtype).requires_grad_()
    bias = torch.zeros(3 * N, device="cuda", dtype=dtype, requires_grad=True)
    dxp, h0 = torch.randn(T, B, 3 * N, device="cuda").to(dtype), torch.zeros(B, N, device="cuda", dtype=dtype)

    def run() -> None:
        torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), dxp)
        recurrent_weight_gradient(dxp, 2 * N, h0, x.detach())

    return microseconds(captured(run).replay, samples=10)[0] / T


def sweep_case(name: str, lock: str, deadline: float, rows: Path) -> None:
    """One case: every variant that the time allows, likely fastest first."""
    N, T, dtype_name, option_name, variants = CASES[name]
    dtype, options, B = DTYPES[dtype_name], OPTIONS[option_name], 128
    torch.set_float32_matmul_precision("high")  # as cuDNN does by default
    for module in (matmul, triton_launch):
        for key in ("SPLIT_K", "WEIGHT_FIRST", "ROUND_PARTS", "BLOCK", "WARPS", "LANES_PER_WARP", "PDL", "CARVEOUT",
                    "MOST_WARPS", "ROW_REGISTERS", "ONE_TILE"):  # fmt: skip
            if hasattr(module, key):
                value = getattr(module, key)
                NOW[f"{module.__name__.split('.')[-1]}.{key}"] = dict(value) if isinstance(value, dict) else value

    def say(row: dict[str, Any], line: str) -> None:
        print(f"{name:>8} {line}", flush=True)
        with rows.open("a") as file:
            file.write(json.dumps({"case": name, **row}) + "\n")

    with alone(lock, 40):
        gru = LayerRun(nn.GRU(N, N, device="cuda", dtype=dtype), T, B, N, dtype)
        gru_both, gru_forward = captured(gru.both), captured(gru.forward)
        torch.manual_seed(0)
        norm, zoneout = options.layer_norm, options.zoneout
        layer = torchrum.RUM(
            N,
            N,
            **{**PAPER_OPTIONS, "eta": 1.0},
            layer_norm=norm,
            zoneout=zoneout,
            backend="fused",
            device="cuda",
            dtype=dtype,
        )
        rum = LayerRun(layer, T, B, N, dtype)
        parallel = parallel_parts(T, B, N, dtype)
        say({"parallel": parallel}, f"{'outside the loop':16} {'':9} {parallel:9.2f}")
    wanted: list[Tensor] = []
    best = (float("inf"), "")
    for variant in variants:
        if time.time() > deadline:
            say({"variant": variant, "error": "no time left"}, f"{variant:16} no time left")
            continue
        try:
            tune(VARIANTS[variant])
            with alone(lock, 20):
                pieces = Pieces(T, B, N, dtype, options)
            pieces.compile()
            with alone(lock, 20):
                forward, both = captured(rum.forward), captured(rum.both)
                times = microseconds(gru_both.replay, both.replay, forward.replay, gru_forward.replay)
                cudnn, total, ahead, cudnn_ahead = (time / T for time in times)
                torch.manual_seed(7)  # zoneout's masks are then the same in every variant
                both.replay()
                found = rum.results()
                wanted = wanted or [part.clone() for part in found]
                error = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))
                chain = pieces.times()
            del forward, both, found, pieces
            if error < 0.05 and total < best[0]:
                best = (total, variant)
            row = {"variant": variant, "forward": ahead, "both": total, "gru": cudnn, "gru_forward": cudnn_ahead}
            words = " ".join(f"{chain[f'{d} {part}']:5.2f}" for d in BOTH for part in ("matmul", "row", "step"))
            say(
                {**row, "ratio": total / cudnn, "error": error, "chain": chain},
                f"{variant:16} {ahead:9.2f} {total:9.2f} {cudnn:9.2f} {total / cudnn:6.3f} {error:9.1e}   {words}",
            )
        except Exception as problem:  # one variant that fails must not end the others
            words = f"{type(problem).__name__}: {' '.join(str(problem).split())[:160]}"
            say({"variant": variant, "error": words}, f"{variant:16} {words}")
            torch.cuda.synchronize()  # raises again where the device's context is lost: this case ends
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{name:>8} best: {best[1]} {best[0]:.2f}", flush=True)


def sweep(names: list[str], seconds: float, out: str | None) -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, B=128, medians in us/step, all captured")
    print("  chains: matmul, row kernel, both in turns; forward, then backward")
    print("    case variant            forward      both       GRU  ratio     error   chains", flush=True)
    deadline = time.time() + seconds
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        command = [sys.executable, __file__, "--lock", f"{folder}/lock", "--deadline", str(deadline), "--rows", rows]
        children = {name: subprocess.Popen([*map(str, command), "--case", name]) for name in names}
        for name, child in children.items():
            try:
                code = child.wait(max(1.0, deadline + 25 - time.time()))
                if code:
                    print(f"{name:>8} ended with {code}", flush=True)
            except subprocess.TimeoutExpired:
                child.kill()
                print(f"{name:>8} stopped: out of time", flush=True)
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    if out is not None:
        Path(out).write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": found}, indent=1))
    for name in names:
        timed = [row for row in found if row["case"] == name and "ratio" in row]
        for row in sorted(timed, key=lambda row: row["both"])[:3]:
            print(f"{name:>8} {row['variant']:16} {row['both']:6.2f} {row['ratio']:6.3f} error {row['error']:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", help="where the sweep's numbers go")
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 704, 1000, 1024, 2000])
    parser.add_argument("--T", type=int, default=150)
    parser.add_argument("--B", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--options", choices=OPTIONS, default="eta")
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--seconds", type=float, default=90.0)
    for name in ("--case", "--lock", "--deadline", "--rows"):  # of a sweep's own processes
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # as cuDNN does by default
    if args.case:
        sweep_case(args.case, args.lock, float(args.deadline), Path(args.rows))
    elif args.sweep:
        sweep(args.cases, args.seconds, args.out)
    else:
        table(args.T, args.B, args.sizes, DTYPES[args.dtype], OPTIONS[args.options], not args.no_errors)


if __name__ == "__main__":
    main()
