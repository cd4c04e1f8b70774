"""Every figure by its name: what it shows, where the paper has it, how it is drawn, and the pages that show it."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.lab.tasks import Copying
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.run_folder import read_config
from torchrum.layers.introspection import gradient_norms
from torchrum.layers.registry import build_layer
from torchrum.paper.ledger.arrays import collect_arrays, drawable, read_arrays
from torchrum.paper.ledger.babi import best_columns
from torchrum.paper.ledger.runs import Row, best_settings, model_label, score_names, table_rows
from torchrum.paper.ledger.schema import Entry, LedgerError, arrays_path, read_ledger
from torchrum.paper.plots.curves import babi_figure, char_figure, copying_figure, headline_figure, recall_figure
from torchrum.paper.plots.diagrams import cell_figure, gradients_figure, reflections_figure
from torchrum.paper.plots.style import Figure, save_themes
from torchrum.paper.plots.trained import Arrays, diagonal_figure, kernels_figure, phases_figure, rotation_figure
from torchrum.paper.table import spread, write_marked


@dataclass(frozen=True)
class Drawing:
    """One figure that can be drawn."""

    name: str
    """Its file's name, without ending."""
    caption: str
    """What it shows, in words."""
    draw: Callable[[], Figure]
    """Draws it in the theme that is set."""


Plan = Callable[[Sequence[Entry], Path], Iterator[Drawing]]


def curves(task: str, caption: str, draw: Callable[[Sequence[Row]], Figure]) -> Plan:
    """Learning curves of one task: of each model the setting with the best final loss.

    Runs of a changed task are drawn only where there are no others.
    """

    def plan(entries: Sequence[Entry], results: Path) -> Iterator[Drawing]:
        rows = table_rows(entries, task)
        rows = [row for row in rows if row[0].own_problem] or rows
        if rows:
            yield Drawing(task, caption, lambda: draw(best_settings(rows)))

    return plan


def headline(entries: Sequence[Entry], results: Path) -> Iterator[Drawing]:
    """RUM beside an LSTM on recall at the paper's longer length, 50 units each."""
    kept = [entry for entry in entries if entry.recipe in ("recall-rum-lam1-t50", "recall-lstm-t50")]
    kept = [entry for entry in kept if entry.own_problem and entry.config().model.hidden_size == 50]
    rows = best_settings(table_rows(kept, "recall"))
    if len(rows) == 2:
        caption = "Associative recall of 25 pairs, validation accuracy of RUM and an LSTM: median and range over seeds."
        yield Drawing("headline", caption, lambda: headline_figure(rows))


def babi(entries: Sequence[Entry], results: Path) -> Iterator[Drawing]:
    """Accuracy task by task."""
    if best_columns(entries):
        caption = "bAbI task by task, the paper's RUM beside our models: mean and range over seeds; solved at 95%."
        yield Drawing("babi", caption, lambda: babi_figure(entries))


def describe(entry: Entry) -> str:
    """What was trained, for a title: task, model, size, seed and score."""
    config = entry.config()
    name, key = next(iter(score_names(entry).items()))
    score = f"{name} {spread([entry.final[key]], key)}"
    return f"{entry.recipe}: {model_label(config.model)}, {config.model.hidden_size} units, seed {entry.seed}, {score}"


@dataclass(frozen=True)
class PaperKernel:
    """A heat map of the paper and the run that it was drawn from."""

    task: str
    where: str
    fits: Callable[[TrainConfig], bool]


def _rum(config: TrainConfig, units: int, **options: float) -> bool:
    model = config.model
    return (
        model.layer == "rum" and model.hidden_size == units and {"lam": 0, **model.options}.items() >= options.items()
    )


KERNELS = {
    "recall": PaperKernel("recall", "Figure 3 (a)", lambda config: _rum(config, 50, lam=1)),
    "char": PaperKernel("char", "Figure 3 (b)", lambda config: _rum(config, 2000, lam=0, eta=1.0)),
    "copying": PaperKernel("copying", "Appendix E, first figure", lambda config: _rum(config, 100, lam=1)),
    "babi": PaperKernel("babi", "Appendix E, second figure", lambda config: _rum(config, 256, lam=0)),
}
"""The four heat maps of the paper."""


def with_arrays(entries: Sequence[Entry], results: Path) -> list[tuple[Entry, Path]]:
    """Entries that have a file of arrays, and the file."""
    paths = [(entry, arrays_path(results, entry)) for entry in entries]
    return [(entry, path) for entry, path in paths if path.exists()]


def representative(task: str, entries: Sequence[Entry], results: Path) -> tuple[Entry, Path] | None:
    """Of the runs of a task with arrays the one nearest to the paper's: its model first, then the lowest loss."""
    fits = KERNELS[task].fits
    kept = [(entry, path) for entry, path in with_arrays(entries, results) if entry.task == task]
    return min(kept, key=lambda item: (not fits(item[0].config()), item[0].final["loss"]), default=None)


