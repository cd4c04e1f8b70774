"""Time the persistent lam=0 kernels beside cuDNN's GRU on one GPU.

First green: pytest -m gpu tests/ops/test_fused_persistent.py. Then:
    python benchmarks/fused_persistent.py [--out out.json] [--sizes 256 1000]
Microseconds per step at B=128, T=150, bfloat16, eta=1: kernels alone, and whole (input projection of width N, its
gradients and the weights' included), median of repeated graph replays. Errors are against float64 over 20 steps.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from timing import microseconds
from torchrum.ops.rum_scan import RumOptions, ScanInputs, persistent, rum_scan_reference
from torchrum.ops.rum_scan.types import Gradients, Results

B, T = 128, 150
OPTIONS = RumOptions(eta=1.0)
SEED = None
VARIANTS = [  # hidden size, row blocks of a tile
    (256, 1),
    (704, 3),
    (1024, 4),
    (1000, 4),
    (512, 2),
    (704, 4),
    (256, 2),
]


def microseconds_per_step(work: Callable[[], object], repeats: int = 15) -> float:
    """Median over graph replays; without a graph where the work cannot be captured."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        go: Callable[[], object] = graph.replay
    except RuntimeError as error:
        print(f"    not captured ({error}); timed eagerly")
        go = work
    return microseconds(go, samples=repeats)[0] / T


def gru_time(N: int) -> float:
    gru = torch.nn.GRU(N, N, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(T, B, N, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(T, B, N, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        torch.autograd.grad(gru(x)[0], [x, *gru.parameters()], gradient)

    return microseconds_per_step(work)


def inputs(steps: int, N: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    tensors = (draw(steps, B, 3 * N), draw(B, N) * 0.5, draw(2 * N, N) / N**0.5, draw(steps, B, N))
    xp, h0, weight, gradient = (x.bfloat16() for x in tensors)
    return xp, h0, weight, gradient


def forward(xp: Tensor, h0: Tensor, weight: Tensor) -> Results:
    return persistent.forward(ScanInputs(xp, h0, None, weight, seed=SEED), OPTIONS)


def backward(gradient: Tensor, xp: Tensor, h0: Tensor, weight: Tensor, results: Results) -> Gradients:
    inputs = ScanInputs(xp, h0, None, weight, seed=SEED)
    return persistent.backward(gradient, None, inputs, results, OPTIONS, False)


def errors(N: int) -> dict[str, float]:
    xp, h0, weight, gradient = inputs(20, N)
    saved = forward(xp, h0, weight)
    grads = backward(gradient, xp, h0, weight, saved)
    assert grads.h0 is not None
    ours = (saved.out, grads.xp, grads.h0, grads.weight_hh)
    exact = [x.double().requires_grad_() for x in (xp, h0, weight)]
    out, _ = rum_scan_reference(ScanInputs(exact[0], exact[1], None, exact[2]), OPTIONS)
    theirs = (out, *torch.autograd.grad(out, exact, gradient.double()))
    names = ("out", "dxp", "dh0", "dweight_hh")
    return {n: float((x.double() - y).norm() / y.norm()) for n, x, y in zip(names, ours, theirs, strict=True)}


def times(N: int) -> dict[str, float]:
    xp, h0, weight, gradient = inputs(T, N)
    saved = forward(xp, h0, weight)
    x = torch.randn(T, B, N, device="cuda", dtype=torch.bfloat16)
    weight_ih = (torch.randn(3 * N, N, device="cuda") / N**0.5).bfloat16()
    bias = torch.zeros(3 * N, device="cuda", dtype=torch.bfloat16)

    def whole() -> None:
        projected = F.linear(x, weight_ih, bias)
        dxp = backward(gradient, projected, h0, weight, forward(projected, h0, weight))[0].view(T * B, 3 * N)
        dxp @ weight_ih
        dxp.t() @ x.view(T * B, N)
        dxp.sum(0)

    return {
        "forward": microseconds_per_step(lambda: forward(xp, h0, weight)),
        "backward": microseconds_per_step(lambda: backward(gradient, xp, h0, weight, saved)),
        "whole": microseconds_per_step(whole),
    }


def choose(N: int, row_blocks: int) -> persistent.Plan:
    persistent.ROW_BLOCKS = (row_blocks,)
    persistent.make_plan.cache_clear()
    blocks = persistent.machine.blocks(torch.device("cuda"))
    return persistent.make_plan(B, N, torch.bfloat16, OPTIONS, False, blocks, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="JSON file for the records")
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 512, 704, 1000, 1024])
    args = parser.parse_args()
    variants = [variant for variant in VARIANTS if variant[0] in args.sizes]
    print(torch.cuda.get_device_name(), torch.__version__, "B", B, "T", T)
    start = time.perf_counter()
    persistent.compile_ahead([choose(*variant) for variant in variants])
    print(f"compiled in {time.perf_counter() - start:.1f} s")
    records: list[dict[str, object]] = []
    gru = {N: gru_time(N) for N in sorted({variant[0] for variant in variants})}
    try:
        for variant in variants:
            N = variant[0]
            plan = choose(*variant)
            record: dict[str, object] = {"N": N, "rows": plan.rows, "blocks": plan.group * plan.groups}
            record["gru"] = gru[N]
            try:
                record |= errors(N)
                record |= (timed := times(N))
                record["ratio"] = timed["whole"] / gru[N]
            except Exception:  # one broken variant must not hide the others
                record["failed"] = traceback.format_exc()
            records.append(record)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}, flush=True)
    finally:
        if args.out:
            with open(args.out, "w") as file:
                json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()
