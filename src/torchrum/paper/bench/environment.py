"""What a timing depends on besides the code."""

import datetime
import os
import shlex
import subprocess
from typing import Any

import torch

from torchrum.lab.training.environment import environment, given_commit


def conditions(commit: str | None = None) -> dict[str, Any]:
    """The environment of this process with what timings need besides: date, cores, driver and clocks.

    Args:
        commit: of the code, where there is no checkout to ask.
    """
    place = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"), processes=1)
    own = None if place.commit is None else place.commit + (" with changes" if place.uncommitted_changes else "")
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(place.command),
        "commit": own if commit is None else given_commit(commit),
        "python": place.python,
        "torch": place.versions["torch"],
        "system": place.system,
        "cpu": place.processor,
        "cores": os.cpu_count(),
        "threads": place.threads,
    }
    if torch.cuda.is_available():
        found |= {
            "gpu": place.accelerator,
            "cuda": place.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "triton": place.versions["triton"],
            "driver": (query_gpu("driver_version") or {}).get("driver_version"),
            "clocks": clocks(),
        }
    return found


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


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
