"""How far float32 alone takes relu's gradients from float64, without a kernel: the reference and the torch backend.

A unit that rounding puts on the other side of 0 has another slope. Run after tests/paper/bench/test_judging.py:

    python benchmarks/relu_kinks.py --json results/bench/kinks.json
"""

import argparse
import json
from pathlib import Path

import torch

from judging.errors import relative_error
from torchrum import RUM
from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.paper.bench.layers import Shape
from torchrum.paper.bench.measure import conditions


def measure(N: int, seed: int, device: str) -> dict[str, float | int]:
    """Largest relative error over outputs and gradients, with and without samples near the ReLU threshold."""
    shape = Shape(N=N, T=20, B=128, device=device)
    torch.manual_seed(seed)
    rum = RUM(N, N, **{**PAPER_OPTIONS, "eta": 1.0}, backend="torch", device=device)
    row: dict[str, float | int] = {"N": N, "seed": seed, "torch": relative_error(rum, shape, "highest")}
    row["torch_without_kinks"] = relative_error(rum, shape, "highest", exclude_near_threshold=True)
    rum.backend = "reference"
    row["reference"] = relative_error(rum, shape, "highest")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1000])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for N in args.sizes:
        for seed in range(args.seeds):
            rows.append(measure(N, seed, args.device))
            print("  ".join(f"{name} {value:.2e}" if isinstance(value, float) else f"{name} {value}"
                            for name, value in rows[-1].items()), flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"environment": conditions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
