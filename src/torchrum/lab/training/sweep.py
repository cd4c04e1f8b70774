"""Many runs of one recipe: seeds, grids, and searches by Optuna."""

import itertools
import math
import re
import socket
import statistics
import time
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrum.lab.training.config import (
    STUDY_CHANGEABLE,
    TrainConfig,
    differences,
    first_of,
    plain_differences,
    to_json,
)
from torchrum.lab.training.distributed import Engine, Outcome, train_side_by_side
from torchrum.lab.training.errors import ConfigError, DivergedError, RunError
from torchrum.lab.training.files import write_json
from torchrum.lab.training.overrides import declared_type, override
from torchrum.lab.training.progress import say
from torchrum.lab.training.run_folder import Result, holds_run, lock_folder, lock_free_folder, read_config, read_result
from torchrum.lab.training.trainer import Trainer

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

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
        return _train_runs(runs, folder, quiet, on_end, engine, jobs)


def _train_runs(
    runs: Mapping[str, TrainConfig], folder: Path, quiet: bool, on_end: OnEnd, engine: Engine, jobs: int
) -> list[Result]:
    """Train all runs, ``jobs`` at a time, and report and sum up each as it ends."""
    results: dict[str, Result] = {}
    means: dict[str, Any] = {}
    metric = next(iter(runs.values())).task.metric

    def tell(text: str) -> None:
        if engine.rank == 0 and not quiet:
            say(text)

    def ended(label: str, outcome: Outcome) -> None:
        if isinstance(outcome, DivergedError):
            tell(f"{label}: {outcome}")
            outcome = _empty(folder / label, "diverged")
        results[label] = outcome
        if not outcome.stopped.startswith("SIG"):
            means.update(engine.first(lambda: _summarise(folder, runs, results)))
        if jobs > 1:
            score = f", {metric} {outcome.scores[metric]:.4f}" if metric in outcome.scores else ""
            ending = f"{outcome.stopped} at step {outcome.step}{score}, {outcome.seconds:.0f} s"
            tell(f"{label}, {len(results)} of {len(runs)}: {ending}")

    calls = {
        label: partial(train_or_keep, config, folder / label, quiet or jobs > 1, engine if jobs == 1 else None, on_end)
        for label, config in runs.items()
    }
    if jobs > 1:
        tell(f"{len(runs)} runs, {min(jobs, len(runs))} at a time")
        signalled = train_side_by_side(calls, jobs, ended)
    else:
        signalled = _train_in_turn(calls, ended, tell)
    found = [results[label] for label in runs if label in results]
    if signalled and not found:
        tell("stopped before the first run began; the same command starts over")
        return [_empty(folder, signalled)]
    if signalled:
        count = f"all {len(runs)} runs" if len(runs) > 1 else "the run"
        tell(f"to resume {count}, run the same command with --resume {folder}")
        return found
    for group, mean in means.items():
        tell(f"{group}: {metric} {mean['mean']:.4f} +- {mean['spread']:.4f} over {mean['runs']}")
    tell(f"summary: {folder / SUMMARY}")
    return found


def _train_in_turn(
    calls: Mapping[str, Callable[[], Result]], ended: Callable[[str, Outcome], None], tell: Callable[[str], None]
) -> str | None:
    """Make the calls one after another, as ``train_side_by_side`` does; return the name of a signal, or None."""
    for number, (label, call) in enumerate(calls.items(), 1):
        tell(f"{label}, {number} of {len(calls)}")
        try:
            outcome: Outcome = call()
        except DivergedError as error:
            outcome = error
        ended(label, outcome)
        if isinstance(outcome, Result) and outcome.stopped.startswith("SIG"):
            return outcome.stopped
    return None


def _empty(folder: Path, stopped: str) -> Result:
    return Result(folder, stopped, 0, {}, None, 0, 0.0)


def train_or_keep(config: TrainConfig, folder: Path, quiet: bool, engine: Engine | None, on_end: OnEnd) -> Result:
    """Train a run of a sweep, or resume it; one that is finished is kept. None: a process of its own."""
    engine = engine or Engine(config)
    done, begun = engine.first(lambda: (read_result(folder), holds_run(folder)))  # one look for all processes
    if done is None:
        return Trainer(config, quiet=quiet, on_end=on_end).fit(folder, resume=begun)
    changed = differences(read_config(folder), config)
    if changed:
        raise RunError(f"{folder} holds a finished run of another config: {'; '.join(changed)}.")
    return done


