"""The CPU suite: the original implementation, our backends, nn.GRU and nn.LSTM, side by side in one run.

``python -m torchrum.paper.bench.cpu '{"name": "torch", "N": 100, "T": 100, "B": 128, "options": {"lam": 1}}'`` prints
the peak memory of a forward and backward pass in bytes, in a new process that nothing else has grown.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchrum.paper.bench.layers import MODES, Case, Shape, Work, make_layer
from torchrum.paper.bench.measure import time_cpu
from torchrum.paper.bench.records import Report, Row

IMPLEMENTATIONS = ("authors", "reference", "torch", "native", "gru", "lstm")
FAST = ("torch", "native", "gru", "lstm")
LAM0, LAM1 = {"lam": 0}, {"lam": 1}

# the copying task's ten inputs, a layer in the middle of a stack, the recall task's sizes, and a step of serving
CASES: list[Case] = [
    Case("lam0-n100-t100", Shape(N=100, T=100, I=10), LAM0, IMPLEMENTATIONS, MODES, peak=True),
    Case("lam1-n100-t100", Shape(N=100, T=100, I=10), LAM1, IMPLEMENTATIONS, MODES, peak=True),
    Case("lam0-n100-t100-wide", Shape(N=100, T=100, I=100), LAM0, IMPLEMENTATIONS, MODES),
    Case("lam1-n100-t100-wide", Shape(N=100, T=100, I=100), LAM1, IMPLEMENTATIONS, MODES),
    Case("lam0-n256-t100", Shape(N=256, T=100, I=10), LAM0, FAST, MODES, peak=True),
    Case("lam1-n50-t53", Shape(N=50, T=53, I=36), LAM1, FAST, MODES, peak=True),
    Case("step-n256", Shape(N=256, T=1, B=1), LAM0, FAST, ("forward",), calls=100),
    Case("lam0-n100-t100-1thread", Shape(N=100, T=100, I=10), LAM0, FAST, MODES, threads=1),
    Case("lam1-n100-t100-1thread", Shape(N=100, T=100, I=10), LAM1, FAST, MODES, threads=1),
    Case("lam0-n256-t100-1thread", Shape(N=256, T=100, I=10), LAM0, FAST, MODES, threads=1),
    Case("lam1-n50-t53-1thread", Shape(N=50, T=53, I=36), LAM1, FAST, MODES, threads=1),
    Case("step-n256-1thread", Shape(N=256, T=1, B=1), LAM0, FAST, ("forward",), threads=1, calls=100),
]
QUICK: list[Case] = [
    Case("lam0-quick", Shape(N=8, T=5, B=4), LAM0, IMPLEMENTATIONS, MODES, peak=True),
    Case("lam1-quick", Shape(N=8, T=5, B=4), LAM1, IMPLEMENTATIONS, MODES, peak=True),
]
LONG = ("lam1-n100-t1000-memory", LAM1, Shape(N=100, T=1000, I=10))
"""Name, options and shape of the memory case; the original implementation needs about 11 GB here."""
SECONDS = 1.0
"""Seconds of timed calls after which a slow implementation of a case gets no more of them."""
# glibc otherwise carves large tensors out of a heap full of holes, which triples the peak of the original
# implementation; so each is mapped by itself, and the peak is that of the tensors
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
STATUS = Path("/proc/self/status")


def run_cpu(
    report: Report,
    suite: Sequence[Case],
    *,
    memory: bool = False,
    samples: int = 21,
    cases: str = "*",
    log: Callable[[str], None] = print,
) -> None:
    """Measure the suite into ``report``.

    Args:
        report: takes the rows.
        suite: ``CASES`` or ``QUICK``.
        memory: also the peak memory at T = 1000.
        samples: number of samples of each implementation; fewer if it takes more than ``SECONDS``.
        cases: pattern that a case's name must match.
        log: prints the case that is being measured.
    """
    for case in suite:
        if fnmatch(case.name, cases):
            log(f"{case.name}: {', '.join(case.implementations).replace('authors', 'original')}")
            before = torch.get_num_threads()
            torch.set_num_threads(case.threads or before)
            try:
                report.add(*_rows(case, samples))
            finally:
                torch.set_num_threads(before)
    name, options, shape = LONG
    for implementation in ("authors", "torch", "native") if memory and fnmatch(name, cases) else ():
        log(f"{name}: {implementation}")
        row = Row(name, implementation, "forward_backward", shape, options)
        try:
            row.peak_bytes = peak_memory(implementation, shape, options)
        except RuntimeError as error:  # most likely too little memory
            row.failed = str(error)
        report.add(row)


def _rows(case: Case, samples: int) -> list[Row]:
    shape = case.shape
    works = {
        name: Work(lambda name=name: make_layer(name, shape, **case.options_of(name)), shape)  # type: ignore[misc]
        for name in case.implementations
    }
    rows = []
    for mode in case.modes:
        runs = {name: work.run(mode) for name, work in works.items()}
        times = time_cpu(runs, samples, calls=case.calls, seconds=SECONDS, settle=True)
        for name, work in works.items():
            row = Row(case.name, name, mode, shape, case.options_of(name), times[name])
            row.num_parameters, row.threads = work.num_parameters, case.threads
            rows.append(row)
    works.clear()
    for row in rows if case.peak else ():
        if row.mode == "forward_backward":
            row.peak_bytes = peak_memory(row.implementation, shape, row.options)
    return rows


def peak_memory(name: str, shape: Shape, options: Mapping[str, Any], seconds: float = 600) -> int:
    """Measure in a new process by how many bytes a forward and backward pass raises its resident memory at the peak."""
    request = json.dumps({"name": name, "options": options, **dataclasses.asdict(shape)})
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


def measure_peak(name: str, options: Mapping[str, Any], **shape: Any) -> int:
    """Measure the same in this process."""
    make = partial(make_layer, name, Shape(**shape), **options)
    Work(make, Shape(**{**shape, "T": 2})).forward_backward()  # libraries load, thread pools and their buffers start
    work = Work(make, Shape(**shape))
    if STATUS.exists():  # on Linux: forget the peak so far
        Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    work.forward_backward()
    return _resident("VmHWM") - before


def _resident(word: str) -> int:
    """Read the resident memory, now (VmRSS) or at its peak (VmHWM); outside Linux always at its peak."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(word))
        return int(line.split()[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    print(measure_peak(**json.loads(sys.argv[1])))
