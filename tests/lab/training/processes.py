"""Runs in processes of their own, forked from one that has imported torch: a start takes a tenth of a second."""

import fcntl
import multiprocessing
import os
import resource
import signal
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from lab.training.tiny import tiny, tiny_model
from torchrum.cli import main
from torchrum.lab.training import RunError, Trainer
from torchrum.lab.training.run_folder import CONFIG

METHOD = "forkserver"
_context = multiprocessing.get_context(METHOD)
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "lightning_fabric", "safetensors.torch", "lab.training.processes"]
)


def start(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start ``function`` in a fresh process."""
    process = _context.Process(target=_begin, args=(function, *arguments))
    process.start()
    return process


def _begin(function: Callable[..., Any], *arguments: Any) -> None:
    """Let Ctrl-C through: a sweep of an earlier test may have started the fork server, and it holds SIGINT back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    function(*arguments)


def train(folder: Path, steps: int, hidden_size: int = 8) -> None:
    """Start the tiny run, or resume it."""
    torch.set_num_threads(1)
    config = tiny()
    config = replace(config, steps=steps, log_every=1, model=replace(config.model, hidden_size=hidden_size))
    Trainer(config, tiny_model(config), quiet=True).fit(folder, resume=(folder / CONFIG).exists())


def train_fresh(folder: Path, hidden_size: int, rename: bool, at: float) -> None:
    """Begin a run at a given moment; 3 if the folder is refused."""
    torch.set_num_threads(1)
    config = replace(tiny(), steps=16, log_every=1, model=replace(tiny().model, hidden_size=hidden_size))
    trainer = Trainer(config, tiny_model(config), quiet=True)
    time.sleep(max(0.0, at - time.time()))
    try:
        trainer.fit(folder, rename=rename)
    except RunError as error:
        sys.exit(3 if "in use by" in str(error) or "holds a run already" in str(error) else 4)


def run_command(arguments: list[str], stderr: str, terminal: bool = False, largest: int | None = None) -> None:
    """Run the command line, with ``stderr`` for standard error or, if it is a terminal, for all three streams.

    No file may grow beyond ``largest`` bytes, as on a full disk.
    """
    sys.modules["torchrum.paper.plots.run"] = None  # type: ignore[assignment]  # drawing takes longer than training
    if terminal:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    handle = os.open(stderr, os.O_RDWR if terminal else os.O_WRONLY)
    if terminal:
        fcntl.ioctl(handle, termios.TIOCSCTTY, 0)
    for place in (0, 1, 2) if terminal else (2,):
        os.dup2(handle, place)
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    torch.set_num_threads(1)
    sys.exit(main(arguments))


def run_rank(arguments: list[str], stderr: str, rank: int, port: int) -> None:
    """Run the command line as the process ``rank`` of two that torchrun has started."""
    counts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in counts.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
    run_command(arguments, stderr)


def train_until_call(folder: Path, steps: int, number: int) -> None:
    """Train, and die at call ``number`` of any function that changes what is on the disk."""
    import shutil

    calls = 0

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    for module, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (shutil, "rmtree")):
        setattr(module, name, deadly(getattr(module, name)))
    train(folder, steps)


def train_as_nobody(folder: Path, steps: int) -> None:
    """Train without the rights of the superuser; 3 if that failed with a clear error."""
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        train(folder, steps)
    except RunError as error:
        sys.exit(3 if "cannot be written" in str(error) else 4)
