"""Time trainings on one CPU: processes that share a batch, workers that share a study. Each has one thread.

python benchmarks/scaling.py --json results/bench/scaling.json
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recording import markdown, run

TEXT = Path(__file__).parent / "swap" / "text.txt"
SHARED_BATCH = ["train", "char-rum", "--data", str(TEXT), "--steps", "60", "--eval-every", "60", "--device", "cpu"]
STUDY = ["sweep", "recall-rum-lam1-t30", "--steps", "400", "--device", "cpu", "--trials", "8"]
STUDY += ["--search", "optimizer.lr=1e-4:1e-1:log"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
REPEATS = 2


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "torchrum", *arguments, "--quiet"], env=ONE_THREAD)


def finish(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.wait() != 0:
            raise SystemExit("a torchrum command failed; its message is above")


def shared_batch(options: list[str], folder: Path) -> float:
    """Milliseconds per step of one training."""
    finish([start([*SHARED_BATCH, *options, "--out", str(folder)])])
    result = json.loads((folder / "char-rum" / "result.json").read_text())
    return 1000 * result["seconds"] / result["step"]


def study(workers: int, folder: Path) -> float:
    """Seconds from the start of the first worker until the last one has ended."""
    storage, begin = f"journal://{folder / 'study.log'}", time.monotonic()
    finish([start([*STUDY, "--storage", storage, "--out", str(folder / str(worker))]) for worker in range(workers)])
    return time.monotonic() - begin


def measure() -> dict[str, list[float]]:
    two = ["--devices", "2"]
    measured: dict[str, Any] = {
        "one training, one process, ms per step": lambda folder: shared_batch([], folder),
        "two processes, ms per step": lambda folder: shared_batch(two, folder),
        "two processes, `--strategy fsdp`, ms per step": lambda folder: shared_batch(
            [*two, "--strategy", "fsdp"], folder
        ),
        "a study of 8 trials, one worker, s": lambda folder: study(1, folder),
        "two workers, s": lambda folder: study(2, folder),
        "four workers, s": lambda folder: study(4, folder),
    }
    found: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(REPEATS):
        for name, time_it in measured.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(time_it(Path(folder)))
    return found


def table(measured: dict[str, list[float]]) -> str:
    rows = [[name, f"{statistics.median(v):.0f}", f"{min(v):.0f} to {max(v):.0f}"] for name, v in measured.items()]
    return markdown(["", "median", "range"], rows)


if __name__ == "__main__":
    run(__doc__, measure, table)
