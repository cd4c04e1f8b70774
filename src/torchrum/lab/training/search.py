"""A search for good values of fields, by Optuna."""

import math
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError, DivergedError, RunError
from torchrum.lab.training.fabric import Engine
from torchrum.lab.training.files import write_json
from torchrum.lab.training.overrides import declared_type, override
from torchrum.lab.training.progress import Lenient
from torchrum.lab.training.sweep import SUMMARY, OnEnd, claim, train_or_keep
from torchrum.lab.training.typed_data import UNFIT


class Range(NamedTuple):
    """What is searched: one of ``choices``, or a number from ``low`` to ``high``, whole where these are."""

    name: str
    choices: list[str]
    low: float = 0
    high: float = 0
    log: bool = False
    """Whether the logarithm is what is drawn evenly."""

    def choose(self, trial: Any) -> Any:
        """The value that Optuna proposes."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        suggest = trial.suggest_int if isinstance(self.low, int) else trial.suggest_float
        return suggest(self.name, self.low, self.high, log=self.log)


def read_range(config: TrainConfig, text: str) -> Range:
    """Read ``field=low:high``, ``field=low:high:log`` or ``field=a,b,c``; the field must take each value."""
    name, equals, values = text.partition("=")
    parts = values.split(":")
    if not equals or not values or (len(parts) == 3 and parts[2] != "log") or len(parts) > 3:
        raise ConfigError(f"{text!r} is not a search range; write field=low:high, field=low:high:log or field=a,b,c.")
    if len(parts) == 1:
        found = Range(name, values.split(","))
    else:
        try:
            found = Range(name, [], *_ends(config, name, parts[:2]), log=len(parts) == 3)
            if found.log and found.low <= 0:
                raise ValueError("a logarithmic range must be above 0.")
        except ValueError as error:
            raise ConfigError(f"the search range {text} is not possible: {error}") from error
    for value in found.choices or parts[:2]:
        override(config, [f"{name}={value}"])
    return found


def _ends(config: TrainConfig, name: str, parts: list[str]) -> tuple[float, float]:
    """The ends of a range: ints if the field is whole or, where its type is not declared, if both are."""
    hint = declared_type(config, name)
    if hint in (bool, str) or typing.get_origin(hint) is not None:
        raise ValueError(f"{name} is not a number; write {name}=a,b,c.")
    try:
        low, high = map(float, parts)
    except ValueError:
        raise ValueError("both ends must be numbers.") from None
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("both ends must be finite.")
    if low > high:
        raise ValueError("the lower end must come first.")
    whole = hint is int or (hint is not float and low.is_integer() and high.is_integer())
    return (int(low), int(high)) if whole else (low, high)


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
    ranges = [read_range(config, item) for item in space]
    if len({item.name for item in ranges}) < len(ranges):
        raise ConfigError(f"a field is searched twice: {', '.join(space)}; give each field one range.")
    engine = Engine(config)
    if engine.world_size > 1:
        raise ConfigError("a search trains in one process; start it with devices 1, or sweep over a grid.")
    with claim(folder, rename) as lock:
        return _search(config, ranges, trials, lock.folder, quiet, on_end, engine)


def _search(
    config: TrainConfig,
    ranges: list[Range],
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
        assignments = [f"{item.name}={item.choose(trial)}" for item in ranges]
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
