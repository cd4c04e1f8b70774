"""Time the fused lam = 0 scan (a product and a row kernel a step) beside cuDNN's GRU. Needs a CUDA device.

    python benchmarks/fused_lam0.py                  the table: forward, forward + backward, errors against float64
    python benchmarks/fused_lam0.py --options ln     with layer norm, zoneout and eta
    python benchmarks/fused_lam0.py --pieces         what the products and the row kernels cost by themselves
    python benchmarks/fused_lam0.py --split --pdl    the same with split products and dependent launch
    python benchmarks/fused_lam0.py --sweep 1000     split products, dependent launch, warps, weight layout

tests/ops/test_fused_lam0.py must be green first. Times are medians in microseconds a step; the input projection is
included everywhere, with as many inputs as units. "own" is the scan's own graphs, "captured" the whole forward and
backward inside one outer capture, as cuDNN's GRU is measured.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrum.ops.rum_scan import RumOptions, rum_scan
from torchrum.ops.rum_scan.fused import lam0_backward, lam0_forward, product
from torchrum.ops.rum_scan.fused.graphs import clear_graphs
from torchrum.ops.rum_scan.reference import rum_scan_reference

OPTIONS = {
    "eta": RumOptions(eta=1.0),
    "plain": RumOptions(),
    "ln": RumOptions(eta=1.0, layer_norm=True, zoneout=0.1, training=True),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def microseconds(run: Callable[[], object], samples: int = 15) -> float:
    """Median time of one call, by device events."""
    for _ in range(3):
        run()
    times = []
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """``run`` inside one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


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
        return rum_scan(xp, v["h0"], None, v["w_hh"], *norms, options=self.options, seed=self.seed, backend="fused")[0]

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
        found = {"out": self.forward().detach(), **{name: leaf.grad for name, leaf in self.leaves.items()}}
        v = {name: leaf.detach().double().requires_grad_() for name, leaf in self.leaves.items()}
        xp = F.linear(v["x"], v["w_ih"], v["bias"])
        norms = (v.get("ln_weight"), v.get("ln_bias"))
        out, _ = rum_scan_reference(xp, v["h0"], None, v["w_hh"], *norms, None, self.seed, self.options)
        grads = torch.autograd.grad(out, list(v.values()), self.grad.double())
        wanted = {"out": out.detach(), **dict(zip(v, grads, strict=True))}
        return {name: ((found[name].double() - want).norm() / want.norm()).item() for name, want in wanted.items()}


def gru(T: int, B: int, N: int, dtype: torch.dtype) -> float:
    """cuDNN's GRU, forward and backward in one graph."""
    layer = torch.nn.GRU(N, N, device="cuda", dtype=dtype)
    x = torch.randn(T, B, N, device="cuda").to(dtype).requires_grad_()
    grad = torch.randn(T, B, N, device="cuda").to(dtype)

    def both() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x)[0].backward(grad)

    return microseconds(captured(both)) / T


def table(T: int, B: int, sizes: list[int], dtype: torch.dtype, options: RumOptions, check: bool) -> None:
    rows = []
    for N in sizes:
        case = Case(T, B, N, dtype, options)
        own_forward, own = microseconds(case.no_grad) / T, microseconds(case.both) / T
        whole = microseconds(captured(case.both)) / T
        cudnn = gru(T, B, N, dtype)
        errors = case.errors() if check else {}
        words = " ".join(f"{name} {error:.1e}" for name, error in errors.items())
        numbers = (own_forward, own, whole, cudnn, own / cudnn, whole / cudnn)
        rows.append(f"{N:5d}" + "".join(f"{number:10.2f}" for number in numbers) + f"  {words}")
        clear_graphs()
        del case
        torch.cuda.empty_cache()
    print(f"us/step  T={T} B={B} {dtype} {options}")
    print("    N   fwd own   f+b own  f+b capt cuDNN GRU own/cuDNN cap/cuDNN  relative errors")
    print("\n".join(rows), flush=True)


