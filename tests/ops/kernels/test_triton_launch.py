"""Kernels are compiled together, once, and before the first launch; all without a device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="what is tested compiles Triton's kernels")

import torchrum
from grids import thinned
from torchrum.ops.kernels import triton_launch

SCRIPT = Path(__file__).with_name("compile_without_device.py")


class Kernel:
    """Says what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], tuple[object, ...]]] = []

    def __getitem__(self, grid):
        return lambda *args, **flags: self.calls.append(("launch", grid, args)) or "launched"

    def warmup(self, *args, grid, **flags):
        self.calls.append(("compile", grid, args))


@pytest.fixture
def compiled(monkeypatch):
    """As where kernels are real: here they are the interpreter's."""
    monkeypatch.setattr(triton_launch, "INTERPRET", type("Constant", (), {"value": False}))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_a_dry_run_compiles_and_a_launch_launches(compiled):
    kernel = Kernel()
    triton_launch.compile_in_parallel(lambda: triton_launch.launch(kernel, (2,), 7))
    assert kernel.calls == [("compile", (2,), (7,))]
    assert not triton_launch.is_dry_run()
    triton_launch.launch(kernel, (2,), 7)
    assert kernel.calls[1:] == [("launch", (2,), (7,))]


def test_a_launch_is_prepared_without_a_trace_and_returns_the_kernel(compiled):
    kernel = Kernel()
    prepared = triton_launch.prepare(kernel, (2,), 7)
    assert not kernel.calls
    assert prepared() == prepared() == "launched"
    assert kernel.calls == [("launch", (2,), (7,))] * 2


def test_a_failed_dry_run_leaves_the_kernels_to_their_launches(compiled):
    kernel = Kernel()

    def fail() -> None:
        triton_launch.launch(kernel, (1,))
        raise RuntimeError("no memory for a dry run")

    triton_launch.compile_in_parallel(fail)
    assert not triton_launch.is_dry_run()
    assert triton_launch.prepare(kernel, (1,))() == "launched"


FAST_SLOW = ["fast_slow", "fast_slow_gated", "fast_slow_rotational"]


@pytest.mark.parametrize("name", thinned(["gated", "stepwise", "stepwise_tf32", *FAST_SLOW], 6))
def test_the_first_forward_compiles_all_kernels_once(tmp_path, name):
    """Forward and backward; then under a capture; then at another length. None compiles anything again."""
    source = str(Path(torchrum.__file__).parents[1])
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    env.pop("TRITON_INTERPRET", None)
    run = subprocess.run([sys.executable, str(SCRIPT), name], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    first, *later = found["counts"]
    assert first == found["different"] > 0
    assert later == [0] * 5