def of_runs(name: str, caption: str, draw: Callable[[Arrays, Entry], Figure], turning: bool = False) -> Plan:
    """A figure of one trained RUM for each task that has one, with lam other than 0 if ``turning``."""

    def plan(entries: Sequence[Entry], results: Path) -> Iterator[Drawing]:
        if turning:
            entries = [entry for entry in entries if entry.config().model.options.get("lam", 0) != 0]
        for task in KERNELS:
            if found := representative(task, entries, results):
                entry, path = found
                text = caption.format(where=KERNELS[task].where)
                drawn = functools.partial(_draw_entry, draw, entry, path)
                yield Drawing(f"{name}-{task}", f"{text}: {describe(entry)}.", drawn)

    return plan


def _draw_entry(draw: Callable[[Arrays, Entry], Figure], entry: Entry, path: Path) -> Figure:
    return draw(read_arrays(path), entry)


def diagonal(entries: Sequence[Entry], results: Path) -> Iterator[Drawing]:
    """Diagonal dominance of W_hh over training, of the runs that the heat maps show."""
    found = [item for task in KERNELS if (item := representative(task, entries, results))]
    if found:
        caption = "How far the diagonals of the recurrent matrices stand out in the course of training."
        yield Drawing(
            "diagonal", caption, lambda: diagonal_figure({_short(entry): read_arrays(path) for entry, path in found})
        )


def gradients(entries: Sequence[Entry], results: Path) -> Iterator[Drawing]:
    """Gradient norm through time at initialisation; needs no run."""
    caption = (
        "How much of a gradient at the last step reaches each earlier state, at initialisation, on sequences of the "
        "copying task (T = 200, 100 units): median and the middle 90% of 32 sequences."
    )
    yield Drawing("gradients", caption, draw_gradients)


def reflections(entries: Sequence[Entry], results: Path) -> Iterator[Drawing]:
    """The rotation as two reflections; needs no run."""
    caption = "R(a, b) as two reflections: across a, then across the bisector of a and b (Figure 1 (a) of the paper)."
    yield Drawing("reflections", caption, reflections_figure)


def cell(entries: Sequence[Entry], results: Path) -> Iterator[Drawing]:
    """The RUM cell; needs no run."""
    yield Drawing("cell", "The RUM cell (Figure 1 (b) of the paper).", cell_figure)


def draw_gradients(delay: int = 200, units: int = 100, sequences: int = 32) -> Figure:
    """RUM, LSTM and GRU as their recipes initialise them."""
    title = f"Gradients through time at initialisation, {units} units, copying T = {delay}"
    return gradients_figure(initial_gradients(delay, units, sequences), title)


