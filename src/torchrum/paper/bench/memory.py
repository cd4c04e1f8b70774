"""Peak memory of a forward and backward pass on the CPU: of a process of its own, which nothing else has grown.

``python -m torchrum.paper.bench.memory '{"name": "torch", "N": 100, "T": 100, "B": 128, "lam": 1}'`` prints bytes.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from torchrum.paper.bench.work import Shape, Work, make_layer

# glibc otherwise carves large tensors out of a heap full of holes, which triples the peak of the original
# implementation; so each is mapped by itself, and the peak is that of the tensors
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(name: str, shape: Shape, lam: int, seconds: float = 600) -> int:
    """Bytes by which one forward and backward pass raises the resident memory of a fresh process at its peak."""
    request = json.dumps({"name": name, "lam": lam, **dataclasses.asdict(shape)})
    here = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH")) if part)
    done = subprocess.run(
        [sys.executable, "-m", "torchrum.paper.bench.memory", request],
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


def measure(request: dict) -> int:
    """The same in this process."""
    name, lam = request.pop("name"), request.pop("lam")
    shape = Shape(**request)
    # a short pass first: libraries load, thread pools and their buffers come to life
    Work(lambda: make_layer(name, shape, **_options(name, lam)), dataclasses.replace(shape, T=2)).forward_backward()
    work = Work(lambda: make_layer(name, shape, **_options(name, lam)), shape)
    before = _start_peak()
    work.forward_backward()
    return _peak() - before


def _options(name: str, lam: int) -> dict:
    return {} if name in ("gru", "lstm") else {"lam": lam}


def _start_peak() -> int:
    """Forget the peak so far, where the system can, and return the memory in use now."""
    if not _STATUS.exists():
        return _peak()  # the peak so far, which the pass must first exceed: an underestimate for small passes
    _CLEAR.write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    if _STATUS.exists():
        return _status("VmHWM")
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _status(word: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(word))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(measure(json.loads(sys.argv[1])))
