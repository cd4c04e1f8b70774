"""The search: plan the steps, train everything on what the machine has, and keep each training as it ends.

A folder of a comparison has

    settings.json     what was asked for, the sizes of the models, and the steps of a training once they are fixed
    problem.pt        the prepared data, for the trainings and for --resume; problem.json says in words what they are
    trainings.jsonl   one finished training per line
    weights/          the best weights of each training with a fresh seed
    best.*, report.html
"""

import hashlib
import heapq
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor

from torchrum.lab.compare.models import (
    MODELS,
    Finished,
    Network,
    Sizes,
    choose_hidden_sizes,
    count_parameters,
    time_training,
    train,
)
from torchrum.lab.compare.problem import Part, Problem
from torchrum.lab.compare.verdict import RATES, SEARCH_SEED, SEEDS, choose_rates
from torchrum.lab.training.distributed import Interrupts, hold_back_interrupts, start_context
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.files import read_json, write_json
from torchrum.lab.training.run_folder import FolderLock, holds_files, lock_folder

FILLED = 0.8
"""Share of the time limit that the plan fills: a machine may become slower."""
LEAST_STEPS = 50
SETTINGS, PROBLEM, TRAININGS, WEIGHTS = "settings.json", "problem.pt", "trainings.jsonl", "weights"
PARTS = ("train", "validation", "test")
TICK = 16
"""Steps after which a training adds to the progress, and looks whether it is to stop."""
PLAIN_SECONDS = 10.0
"""Seconds between lines of progress where there is no terminal."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a comparison is; the first three fields tell whether it is the one that is asked for again."""

    data: str
    options: Mapping[str, Any]
    digest: str
    """Hash of the prepared data."""
    hidden_sizes: Mapping[str, int]
    parameters: Mapping[str, int]
    steps: int | None = None
    """Of every training; None until it is fixed."""

    def same_request(self, other: "Settings") -> bool:
        """Whether both are the same comparison of the same data."""
        return (self.data, self.options, self.digest) == (other.data, other.options, other.digest)


class Training(NamedTuple):
    """One training to do."""

    model: str
    rate: float
    seed: int

    @property
    def weights(self) -> str:
        """Name of the file of its best weights."""
        return f"{list(MODELS).index(self.model)}-{self.seed}.safetensors"


def settings_for(problem: Problem, data: str, options: Mapping[str, Any]) -> Settings:
    """Choose the sizes of the models for a problem."""
    sizes = Sizes.of(problem)
    hidden_sizes = choose_hidden_sizes(sizes)
    parameters = {name: count_parameters(Network(name, sizes, units)) for name, units in hidden_sizes.items()}
    return Settings(
        data=data, options=options, digest=digest(problem), hidden_sizes=hidden_sizes, parameters=parameters
    )


