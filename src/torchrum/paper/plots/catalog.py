"""Every figure by its name: what it shows, where the paper has it, how it is drawn, and the pages that show it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path

from torchrum.lab.plot_style import Figure, save_themes
from torchrum.lab.tables import spread, write_marked
from torchrum.lab.tasks.base import Task
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.run_folder import read_config
from torchrum.paper.ledger.arrays import collect_arrays, drawable, read_arrays
from torchrum.paper.ledger.babi import best_columns
from torchrum.paper.ledger.entries import Entry, LedgerError, arrays_path, read_ledger
from torchrum.paper.ledger.runs import best_settings, model_label, place, score_names, table_rows
from torchrum.paper.plots.curves import (
    babi_figure,
    char_figure,
    copying_figure,
    gradients_figure,
    headline_figure,
    recall_figure,
)
from torchrum.paper.plots.run import Arrays, diagonal_figure, kernels_figure, phases_figure, rotation_figure

FIGURES = {
    "copying": "Copying memory, training loss (Figure 2 of the paper). A run that reaches its goal stops there and "
    "keeps its last value in the median; a dot marks the end where all seeds did.",
    "recall": "Associative recall, validation (the figure of Appendix B).",
    "char": "Character-level Penn Treebank, validation (Table 3 has the test scores). Runs of less than a quarter of "
    "the longest one's epochs are left out.",
    "babi": "bAbI task by task, the paper's RUM beside our models: mean and range over seeds; solved at 95%.",
    "headline": "Associative recall of 25 pairs at equal settings, validation: median and range over three seeds.",
    "kernels": "The recurrent matrices after training ({where} of the paper)",
    "rotation": "Angle and plane of each rotation and the norm of the state over one sequence",
    "phases": "Phases of the accumulated rotation R as it reads one sequence",
    "diagonal": "How far the diagonals of the recurrent matrices stand out in the course of training.",
    "gradients": "How much of a gradient at the last step reaches each earlier state, at initialisation, on sequences "
    "of the copying task (T = 200, 100 units): median and the middle 90% of 32 sequences.",
}
"""Name of each figure to its caption; the run is named after those of kernels, rotation and phases."""

RUN_FIGURES = {
    "kernels": "The recurrent matrices of the best checkpoint.",
    "rotation": "Angle and plane of each rotation and the norm of the state over one validation sequence.",
    "phases": "Phases of the accumulated rotation R as it reads that sequence.",
    "diagonal": FIGURES["diagonal"],
}
"""Name of each figure of one run folder to its caption."""

KERNELS: dict[str, tuple[str, int, dict[str, float]]] = {
    "recall": ("Figure 3 (a)", 50, {"lam": 1}),
    "char": ("Figure 3 (b)", 2000, {"lam": 0, "eta": 1.0}),
    "copying": ("Appendix E, first figure", 100, {"lam": 1}),
    "babi": ("Appendix E, second figure", 256, {"lam": 0}),
}
"""The four heat maps of the paper by task: where it has them, and the units and options of the RUM."""


@dataclass(frozen=True)
class Drawing:
    """One figure that can be drawn."""

    name: str
    """Its file's name, without ending."""
    caption: str
    """Caption."""
    draw: Callable[[], Figure]
    """Draws it in the theme that is set."""


def plan(name: str, entries: Sequence[Entry], results: Path) -> list[Drawing]:
    """List the figures of one name that a ledger has runs for."""
    caption = FIGURES[name]
    draw: Callable[[], Figure] | None = None
    match name:
        case "copying" | "recall" | "char":
            rows = table_rows(entries, name)
            rows = [
                row for row in rows if row[0].own_problem and not place(row)[1]
            ] or rows  # a changed task if no other
            figures = {"copying": copying_figure, "recall": recall_figure, "char": char_figure}
            draw = partial(figures[name], best_settings(rows)) if rows else None
        case "headline":
            panels = {"one symbol per step": "-fresh-t50", "with the previous symbol": "-window-t50"}
            kinds = {
                title: table_rows([entry for entry in entries if entry.recipe.endswith(ending)], "recall")
                for title, ending in panels.items()
            }
            draw = partial(headline_figure, kinds) if all(kinds.values()) else None
        case "babi":
            draw = partial(babi_figure, entries) if best_columns(entries) else None
        case "diagonal":
            runs = [found for task in KERNELS if (found := representative(task, entries, results))]
            draw = (
                (lambda: diagonal_figure({title(e.config(), e.recipe): read_arrays(path) for e, path in runs}))
                if runs
                else None
            )
        case "gradients":
            draw = gradients_figure
        case _:
            return _of_runs(name, entries, results)
    return [Drawing(name, caption, draw)] if draw else []


def _of_runs(name: str, entries: Sequence[Entry], results: Path) -> list[Drawing]:
    """A figure of one trained RUM for each task that has one; phases need lam other than 0."""
    if name == "phases":
        entries = [entry for entry in entries if entry.config().model.options.get("lam", 0) != 0]
    drawings = []
    for task in KERNELS:
        if found := representative(task, entries, results):
            entry, path = found
            words = describe(entry)
            caption = f"{FIGURES[name].format(where=KERNELS[task][0])}: {words}."
            draw = partial(TRAINED[name], read_arrays(path), words, entry.config().task)
            drawings.append(Drawing(f"{name}-{task}", caption, draw))
    return drawings


