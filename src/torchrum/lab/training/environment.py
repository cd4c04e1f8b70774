"""What a run ran on: versions, commit and hardware; nothing that names the machine or its user."""

import functools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.files import read_json
from torchrum.lab.training.run_folder import ENVIRONMENT
from torchrum.lab.training.typed_data import Reader

PACKAGE = Path(__file__).resolve().parents[2]
HASH = re.compile(r"[0-9a-f]{7,40}")


class Commit(NamedTuple):
    """The state of a checkout."""

    hash: str
    changes: bool
    """Whether files of the package had been edited since."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """``environment.json``."""

    python: str
    system: str
    versions: dict[str, str | None]
    """Of the packages that compute; None for one that is not installed."""
    commit: str | None
    """Of torchrum's own repository; None outside a checkout of it."""
    uncommitted_changes: bool | None
    processor: str
    threads: int
    device: str
    accelerator: str | None
    cuda: str | None
    processes: int
    command: list[str]
    data: str | None = None
    """What is unusual about the data, see ``Task.provenance``."""
    parameters: int | None = None
    """Trainable numbers of the model; None in folders of earlier versions."""
    resumed: list[dict[str, Any]] = field(default_factory=list)
    """The step of each resumption, and what was different then."""


def read_environment(run: Path) -> Environment:
    """``environment.json`` of a run folder."""
    return Reader(run / ENVIRONMENT).build(Environment, read_json(run / ENVIRONMENT))


def environment(device: Any, processes: int, data: str = "") -> Environment:
    """The environment of this process.

    Args:
        device: the torch device that computes.
        processes: how many share the batch.
        data: what is unusual about the data.
    """
    import torch

    commit, name = own_commit(), Path(sys.argv[0]).name
    program = ["python", "-m", "torchrum"] if name == "__main__.py" else [name]
    packages = ("torchrum", "torch", "triton", "lightning-fabric", "safetensors", "numpy")
    return Environment(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        versions={name: _version(name) for name in packages} | {"torch": str(torch.__version__)},
        commit=None if commit is None else commit.hash,
        uncommitted_changes=None if commit is None else commit.changes,
        processor=_processor(),
        threads=torch.get_num_threads(),
        device=str(device.type),
        accelerator=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        cuda=torch.version.cuda if device.type == "cuda" else None,
        processes=processes,
        command=[*program, *map(without_folders, sys.argv[1:])],
        data=data,
    )


def without_folders(argument: str) -> str:
    """An argument of a command whose absolute paths are shortened to their last name; that of a user goes too."""
    return re.sub(r"(^|=|,)((?:~|/|[A-Za-z]:[\\/])[^,]*)", lambda found: found[1] + _shortened(found[2]), argument)


def _shortened(path: str) -> str:
    *folders, name = [part for part in re.split(r"[\\/]", path) if part] or [""]
    at_home = (path.startswith("~") and not folders) or Path(path) == Path.home()
    of_user = at_home or folders[-1:] in (["home"], ["Users"])
    return "..." if of_user else f".../{name}"


@functools.cache
def own_commit(package: Path = PACKAGE) -> Commit | None:
    """The commit of torchrum's own repository; None where the package cannot tell.

    The package must stand in ``src/torchrum`` of the repository and be tracked by it: a project that contains the
    virtual environment, or a copy of the package, has a commit of its own that says nothing about torchrum.
    """
    found = (_git(["rev-parse", "--show-toplevel", "HEAD"], package) or "").splitlines()
    tracked = _git(["ls-files", "--error-unmatch", "--", "__init__.py"], package) is not None
    if not tracked or Path(found[0]).resolve() / "src" / "torchrum" != package.resolve():
        return None
    return Commit(found[1], bool(_git(["status", "--porcelain", "--", "."], package)))


def given_commit(text: str) -> str:
    """What a user passes as ``--commit``: a hash, or HEAD for that of torchrum's own checkout."""
    if text == "HEAD":
        commit = own_commit()
        if commit is None:
            raise ConfigError("--commit HEAD: torchrum is not running from a checkout of its own; pass the hash.")
        return commit.hash + ("+changes" if commit.changes else "")
    if not HASH.fullmatch(text.lower()):
        raise ConfigError(f"--commit is {text!r}, but it must be a hash of 7 to 40 hexadecimal digits, or HEAD.")
    return text.lower()


def _git(arguments: Iterable[str], folder: Path) -> str | None:
    # a git hook, for one, sets variables that would lead to another repository
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=variables)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
