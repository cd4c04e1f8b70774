"""Compare recurrent layers on a user's own data."""

import re
import time as clock
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchrum.lab.compare.best import Best, load, save_best
from torchrum.lab.compare.data import read_problem
from torchrum.lab.compare.models import Network, Sizes, time_steps
from torchrum.lab.compare.problem import Kind, Problem
from torchrum.lab.compare.run import (
    SETTINGS,
    Settings,
    claim_folder,
    is_scored,
    load_problem,
    read_settings,
    read_trainings,
    save_problem,
    settings_for,
    train_all,
)
from torchrum.lab.compare.verdict import Standing, Verdict, decide, score_table, standings
from torchrum.lab.tables import Table
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.files import write_json
from torchrum.lab.training.progress import visible
from torchrum.lab.training.run_folder import FolderLock, lock_folder

__all__ = ["Best", "Comparison", "compare", "load", "resume"]


@dataclass(frozen=True)
class Comparison:
    """A finished or interrupted comparison; ``print`` shows the table and the verdict."""

    folder: Path
    """Where everything is written."""
    verdict: Verdict
    table: Table
    found: Sequence[Standing]
    """The scores of each model."""
    page: Path

    def __str__(self) -> str:
        notes = "".join(f"{note}\n" for note in self.table.notes)
        return visible(f"{self.table.text()}\n{notes}\n{self.verdict.sentence}")


def compare(
    data: Any,
    *,
    target: str | None = None,
    time: str | None = None,
    group: str | None = None,
    inputs: Sequence[str] | None = None,
    kind: Kind | None = None,
    minutes: float = 10.0,
    out: Path | str | None = None,
    quiet: bool = False,
) -> Comparison:
    """Train GRU, LSTM and RUM on your data with an equal search, and say whether RUM is worth it.

    The same call again goes on where an earlier one was stopped. In a script call it below
    ``if __name__ == "__main__"``, since it starts processes.

    Args:
        data: a CSV or Parquet file, a ``.npz`` or ``.npy`` file, a text, a folder of texts by class, or arrays.
        target: column to predict.
        time: column that orders the rows.
        group: column that tells sequences apart.
        inputs: columns to predict from.
        kind: ``"classification"``, ``"regression"``, ``"forecasting"``, ``"tagging"`` or ``"symbols"``.
        minutes: time limit; the number of steps is chosen so that all trainings fit into it.
        out: folder to write. Default: ``runs/NAME``, after the data.
        quiet: print nothing.
    """
    begin = clock.monotonic()
    _check_minutes(minutes)
    columns: dict[str, Any] = {"target": target, "time": time, "group": group, "inputs": inputs}
    problem = read_problem(data, **columns, kind=kind)
    path = Path(data) if isinstance(data, str | Path) else None
    options = {**columns, "inputs": list(inputs) if inputs else None, "kind": kind, "minutes": minutes}
    settings = settings_for(problem, "" if path is None else str(path.resolve()), options)
    name = "data" if path is None else re.sub(r"[^\w.-]+", "-", path.resolve().stem) or "data"
    with claim_folder(None if out is None else Path(out), name, settings) as lock:
        if (lock.folder / SETTINGS).exists() and (there := read_settings(lock.folder)).steps is not None:
            settings = there
        else:
            save_problem(lock.folder, problem)
            write_json(lock.folder / SETTINGS, asdict(settings))
        return _finish(lock, problem, settings, minutes, begin, quiet)


def resume(folder: Path | str, *, minutes: float = 10.0, quiet: bool = False) -> Comparison:
    """Go on with a comparison that was stopped; its data need not be there any more.

    Args:
        folder: of the comparison.
        minutes: time limit of this call.
        quiet: print nothing.
    """
    begin = clock.monotonic()
    _check_minutes(minutes)
    problem = load_problem(Path(folder))
    with lock_folder(Path(folder)) as lock:
        return _finish(lock, problem, read_settings(lock.folder), minutes, begin, quiet)


def _check_minutes(minutes: float) -> None:
    if not 0 < minutes < float("inf"):
        raise ConfigError(f"minutes is {minutes:g}; it must be a positive number.")


def _finish(
    lock: FolderLock, problem: Problem, settings: Settings, minutes: float, begin: float, quiet: bool
) -> Comparison:
    """Train what is missing, then write and return the outcome."""
    folder = lock.folder
    if not quiet:
        for guess in problem.guesses:
            print(visible(guess))
        print(f"everything is written to {folder}", flush=True)
    settings, interrupted = train_all(folder, settings, minutes, begin, quiet)
    outcome = _report(folder, problem, settings)
    if not quiet:
        print(f"\n{outcome}\nThe page: {outcome.page}", flush=True)
    if interrupted:
        if not quiet:
            print(f"To go on: {_more(folder)}", flush=True)
        raise KeyboardInterrupt
    return outcome


def _more(folder: Path) -> str:
    return f"torchrum compare --resume {folder}"


def _report(folder: Path, problem: Problem, settings: Settings) -> Comparison:
    """Judge the finished trainings, save the best model, and write the page."""
    from torchrum.lab.compare.page import comparison_page  # the processes that train have no use for matplotlib
    from torchrum.lab.page import write_page

    found = standings([run for run in read_trainings(folder, settings.steps) if is_scored(run)])
    verdict = decide(found, problem.floor, problem.metric, _more(folder))
    sizes = Sizes.of(problem)
    times = time_steps({name: Network(name, sizes, size) for name, size in settings.hidden_sizes.items()}, problem)
    facts = {
        name: {"hidden_size": size, "parameters": settings.parameters[name], "step_seconds": times[name]}
        for name, size in settings.hidden_sizes.items()
    }
    table = score_table(found, problem.floor, problem.metric, settings.steps or 0, facts)
    if settings.planned is not None:
        cut = f"The steps were cut from {settings.planned:,} to {settings.steps:,}, since the machine became slower."
        table = replace(table, notes=[*table.notes, cut])
    if any(each.runs for each in found):
        save_best(folder, found, problem, settings)
    page = comparison_page(folder, problem, verdict, table, found, _more(folder))
    return Comparison(folder, verdict, table, found, write_page(page, folder / "report.html"))
