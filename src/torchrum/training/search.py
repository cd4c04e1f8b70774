"""A search for good values of fields, by Optuna."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from torchrum.training.config import TrainConfig
from torchrum.training.errors import ConfigError, DivergedError, RunError
from torchrum.training.fabric import Engine
from torchrum.training.files import write_json
from torchrum.training.overrides import override
from torchrum.training.progress import Lenient
from torchrum.training.sweep import SUMMARY, OnEnd, claim, train_or_keep
from torchrum.training.typed_data import UNFIT


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
    with claim(folder, rename) as lock:
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
            result = train_or_keep(override(config, assignments), place, quiet, engine, on_end)
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
