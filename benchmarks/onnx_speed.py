"""Time exported RUMs beside an exported nn.GRU in onnxruntime, one thread, interleaved.

    python benchmarks/onnx_speed.py

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

from torchrum import RUM
from torchrum.export import to_onnx, to_onnx_step

H, ROUNDS = 128, 101
FORMS: dict[str, dict[str, Any]] = {"default": {}, "paper": {"form": "paper"}, "lam=1": {"lam": 1}}


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


def main(folder: Path) -> None:
    layers = {name: RUM(H, H, **options) for name, options in FORMS.items()}
    wholes = {name: load(to_onnx(rum, folder / f"{name}.onnx", lengths=False)) for name, rum in layers.items()}
    steps = {name: load(to_onnx_step(rum, folder / f"{name}-step.onnx")) for name, rum in layers.items()}
    for B, T in ((1, 1), (1, 100), (16, 50)):
        sessions = {"nn.GRU": load(export_gru(T, B, folder / "gru.onnx")), **(steps if T == 1 else wholes)}
        times: dict[str, list[float]] = {name: [] for name in sessions}
        x = np.random.default_rng(0).standard_normal((T, B, H), "f")
        for _ in range(ROUNDS):
            for name, session in sessions.items():
                given = {"input": x[0] if T == 1 and name != "nn.GRU" else x, "h0": np.zeros((1, B, H), "f")}
                if name == "lam=1":
                    given["R0"] = np.zeros((1, B, H, H), "f")
                start = time.thread_time()
                session.run(None, given)
                times[name].append(time.thread_time() - start)
        middle = {name: statistics.median(values) for name, values in times.items()}
        gru = middle["nn.GRU"]
        print(f"(B, T) = {(B, T)}:", *(f"{name} {t * 1e6:.0f} us ({t / gru:.2f})" for name, t in middle.items()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
