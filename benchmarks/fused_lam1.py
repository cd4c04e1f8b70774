"""Times of the lam = 1 kernels; tests/ops/test_fused_lam1.py (with -m gpu) must be green first.

python benchmarks/fused_lam1.py            # the table
python benchmarks/fused_lam1.py --tilings  # also every number of rows per thread
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from timing import milliseconds
from torchrum.ops.rum_scan import RumOptions, ScanInputs, lam1, rum_scan_reference
from torchrum.ops.rum_scan.types import Results

CASES = [
    ("N=50 T=53", 50, 53, RumOptions(lam=1.0), torch.float32),
    ("N=100 T=1020", 100, 1020, RumOptions(lam=1.0), torch.float32),
    ("N=100 T=1020 eta", 100, 1020, RumOptions(lam=1.0, eta=1.0), torch.float32),
    ("N=128 T=220", 128, 220, RumOptions(lam=1.0), torch.float32),
    (
        "N=128 T=220 LN zoneout eta",
        128,
        220,
        RumOptions(lam=1.0, eta=1.0, layer_norm=True, zoneout=0.1, training=True),
        torch.float32,
    ),
    ("N=100 T=220 bf16", 100, 220, RumOptions(lam=1.0), torch.bfloat16),
]
BATCH = 128


def graphed(work: Callable[[], object]) -> Callable[[], None]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def draw(N: int, T: int, options: RumOptions, dtype: torch.dtype, B: int = BATCH) -> ScanInputs:
    gen = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=gen).to(dtype)

    ln = options.num_inputs * N
    weight = normal(options.num_gates * N, N) * N**-0.5
    inputs = ScanInputs(normal(T, B, ln), normal(B, N), None, weight, seed=torch.tensor(7, device="cuda"))
    if not options.layer_norm:
        return inputs
    return inputs._replace(ln_weight=torch.ones(ln, device="cuda"), ln_bias=torch.zeros(ln, device="cuda"))


def relative_error(N: int, options: RumOptions, dtype: torch.dtype) -> tuple[float, float]:
    """Of the states and of xp's gradient after 60 steps of 4 rows, against the reference in float64."""
    inputs = draw(N, 60, options, dtype, B=4)
    grad_out = torch.randn(60, 4, N, device="cuda").to(dtype)
    results = lam1.forward(inputs, options)
    grad = lam1.backward(grad_out, None, inputs, results, options, False).xp
    given = {name: x.cpu() for name, x in inputs._asdict().items() if x is not None}
    exact = inputs._replace(**{name: x.double() if x.is_floating_point() else x for name, x in given.items()})
    exact.xp.requires_grad_()
    want, _ = rum_scan_reference(exact, options)
    (want_grad,) = torch.autograd.grad(want, exact.xp, grad_out.cpu().double())
    return distance(results.out, want.detach()), distance(grad, want_grad)


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.cpu().double() - exact).norm() / exact.norm())


def measure(name: str, N: int, T: int, options: RumOptions, dtype: torch.dtype, rows: int) -> None:
    lam1.rows_per_thread = lambda hidden: rows
    inputs = draw(N, T, options, dtype)
    grad_out = torch.randn(T, BATCH, N, device="cuda").to(dtype)

    def forward() -> Results:
        return lam1.forward(inputs, options)

    def both() -> None:
        lam1.backward(grad_out, None, inputs, forward(), options, False)

    torch.cuda.synchronize()
    start = time.perf_counter()
    both()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = torch.cuda.max_memory_allocated() / 1e9
    samples = 20 if T < 500 else 10
    eager = milliseconds(forward, both, samples=samples)
    in_graph = [milliseconds(graphed(work), samples=samples)[0] for work in (forward, both)]
    errors = relative_error(N, options, dtype)
    per_step = " ".join(f"{1e3 * ms / T:7.2f}" for ms in (*eager, *in_graph))
    print(
        f"{name:<28} {rows:>2} {per_step} {eager[1]:8.3f} {in_graph[1]:8.3f} {peak:6.3f} {first:6.2f} "
        f"{errors[0]:8.1e} {errors[1]:8.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tilings", action="store_true", help="time every number of rows per thread")
    tilings = parser.parse_args().tilings
    print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(), f"B={BATCH}")
    print(
        "us per step: forward, forward+backward, launched one by one and in a CUDA graph; then forward+backward in ms"
    )
    print(
        f"{'case':<28} {'RP':>2} {'fwd':>7} {'f+b':>7} {'fwd gr':>7} {'f+b gr':>7} {'ms':>8} {'ms gr':>8} "
        f"{'GB':>6} {'1st s':>6} {'err out':>8} {'err dxp':>8}"
    )
    default = lam1.rows_per_thread
    for name, N, T, options, dtype in CASES:
        for rows in (2, 4) if tilings else (default(N),):
            measure(name, N, T, options, dtype, rows)


if __name__ == "__main__":
    main()
