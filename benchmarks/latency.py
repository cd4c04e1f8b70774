"""Time one step of one sequence: a torchrum.Stream beside nn.GRU, nn.GRUCell and onnxruntime, one thread, interleaved.

    python benchmarks/latency.py --json results/bench/latency.json

Each call gets the state of the one before it. Medians and 99th percentiles, in microseconds.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from onnx_speed import load
from recording import markdown, run
from torchrum import RUM, Stream
from torchrum.export import to_onnx_step

H, LAYERS, WARM_UP, STEPS = 128, (1, 2), 300, 5000
Step = Callable[[], object]


def carried(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, state: Tensor) -> Step:
    """A step that keeps the state for the next one."""

    def step() -> None:
        nonlocal state
        with torch.no_grad():
            state = call(x, state)

    return step


def cells(layers: int) -> Callable[[Tensor, Tensor], Tensor]:
    stack = [nn.GRUCell(H, H) for _ in range(layers)]

    def call(x: Tensor, state: Tensor) -> Tensor:
        after = []
        for cell, h in zip(stack, state, strict=True):
            x = cell(x, h)
            after.append(x)
        return torch.stack(after)

    return call


def session_step(session: onnxruntime.InferenceSession, x: np.ndarray, layers: int) -> Step:
    h = np.zeros((layers, 1, H), "f")

    def step() -> None:
        nonlocal h
        h = session.run(None, {"input": x, "h0": h})[1]

    return step


def export_gru(layers: int, path: Path) -> Path:
    given = torch.zeros(1, 1, H), torch.zeros(layers, 1, H)
    program = torch.onnx.export(
        nn.GRU(H, H, layers).eval(), given, input_names=["input", "h0"], dynamo=True, verbose=False
    )
    assert program is not None
    program.save(path, external_data=False)
    return path


def steps_of(layers: int, folder: Path) -> dict[str, Step]:
    x, h, gru = torch.randn(1, H), torch.zeros(layers, 1, H), nn.GRU(H, H, layers)
    streams = {
        "Stream(RUM)": Stream(RUM(H, H, layers)),
        "Stream(RUM, form=paper)": Stream(RUM(H, H, layers, form="paper")),
        "Stream(RUM, lam=1)": Stream(RUM(H, H, layers, lam=1)),
    }
    onnx_rum = load(to_onnx_step(RUM(H, H, layers), folder / "rum.onnx"))
    onnx_gru = load(export_gru(layers, folder / "gru.onnx"))
    return {
        **{name: partial(stream, x) for name, stream in streams.items()},
        "nn.GRU with hx": carried(lambda x, state: gru(x, state)[1], x.unsqueeze(0), h),
        "nn.GRUCell": carried(cells(layers), x, h),
        "onnxruntime, RUM step graph": session_step(onnx_rum, x.numpy(), layers),
        "onnxruntime, nn.GRU": session_step(onnx_gru, x.unsqueeze(0).numpy(), layers),
    }


def percentiles(steps: dict[str, Step]) -> dict[str, list[float]]:
    """Median and 99th percentile of each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for count in range(WARM_UP + STEPS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if count >= WARM_UP:
                times[name].append(1e6 * (time.perf_counter() - start))
    return {name: [statistics.median(found), statistics.quantiles(found, n=100)[98]] for name, found in times.items()}


def measure() -> dict[str, dict[str, list[float]]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        return {f"{n} layer{'s' * (n > 1)}": percentiles(steps_of(n, Path(folder))) for n in LAYERS}


def table(measured: dict[str, dict[str, list[float]]]) -> str:
    names = next(iter(measured.values()))
    cells = {name: [f"{found[name][0]:.0f} ({found[name][1]:.0f})" for found in measured.values()] for name in names}
    return markdown(["", *measured], [[name, *row] for name, row in cells.items()])


if __name__ == "__main__":
    run(__doc__, measure, table)
