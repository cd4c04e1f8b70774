"""Many runs of one recipe: seeds, grids, and searches by Optuna."""

import itertools
import math
import statistics
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from torchrum.lab.training.config import TrainConfig, run_differences
from torchrum.lab.training.distributed import Engine, Outcome, train_side_by_side
from torchrum.lab.training.errors import ConfigError, DivergedError, RunError
from torchrum.lab.training.files import write_json
from torchrum.lab.training.overrides import declared_type, override
from torchrum.lab.training.progress import Lenient
from torchrum.lab.training.run_folder import (
    Result,
    holds_run,
    lock_folder,
    lock_free_folder,
    read_config,
    read_result,
)
from torchrum.lab.training.trainer import Trainer

SUMMARY = "summary.json"
OnEnd = Callable[[Path], object] | None


def grid(config: TrainConfig, choices: Sequence[str], seeds: int = 1) -> dict[str, TrainConfig]:
    """Every combination of ``choices`` (``"field=a,b"``) and seeds, by the name of its folder."""
    if isinstance(choices, str):
        raise ConfigError(f"grid: choices is {choices!r}; pass a list, such as ['steps=10,20'].")
    axes: list[list[str]] = []
    for choice in choices:
        field, equals, values = choice.partition("=")
        if not equals or not values:
            raise ConfigError(f"{choice!r:.60} is not a grid; write it as field=a,b,c.")
        if field.strip() == "seed":
            first = values.split(",")[0]
            raise ConfigError(f"{choice!r} cannot be a grid; pass --seed {first} --seeds N to train with N seeds.")
        if any(axis[0].startswith(f"{field}=") for axis in axes):
            raise ConfigError(f"{choice!r}: {field} has a grid already; write all its values in one, as {field}=a,b,c.")
        parts = values.split(",")
        if len({part.strip() for part in parts}) < len(parts):
            raise ConfigError(f"{choice!r:.60} has a value twice; to repeat runs, pass --seeds N.")
        axes.append([f"{field}={part}" for part in parts])
    runs = {}
    for assignments in itertools.product(*axes):
        for seed in range(config.seed, config.seed + seeds):
            # a value may hold a slash, but it must not choose a folder
            label = "/".join([*([",".join(assignments).replace("/", "_")] if assignments else []), f"seed-{seed}"])
            runs[label] = replace(override(config, assignments), seed=seed)
    return runs


def run_sweep(
    runs: Mapping[str, TrainConfig],
    folder: Path | str,
    quiet: bool = False,
    on_end: OnEnd = None,
    rename: bool = False,
    jobs: int = 1,
) -> list[Result]:
    """Train each config in its own folder under ``folder``; what is finished there is kept, what is begun is resumed.

    Args:
        runs: the configs by the name of their folder.
        folder: where they go; one process at a time may sweep there.
        quiet, on_end: as for ``Trainer``.
        rename: take the next free name, as ``folder-2``, where ``folder`` is taken.
        jobs: how many to train at the same time, in processes of their own, which show no progress; a script that
            asks for more than one needs ``if __name__ == "__main__":``.

    Returns:
        The results in the order of ``runs``, without those that a signal kept from beginning; ``folder/summary.json``
        has them too. A run that diverged is one of them, without scores.
    """
    for label in runs:
        if not label.strip("/. ") or label.startswith("/") or ".." in Path(label).parts:
            raise ConfigError(f"run_sweep: {label!r} is not the name of a folder inside that of the sweep.")
    if not runs:
        raise ConfigError("there is nothing to train: the number of seeds must be at least 1.")
    if jobs > 1 and any(config.devices * config.nodes > 1 for config in runs.values()):
        raise ConfigError(
            f"jobs is {jobs}, but only trainings of one process each run side by side; set devices and nodes to 1, "
            "or jobs to 1."
        )
    engine = Engine(next(iter(runs.values())))
    with ExitStack() as held:
        lock = lock_free_folder if rename else lock_folder
        folder = engine.first(lambda: held.enter_context(lock(Path(folder))).folder)
        return Sweep(runs, folder, quiet, on_end, engine).train(jobs)


