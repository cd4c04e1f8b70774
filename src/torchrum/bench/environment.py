"""What a timing depends on besides the code."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from torchrum.training.environment import given_commit, own_commit, without_folders


def environment(commit: str | None = None) -> dict[str, Any]:
    """Versions, commit, machine and settings of this process, for the record.

    Args:
        commit: of the code, where there is no checkout to ask.
    """
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join([*_program(), *map(without_folders, sys.argv[1:])]),
        "commit": _commit() if commit is None else given_commit(commit),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system() + " " + platform.machine(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "triton": _version("triton"),
            "driver": (query_gpu("driver_version") or {}).get("driver_version"),
            "clocks": clocks(),
        }
    return found


def _program() -> list[str]:
    name = Path(sys.argv[0]).name
    return ["python", "-m", "torchrum"] if name == "__main__.py" else [name]


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _commit() -> str | None:
    commit = own_commit()
    return None if commit is None else commit.hash + (" with changes" if commit.changes else "")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        if names:
            return names[0]
    return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def clocks() -> dict[str, str] | None:
    """Clocks now and at most, power and temperature of the current GPU, or None where nobody can tell."""
    return query_gpu("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu")


def query_gpu(*fields: str) -> dict[str, str] | None:
    """What nvidia-smi says of the current GPU, by field."""
    if not torch.cuda.is_available():
        return None
    index = str(torch.cuda.current_device())
    said = _ask("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={index}")
    values = [value.strip() for value in said.splitlines()[0].split(",")] if said else []
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else None
