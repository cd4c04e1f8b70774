"""The entries of the results ledger: their fields and checks, the files that hold them, and how a run becomes one.

``results/<task>.jsonl`` has one line of JSON per run, sorted by name.
"""

import functools
import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from filelock import FileLock

from torchrum.lab.models import build_model, count_parameters
from torchrum.lab.recipes import registered_recipe
from torchrum.lab.training import run_folder as records
from torchrum.lab.training.checkpoint import check_ended_run, checkpoint_step
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.evaluation import read_looks
from torchrum.lab.training.files import UNFIT, Reader, parse_json, read_text, write_atomic
from torchrum.lab.training.overrides import assignments, override
from torchrum.lab.training.run_folder import given_commit, read_config, read_environment

FORMAT = 1
MAX_POINTS = 200
OPTIONAL = {"test", "tested", "dynamic", "diverged"}
"""Fields that are left out where they are empty."""
LOCAL = re.compile(
    r"""
    (?<![\w.)/-])/[\w.]                          # an absolute path, but not loss/baseline
    | ~[\w-]*/ | \$\{?[A-Z]+ | \b[A-Za-z]:[\\/]  # a home folder, a variable, a drive
    | \\\\\w | @[\w-]+ | ://                     # a share, a user or host, an address
    | \blocalhost\b | \b\d{1,3}(?:\.\d{1,3}){3}\b
    | \b[\w-]+\.(?:local|internal|lan|corp|home|com|org|net|edu|gov|io|dev|cloud)\b
    """,
    re.VERBOSE,
)
"""Path, host or user name, as far as one can be recognised."""


class LedgerError(ValueError):
    """A ledger file or a run to record is damaged or incomplete."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run: its settings, its machine and its scores."""

    format: int = FORMAT
    """Version of this layout."""
    recipe: str
    """Name of the recipe, as ``torchrum list`` shows it."""
    overrides: list[str]
    """Fields that differ from the recipe, as ``field=value``, without the seed."""
    seed: int
    """Seed of the run."""
    command: str
    """Command that runs it again."""
    commit: str
    """Commit of the code, followed by ``+changes`` if files were edited."""
    hardware: str
    """Name of the accelerator or processor."""
    processes: int
    """Number of processes that shared the batch."""
    versions: dict[str, str]
    """Versions of Python and of the libraries that compute."""
    wall_seconds: float
    """Time of training."""
    steps: int
    """Number of optimizer steps."""
    parameters: int
    """Number of trainable parameters, read-out included."""
    baseline: float
    """Loss of the best model without memory."""
    final: dict[str, float]
    """Validation scores after the last step: the last point of ``curve``."""
    curve: dict[str, list[float]]
    """Validation scores during training, at most 200 points: ``step``, ``loss`` and metrics, lists of one length."""
    train_curve: dict[str, list[float]]
    """Training scores during training, in the same layout."""
    note: str = ""
    """Remark for readers of the numbers."""
    test: dict[str, float] = field(default_factory=dict)
    """Test scores of the checkpoint that was best on validation, and its ``step``; where the task has a test set."""
    tested: list[str] = field(default_factory=list)
    """Dates of evaluations on the test set, one for each."""
    dynamic: str = ""
    """Settings of the dynamic evaluation whose scores are in ``test``."""
    diverged: int = 0
    """Step at which the loss became NaN or infinite, if it did; the scores are from before that step."""

    @property
    def task(self) -> str:
        """The recipe's first word, which names the file of the entry."""
        return self.recipe.partition("-")[0]

    @property
    def name(self) -> str:
        """The recipe, the seed and, if there are overrides, a hash of them."""
        return entry_name(self.recipe, self.seed, self.overrides)

    @property
    def own_problem(self) -> bool:
        """Whether the run learnt the recipe's own problem, not a changed one."""
        settings = {f"task.{name}" for name in self.config().task.batching}
        changed = {text.partition("=")[0] for text in self.overrides}
        return not any(name.startswith("task.") for name in changed - settings)

    def config(self) -> TrainConfig:
        """Rebuild the config of the run from the recipe."""
        return _rebuilt(self.recipe, tuple(self.overrides), self.seed)

    def to_json(self) -> str:
        """Render the line of the entry, without its newline."""
        values = {key: value for key, value in asdict(self).items() if value or key not in OPTIONAL}
        return json.dumps(values, separators=(",", ":"))


def entry_name(recipe: str, seed: int, overrides: Iterable[str]) -> str:
    """Name the run of a recipe with a seed and overrides."""
    text = "\n".join(overrides)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{recipe}-seed{seed}{'-' + digest if text else ''}"


def sort_key(name: str) -> str:
    """Order entries by recipe and seed; a run with overrides comes before the one without."""
    return f"{name}."  # a dot sorts after the dash before the hash


@functools.cache  # tables and figures ask thousands of times; a config is frozen
def _rebuilt(recipe: str, overrides: tuple[str, ...], seed: int) -> TrainConfig:
    return override(registered_recipe(recipe), [*overrides, f"seed={seed}"])


