"""Time the layers without kernels as they are and under ``graphed``; needs a CUDA device, and takes under a minute.

First green: pytest -m gpu tests/layers/test_cuda_graphs.py. Then: python benchmarks/graphed.py [out.json]
B=128, T=100, float32, forward and backward. Times are medians in microseconds per step; "first" is the seconds of the
first call, which records; "difference" is the largest of outputs and gradients, against the largest entry of each;
"GiB" is the memory reserved by the recording.
"""

import json
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from timing import microseconds
from torchrum.layers.cuda_graphs import graphed
from torchrum.layers.registry import build_layer

B, T, I = 128, 100, 10
SIZES = (100, 50)
CASES: dict[str, dict[str, Any]] = {
    "eunn": {},
    "goru": {},
    "fast_weights": {},
    "ntm": {},
    "exprnn": {},
    "exprnn taylor": {"orthogonal_map": "taylor"},
    "urnn": {},
    "ln_lstm": {"zoneout": 0.1},
}
SAMPLES = {"eager": 3, "graphed": 15}


def step(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """One forward and backward; the outputs and all gradients."""
    layer.zero_grad()
    x.grad = None
    output, hidden = layer(x)
    output.sin().sum().backward()  # RUM's states have a fixed norm: their sum of squares has no gradient
    states = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    assert x.grad is not None
    return [part.detach().clone() for part in (output, *states, x.grad, *grads)]


def difference(given: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1e-6)).item() for a, b in zip(given, expected, strict=True)
    )


def measure(name: str, hidden: int) -> dict[str, object]:
    """One row of the table."""
    torch.manual_seed(0)
    layer = build_layer(name.split()[0], I, hidden, **CASES[name]).cuda()
    x = torch.randn(T, B, I, device="cuda", requires_grad=True)
    wrapped = graphed(layer)
    torch.manual_seed(1)
    expected = step(layer, x)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved, begin = torch.cuda.memory_reserved(), time.perf_counter()
    step(wrapped, x)
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    memory = (torch.cuda.memory_reserved() - reserved) / 2**30
    torch.manual_seed(1)  # zoneout's masks are then those of the eager call
    error = difference(step(wrapped, x), expected)
    row: dict[str, object] = {"layer": name, "hidden": hidden, "first": first, "GiB": memory, "difference": error}
    row["eager"] = microseconds(lambda: step(layer, x), samples=SAMPLES["eager"])[0] / T
    row["graphed"] = microseconds(lambda: step(wrapped, x), samples=SAMPLES["graphed"])[0] / T
    row["ran"], row["reason"] = wrapped.explain()
    wrapped.clear()
    torch.cuda.empty_cache()
    return row


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, B={B}, T={T}, float32")
    print(f"{'layer':15}{'H':>5}{'eager':>9}{'graphed':>9}{'ratio':>7}{'first':>7}{'GiB':>6}{'difference':>12}  ran")
    rows = []
    for hidden in SIZES:
        for name in CASES:
            row = measure(name, hidden)
            rows.append(row)
            ran = row["ran"] if row["ran"] == "graphed" else f"{row['ran']}: {row['reason']}"
            print(
                f"{name:15}{hidden:5}{row['eager']:9.0f}{row['graphed']:9.0f}{row['eager'] / row['graphed']:7.1f}"  # type: ignore[operator]
                f"{row['first']:7.2f}{row['GiB']:6.2f}{row['difference']:12.1e}  {ran}",
                flush=True,
            )
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as out:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, out, indent=1)


if __name__ == "__main__":
    main()
