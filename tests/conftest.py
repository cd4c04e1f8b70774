"""Fixtures for every test: fresh memory is NaN, so that what a kernel forgets to write is seen."""

import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # one worker per core; more threads only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # likewise: the threads some tests ask for would spin on busy cores

import pytest
import torch

from browser import Browser, find_browser
from interpreting import prepare_once, sum_one_by_one
from torchrum.ops.kernels.machine import limit_isa
from torchrum.ops.rum_scan.designs import clear_design_cache

if "PYTEST_XDIST_WORKER" not in os.environ and (done := limit_isa()):  # workers and children inherit it
    print(done, flush=True)
if torch.cuda.is_available() and "PYTEST_XDIST_WORKER" in os.environ:
    from torchrum.ops.kernels import triton_launch

    triton_launch.MAX_THREADS = 2
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are declared, so before Triton is imported


def pytest_collection_finish() -> None:
    """Interpret Triton's kernels faster, if a test has imported it."""
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        prepare_once(interpreter)
        if rows := sys.modules.get("torchrum.ops.kernels.rows"):
            sum_one_by_one(interpreter, [getattr(rows, f"_add{count}") for count in range(2, 9)])


@pytest.fixture(autouse=True)
def fresh_decisions():
    """What a test does to the machine must not be remembered, nor what others did."""
    clear_design_cache()
    yield
    clear_design_cache()


@pytest.fixture(autouse=True)
def nan_filled_memory(request):
    """Fill ``torch.empty`` with NaN and seed the generator."""
    if "compile" in request.node.name:  # the compiler would see the fill in its graphs
        yield
        return
    torch.manual_seed(0)
    before = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before[0]
    torch.use_deterministic_algorithms(before[1])


@pytest.fixture
def process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, which outlives what a test makes with it.

    DDP must go first: held by nothing but DDP, a group would be taken down by a destructor that keeps the GIL, while
    its thread may wait for the GIL, and both would wait for ever.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    gc.collect()
    time.sleep(0.1)  # gloo's thread needs the GIL to let go of the last exchange, as in training.fabric.leave_together
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for the pages of a module; skipped where there is none."""
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    found = Browser(path, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
