"""The page of a few run folders: how they went side by side, and what each was."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torchrum.lab.training.config import TrainConfig, to_json
from torchrum.lab.training.environment import read_environment
from torchrum.lab.training.errors import RunError
from torchrum.lab.training.run_folder import read_config, read_metrics
from torchrum.paper.ledger.arrays import collect_arrays, drawable
from torchrum.paper.ledger.labels import model_label
from torchrum.paper.ledger.record import count_parameters
from torchrum.paper.plots.comparison import comparison_figure
from torchrum.paper.plots.diagonal import diagonal_figure
from torchrum.paper.plots.kernels import kernels_figure
from torchrum.paper.plots.rotation import phases_figure, rotation_figure
from torchrum.paper.report.blocks import Block, Playground, Table, Text, inline
from torchrum.paper.report.ledger_page import PLAYGROUND
from torchrum.paper.report.page import Page, Section
from torchrum.paper.report.pictures import picture


def runs_page(
    runs: Sequence[Path],
    title: str = "torchrum runs",
    lead: str = "",
    drawn: Mapping[Path, list[Block]] | None = None,
) -> Page:
    """Gather the page of run folders; each needs at least one validation.

    Args:
        runs: the folders.
        title, lead: what stands at the top.
        drawn: what ``run_blocks`` has given for some of them already.
    """
    configs = {run: read_config(run) for run in runs}
    for run in runs:
        if not read_metrics(run, "validation"):
            raise RunError(f"{run} has no validation scores to report yet.")
    labels = _labels(configs)
    parts = {run: (drawn or {}).get(run) or run_blocks(run) for run in runs}
    sections = [
        Section("Side by side" if len(runs) > 1 else "Scores", list(_comparison(configs, labels)), "scores"),
        *(Section(labels[run], part, f"run-{n}") for n, (run, part) in enumerate(parts.items())),
        Section("Rotation playground", [Text(inline(PLAYGROUND)), Playground()], "playground"),
    ]
    told = f"{len(runs)} runs, from their folders." if len(runs) > 1 else "One run, from its folder."
    return Page(title, lead or told, sections)


def _labels(configs: dict[Path, TrainConfig]) -> dict[Path, str]:
    """The model's name, with the folder where two are alike."""
    labels = {run: model_label(config.model) for run, config in configs.items()}
    alike = list(labels.values())
    return {run: label if alike.count(label) == 1 else f"{label}, {run.name}" for run, label in labels.items()}


def _comparison(configs: dict[Path, TrainConfig], labels: dict[Path, str]) -> Iterator[Block]:
    lines = {run: read_metrics(run, "validation") for run in configs}
    names = [name for name in next(iter(lines.values()))[0] if name not in ("kind", "step", "seconds")]
    header = ["model", "task", "parameters", "steps", "seconds", *names]
    rows = []
    for run, config in configs.items():
        last = lines[run][-1]
        scores = [f"{last[name]:{'.1%' if name == 'accuracy' else '.4g'}}" if name in last else "" for name in names]
        counts = [f"{count_parameters(config):,}", f"{last['step']:,}", f"{last['seconds']:.0f}"]
        rows.append([labels[run], type(config.task).__name__, *counts, *scores])
    yield _table(header, rows)
    task = next(iter(configs.values())).task
    if all(config.task == task for config in configs.values()):
        caption = "Validation over the steps; the dashed line is the best that is possible without memory."
        shown = {labels[run]: run for run in configs}
        yield picture("side-by-side", lambda: comparison_figure(shown, task), caption)


def run_blocks(run: Path) -> list[Block]:
    """The part of the page that is about one run."""
    return list(_run(run, read_config(run)))


def _run(run: Path, config: TrainConfig) -> Iterator[Block]:
    environment = read_environment(run)
    place = environment.accelerator or environment.processor
    commit = (environment.commit or "unknown")[:10]
    place, command = f"{place}, commit {commit}, seed {config.seed}", shlex.join(environment.command)
    yield Text([("text", "Command: "), ("code", command), ("text", f". {place}.")])
    arrays = drawable(collect_arrays(run))
    title = f"{config.name}, {config.model.hidden_size} units, seed {config.seed}"
    if arrays:
        yield picture(
            "kernels", lambda: kernels_figure(arrays, title), "The recurrent matrices of the best checkpoint."
        )
        caption = "Angle and plane of each rotation and the norm of the state over one validation sequence."
        yield picture("rotation", lambda: rotation_figure(arrays, title, config.task), caption)
        if any(key.endswith("/phases") for key in arrays):
            caption = "Phases of the accumulated rotation R as it reads that sequence."
            yield picture("phases", lambda: phases_figure(arrays, title, config.task), caption)
        if "steps" in arrays:
            caption = "How far the diagonals of the recurrent matrices stand out in the course of training."
            yield picture("diagonal", lambda: diagonal_figure({title: arrays}), caption)
    yield _table(("field", "value"), _fields(to_json(config)))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Build a table of plain text, which may come from a file and is shown as it is."""
    return Table([[("text", cell)] for cell in header], [[[("text", cell)] for cell in row] for row in rows])


def _fields(config: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """List the fields of a config with their values, nested names joined by dots."""
    rows = []
    for key, value in config.items():
        if isinstance(value, dict):
            rows += _fields(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", str(value)))
    return rows
