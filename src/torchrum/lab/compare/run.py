"""The search: plan the steps, train everything on what the machine has, and keep each training as it ends.

A folder of a comparison has

    settings.json     what was asked for, the sizes of the models, and the steps of a training once they are fixed
    problem.pt        the prepared data, for the trainings and for --resume; problem.json says in words what they are
    trainings.jsonl   one finished training per line
    weights/          the best weights of each training with a fresh seed, and while they are trained, the best so far
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchrum.lab.compare.models import (
    MODELS,
    Finished,
    Learner,
    Network,
    Sizes,
    check_steps,
    choose_hidden_sizes,
    count_parameters,
    shorten,
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
"""Share of the time left that a plan fills: a machine may become slower."""
LEAST_STEPS = 50
LEAST_SHARE = 0.2
"""Share of the planned steps below which they are not cut."""
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
    planned: int | None = None
    """Steps before they were cut, since the machine became slower."""

    def same_request(self, other: "Settings") -> bool:
        """Whether both are the same comparison of the same data."""
        return (self.data, self.options, self.digest) == (other.data, other.options, other.digest)


class Training(NamedTuple):
    """One training to do."""

    model: str
    rate: float
    seed: int


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
    try:
        fields: dict[str, Any] = torch.load(folder / PROBLEM, weights_only=True)
        return Problem(**fields | {name: Part(**fields[name]) for name in PARTS})
    except Exception as error:  # of many kinds, if the file is damaged
        raise RunError(f"{folder / PROBLEM} is damaged; start again with the data and another --out.") from error


def read_settings(folder: Path) -> Settings:
    """Read the settings of a folder."""
    try:
        return Settings(**read_json(folder / SETTINGS))
    except TypeError as error:
        raise RunError(f"{folder / SETTINGS} is not of a comparison; start again with another --out.") from error


def read_trainings(folder: Path, steps: int | None = None) -> list[Finished]:
    """Read the finished trainings of a folder; a line that was cut off is left out.

    Args:
        folder: of the comparison.
        steps: read the trainings as they were after this step.
    """
    found = []
    path = folder / TRAININGS
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            run = Finished(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
        found.append(run if steps is None else shorten(run, steps))
    return found


def is_scored(run: Finished) -> bool:
    """Whether a training has all its scores; one that was shortened may lack that on the test part."""
    return run.seed == SEARCH_SEED or run.test is not None


def weights_file(folder: Path, run: Finished, step: int | None = None) -> Path:
    """Name the file of the weights of a training after a step; by default the best ones."""
    place = list(MODELS).index(run.model)
    return folder / WEIGHTS / f"{place}-{run.rate:g}-{run.seed}-{run.best_step if step is None else step}.safetensors"


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
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; name a folder with --out.")
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

    folder: Path
    problem: Problem
    hidden_sizes: Mapping[str, int]
    device: torch.device
    stop: Any
    done: Any
    limit: Any


_worker: Worker | None = None


def _start_worker(folder: Path, hidden_sizes: Mapping[str, int], device: str, stop: Any, done: Any, limit: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process passes it on
    torch.set_num_threads(1)
    _worker = Worker(folder, load_problem(folder), hidden_sizes, torch.device(device), stop, done, limit)


class _StopError(Exception):
    """The trainings are to end."""


def _time(model: str) -> tuple[float, float]:
    assert _worker is not None
    return time_training(_worker.problem, model, _worker.hidden_sizes[model], _worker.device)


def _train(
    training: Training, planned: int, earlier: Finished | None
) -> tuple[Finished, dict[int, dict[str, Tensor]]] | None:
    """Do one training, or score the test part with the weights of an earlier one; None if it was stopped."""
    assert _worker is not None
    folder, problem, hidden_sizes, device, stop, done, limit = _worker
    model, rate, seed = training
    size, fresh, count = hidden_sizes[model], seed != SEARCH_SEED, 0
    if earlier is not None:
        learner = Learner(problem, model, size, rate, seed, device)
        learner.network.load_state_dict(load_file(weights_file(folder, earlier)))
        return earlier._replace(test=learner.test()), {}

    def tick() -> None:
        nonlocal count
        count += 1
        if count % TICK == 0:
            with done.get_lock():
                done.value += TICK
            if stop.is_set():
                raise _StopError

    try:
        row, weights = train(problem, model, size, rate, seed, planned, fresh, device, tick, lambda: limit.value)
    except _StopError:
        return None
    with done.get_lock():
        done.value += max(0, limit.value - count // TICK * TICK)
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
        self.limit = context.Value("q", 0)
        """Steps after which trainings end."""
        self.running: dict[Future[Any], tuple[Any, float]] = {}
        """Tasks with the time of their start."""
        given = folder, settings.hidden_sizes, "cuda" if cuda else "cpu", self._stop, self._done, self.limit
        self._executor = ProcessPoolExecutor(self.jobs, context, _start_worker, given)

    @property
    def interrupted(self) -> bool:
        """Whether a signal has ended the trainings."""
        return bool(self._interrupts.received)

    def run(
        self, call: Callable[..., Any], waiting: list[tuple[Any, ...]], ended: Callable[[Any, Any, float], None]
    ) -> bool:
        """Make a call for each task, and say for each how it ended as soon as it has.

        Args:
            call: made in one of the processes.
            waiting: arguments of the calls; each is removed when its call begins.
            ended: receives the arguments, the outcome and the seconds of a call, and may change ``waiting``.

        Returns:
            Whether all were made; otherwise the time was up or a signal came.
        """
        running = self.running
        while running or waiting:
            open_for_more = not self.interrupted and time.monotonic() < self._deadline
            while open_for_more and waiting and len(running) < self.jobs:
                task = waiting.pop(0)
                with hold_back_interrupts():
                    running[self._executor.submit(call, *task)] = task, time.monotonic()
            if not running:
                return False
            finished, _ = wait(running, 0.2, FIRST_COMPLETED)
            if self.interrupted:
                self._stop.set()
            self._bar.show(self._done.value)
            for future in finished:
                task, begin = running.pop(future)
                outcome = self._outcome(future)
                if outcome is not None:
                    ended(task, outcome, time.monotonic() - begin)
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
        self._before, self._printed = 0, time.monotonic()

    def start(self, total: int, before: int) -> None:
        """Begin to count: ``total`` steps altogether, of which ``before`` were done by an earlier call."""
        self._before = before
        self._progress.reset(self._row, total=total, completed=before)

    def shorten(self, left: int) -> None:
        """Count ``left`` steps from here on."""
        self._progress.update(self._row, total=self._progress.tasks[0].completed + left)

    def note(self, text: str) -> None:
        """Print a line above the progress."""
        if not self._quiet:
            self._console.print(text)

    def say(self, text: str) -> None:
        """Describe what is done now."""
        self._progress.update(self._row, description=text)

    def show(self, done: int) -> None:
        """Show the steps done in this call."""
        self._progress.update(self._row, completed=self._before + done)
        task, now = self._progress.tasks[0], time.monotonic()
        left = task.time_remaining
        if self._progress.disable and not self._quiet and left and now - self._printed > PLAIN_SECONDS:
            self._printed = now
            text = f"{task.description}: {task.percentage:.0f}% of all steps, {left / 60:.1f} minutes left"
            self._console.print(text)

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


def cut_steps(planned: int, steps: int, seconds: float, needed: Callable[[int], float]) -> int:
    """Choose fewer steps for every training if the machine has become too slow.

    Args:
        planned: steps of the plan.
        steps: steps now.
        seconds: time left.
        needed: seconds until all trainings have ended, by their steps.

    Returns:
        The most of the ``check_steps`` of the plan that fit into the time; ``steps`` if they fit, or if none does.
    """
    if needed(steps) <= seconds:
        return steps
    least = max(LEAST_STEPS, LEAST_SHARE * planned)
    fitting = [each for each in check_steps(planned) if least <= each < steps and needed(each) <= FILLED * seconds]
    return max(fitting, default=steps)


def in_parallel(costs: Sequence[float], jobs: int, busy: Sequence[float] = ()) -> float:
    """Seconds until all of some trainings have ended, which start in this order and ``jobs`` at a time.

    Args:
        costs: seconds of each.
        jobs: trainings at the same time.
        busy: seconds until each running training has ended.
    """
    free = [*busy, *[0.0] * (jobs - len(busy))]
    heapq.heapify(free)
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


Task = tuple[Training, int, Finished | None]
"""A training, the steps of the plan, and the same training as it was after fewer steps, if only its test is missing."""


class Schedule:
    """What is left to train, and the steps of each training, which are cut if the machine becomes slower.

    The rate of a training is constant, so that one of more steps contains those of fewer: their scores are in its
    curve.

    Args:
        folder: of the comparison.
        settings: with the number of steps.
        deadline: in the time of ``time.monotonic``.
        pool: where the trainings run.
        bar: shows the progress.
        fixed: keep the number of steps, since it was not planned for this deadline.
    """

    def __init__(self, folder: Path, settings: Settings, deadline: float, pool: Pool, bar: "Bar", fixed: bool) -> None:
        assert settings.steps is not None
        self._fixed = fixed
        self.settings = settings
        self._folder, self._deadline, self._pool, self._bar = folder, deadline, pool, bar
        self._planned, self._steps = settings.planned or settings.steps, settings.steps
        self._walls: list[tuple[str, float]] = []  # the model and the seconds per step of each training of this call
        self._waiting: list[Task] = []
        pool.limit.value = settings.steps

    def run(self) -> None:
        """Train everything, first the search of the rates."""
        trainings = (len(RATES) + len(SEEDS)) * len(MODELS)
        before = len(read_trainings(self._folder, self._steps))
        self._bar.start(trainings * self._steps, before * self._steps)
        while left := self.left(self._steps):
            self._bar.say("learning rates" if left[0].seed == SEARCH_SEED else "fresh seeds")
            self._await(left)
            if not self._pool.run(_train, self._waiting, self._keep):
                break
        kept = {weights_file(self._folder, row) for row in read_trainings(self._folder, self._steps)}
        for path in (self._folder / WEIGHTS).iterdir():  # the steps are not cut any more
            if path not in kept:
                path.unlink()

    def left(self, steps: int) -> list[Training]:
        """Trainings to do now: the search, or once it is complete the fresh seeds."""
        rows = read_trainings(self._folder, steps)
        done = {Training(*row[:3]) for row in rows if is_scored(row)}
        search = [Training(model, rate, SEARCH_SEED) for rate in RATES for model in MODELS]
        if missing := [each for each in search if each not in done]:
            return missing
        rates = choose_rates(rows)
        # seed by seed, so that a time limit leaves as many seeds of every model as possible
        fresh = [Training(model, rates[model], seed) for seed in SEEDS for model in MODELS]
        return [each for each in fresh if each not in done]

    def _await(self, left: Sequence[Training]) -> None:
        running, earlier = {task[0] for task, _ in self._pool.running.values()}, self._earlier(self._steps)
        self._waiting[:] = [(each, self._planned, earlier.get(each)) for each in left if each not in running]

    def _earlier(self, steps: int) -> dict[Training, Finished]:
        """Trainings that lack no more than the score on the test part."""
        rows = read_trainings(self._folder, steps)
        found = {Training(*row[:3]): row for row in rows if not is_scored(row)}
        return {each: row for each, row in found.items() if weights_file(self._folder, row).exists()}

    def _keep(self, task: Task, outcome: tuple[Finished, dict[int, dict[str, Tensor]]], seconds: float) -> None:
        row, weights = outcome
        for step, values in weights.items():
            save_file(values, weights_file(self._folder, row, step))
        add_training(self._folder, row)
        if not (row.diverged or task[2] or self._fixed):
            self._walls.append((row.model, seconds / row.curve[-1][0]))
            self._cut()

    def _cut(self) -> None:
        """Cut the steps if the trainings that are left would take too long at the speed of the last ones."""
        found: dict[str, list[float]] = {}
        for row in read_trainings(self._folder):
            if not row.diverged:
                found.setdefault(row.model, []).append(row.seconds / row.curve[-1][0])
        if len(found) < len(MODELS):
            return
        costs = {model: fmean(seconds) for model, seconds in found.items()}  # of one step
        pace = fmean(wall / costs[model] for model, wall in self._walls[-2 * self._pool.jobs :])
        now = time.monotonic()

        def needed(steps: int) -> float:
            running = {task[0]: now - begin for task, begin in self._pool.running.values()}
            busy = [max(0.0, pace * costs[each.model] * steps - spent) for each, spent in running.items()]
            left = self.left(steps)
            known = running.keys() | self._earlier(steps).keys()
            models = [each.model for each in left if each not in known]
            if left and left[0].seed == SEARCH_SEED:
                models += [model for _ in SEEDS for model in MODELS]
            return in_parallel([pace * costs[model] * steps for model in models], self._pool.jobs, busy)

        steps = cut_steps(self._planned, self._steps, self._deadline - now, needed)
        if steps == self._steps:
            return
        self._bar.note(f"the machine is slower than planned: every training counts up to step {steps:,}")
        self._steps = self._pool.limit.value = steps
        self.settings = replace(self.settings, steps=steps, planned=self._planned)
        write_json(self._folder / SETTINGS, asdict(self.settings))
        self._await(self.left(steps))
        self._bar.shorten((len(self._waiting) + len(self._pool.running)) * steps)


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
        fixed = settings.steps is not None
        if not fixed:
            times: dict[str, tuple[float, float]] = {}
            pool.run(_time, [(model,) for model in MODELS], lambda task, found, _: times.update({task[0]: found}))
            if len(times) < len(MODELS):
                return settings, pool.interrupted
            settings = replace(settings, steps=plan_steps(times, pool.jobs, deadline - time.monotonic()))
            write_json(folder / SETTINGS, asdict(settings))
        (folder / WEIGHTS).mkdir(exist_ok=True)
        schedule = Schedule(folder, settings, deadline, pool, bar, fixed)
        schedule.run()
        return schedule.settings, pool.interrupted