TRAINED: dict[str, Callable[[Arrays, str, Task], Figure]] = {
    "kernels": lambda arrays, title, task: kernels_figure(arrays, title),
    "rotation": rotation_figure,
    "phases": phases_figure,
    "diagonal": lambda arrays, title, task: diagonal_figure({title: arrays}),
}
"""Name of each figure of one trained RUM to what draws it."""


def title(config: TrainConfig, name: str) -> str:
    """Name a run in a figure."""
    return f"{name}, {config.model.hidden_size} units, seed {config.seed}"


def describe(entry: Entry) -> str:
    """Describe a run for a title: task, model, size, seed and score."""
    name, key = next(iter(score_names(entry).items()))
    words = title(entry.config(), f"{entry.recipe}: {model_label(entry.config().model)}")
    return f"{words}, {name} {spread([entry.final[key]], key)}"


def representative(task: str, entries: Sequence[Entry], results: Path) -> tuple[Entry, Path] | None:
    """Choose the run of a task with arrays that is nearest to the paper's: its model first, then the lowest loss."""
    _, units, options = KERNELS[task]

    def distance(entry: Entry) -> tuple[bool, float]:
        model = entry.config().model
        fits = model.layer == "rum" and model.hidden_size == units
        return not (fits and {"lam": 0, **model.options}.items() >= options.items()), entry.final["loss"]

    kept = [entry for entry in entries if entry.task == task and arrays_path(results, entry).exists()]
    found = min(kept, key=distance, default=None)
    return None if found is None else (found, arrays_path(results, found))


def draw_figure(name: str, results: Path | str, out: Path | str) -> list[Path]:
    """Draw a figure from the ledger, in a light and a dark version.

    Args:
        name: a key of ``FIGURES``, or ``all``.
        results: the ledger.
        out: a folder; the figures are written there as ``.svg``.

    Returns:
        The paths of the pictures.
    """
    results, out = Path(results), Path(out)
    check_figure(name, "all")
    entries = read_ledger(results)
    found = [drawing for each in (FIGURES if name == "all" else [name]) for drawing in plan(each, entries, results)]
    if not found and not results.is_dir():
        raise ConfigError(f"{results} is not a folder; pass the folder of a results ledger with --results DIR.")
    if not found:
        advice = "torchrum record --arrays RUN" if name in RUN_FIGURES else "torchrum record RUN"
        raise LedgerError(f"{results} has nothing to draw {name} from; add a run with {advice}.")
    return [path for drawing in found for path in save_themes(drawing.draw, out / drawing.name)]


def check_figure(name: str, *others: str) -> None:
    """Refuse a figure that does not exist."""
    if name not in FIGURES and name not in others:
        raise LedgerError(f"no figure {name!r}; there are: {', '.join([*FIGURES, *others])}.")


def plan_run(run: Path) -> list[Drawing]:
    """List the figures of a run folder with a trained RUM; none for another model."""
    config, arrays = read_config(run), drawable(collect_arrays(run))
    needed = {"kernels": "/tau", "rotation": "/theta", "phases": "/phases", "diagonal": "steps"}
    names = [name for name in RUN_FIGURES if any(key.endswith(needed[name]) for key in arrays)]
    words = title(config, config.name)
    return [Drawing(name, RUN_FIGURES[name], partial(TRAINED[name], arrays, words, config.task)) for name in names]


def draw_run(name: str, run: Path | str, out: Path | str) -> list[Path]:
    """Draw a figure of one run folder with a trained RUM, in a light and a dark version.

    Args:
        name: ``kernels``, ``rotation``, ``phases`` or ``diagonal``.
        run: the run folder.
        out: a folder.

    Returns:
        The paths of the pictures.
    """
    run = Path(run)
    if name not in RUN_FIGURES:
        raise ConfigError(f"{name!r} cannot be drawn for one run; choose from: {', '.join(RUN_FIGURES)}.")
    found = {drawing.name: drawing.draw for drawing in plan_run(run)}
    if not found:
        raise RunError(f"{run} has no RUM to draw: its model is {read_config(run).model.layer!r}.")
    if name not in found:
        raise RunError(f"{run} accumulates no rotation (lam is 0), so there are no phases to draw.")
    return save_themes(found[name], Path(out) / name)


IMAGE = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}-dark.svg">
  <img src="{folder}/{name}.svg" alt="{caption}">
</picture>
"""


def write_gallery(page: Path, results: Path, folder: Path) -> bool:
    """Put figures and captions between the markers of a page; return whether it changed.

    Args:
        page: a Markdown file of the documentation.
        results: the ledger, from which the captions come.
        folder: where the figures lie.
    """
    entries, place = read_ledger(results), os.path.relpath(folder, page.parent)
    return write_marked(page, "figure", "recall", lambda name: gallery(name, entries, results, place))


def gallery(name: str, entries: Sequence[Entry], results: Path, folder: str) -> str:
    """Write the figures of one name, light and dark, with caption and command, or a note if there is no run yet."""
    check_figure(name)
    parts = []
    for drawing in plan(name, entries, results):
        parts.append(IMAGE.format(folder=folder, name=drawing.name, caption=escape(drawing.caption)))
        parts.append(f"{drawing.caption}\n")
    parts.append(f"`torchrum figure {name}`\n" if parts else f"No run recorded for `torchrum figure {name}` yet.\n")
    return "\n" + "\n".join(parts) + "\n"