@dataclass
class Sweep:
    """The runs of one sweep, and what became of them so far."""

    runs: Mapping[str, TrainConfig]
    folder: Path
    quiet: bool
    on_end: OnEnd
    engine: Engine
    results: dict[str, Result] = field(default_factory=dict)
    means: dict[str, Any] = field(default_factory=dict)

    def train(self, jobs: int) -> list[Result]:
        """Train all of them, ``jobs`` at a time, and sum up."""
        stopped = self._side_by_side(jobs) if jobs > 1 else self._in_turn()
        found = [self.results[label] for label in self.runs if label in self.results]
        if stopped and not found:
            self._say("stopped before the first run began; the same command starts over")
            return found
        if stopped:
            count = f"all {len(self.runs)} runs" if len(self.runs) > 1 else "the run"
            self._say(f"to resume {count}, run the same command with --resume {self.folder}")
            return found
        metric = next(iter(self.runs.values())).task.metric
        for group, mean in self.means.items():
            self._say(f"{group}: {metric} {mean['mean']:.4f} +- {mean['spread']:.4f} over {mean['runs']}")
        self._say(f"summary: {self.folder / SUMMARY}")
        return found

    def _in_turn(self) -> bool:
        for number, (label, config) in enumerate(self.runs.items(), 1):
            self._say(f"{label}, {number} of {len(self.runs)}")
            try:
                result: Outcome = train_or_keep(config, self.folder / label, self.quiet, self.engine, self.on_end)
            except DivergedError as error:
                result = error
            self._note(label, result)
            if self.results[label].stopped.startswith("SIG"):
                return True
        return False

    def _side_by_side(self, jobs: int) -> bool:
        calls = {}
        for label, config in self.runs.items():
            calls[label] = partial(train_or_keep, config, self.folder / label, True, None, self.on_end)
        self._say(f"{len(calls)} runs, {min(jobs, len(calls))} at a time")
        signalled = train_side_by_side(calls, jobs, self._tell)
        if signalled and not self.results:  # none had begun
            self.results[next(iter(self.runs))] = _empty(self.folder, signalled)
        return signalled is not None

    def _tell(self, label: str, outcome: Outcome) -> None:
        self._note(label, outcome)
        result = self.results[label]
        metric = self.runs[label].task.metric
        score = f", {metric} {result.scores[metric]:.4f}" if metric in result.scores else ""
        done = f"{len(self.results)} of {len(self.runs)}"
        self._say(f"{label}, {done}: {result.stopped} at step {result.step}{score}, {result.seconds:.0f} s")

    def _note(self, label: str, outcome: Outcome) -> None:
        if isinstance(outcome, DivergedError):
            self._say(f"{label}: {outcome}")
            outcome = _empty(self.folder / label, "diverged")
        self.results[label] = outcome
        if not outcome.stopped.startswith("SIG"):
            self.means = self.engine.first(lambda: _summarise(self.folder, self.runs, self.results))

    def _say(self, text: str) -> None:
        if self.engine.rank == 0 and not self.quiet:
            print(text, file=cast(TextIO, Lenient()))


def _empty(folder: Path, stopped: str) -> Result:
    return Result(folder, stopped, 0, {}, None, 0, 0.0)


def train_or_keep(config: TrainConfig, folder: Path, quiet: bool, engine: Engine | None, on_end: OnEnd) -> Result:
    """Train a run of a sweep, or resume it; one that is finished is kept. None: a process of its own."""
    engine = engine or Engine(config)
    done, begun = engine.first(lambda: (read_result(folder), holds_run(folder)))  # one look for all processes
    if done is None:
        return Trainer(config, quiet=quiet, on_end=on_end).fit(folder, resume=begun)
    changed = run_differences(read_config(folder), config)
    if changed:
        raise RunError(f"{folder} holds a finished run of another config: {'; '.join(changed)}.")
    return done


def _summarise(folder: Path, runs: Mapping[str, TrainConfig], results: Mapping[str, Result]) -> dict[str, Any]:
    """Write the summary; returns the means of the runs that differ in their seed alone."""
    results = {label: results[label] for label in runs if label in results}  # whatever the order of their ends
    rows = {
        label: {"scores": result.scores, "best": result.best, "step": result.step, "stopped": result.stopped}
        for label, result in results.items()
    }
    groups: dict[str, list[float]] = {}
    for label, result in results.items():
        value = result.scores.get(runs[label].task.metric, math.nan)
        if math.isfinite(value):  # one that diverged, or was stopped before its first validation, has none
            groups.setdefault(label.rpartition("/")[0], []).append(value)
    means = {
        group or "all": {"runs": len(values), "mean": statistics.fmean(values), "spread": statistics.pstdev(values)}
        for group, values in groups.items()
    }
    write_json(folder / SUMMARY, {"metric": next(iter(runs.values())).task.metric, "means": means, "runs": rows})
    return means


