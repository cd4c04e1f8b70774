"""The CPU suite: the original implementation, our backends, nn.GRU and nn.LSTM, side by side in one run.

``python -m torchrum.paper.bench.cpu '{"name": "torch", "N": 100, "T": 100, "B": 128, "lam": 1}'`` prints the peak
memory of a forward and backward pass in bytes: of a process of its own, which nothing else has grown.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch

from torchrum.paper.bench.layers import MODES, Mode, Shape, Work, make_layer
from torchrum.paper.bench.measure import time_cpu
from torchrum.paper.bench.records import Report, Row

IMPLEMENTATIONS = ("authors", "reference", "torch", "native", "gru", "lstm")
FAST = ("torch", "native", "gru", "lstm")
RUMS = ("authors", "reference", "torch", "native")


@dataclass(frozen=True)
class Case:
    """What one case times."""

    lam: int
    shape: Shape
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    modes: tuple[Mode, ...] = MODES
    threads: int | None = None
    """Torch's own number if None."""
    calls: int = 1
    """In one sample; their mean is taken."""
    peak: bool = False
    """Whether to measure the peak memory too, each in a process of its own."""


# the copying task's ten inputs, a layer in the middle of a stack, the recall task's sizes, and a step of serving
CASES: dict[str, Case] = {
    "lam0-n100-t100": Case(0, Shape(N=100, T=100, I=10), peak=True),
    "lam1-n100-t100": Case(1, Shape(N=100, T=100, I=10), peak=True),
    "lam0-n100-t100-wide": Case(0, Shape(N=100, T=100, I=100)),
    "lam1-n100-t100-wide": Case(1, Shape(N=100, T=100, I=100)),
    "lam0-n256-t100": Case(0, Shape(N=256, T=100, I=10), FAST, peak=True),
    "lam1-n50-t53": Case(1, Shape(N=50, T=53, I=36), FAST, peak=True),
    "step-n256": Case(0, Shape(N=256, T=1, B=1), FAST, ("forward",), calls=100),
    "lam0-n100-t100-1thread": Case(0, Shape(N=100, T=100, I=10), FAST, threads=1),
    "lam1-n100-t100-1thread": Case(1, Shape(N=100, T=100, I=10), FAST, threads=1),
    "lam0-n256-t100-1thread": Case(0, Shape(N=256, T=100, I=10), FAST, threads=1),
    "lam1-n50-t53-1thread": Case(1, Shape(N=50, T=53, I=36), FAST, threads=1),
    "step-n256-1thread": Case(0, Shape(N=256, T=1, B=1), FAST, ("forward",), threads=1, calls=100),
}
QUICK: dict[str, Case] = {
    "lam0-quick": Case(0, Shape(N=8, T=5, B=4), peak=True),
    "lam1-quick": Case(1, Shape(N=8, T=5, B=4), peak=True),
}
LONG = ("lam1-n100-t1000-memory", 1, Shape(N=100, T=1000, I=10))
"""The original implementation needs about 11 GB here."""
SECONDS = 1.0
"""Seconds of timed calls after which a slow implementation of a case gets no more of them."""
# glibc otherwise carves large tensors out of a heap full of holes, which triples the peak of the original
# implementation; so each is mapped by itself, and the peak is that of the tensors
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
STATUS = Path("/proc/self/status")


def run_cpu(
    report: Report,
    *,
    quick: bool = False,
    memory: bool = False,
    samples: int = 21,
    cases: str = "*",
    log: Callable[[str], None] = print,
) -> None:
    """Measure the suite into ``report``.

    Args:
        report: takes the rows.
        quick: tiny sizes, to see that everything runs.
        memory: also the peak memory at T = 1000.
        samples: of each implementation; fewer of one that takes more than ``SECONDS``.
        cases: pattern that a case's name must match.
        log: told what is being measured.
    """
    for name, case in (QUICK if quick else CASES).items():
        if fnmatch(name, cases):
            log(f"{name}: {', '.join(case.implementations).replace('authors', 'original')}")
            before = torch.get_num_threads()
            torch.set_num_threads(case.threads or before)
            try:
                report.add(*_rows(name, case, samples))
            finally:
                torch.set_num_threads(before)
    if memory and not quick and fnmatch(LONG[0], cases):
        name, lam, shape = LONG
        for implementation in ("authors", "torch", "native"):
            log(f"{name}: {implementation}")
            row = Row(name, implementation, "forward_backward", shape, _options(implementation, lam))
            try:
                row.peak_bytes = peak_memory(implementation, shape, lam)
            except RuntimeError as error:  # most likely too little memory
                row.failed = str(error)
            report.add(row)


def _rows(name: str, case: Case, samples: int) -> list[Row]:
    shape = case.shape
    works = {
        implementation: Work(lambda c=implementation: make_layer(c, shape, **_options(c, case.lam)), shape)  # type: ignore[misc]
        for implementation in case.implementations
    }
    rows = []
    for mode in case.modes:
        runs = {implementation: work.run(mode) for implementation, work in works.items()}
        times = time_cpu(runs, samples, calls=case.calls, seconds=SECONDS, settle=True)
        for implementation, work in works.items():
            row = Row(name, implementation, mode, shape, _options(implementation, case.lam), times[implementation])
            row.num_parameters, row.threads = work.num_parameters, case.threads
            rows.append(row)
    works.clear()
    for row in rows if case.peak else ():
        if row.mode == "forward_backward":
            row.peak_bytes = peak_memory(row.implementation, shape, case.lam)
    return rows


def _options(implementation: str, lam: int) -> dict[str, int]:
    return {"lam": lam} if implementation in RUMS else {}


def peak_memory(name: str, shape: Shape, lam: int, seconds: float = 600) -> int:
    """Bytes by which one forward and backward pass raises the resident memory of a fresh process at its peak."""
    request = json.dumps({"name": name, "lam": lam, **dataclasses.asdict(shape)})
    here = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH")) if part)
    done = subprocess.run(
        [sys.executable, "-m", "torchrum.paper.bench.cpu", request],
        env={**os.environ, **_ALLOCATOR, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or "it was killed").splitlines()[-1]
        raise RuntimeError(f"measuring {name} failed with code {done.returncode}: {last}")
    return int(done.stdout)


def measure_peak(request: dict) -> int:
    """Measure the same in this process."""
    name, lam = request.pop("name"), request.pop("lam")
    shape = Shape(**request)
    # a short pass first: libraries load, thread pools and their buffers come to life
    Work(lambda: make_layer(name, shape, **_options(name, lam)), dataclasses.replace(shape, T=2)).forward_backward()
    work = Work(lambda: make_layer(name, shape, **_options(name, lam)), shape)
    if STATUS.exists():  # on Linux: forget the peak so far
        Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    work.forward_backward()
    return _resident("VmHWM") - before


def _resident(word: str) -> int:
    """Resident memory now (VmRSS) or at its peak (VmHWM); elsewhere than on Linux always at its peak."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(word))
        return int(line.split()[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    print(measure_peak(json.loads(sys.argv[1])))