def _summarise(folder: Path, runs: Mapping[str, TrainConfig], results: Mapping[str, Result]) -> dict[str, Any]:
    """Write the summary; return the means of the runs that differ only in their seed."""
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
    storage: str | None = None,
) -> int:
    """Let Optuna choose fields (``"field=low:high:log"`` or ``"field=a,b"``) for the best value of the task's metric.

    With ``storage`` any number of processes, on any machines, work on one study: each makes this call with a folder of
    its own. They may join, leave and die at any time. A process that starts again in its folder first completes the
    trial that it left there.

    Args:
        config: the recipe; the study has its name.
        space: the fields to choose.
        trials: the study ends when so many trials have a score or have diverged. A trial whose process died does not
            count. Processes that are free while the last trials run begin further ones.
        folder: where the runs of this process go.
        quiet, on_end: as for ``Trainer``.
        rename: as for ``run_sweep``.
        storage: where the study is kept: a database (``postgresql://...``, ``sqlite:///FILE``), a file on a shared disk
            (``journal:///PATH``) or Optuna's proxy (``grpc://HOST:PORT``); None: ``folder/optuna.log``.

    Returns:
        0, or the exit code of a run that a signal ended.
    """
    try:
        import optuna
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
        storage = storage or f"journal://{(lock.folder / 'optuna.log').absolute()}"
        with reaching(storage):
            study = open_study(storage, config, space)
        while True:
            with reaching(storage):
                if len(ended_trials(study)) >= trials:
                    break
                trial = next_trial(study, config, ranges, lock.folder)
                chosen = override(config, [f"{item.name}={trial.params[item.name]}" for item in ranges])
            place = lock.folder / trial_folder(trial)
            try:
                result = train_or_keep(chosen, place, quiet, engine, on_end)
            except DivergedError as error:
                say(f"{place.name}: {error}")
                score = None
            else:
                if result.exit_code:
                    say(f"to resume the search, run the same command with --resume {lock.folder}")
                    return result.exit_code
                score = result.best
            with reaching(storage):
                study.tell(trial.number, score, state=optuna.trial.TrialState.FAIL if score is None else None)
        with reaching(storage):
            ended = ended_trials(study)
            if all(trial.value is None for trial in ended):
                raise RunError(f"none of the {len(ended)} trials in {folder} has a score; search in another range.")
            best = study.best_trial
        found = {"trial": best.number, "value": best.value, "fields": best.params}
        write_json(lock.folder / SUMMARY, {"metric": config.task.metric, "trials": len(ended), "best": found})
        if not quiet:
            fields = " ".join(f"{name}={value}" for name, value in best.params.items())
            place = best.user_attrs.get("run", trial_folder(best))
            say(f"best of {len(ended)} trials: {config.task.metric} {best.value:.4f} with {fields}, in {place}")
    return 0


@contextmanager
def reaching(storage: str) -> Iterator[None]:
    """Report a failure of the storage as one line."""
    try:
        yield
    except (ConfigError, RunError):
        raise
    except Exception as error:  # each driver has its own kinds
        details = error.details() if hasattr(error, "details") else str(error)  # grpc, others
        reason = (str(details).splitlines() or [type(error).__name__])[0]
        place = re.sub(r"//([^/@]*):[^/@]*@", r"//\1:***@", storage)
        raise RunError(
            f"the storage {place} failed: {reason.rstrip('.')}. Check the address; runs and trials are kept, and the "
            "same command with --resume FOLDER continues."
        ) from error


CONNECT = 10.0
"""Seconds to wait for a storage that does not answer."""


def open_study(storage: str, config: TrainConfig, space: Sequence[str]) -> "Study":
    """Open or create the study of a config; one of another config or space is refused."""
    import optuna

    study = optuna.create_study(
        study_name=config.name,
        direction="maximize" if config.task.goal == "max" else "minimize",
        storage=open_storage(storage),
        load_if_exists=True,
    )
    searched = dict(sorted(item.split("=", 1) for item in space))
    if "config" not in study.user_attrs:
        study.set_user_attr("space", searched)
        study.set_user_attr("config", to_json(config))
    known = study.user_attrs  # read again: another process may have come first
    changed = differences(known["config"], config, STUDY_CHANGEABLE)
    changed += plain_differences(known["space"], searched)
    if changed:
        raise ConfigError(
            f"the storage has a study {config.name!r} of another search: {first_of(changed)}. Repeat its command, or "
            "start a new one: another --name, without --resume."
        )
    return study


def open_storage(url: str) -> "BaseStorage":
    """Open a storage of Optuna."""
    from optuna.exceptions import ExperimentalWarning
    from optuna.storages import GrpcStorageProxy, JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend
    from sqlalchemy.exc import DBAPIError, IntegrityError

    kind, _, place = url.partition("://")
    if kind == "journal":
        return JournalStorage(JournalFileBackend(place))
    if kind == "grpc":
        host, _, port = place.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"the storage is {url}, but a proxy is grpc://HOST:PORT, such as grpc://head:13000.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            proxy = GrpcStorageProxy(host=host, port=int(port))
        proxy.wait_server_ready(CONNECT)
        return proxy
    if not place:
        raise ConfigError(
            f"the storage is {url!r}, but it must be a URL: postgresql://USER@HOST/NAME, sqlite:///FILE, "
            "journal:///PATH or grpc://HOST:PORT."
        )
    for wait in (0.2, 0.5, 1.0, 2.0):
        try:
            return RDBStorage(url)
        except DBAPIError as error:  # processes that start together create the same tables
            if not isinstance(error, IntegrityError) and "already exists" not in str(error):
                raise
            time.sleep(wait)
    return RDBStorage(url)


def ended_trials(study: "Study") -> list["FrozenTrial"]:
    """Return the trials that count: those with a score, and those that diverged."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]


def trial_folder(trial: "Trial | FrozenTrial") -> str:
    """Name the folder of a trial."""
    return f"trial-{trial.number:04d}"


def next_trial(study: "Study", config: TrainConfig, ranges: Sequence[Range], folder: Path) -> "Trial | FrozenTrial":
    """Return the trial whose unfinished run is in ``folder``, or a new one."""
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    for begun in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if (folder / trial_folder(begun)).exists():
            return begun
    trial = study.ask()
    # by its number: processes with one seed, and one that was resumed, would draw the same values again
    study.sampler = TPESampler(seed=config.seed + trial.number)
    for item in ranges:
        item.choose(trial)
    trial.set_user_attr("run", f"{socket.gethostname()}:{(folder / trial_folder(trial)).absolute()}")
    return trial
