"""Many runs of one recipe, one after another: seeds, grids, and a search by Optuna."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

from torchrum.training.config import TrainConfig
from torchrum.training.config_file import differences, identity
from torchrum.training.errors import ConfigError, DivergedError, RunError
from torchrum.training.fabric import Engine
from torchrum.training.files import write_json
from torchrum.training.loading import read_config
from torchrum.training.lock import FolderLock, lock_folder, lock_free_folder
from torchrum.training.overrides import override
from torchrum.training.progress import Lenient
from torchrum.training.records import holds_run, read_result
from torchrum.training.run_state import Result
from torchrum.training.schema import UNFIT
from torchrum.training.trainer import Trainer

SUMMARY = "summary.json"
OnEnd = Callable[[Path], object] | None


def grid(config: TrainConfig, choices: Sequence[str], seeds: int = 1) -> dict[str, TrainConfig]:
    """Every combination of ``choices`` (``"field=a,b"``) and seeds, by the name of its folder."""
    axes = []
    for choice in choices:
        field, equals, values = choice.partition("=")
        if not equals or not values:
            raise ConfigError(f"{choice!r} is not a grid; write it as field=a,b,c.")
        if field.strip() == "seed":
            raise ConfigError(f"{choice!r} cannot be a grid; --seed {values.split(',')[0]} --seeds N takes N of them.")
        axes.append([f"{field}={value}" for value in values.split(",")])
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
) -> list[Result]:
    """Train each config in its own folder under ``folder``; what is finished there is kept, what is begun is resumed.

    Args:
        runs: the configs by the name of their folder.
        folder: where they go; one process at a time may sweep there.
        quiet, on_end: as for ``Trainer``.
        rename: take the next free name, as ``folder-2``, where ``folder`` is taken.

    Returns:
        The results, up to the first that a signal ended; ``folder/summary.json`` has them too. A run that diverged is
        one of them, without scores.
    """
    if not runs:
        raise ConfigError("there is nothing to train: the number of seeds must be at least 1.")
    engine = Engine(next(iter(runs.values())))
    with ExitStack() as held:
        folder = engine.first(lambda: held.enter_context(_claim(Path(folder), rename)).folder)
        return _run_all(runs, folder, quiet, on_end, engine)


def _claim(folder: Path, rename: bool) -> FolderLock:
    return lock_free_folder(folder) if rename else lock_folder(folder)


def _run_all(runs: Mapping[str, TrainConfig], folder: Path, quiet: bool, on_end: OnEnd, engine: Engine) -> list[Result]:
    results: dict[str, Result] = {}

    def say(text: str) -> None:
        if engine.rank == 0 and not quiet:
            print(text, file=cast(TextIO, Lenient()))

    for number, (label, config) in enumerate(runs.items(), 1):
        say(f"{label}, {number} of {len(runs)}")
        try:
            results[label] = _train(config, folder / label, quiet, engine, on_end)
        except DivergedError as error:
            results[label] = Result(folder / label, "diverged", 0, {}, None, 0, 0.0)
            say(f"{label}: {error}")
        if results[label].stopped.startswith("SIG"):
            say(f"to resume all {len(runs)} runs, give the same command with --resume {folder}")
            return list(results.values())
        means = engine.first(lambda: _summarise(folder, runs, results))
    metric = next(iter(runs.values())).task.metric
    for group, found in means.items():
        say(f"{group}: {metric} {found['mean']:.4f} +- {found['spread']:.4f} over {found['runs']}")
    say(f"all of it: {folder / SUMMARY}")
    return list(results.values())


def _train(config: TrainConfig, folder: Path, quiet: bool, engine: Engine, on_end: OnEnd) -> Result:
    done, begun = engine.first(lambda: (read_result(folder), holds_run(folder)))  # one look for all processes
    if done is None:
        return Trainer(config, quiet=quiet, on_end=on_end).fit(folder, resume=begun)
    changed = differences(identity(read_config(folder)), identity(config))
    if changed:
        raise RunError(f"{folder} holds a finished run of another config: {'; '.join(changed)}.")
    return done


def _summarise(folder: Path, runs: Mapping[str, TrainConfig], results: Mapping[str, Result]) -> dict[str, Any]:
    """Write the summary; returns the means of the runs that differ in their seed alone."""
    rows = {
        label: {"scores": result.scores, "best": result.best, "step": result.step, "stopped": result.stopped}
        for label, result in results.items()
    }
    groups: dict[str, list[float]] = {}
    for label, result in results.items():
        if result.stopped != "diverged":
            value = result.scores.get(runs[label].task.metric, math.nan)
            groups.setdefault(label.rpartition("/")[0], []).append(value)
    means = {
        group or "all": {"runs": len(values), "mean": statistics.fmean(values), "spread": statistics.pstdev(values)}
        for group, values in groups.items()
    }
    write_json(folder / SUMMARY, {"metric": next(iter(runs.values())).task.metric, "means": means, "runs": rows})
    return means


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
    except ModuleNotFoundError as error:
        raise RunError('a search needs Optuna: pip install "torchrum[sweep]"') from error

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # each run tells its story already
    ranges = [_range(item) for item in space]
    engine = Engine(config)
    if engine.world_size > 1:
        raise ConfigError("a search trains in one process; start it with devices 1, or sweep over a grid.")
    with _claim(folder, rename) as lock:
        return _search(config, ranges, trials, lock.folder, quiet, on_end, engine)


def _search(
    config: TrainConfig,
    ranges: list[tuple[str, list[str]]],
    trials: int,
    folder: Path,
    quiet: bool,
    on_end: OnEnd,
    engine: Engine,
) -> int:
    from optuna.trial import TrialState

    study = _study(config, folder / "optuna.log")
    finished = [trial for trial in study.trials if trial.state.is_finished()]
    for _ in range(len(finished), trials):
        trial = study.ask()
        assignments = [f"{name}={_choose(trial, name, values)}" for name, values in ranges]
        place = folder / f"trial-{trial.number:04d}"
        try:
            result = _train(override(config, assignments), place, quiet, engine, on_end)
        except DivergedError as error:  # which is what a search is there to find out
            study.tell(trial, state=TrialState.FAIL)
            print(f"{place.name}: {error}", file=cast(TextIO, Lenient()))
            continue
        if result.exit_code or result.best is None:
            study.tell(trial, state=TrialState.FAIL)
            if result.exit_code:
                return result.exit_code
            continue
        study.tell(trial, result.best)
    if not any(trial.state is TrialState.COMPLETE for trial in study.trials):
        raise RunError(f"none of the {len(study.trials)} trials in {folder} has a score; search in another range.")
    best = study.best_trial
    chosen = {"trial": best.number, "value": best.value, "fields": best.params}
    write_json(folder / SUMMARY, {"metric": config.task.metric, "trials": len(study.trials), "best": chosen})
    return 0


def _study(config: TrainConfig, path: Path) -> Any:
    """The study that is kept in ``path``, or a new one."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise RunError(f"{path} is not a plain file; remove it, and the search begins anew.")
    try:
        return optuna.create_study(
            study_name=config.name,
            direction="maximize" if config.task.goal == "max" else "minimize",
            sampler=optuna.samplers.TPESampler(seed=config.seed),
            storage=JournalStorage(JournalFileBackend(str(path))),
            load_if_exists=True,
        )
    except (*UNFIT, AssertionError, AttributeError, RecursionError) as error:  # Optuna takes its file as it is
        raise RunError(f"{path} is damaged ({error!r:.80}); remove it, and the search begins anew.") from error


def _range(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    parts = values.split(":")
    if not equals or not values or (len(parts) == 3 and parts[2] != "log") or len(parts) > 3:
        raise ConfigError(f"{text!r} is not a search range; write field=low:high, field=low:high:log or field=a,b,c.")
    return name, parts if len(parts) > 1 else [values]


def _choose(trial: Any, name: str, values: list[str]) -> Any:
    try:
        if len(values) == 1:
            return trial.suggest_categorical(name, values[0].split(","))
        whole = all(part.lstrip("+-").isdigit() for part in values[:2])
        suggest = trial.suggest_int if whole else trial.suggest_float
        low, high = (int(part) if whole else float(part) for part in values[:2])
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("both ends must be finite.")
        return suggest(name, low, high, log=len(values) == 3)
    except ValueError as error:
        raise ConfigError(f"the search range {name}={':'.join(values)} is not possible: {error}") from error
