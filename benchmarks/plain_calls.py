"""What a plain call costs: RUM beside nn.GRU, forward and backward, without CUDA graphs.

At these sizes the kernels take a fraction of a call; the rest is Python and launches. tests/ops must be green first.

    python benchmarks/plain_calls.py                     on a GPU if there is one, else on the CPU
    python benchmarks/plain_calls.py --device cpu --backend torch --threads 1
    python benchmarks/plain_calls.py --profile lam1      where the time of one case goes
    python benchmarks/plain_calls.py --input-gradient --precision high     as torchrum bench --suite gpu times them
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from torchrum import RUM


@dataclass(frozen=True)
class Case:
    """A shape, and what is timed there."""

    N: int
    T: int
    B: int
    lam: float = 0
    training: bool = True
    """Forward and backward; else the forward without gradients."""


CASES = {
    "lam1": Case(50, 53, 128, lam=1),
    "lam0": Case(100, 100, 128),
    "small": Case(128, 32, 16),
    "step": Case(64, 1, 1, training=False),
    "step-lam1": Case(64, 1, 1, lam=1, training=False),
}


def make_call(layer: nn.Module, case: Case, device: str, input_gradient: bool) -> Callable[[], None]:
    x = torch.randn(case.T, case.B, case.N, device=device, requires_grad=input_gradient)
    if not case.training:
        layer.eval()

        def infer() -> None:
            with torch.no_grad():
                layer(x)

        return infer
    grad = torch.randn(case.T, case.B, case.N, device=device)

    def train() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(x)[0].backward(grad)

    return train


def milliseconds(calls: dict[str, Callable[[], None]], device: str, repeats: int, seconds: float) -> dict[str, float]:
    """The best of interleaved repeats, each ``seconds`` long, after a warm-up."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    counts, best = {}, dict.fromkeys(calls, float("inf"))
    for name, call in calls.items():
        for _ in range(5):
            call()
        wait()
        start = time.perf_counter()
        call()
        wait()
        counts[name] = max(3, int(seconds / (time.perf_counter() - start)))
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            wait()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start) / counts[name])
    return best


def calls_of(case: Case, device: str, backend: str, input_gradient: bool) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    rum = RUM(case.N, case.N, lam=case.lam, backend=backend, device=device)  # type: ignore[arg-type]
    layers = {"rum": rum, "gru": nn.GRU(case.N, case.N, device=device)}
    return {name: make_call(layer, case, device, input_gradient) for name, layer in layers.items()}


def profile(call: Callable[[], None]) -> None:
    for _ in range(20):
        call()
    with cProfile.Profile() as profiler:
        for _ in range(300):
            call()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="auto", help="of RUM")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each repeat")
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--input-gradient", action="store_true", help="ask for the gradient of the input too")
    parser.add_argument("--precision", default="highest", choices=("highest", "high"), help="high allows TF32")
    parser.add_argument("--profile", choices=CASES, help="print where the time of this case goes instead")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision(args.precision)
    if args.profile is not None:
        profile(calls_of(CASES[args.profile], args.device, args.backend, args.input_gradient)["rum"])
        return
    print(f"{'case':10} {'N':>4} {'T':>4} {'B':>4} {'lam':>4}  {'what':16} {'RUM ms':>8} {'GRU ms':>8} {'ratio':>6}")
    for name, case in CASES.items():
        calls = calls_of(case, args.device, args.backend, args.input_gradient)
        found = milliseconds(calls, args.device, args.repeats, args.seconds)
        what = "forward+backward" if case.training else "inference"
        print(
            f"{name:10} {case.N:4} {case.T:4} {case.B:4} {case.lam:4}  {what:16} "
            f"{found['rum']:8.3f} {found['gru']:8.3f} {found['rum'] / found['gru']:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