def pieces(T: int, B: int, sizes: list[int], dtype: torch.dtype, options: RumOptions) -> None:
    """Each kernel by itself, chained 64 times in one graph."""
    length = 64
    print("    N product fwd     row fwd product bwd     row bwd       begin     dweight")
    for N in sizes:
        like = torch.empty(0, device="cuda", dtype=dtype)
        xp, out = torch.randn(T, B, 3 * N, device="cuda").to(dtype), torch.empty(T, B, N, device="cuda", dtype=dtype)
        gates, dxp = torch.empty(T, B, 2 * N, device="cuda", dtype=dtype), torch.empty_like(xp)
        stats = torch.empty(T, B, lam0_backward.STATS.value, device="cuda")
        norms = (
            (torch.ones(3 * N, device="cuda"), torch.zeros(3 * N, device="cuda")) if options.layer_norm else (None,) * 2
        )
        weight = (torch.randn(2 * N, N, device="cuda") * N**-0.5).to(dtype)
        loaded = (torch.randn(B, N, device="cuda"), weight, *norms, None, torch.tensor(3, device="cuda"))
        forward = lam0_forward.ForwardSteps(like, B, N, options, False, graphed=False)
        backward = lam0_backward.BackwardSteps(like, B, N, options, False, graphed=False)
        forward.begin(xp, out, gates, *loaded)
        for t in range(T):
            forward.step(t)
        grad_out = torch.randn(T, B, N, device="cuda").to(dtype)

        def begin_backward(steps=backward, given=(xp, out, gates, stats, grad_out, dxp, *loaded)) -> None:
            steps.begin(*given)

        begin_backward()
        times = []
        for steps in (forward, backward):

            def products(steps=steps) -> None:
                for _ in range(length):
                    steps.product()

            def whole(steps=steps) -> None:
                for t in range(length):
                    steps.step(t)

            one = microseconds(captured(products)) / length
            times += [one, microseconds(captured(whole)) / length - one]
        times.append(microseconds(begin_backward) / T)

        def weight_grad(dxp=dxp, h0=loaded[0], out=out, N=N) -> None:
            lam0_backward.recurrent_weight_grad(dxp, h0, out, N, 2)

        times.append(microseconds(weight_grad) / T)
        print(f"{N:5d}" + "".join(f"{time:12.2f}" for time in times), flush=True)


def sweep(T: int, B: int, N: int, dtype: torch.dtype, options: RumOptions) -> None:
    """Forward, and forward with backward, for each tuning."""
    print("    N  split    PDL lanes/warp transposed f,b    fwd own   f+b own  f+b captured")
    case = Case(T, B, N, dtype, options)
    base = (128, (False, False))
    tunings = [(split, pdl, *base) for split, pdl in itertools.product((False, True), repeat=2)]
    tunings += [(False, False, lanes, (False, False)) for lanes in (64, 256)]
    tunings += [(False, False, 128, layout) for layout in itertools.product((False, True), repeat=2) if any(layout)]
    for split, pdl, lanes, transposed in tunings:
        set_tuning(split, pdl)
        lam0_forward.LANES_PER_WARP.update(forward=lanes, backward=lanes)
        lam0_forward.TRANSPOSED.update(forward=transposed[0], backward=transposed[1])
        clear_graphs()
        times = [microseconds(run) / T for run in (case.no_grad, case.both, captured(case.both))]
        numbers = " ".join(f"{time:9.2f}" for time in times)
        print(f"{N:5d} {split!s:>6} {pdl!s:>6} {lanes:10d} {transposed!s:>15} {numbers}", flush=True)


def set_tuning(split: bool | None, pdl: bool) -> None:
    if split is not None:
        product.SPLIT.update(forward=split, backward=split)
    lam0_forward.PDL = pdl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 704, 1000, 1024, 2000])
    parser.add_argument("--T", type=int, default=150)
    parser.add_argument("--B", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--options", choices=OPTIONS, default="eta")
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--pieces", action="store_true")
    parser.add_argument("--sweep", type=int)
    parser.add_argument("--split", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--pdl", action=argparse.BooleanOptionalAction, default=lam0_forward.PDL)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # as cuDNN does by default
    dtype, options = DTYPES[args.dtype], OPTIONS[args.options]
    set_tuning(args.split, args.pdl)
    if args.sweep:
        sweep(args.T, args.B, args.sweep, dtype, options)
    elif args.pieces:
        pieces(args.T, args.B, args.sizes, dtype, options)
    else:
        table(args.T, args.B, args.sizes, dtype, options, not args.no_errors)


if __name__ == "__main__":
    main()
