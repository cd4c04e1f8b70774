"""Several trainings at the same time, each in a process of its own: small ones leave most of a GPU, or a core, idle."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from torchrum.lab.training.errors import DivergedError, RunError
from torchrum.lab.training.run_state import Result
from torchrum.lab.training.signals import Interrupts

Call = Callable[[], Result]
Outcome = Result | DivergedError
WATCH = 0.2
"""Seconds between two looks for a signal."""


class Worker(NamedTuple):
    """A training under way."""

    process: BaseProcess
    answer: Connection


def train_side_by_side(calls: Mapping[str, Call], jobs: int, ended: Callable[[str, Outcome], None]) -> str | None:
    """Make the calls, at most ``jobs`` at a time, and say how each one ended as soon as it has.

    A signal is passed on to the trainings, which save and leave, and no other one starts. If one fails, the others are
    ended in the same way and the failure is raised. Calls and results must be picklable.

    Returns:
        The name of the signal, or None.
    """
    waiting, running = list(calls.items()), dict[str, Worker]()
    threads = max(1, torch.get_num_threads() // jobs)
    stopping = False
    with Interrupts() as interrupts:
        try:
            while running or (waiting and not interrupts.received):
                while waiting and len(running) < jobs and not interrupts.received:
                    label, call = waiting.pop(0)
                    running[label] = _start(call, threads)
                wait([worker.process.sentinel for worker in running.values()], WATCH)
                if interrupts.received and not stopping:
                    stopping = True
                    _end(running)
                for label in [label for label, worker in running.items() if not worker.process.is_alive()]:
                    outcome = _outcome(label, running.pop(label), interrupts.received)
                    if outcome is not None:
                        ended(label, outcome)
        finally:
            _end(running)
            for worker in running.values():
                worker.process.join()
        interrupts.heeded = True
    return signal.Signals(interrupts.received).name if interrupts.received else None


def _start(call: Call, threads: int) -> Worker:
    context = _context()
    answer, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(call, sender, threads))
    with _held_back():
        process.start()
    sender.close()
    return Worker(process, answer)


@contextmanager
def _held_back() -> Iterator[None]:
    """Hold Ctrl-C back while a process starts, which would die of it: a terminal sends it to all, and we pass it on.

    The fork server and what it starts inherit this: a process ignores Ctrl-C until it trains. What came meanwhile
    reaches us afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # started here, because it lets SIGINT through again when it has started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _context() -> Any:
    """How processes start: never as forks of this one, which would share its CUDA and miss its threads.

    Where the system can, they are forks of a fresh one that has done nothing but import what takes long.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightning_fabric", "safetensors.torch"])
    return context


def _work(call: Call, sender: Connection, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(threads)
    try:
        sender.send(call())
    except Exception as error:
        if not hasattr(error, "exit_code"):  # only errors that are meant for the user have one
            raise
        sender.send(error)


def _end(running: Mapping[str, Worker]) -> None:
    for worker in running.values():
        worker.process.terminate()


def _outcome(label: str, worker: Worker, received: int) -> Outcome | None:
    """What a training that has ended says; None for one that a signal ended before it began."""
    worker.process.join()
    try:
        said = worker.answer.recv() if worker.answer.poll() else None
    except EOFError:
        said = None
    code = worker.process.exitcode
    if isinstance(said, Result):
        caught = received and said.stopped.startswith("SIG")
        return replace(said, stopped=signal.Signals(received).name) if caught else said
    if isinstance(said, DivergedError):
        return said
    if isinstance(said, Exception):
        raise said
    if received:
        return None
    how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else "failed; see the message above"
    raise RunError(f"{label} {how}. To resume it, run the same command with --resume and the folder of the runs.")
