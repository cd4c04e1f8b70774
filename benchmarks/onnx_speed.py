"""Time exported RUMs beside an exported nn.GRU in onnxruntime, one thread, interleaved.

    python benchmarks/onnx_speed.py --json results/bench/onnx_speed.json

It counts the processor time of the one thread, so that other work on the machine matters less.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

from recording import markdown, run
from torchrum import RUM
from torchrum.export import to_onnx, to_onnx_step

H, ROUNDS = 128, 101
FORMS: dict[str, dict[str, Any]] = {"default": {}, "form=paper": {"form": "paper"}, "lam=1": {"lam": 1}}


def load(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def export_gru(T: int, B: int, path: Path) -> Path:
    """Write an nn.GRU of one size: its own export has a fixed T."""
    example = torch.zeros(T, B, H), torch.zeros(1, B, H)
    program = torch.onnx.export(nn.GRU(H, H).eval(), example, input_names=["input", "h0"], dynamo=True, verbose=False)
    assert program is not None
    program.save(path, external_data=False)
    return path


def measure() -> dict[str, dict[str, float]]:
    """Median microseconds of a call, by size and model."""
    found: dict[str, dict[str, float]] = {}
    layers = {name: RUM(H, H, **options).eval() for name, options in FORMS.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wholes = {form: load(to_onnx(rum, folder / f"{form}.onnx", lengths=False)) for form, rum in layers.items()}
        steps = {form: load(to_onnx_step(rum, folder / f"{form}-step.onnx")) for form, rum in layers.items()}
        for B, T in ((1, 1), (1, 100), (16, 50)):
            sessions = {"nn.GRU": load(export_gru(T, B, folder / "gru.onnx")), **(steps if T == 1 else wholes)}
            found[f"({B}, {T}){', step graph' * (T == 1)}"] = interleaved(sessions, B, T)
    return found


def interleaved(sessions: dict[str, onnxruntime.InferenceSession], B: int, T: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in sessions}
    x = np.random.default_rng(0).standard_normal((T, B, H), "f")
    for _ in range(ROUNDS):
        for name, session in sessions.items():
            given = {"input": x[0] if T == 1 and name != "nn.GRU" else x, "h0": np.zeros((1, B, H), "f")}
            if name == "lam=1":
                given["R0"] = np.zeros((1, B, H, H), "f")
            start = time.thread_time()
            session.run(None, given)
            times[name].append(1e6 * (time.thread_time() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def table(measured: dict[str, dict[str, float]]) -> str:
    """Multiples of the time of nn.GRU."""
    rows = [[size, *(f"{row[form] / row['nn.GRU']:.1f}" for form in FORMS)] for size, row in measured.items()]
    return markdown(["(B, T)", *FORMS], rows)


if __name__ == "__main__":
    run(__doc__, measure, table)