def digest(problem: Problem) -> str:
    """Hash the prepared data."""
    found = hashlib.sha256(repr((problem.kind, problem.metric, problem.outputs, problem.reading)).encode())
    for part in (problem.train, problem.validation, problem.test):
        for tensor in (*part.inputs, *part.targets):
            found.update(repr(tuple(tensor.shape)).encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def save_problem(folder: Path, problem: Problem) -> None:
    """Write the prepared data for the trainings, and what they are for a reader."""
    parts = {name: vars(getattr(problem, name)) for name in PARTS}
    torch.save({**vars(problem), **parts}, folder / PROBLEM)
    words = {name: value for name, value in vars(problem).items() if name not in (*parts, "target_scale")}
    sequences = {name: len(part["inputs"]) for name, part in parts.items()}
    write_json(folder / "problem.json", {**words, "sequences": sequences})


def load_problem(folder: Path) -> Problem:
    """Read the prepared data of a folder."""
    if not (folder / PROBLEM).is_file():
        raise ConfigError(f"{folder} is not a folder of torchrum compare: it has no {PROBLEM}.")
    fields: dict[str, Any] = torch.load(folder / PROBLEM, weights_only=True)
    return Problem(**fields | {name: Part(**fields[name]) for name in PARTS})


def read_settings(folder: Path) -> Settings:
    """Read the settings of a folder."""
    return Settings(**read_json(folder / SETTINGS))


def read_trainings(folder: Path) -> list[Finished]:
    """Read the finished trainings of a folder; a line that was cut off is left out."""
    found = []
    path = folder / TRAININGS
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(Finished(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return found


def add_training(folder: Path, row: Finished) -> None:
    """Add a finished training, on a line of its own even where the last one was cut off."""
    with (folder / TRAININGS).open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * torn + json.dumps(row._asdict()).encode() + b"\n")


def claim_folder(out: Path | None, name: str, settings: Settings) -> FolderLock:
    """Lock the folder of a comparison: one with the same comparison, to go on with it, or one with no training yet.

    Args:
        out: the folder; None takes the first of ``runs/NAME``, ``runs/NAME-2``, ... that is either.
        name: of the data.
        settings: what is asked for.
    """
    names = (Path("runs", name if count == 1 else f"{name}-{count}") for count in itertools.count(1))
    for folder in [out] if out is not None else names:
        lock = lock_folder(folder)
        if not holds_files(folder):
            return lock
        if (folder / SETTINGS).exists():
            there = read_settings(folder)
            if there.same_request(settings) or there.steps is None:  # None: nothing was trained
                return lock
        lock.release()
    raise ConfigError(f"{out} holds something else already; name another folder with --out, or leave --out out.")


# ---- in the processes that train ----


class Worker(NamedTuple):
    """What every process that trains has."""

    problem: Problem
    hidden_sizes: Mapping[str, int]
    device: torch.device
    stop: Any
    done: Any


_worker: Worker | None = None


def _start_worker(folder: Path, hidden_sizes: Mapping[str, int], device: str, stop: Any, done: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process passes it on
    torch.set_num_threads(1)
    _worker = Worker(load_problem(folder), hidden_sizes, torch.device(device), stop, done)


class _StopError(Exception):
    """The trainings are to end."""


def _time(model: str) -> tuple[float, float]:
    assert _worker is not None
    return time_training(_worker.problem, model, _worker.hidden_sizes[model], _worker.device)


def _train(training: Training, steps: int) -> tuple[Finished, dict[str, Tensor]] | None:
    """Do one training; None if it was stopped."""
    assert _worker is not None
    stop, done, count = _worker.stop, _worker.done, 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count % TICK == 0:
            with done.get_lock():
                done.value += TICK
            if stop.is_set():
                raise _StopError

    model, rate, seed = training
    size = _worker.hidden_sizes[model]
    fresh = seed != SEARCH_SEED
    try:
        row, weights = train(_worker.problem, model, size, rate, seed, steps, fresh, _worker.device, tick)
    except _StopError:
        return None
    with done.get_lock():
        done.value += steps - count // TICK * TICK
    return row, weights if fresh else {}


# ---- in the main process ----


class Pool:
    """Processes that train, one thread each on every core, or one process on the GPU.

    Args:
        folder: of the comparison.
        settings: with the sizes of the models.
        deadline: when no further training starts, in the time of ``time.monotonic``.
        bar: shows the progress.
    """

    def __init__(self, folder: Path, settings: Settings, deadline: float, bar: "Bar") -> None:
        cuda = torch.cuda.is_available()
        self.jobs = 1 if cuda else min(count_cores(), len(MODELS) * len(SEEDS))
        self._interrupts = Interrupts()
        self._deadline, self._bar = deadline, bar
        context = start_context("torch._dynamo", "torchrum.lab.compare.run")  # the optimizers import dynamo
        self._stop, self._done = context.Event(), context.Value("q", 0)
        given = folder, settings.hidden_sizes, "cuda" if cuda else "cpu", self._stop, self._done
        self._executor = ProcessPoolExecutor(self.jobs, context, _start_worker, given)

    @property
    def interrupted(self) -> bool:
        """Whether a signal has ended the trainings."""
        return bool(self._interrupts.received)

    def run(
        self, call: Callable[..., Any], tasks: Iterable[tuple[Any, ...]], ended: Callable[[Any, Any], None]
    ) -> bool:
        """Make a call for each task, and say for each how it ended as soon as it has.

        Returns:
            Whether all were made; otherwise the time was up or a signal came.
        """
        waiting, running = list(tasks), dict[Future[Any], Any]()
        while running or waiting:
            open_for_more = not self.interrupted and time.monotonic() < self._deadline
            while open_for_more and waiting and len(running) < self.jobs:
                task = waiting.pop(0)
                with hold_back_interrupts():
                    running[self._executor.submit(call, *task)] = task
            if not running:
                return False
            finished, _ = wait(running, 0.2, FIRST_COMPLETED)
            if self.interrupted:
                self._stop.set()
            self._bar.show(self._done.value)
            for future in finished:
                task = running.pop(future)
                outcome = self._outcome(future)
                if outcome is not None:
                    ended(task, outcome)
        return not self.interrupted

    def _outcome(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except BrokenProcessPool as error:
            if self.interrupted:
                return None
            raise RunError(
                "a process that trains has ended unexpectedly, perhaps for want of memory. In a script of your own, "
                'call compare below if __name__ == "__main__".'
            ) from error

    def __enter__(self) -> "Pool":
        self._interrupts.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stop.set()
        self._executor.shutdown(cancel_futures=True)
        self._interrupts.heeded = True  # the caller raises KeyboardInterrupt when the report is written
        self._interrupts.__exit__(*failure)


def count_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Bar:
    """The progress of all trainings together: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._console = quiet, Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%  left"))
        shown = self._console.is_terminal and not quiet
        self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console, disable=not shown)
        self._row = self._progress.add_task("timing the models", total=None)
        self._text, self._total, self._before = "", 1, 0
        self._begin = self._printed = time.monotonic()

    def start(self, total: int, before: int) -> None:
        """Begin to count: ``total`` steps altogether, of which ``before`` were done by an earlier call."""
        self._total, self._before = max(1, total), before
        self._progress.reset(self._row, total=self._total, completed=before)
        self._begin = time.monotonic()

    def say(self, text: str) -> None:
        """Describe what is done now."""
        self._text = text
        self._progress.update(self._row, description=text)

    def show(self, done: int) -> None:
        """Show the steps done in this call."""
        now = time.monotonic()
        if not self._progress.disable:
            self._progress.update(self._row, completed=self._before + done)
        elif not self._quiet and done and now - self._printed > PLAIN_SECONDS:
            self._printed = now
            count = min(self._before + done, self._total)
            left = (now - self._begin) / done * (self._total - count)
            self._console.print(f"{self._text}: {count / self._total:.0%} of all steps, {left / 60:.1f} minutes left")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()


def plan_steps(times: Mapping[str, tuple[float, float]], jobs: int, seconds: float) -> int:
    """Choose the number of steps of every training so that all trainings fit into the time.

    Args:
        times: seconds of a step and of all scores of a training, by model.
        jobs: trainings at the same time.
        seconds: time for all of them.
    """
    step, scores = (
        sum(in_parallel(count * column, jobs) for count in (len(RATES), len(SEEDS)))
        for column in zip(*times.values(), strict=True)
    )
    steps = int((FILLED * seconds - scores) / step)
    if steps < LEAST_STEPS:
        needed = (LEAST_STEPS * step + scores) / FILLED / 60
        raise ConfigError(
            f"the time left, {seconds:.0f} seconds, is too short for {LEAST_STEPS} steps of every model on this data; "
            f"give it --minutes {math.ceil(needed + 1)} or more."
        )
    return steps


def in_parallel(costs: Sequence[float], jobs: int) -> float:
    """Seconds until all of some trainings have ended, which start in this order and ``jobs`` at a time."""
    free = [0.0] * jobs
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def train_all(folder: Path, settings: Settings, minutes: float, begin: float, quiet: bool) -> tuple[Settings, bool]:
    """Do what is missing: the plan, the search of the rates, the trainings with fresh seeds.

    Args:
        folder: of the comparison, with its problem.
        settings: its settings.
        minutes: time limit.
        begin: when it began, in the time of ``time.monotonic``.
        quiet: show no progress.

    Returns:
        The settings with the number of steps, and whether a signal ended it.
    """
    deadline = begin + 60 * minutes
    with Bar(quiet) as bar, Pool(folder, settings, deadline, bar) as pool:
        bar.say("timing the models")
        if settings.steps is None:
            times: dict[str, tuple[float, float]] = {}
            pool.run(_time, [(model,) for model in MODELS], lambda task, found: times.update({task[0]: found}))
            if len(times) < len(MODELS):
                return settings, pool.interrupted
            settings = replace(settings, steps=plan_steps(times, pool.jobs, deadline - time.monotonic()))
            write_json(folder / SETTINGS, asdict(settings))
        steps = settings.steps
        assert steps is not None
        finished = {Training(*run[:3]) for run in read_trainings(folder)}
        bar.start((len(RATES) + len(SEEDS)) * len(MODELS) * steps, len(finished) * steps)

        def keep(task: tuple[Training, int], outcome: tuple[Finished, dict[str, Tensor]]) -> None:
            row, weights = outcome
            if weights:
                save_file(weights, folder / WEIGHTS / task[0].weights)
            add_training(folder, row)

        def train_missing(what: str, wanted: Sequence[Training]) -> bool:
            bar.say(what)
            return pool.run(_train, [(each, steps) for each in wanted if each not in finished], keep)

        (folder / WEIGHTS).mkdir(exist_ok=True)
        search = [Training(model, rate, SEARCH_SEED) for rate in RATES for model in MODELS]
        if train_missing("learning rates", search):
            rates = choose_rates(read_trainings(folder))
            # seed by seed, so that a time limit leaves as many seeds of every model as possible
            train_missing("fresh seeds", [Training(model, rates[model], seed) for seed in SEEDS for model in MODELS])
        return settings, pool.interrupted
