"""Copy a run folder into an entry of the ledger."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchrum.lab.models import build_model, count_parameters
from torchrum.lab.recipes import registered_recipe
from torchrum.lab.training import run_folder as records
from torchrum.lab.training.checkpoint import check_ended_run, checkpoint_step
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.environment import given_commit, read_environment
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.evaluation import read_looks
from torchrum.lab.training.overrides import assignments
from torchrum.lab.training.run_folder import read_config
from torchrum.paper.ledger.schema import MAX_POINTS, Entry, LedgerError, arrays_path, problems, write_entry

SAME = ("steps", "eval_every", "compile", "model.orthogonal_map")
"""Fields that do not change what a run has learnt by a given step."""


def record(
    run: Path | str,
    results: Path | str,
    *,
    note: str = "",
    commit: str | None = None,
    replace: bool = False,
    arrays: bool = False,
) -> Entry:
    """Copy a finished run into the ledger: one line of ``results/<task>.jsonl``.

    Nothing is evaluated: the test scores are read from the run folder, where ``torchrum eval`` has written them.

    Args:
        run: the run folder.
        results: the folder of the ledger.
        note: a remark to show beside the numbers.
        commit: hash of the code, or HEAD, if the run was made outside a checkout and did not record it.
        replace: replace an entry of the same name.
        arrays: also write the arrays that the figures of a trained RUM need, see :mod:`torchrum.paper.ledger.arrays`;
            they are computed from the best checkpoint, which must still exist.

    Returns:
        The entry.
    """
    run, results = Path(run), Path(results)
    entry = read_run(run, note=note, commit=commit)
    for problem in problems(entry):
        raise LedgerError(f"{run}: {problem}")
    if not arrays:
        write_entry(results, entry, replace=replace)
        return entry
    from torchrum.paper.ledger.arrays import collect_arrays, write_arrays

    found = collect_arrays(run)  # before anything is written: a lost checkpoint must leave no entry
    write_entry(results, entry, replace=replace)
    if found:
        write_arrays(arrays_path(results, entry), found)
    return entry


def read_run(run: Path, *, note: str = "", commit: str | None = None) -> Entry:
    """Read the entry of a run folder; a run that has not ended is an error."""
    config = read_config(run)
    environment = read_environment(run)
    if records.read_result(run) is None:
        raise LedgerError(f"{run} has not ended; finish it with torchrum train {config.name} --resume {run}.")
    check_ended_run(run, config)
    validation, training = records.read_metrics(run, "validation"), records.read_metrics(run, "train")
    if not validation or not training:
        raise LedgerError(f"{run} has no {'training' if validation else 'validation'} scores to record.")
    overrides = changes(config)
    curve = thin(validation)
    last = max(validation[-1]["step"], training[-1]["step"])
    if curve["step"][-1] != last:
        raise LedgerError(f"{run} ends at step {last} without a validation; resume it to its end first.")
    test, tested, dynamic = _test(run) if config.task.has_test else ({}, [], "")
    if commit is None and environment.commit is None:
        raise LedgerError(f"{run} does not say which commit it ran; pass it as --commit.")
    code = f"{environment.commit}{'+changes' if environment.uncommitted_changes else ''}"
    versions = {"python": environment.python, **environment.versions, "cuda": environment.cuda}
    data = config.task.provenance() if environment.data is None else environment.data
    flags = ["--data", config.task.own_data] if config.task.own_data else []
    for text in (f"seed={config.seed}", *without_own_data(config, overrides)):
        field, _, value = text.partition("=")
        flags += [f"--{field}", value]
    return Entry(
        recipe=config.name,
        overrides=overrides,
        seed=config.seed,
        command=shlex.join(["torchrum", "train", config.name, *flags]),
        commit=code if commit is None else given_commit(commit),
        hardware=environment.accelerator or environment.processor,
        processes=environment.processes,
        versions={name: version for name, version in versions.items() if version is not None},
        wall_seconds=max(0.1, round(float(validation[-1]["seconds"]), 1)),
        steps=last,
        parameters=environment.parameters or count_parameters(build_model(config.model, config.task)),
        baseline=rounded(config.task.baseline()),
        final={key: values[-1] for key, values in curve.items() if key != "step"},
        curve=curve,
        train_curve=thin(training),
        note="; ".join(filter(None, (note, data))),
        test=test,
        tested=tested,
        dynamic=dynamic,
    )


def _test(run: Path) -> tuple[dict[str, float], list[str], str]:
    """Read the test scores of the best checkpoint, the dates of all evaluations and the settings of a dynamic one."""
    looks, step = read_looks(run), checkpoint_step(run, "best")
    best = [look for look in looks if look.step == step and not look.dynamic]
    if not best:
        raise LedgerError(f"{run} has no test scores of its best checkpoint; run torchrum eval {run} first.")
    test = {"step": float(step), **{name: rounded(value) for name, value in best[-1].scores.items()}}
    followed = [look for look in looks if look.step == step and look.dynamic]
    for look in followed[-1:]:
        test |= {f"dynamic_{name}": rounded(value) for name, value in look.scores.items()}
    return test, [look.date for look in looks], followed[-1].dynamic if followed else ""


def changes(config: TrainConfig, name: str | None = None) -> list[str]:
    """List where a config differs from the recipe ``name``, by default the one of its own name, as ``field=value``."""
    try:
        return assignments(registered_recipe(name or config.name), config)
    except ConfigError as error:
        raise LedgerError(f"{error} The ledger holds runs of recipes, with or without overrides.") from error


def without_own_data(config: TrainConfig, overrides: Iterable[str]) -> list[str]:
    """Leave out the overrides of fields that are read from the user's own data."""
    known = {f"task.{name}" for name in config.task.from_data} if config.task.own_data else set()
    return [text for text in overrides if text.partition("=")[0] not in known]


def rounded(value: float) -> float:
    """Round to six significant digits: finer than the noise of any run, in small files."""
    return float(f"{value:.6g}")


def thin(lines: Sequence[dict[str, Any]], points: int = MAX_POINTS) -> dict[str, list[float]]:
    """Turn at most ``points`` lines, evenly chosen, into columns; the first and the last line are among them."""
    if len(lines) > points:
        lines = [lines[round(i * (len(lines) - 1) / (points - 1))] for i in range(points)]
    columns = {key: [rounded(line[key]) for line in lines] for key in records.shared_scores(lines)}
    return {"step": [line["step"] for line in lines], **columns}