def from_json(text: bytes | str, source: str) -> Entry:
    """Read an entry and check its numbers; ``source`` names it in errors."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise LedgerError(f"{source}: this is not JSON: {error}.") from error
    entry = Reader(source, LedgerError, finite=True).build(Entry, data)
    for problem in problems(entry):
        raise LedgerError(f"{source}: {problem}")
    return entry


def read_ledger(folder: Path | str, task: str | None = None) -> list[Entry]:
    """Read the entries of one task, or of all, sorted by name; an entry in the wrong file is an error."""
    entries = []
    for path in sorted(Path(folder).glob(f"{task or '*'}.jsonl")):
        names = set()
        for number, line in enumerate(read_text(path).splitlines(), 1):
            source = f"{path}, line {number}"
            entry = from_json(line, source)
            if entry.task != path.stem:
                raise LedgerError(f"{source}: this entry belongs in {entry.task}.jsonl.")
            if entry.name in names:
                raise LedgerError(f"{source}: {entry.name} has more than one line.")
            names.add(entry.name)
            entries.append(entry)
    return sorted(entries, key=lambda entry: (entry.task, sort_key(entry.name)))


def write_entry(results: Path, entry: Entry, *, replace: bool = False) -> Path:
    """Add the line of an entry to its file, or replace it; several processes may do so at once.

    Returns:
        The path of the file.
    """
    path = results / f"{entry.task}.jsonl"
    results.mkdir(parents=True, exist_ok=True)
    with FileLock(results / ".lock"):
        lines = {_line_name(line, path): line for line in read_text(path).splitlines()} if path.exists() else {}
        if entry.name in lines and not replace:
            raise LedgerError(
                f"{path} already has {entry.name}; pass --replace to replace it, or train with another seed."
            )
        lines[entry.name] = entry.to_json()
        write_atomic(path, "".join(f"{lines[name]}\n" for name in sorted(lines, key=sort_key)).encode())
    return path


def _line_name(line: str, path: Path) -> str:
    try:
        data = json.loads(line)
        return entry_name(data["recipe"], data["seed"], data["overrides"])
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} has a damaged line, {line!r:.60}; restore the file first.") from error


def arrays_path(results: Path, entry: Entry) -> Path:
    """Return the path of the arrays of an entry, see :mod:`torchrum.paper.ledger.arrays`."""
    return results / "arrays" / f"{entry.name}.npz"


def problems(entry: Entry) -> Iterator[str]:
    """Describe what is wrong with an entry."""
    try:
        task = entry.config().task
    except UNFIT as error:
        yield f"its recipe cannot be rebuilt: {error}"
        return
    for name, curve in (("curve", entry.curve), ("train_curve", entry.train_curve)):
        steps = curve.get("step", [])
        if not steps or "loss" not in curve:
            yield f"{name} needs step and loss, with at least one point."
            return
        if len(steps) > MAX_POINTS or any(len(values) != len(steps) for values in curve.values()):
            yield f"{name} must hold lists of one length, at most {MAX_POINTS} points."
            return
        if any(later <= earlier for earlier, later in pairwise(steps)):
            yield f"the steps of {name} must rise."
    last = {key: values[-1] for key, values in entry.curve.items() if key != "step"}
    for holds, words in (
        (entry.format == FORMAT, f"format is {entry.format}, but this version reads {FORMAT}."),
        (
            math.isclose(entry.baseline, task.baseline(), rel_tol=1e-5),
            f"baseline is {entry.baseline}, but the task's is {task.baseline():.6g}.",
        ),
        (entry.final == last, f"final is {entry.final}, but the curve ends with {last}."),
        (
            entry.curve["step"][-1] == entry.steps,
            f"steps is {entry.steps}, but the curve ends at {entry.curve['step'][-1]}.",
        ),
        ({task.metric, "loss"} <= entry.final.keys(), f"final must have loss and {task.metric}, which tables show."),
        (
            not entry.test or (task.metric in entry.test and 0 < entry.test.get("step", 0) <= entry.steps),
            f"test must have {task.metric} and the step of its checkpoint, up to {entry.steps}; it is {entry.test}.",
        ),
        (bool(entry.test) == bool(entry.tested), "test and tested belong together: the scores, and the dates."),
    ):
        if not holds:
            yield words
    for text in (entry.command, entry.hardware, entry.note, *entry.overrides):
        if found := LOCAL.search(text):
            yield f"{text!r} names a path or a machine ({found[0]!r}), which holds on one machine only."
        if not text.isprintable():
            yield f"{text!r} is more than one line, or has characters that cannot be printed."


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


def thin(lines: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Turn at most ``MAX_POINTS`` lines, evenly chosen, into columns; the first and the last line are among them."""
    if len(lines) > MAX_POINTS:
        lines = [lines[round(i * (len(lines) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]
    columns = {key: [rounded(line[key]) for line in lines] for key in records.shared_scores(lines)}
    return {"step": [line["step"] for line in lines], **columns}