@functools.cache  # a figure is drawn in two themes
def initial_gradients(delay: int, units: int, sequences: int) -> dict[str, NDArray[np.float64]]:
    """The share of a gradient at the last step that reaches each step, ``(T, B)``, by model."""
    task = Copying(delay=delay)
    x = F.one_hot(task.batch(sequences, torch.Generator().manual_seed(0)).x.T, task.input_size).double()
    exact = {**PAPER_OPTIONS, "backend": "reference"}  # in float64: the figure is the same on every machine
    models: dict[str, tuple[str, dict[str, Any]]] = {
        "RUM λ=0": ("rum", exact),
        "RUM λ=0, η=1": ("rum", {**exact, "eta": 1.0}),
        "RUM λ=1": ("rum", {**exact, "lam": 1}),
        "LSTM": ("lstm", {}),
        "GRU": ("gru", {}),
    }
    generator = torch.Generator().manual_seed(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of tiny calls: waiting for a second thread costs more than it gives
    try:
        layers = {label: _fresh(name, task.input_size, units, options) for label, (name, options) in models.items()}
        return {label: gradient_norms(layer, x, generator).numpy() for label, layer in layers.items()}
    finally:
        torch.set_num_threads(threads)


def _fresh(name: str, inputs: int, units: int, options: dict[str, Any]) -> torch.nn.Module:
    """A layer as drawn from seed 0, without a trace in the global random state."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return build_layer(name, inputs, units, **options).double()


FIGURES: dict[str, Plan] = {
    "copying": curves(
        "copying",
        "Copying memory, training loss (Figure 2 of the paper). A run that reaches its goal stops there and keeps its "
        "last value in the median; a dot marks the end where all seeds did.",
        copying_figure,
    ),
    "recall": curves("recall", "Associative recall, validation (the figure of Appendix B).", recall_figure),
    "char": curves("char", "Character-level Penn Treebank, validation (Table 3 has the test scores).", char_figure),
    "babi": babi,
    "headline": headline,
    "kernels": of_runs(
        "kernels",
        "The recurrent matrices after training ({where} of the paper)",
        lambda arrays, entry: kernels_figure(arrays, describe(entry)),
    ),
    "rotation": of_runs(
        "rotation",
        "Angle and plane of each rotation and the norm of the state over one sequence",
        lambda arrays, entry: rotation_figure(arrays, describe(entry), entry.config().task),
    ),
    "phases": of_runs(
        "phases",
        "Phases of the accumulated rotation R as it reads one sequence",
        lambda arrays, entry: phases_figure(arrays, describe(entry), entry.config().task),
        turning=True,
    ),
    "diagonal": diagonal,
    "gradients": gradients,
    "reflections": reflections,
    "cell": cell,
}
"""Name to what can be drawn of it."""


def draw_figure(name: str, results: Path | str, out: Path | str) -> list[Path]:
    """Draw a figure from the ledger, in a light and a dark version.

    Args:
        name: a key of ``FIGURES``.
        results: the ledger.
        out: a folder; the figures are written there as ``.svg``.

    Returns:
        The paths of the pictures.
    """
    results, out = Path(results), Path(out)
    if name not in FIGURES:
        raise LedgerError(f"no figure {name!r}; there are: {', '.join(FIGURES)}.")
    paths = draw_plan(FIGURES[name], read_ledger(results), results, out)
    if not paths and not results.is_dir():
        raise LedgerError(f"{results} is not a folder; pass the folder of a results ledger with --results DIR.")
    if not paths:
        plain = name in ("copying", "recall", "char", "babi", "headline")
        advice = "torchrum record RUN" if plain else "torchrum record --arrays RUN"
        raise LedgerError(f"{results} has nothing to draw {name} from; add a run with {advice}.")
    return paths


def draw_all(results: Path, out: Path) -> list[Path]:
    """Draw every figure that the ledger has runs for."""
    entries = read_ledger(results)
    return [path for plan in FIGURES.values() for path in draw_plan(plan, entries, results, out)]


def draw_plan(plan: Plan, entries: Sequence[Entry], results: Path, out: Path) -> list[Path]:
    """Draw whatever the ledger has of one figure; nothing is no error."""
    drawings = plan(entries, results)
    return [path for drawing in drawings for path in save_themes(drawing.draw, out / drawing.name)]


def draw_run(name: str, run: Path | str, out: Path | str) -> list[Path]:
    """Draw a figure of one run folder with a trained RUM, in a light and a dark version.

    Args:
        name: ``kernels``, ``rotation``, ``phases`` or ``diagonal``.
        run: the run folder.
        out: a folder.

    Returns:
        The paths of the pictures.
    """
    run, out = Path(run), Path(out)
    config = read_config(run)
    title = f"{config.name}, {config.model.hidden_size} units, seed {config.seed}"
    drawn: dict[str, Callable[[Arrays], Figure]] = {
        "kernels": lambda arrays: kernels_figure(arrays, title),
        "rotation": lambda arrays: rotation_figure(arrays, title, config.task),
        "phases": lambda arrays: phases_figure(arrays, title, config.task),
        "diagonal": lambda arrays: diagonal_figure({title: arrays}),
    }
    if name not in drawn:
        raise ConfigError(f"{name!r} cannot be drawn for one run; choose from: {', '.join(drawn)}.")
    arrays = drawable(collect_arrays(run))
    if not arrays:
        raise RunError(f"{run} has no RUM to draw: its model is {config.model.layer!r}.")
    if name == "phases" and not any(key.endswith("/phases") for key in arrays):
        raise RunError(f"{run} accumulates no rotation (lam is 0), so there are no phases to draw.")
    return save_themes(lambda: drawn[name](arrays), out / name)


def _short(entry: Entry) -> str:
    config = entry.config()
    return f"{entry.recipe}, {config.model.hidden_size} units, seed {entry.seed}"


IMAGE = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}-dark.svg">
  <img src="{folder}/{name}.svg" alt="{caption}">
</picture>
"""


def write_gallery(page: Path, results: Path, folder: Path) -> bool:
    """Put figures and captions between the markers of a page; says whether it changed.

    Args:
        page: a Markdown file of the documentation.
        results: the ledger, from which the captions come.
        folder: where the figures lie.
    """
    entries, place = read_ledger(results), os.path.relpath(folder, page.parent)
    return write_marked(page, "figure", "recall", lambda name: gallery(name, entries, results, place))


def gallery(name: str, entries: Sequence[Entry], results: Path, folder: str) -> str:
    """The figures of one name, light and dark, with caption and command; says so where there is no run yet."""
    if name not in FIGURES:
        raise LedgerError(f"no figure {name!r}; there are: {', '.join(FIGURES)}.")
    parts = []
    for drawing in FIGURES[name](entries, results):
        parts.append(IMAGE.format(folder=folder, name=drawing.name, caption=escape(drawing.caption)))
        parts.append(f"{drawing.caption}\n")
    parts.append(f"`torchrum figure {name}`\n" if parts else f"No run recorded for `torchrum figure {name}` yet.\n")
    return "\n" + "\n".join(parts) + "\n"