class Range(NamedTuple):
    """A range to search: one of ``choices``, or a number from ``low`` to ``high``, whole where these are."""

    name: str
    choices: list[str]
    low: float = 0
    high: float = 0
    log: bool = False
    """Whether the logarithm is drawn evenly."""

    def choose(self, trial: Any) -> Any:
        """The value that Optuna proposes."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        suggest = trial.suggest_int if isinstance(self.low, int) else trial.suggest_float
        return suggest(self.name, self.low, self.high, log=self.log)


def read_range(config: TrainConfig, text: str) -> Range:
    """Read ``field=low:high``, ``field=low:high:log`` or ``field=a,b,c``; the field must take each value."""
    name, _, values = text.partition("=")
    parts, log = values.removesuffix(":log").split(":"), values.endswith(":log")
    if not values or len(parts) > 2 or (log and len(parts) == 1):
        raise ConfigError(f"{text!r} is not a search range; write field=low:high, field=low:high:log or field=a,b,c.")
    if len(parts) == 1:
        found = Range(name, values.split(","))
    else:
        hint = declared_type(config, name)
        try:
            low, high = map(float, parts)
        except ValueError:
            low, high = math.nan, math.nan
        if hint in (bool, str) or typing.get_origin(hint) is not None or not -math.inf < low <= high < math.inf:
            raise ConfigError(
                f"the search range {text} is not possible: {name} must be a number, and the ends finite and in order; "
                f"write {name}=a,b,c for other values."
            )
        if log and low <= 0:
            raise ConfigError(f"the search range {text} is not possible: a logarithmic range must be above 0.")
        whole = hint is int or (hint is not float and low.is_integer() and high.is_integer())
        found = Range(name, [], int(low) if whole else low, int(high) if whole else high, log)
    for value in found.choices or parts:
        override(config, [f"{name}={value}"])
    return found


def search(
    config: TrainConfig,
    space: Sequence[str],
    trials: int,
    folder: Path,
    quiet: bool = False,
    on_end: OnEnd = None,
    rename: bool = False,
) -> int:
    """Let Optuna choose fields (``"field=low:high:log"`` or ``"field=a,b"``) for the best value of the task's metric.

    The study is kept in ``folder/optuna.log``, so a search that was stopped resumes where it was. ``rename`` is that of
    ``run_sweep``.

    Returns:
        0, or the exit code of a run that a signal ended.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
        from optuna.trial import TrialState
    except ModuleNotFoundError as error:
        raise RunError('a search needs Optuna: pip install "torchrum[sweep]"') from error

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # each run reports already
    ranges = [read_range(config, item) for item in space]
    if len({item.name for item in ranges}) < len(ranges):
        raise ConfigError(f"a field is searched twice: {', '.join(space)}; give each field one range.")
    engine = Engine(config)
    if engine.world_size > 1:
        raise ConfigError("a search trains in one process; start it with devices 1, or sweep over a grid.")
    with (lock_free_folder if rename else lock_folder)(folder) as lock:
        study = optuna.create_study(
            study_name=config.name,
            direction="maximize" if config.task.goal == "max" else "minimize",
            sampler=optuna.samplers.TPESampler(seed=config.seed),
            storage=JournalStorage(JournalFileBackend(str(lock.folder / "optuna.log"))),
            load_if_exists=True,
        )
        for _ in range(sum(trial.state.is_finished() for trial in study.trials), trials):
            trial = study.ask()
            chosen = override(config, [f"{item.name}={item.choose(trial)}" for item in ranges])
            place = lock.folder / f"trial-{trial.number:04d}"
            try:
                result = train_or_keep(chosen, place, quiet, engine, on_end)
            except DivergedError as error:
                study.tell(trial, state=TrialState.FAIL)
                print(f"{place.name}: {error}", file=cast(TextIO, Lenient()))
                continue
            if result.exit_code or result.best is None:
                study.tell(trial, state=TrialState.FAIL)
                if result.exit_code:
                    return result.exit_code
            else:
                study.tell(trial, result.best)
        if not any(trial.state is TrialState.COMPLETE for trial in study.trials):
            raise RunError(f"none of the {len(study.trials)} trials in {folder} has a score; search in another range.")
        best = {"trial": study.best_trial.number, "value": study.best_value, "fields": study.best_params}
        summary = {"metric": config.task.metric, "trials": len(study.trials), "best": best}
        write_json(lock.folder / SUMMARY, summary)
    return 0
