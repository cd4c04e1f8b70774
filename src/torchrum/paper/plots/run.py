"""Figures of one run folder: learning curves, recurrent matrices, and rotations over one sequence."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import FixedLocator, NullFormatter, PercentFormatter
from numpy.typing import NDArray

from torchrum.lab.plot_style import (
    LOOKS,
    PALETTE,
    Axes,
    Figure,
    baseline,
    count_steps,
    drawing,
    ink,
    is_dark,
    look,
    save,
)
from torchrum.lab.tasks import Copying, Recall
from torchrum.lab.tasks.base import Task
from torchrum.lab.training.errors import RunError
from torchrum.lab.training.run_folder import read_config, read_metrics, shared_scores

Arrays = Mapping[str, NDArray[np.float64]]
"""Result of ``torchrum.paper.ledger.arrays.read_arrays``."""

TRAINING, VALIDATION = "#9ecae1", "#d55e00"


def draw_curve(run: Path | str, out: Path | str | None = None) -> Path:
    """Draw loss and metrics of a run folder, training and validation.

    Args:
        run: the run folder.
        out: the picture, ``.png``, ``.svg`` or ``.pdf``; ``curve.png`` in the run folder if None.

    Returns:
        The path of the picture.
    """
    config = read_config(run)
    training, validation = read_metrics(run, "train"), read_metrics(run, "validation")
    if not training and not validation:
        raise RunError(f"{run} has no scores to draw yet.")
    # ratio is the loss in other units: one panel serves both
    scores = [key for key in shared_scores([*training, *validation]) if key != "ratio"]
    with drawing():
        figure, panels = score_panels(scores, config.task)
        for axes, score in zip(panels, scores, strict=True):
            for lines, label, colour in ((training, "training", TRAINING), (validation, "validation", VALIDATION)):
                axes.plot([line["step"] for line in lines], [line[score] for line in lines], color=colour, label=label)
            if score == "loss" and min(line["loss"] for line in training + validation) < config.task.baseline() / 10:
                axes.set_yscale("log")
        panels[0].legend(loc="best")
        figure.suptitle(f"{config.name}, seed {config.seed}", fontsize=10)
        return save(figure, Path(run) / "curve.png" if out is None else Path(out))


def comparison_figure(runs: Mapping[str, Path], task: Task) -> Figure:
    """Validation loss and the task's metric over the steps, a line for each run.

    Args:
        runs: label and run folder of each model.
        task: what they learnt.
    """
    scores = list(dict.fromkeys(("loss", "accuracy" if isinstance(task, Recall) else task.metric)))
    figure, panels = score_panels(scores, task)
    for axes, score in zip(panels, scores, strict=True):
        for number, (label, run) in enumerate(runs.items()):
            lines = read_metrics(run, "validation")
            style = look(label) if label in LOOKS else {"color": PALETTE[number % len(PALETTE)]}
            axes.plot([line["step"] for line in lines], [line[score] for line in lines], **style, label=label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def score_panels(scores: Sequence[str], task: Task) -> tuple[Figure, Sequence[Axes]]:
    """A panel for each score over the steps, with the score of the best model without memory."""
    figure = Figure(figsize=(3.6 * len(scores), 2.9), layout="constrained")
    panels = figure.subplots(1, len(scores), squeeze=False)[0]
    for axes, score in zip(panels, scores, strict=True):
        axes.set_ylabel(f"loss, {task.loss_unit}" if score == "loss" else score)
        count_steps(axes)
        if score == "loss":
            baseline(axes, task.baseline(), f"{task.baseline_name} baseline")
        if score == "accuracy":
            axes.set_ylim(0, 1.03)
            if isinstance(task, Recall):
                baseline(axes, task.baseline_accuracy(), f"{task.baseline_name} baseline")
    return figure, panels


TITLES = {"tau": "$W_{hh}^{\\tau}$: generates the target τ", "u": "$W_{hh}^{u}$: generates the update gate u"}


def first_recurrence(arrays: Arrays) -> str:
    """Name the first recurrence of a model, which represents all of them in a figure."""
    return min(name.rpartition("/")[0] for name in arrays if name.endswith("/tau"))


def kernels_figure(arrays: Arrays, title: str) -> Figure:
    """The blocks of W_hh side by side, each with the block's name and how far its diagonal stands out.

    Where a block was too large to be kept, its first rows and columns are shown, and below them the root mean square of
    every tile of the whole.
    """
    name = first_recurrence(arrays)
    blocks = [block for block in TITLES if f"{name}/{block}" in arrays]
    whole = f"{name}/tau_map" not in arrays
    figure = Figure(figsize=(3.5 * len(blocks), 3.9 if whole else 6.8), layout="constrained")
    grid = figure.subplots(1 if whole else 2, len(blocks), squeeze=False)
    for column, block in enumerate(blocks):
        matrix, units = arrays[f"{name}/{block}"], len(arrays[f"{name}/{block}_diagonal"])
        shown = "" if whole else f"\nfirst {len(matrix)} of {units} units"
        grid[0, column].set_title(f"{TITLES[block]}\n{_contrast(arrays, name, block)}{shown}")
        # a few large entries must not wash out the others: the scale ends at the largest 0.5 %
        limit = float(np.quantile(np.abs(matrix), 0.995)) or 1.0
        colours = "berlin" if is_dark() else "RdBu_r"  # a dark centre on a dark page
        heat_map(
            grid[0, column],
            matrix,
            {"shrink": 0.75, "extend": "both"},
            cmap=colours,
            norm=TwoSlopeNorm(0, -limit, limit),
        )
        if not whole:
            grid[1, column].set_title("root mean square of each tile, all units")
            tiles, extent = arrays[f"{name}/{block}_map"], (0.0, float(units), float(units), 0.0)
            heat_map(grid[1, column], tiles, {"shrink": 0.75}, cmap="viridis", extent=extent, vmin=0)
    for axes in grid.flat:
        axes.set(xlabel="from unit", ylabel="to unit")
        axes.spines[:].set_visible(False)
    figure.suptitle(title, fontsize=10)
    return figure


def _contrast(arrays: Arrays, name: str, block: str) -> str:
    """Describe how far the diagonal stands out, from the whole block if it is there."""
    diagonal = np.abs(arrays[f"{name}/{block}_diagonal"])
    matrix = np.abs(arrays[f"{name}/{block}"])
    others = (matrix.sum() - matrix.diagonal().sum()) / max(matrix.size - len(matrix), 1)
    return f"mean |diagonal| is {diagonal.mean() / max(others, 1e-12):.2g} times the rest"


def heat_map(axes: Axes, matrix: NDArray[np.float64], bar: Mapping[str, Any], **image: Any) -> None:
    """Draw a matrix with its scale."""
    shown = axes.imshow(matrix, interpolation="nearest", **image)
    axes.grid(False)
    axes.title.set_fontsize(8.5)
    scale = axes.figure.colorbar(shown, ax=axes, **bar)
    scale.outline.set_visible(False)
    scale.ax.tick_params(labelsize=7)


TICKS = (0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100)


def diagonal_figure(runs: Mapping[str, Mapping[str, NDArray[np.float64]]]) -> Figure:
    """Mean |diagonal| over mean |other entry| of W_hh, a line for each run: the target's block left, the gate's right.

    Runs have lengths from thousands of steps to a hundred thousand, so the axis is the share of each one's steps.

    Args:
        runs: label and arrays of each run.
    """
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    for axes, block, title in zip(
        figure.subplots(1, 2, sharey=True), ("tau", "u"), ("target block τ", "update gate block u"), strict=True
    ):
        for number, (label, arrays) in enumerate(runs.items()):
            name = first_recurrence(arrays)
            if f"{name}/{block}_dominance" in arrays:
                values = arrays[f"{name}/{block}_dominance"]
                steps = arrays["steps"]
                label = f"{label} ({steps[-1]:,.0f} steps)"
                axes.plot(steps / steps[-1], values, color=PALETTE[number % len(PALETTE)], label=label)
        baseline(axes, 1, "no structure")
        axes.set(title=title, yscale="log", xlabel="share of training", xlim=(0, 1.02), xticks=(0, 0.25, 0.5, 0.75, 1))
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.yaxis.set_major_locator(FixedLocator(TICKS))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = figure.axes[0].get_ylim()  # shared
    figure.axes[0].set_ylim(min(low, 0.8), max(high, 2))
    figure.axes[0].set_ylabel("mean |diagonal| / mean |other|")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=1)
    return figure


MAIN, SECOND = "#d55e00", "#2f8fd0"
READABLE = 60
"""Steps up to which every symbol is written below the axis."""


def rotation_figure(arrays: Arrays, title: str, task: Task) -> Figure:
    """Angle theta_t and norm of the state over the steps, and how far the planes of any two steps agree."""
    name = first_recurrence(arrays)
    figure = Figure(figsize=(8.2, 3.9), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.5, 1))
    above = figure.add_subplot(grid[0, 0])
    below = figure.add_subplot(grid[1, 0], sharex=above)
    planes = figure.add_subplot(grid[:, 1])
    theta = arrays[f"{name}/theta"]
    steps = np.arange(1, len(theta) + 1)
    style: dict[str, Any] = {"marker": ".", "markersize": 3} if len(theta) <= READABLE else {}
    above.plot(steps, theta, color=MAIN, linewidth=1, **style)
    radians(above, "angle $\\theta_t$")
    above.tick_params(labelbottom=False)
    below.plot(steps, arrays[f"{name}/norm"], color=SECOND, linewidth=1, **style)
    below.set(ylabel="norm $|h_t|$")
    below.set_ylim(0, 1.1 * float(arrays[f"{name}/norm"].max()))  # eta holds it constant: not at the very top
    mark_symbols(below, arrays.get("symbols"), task)
    above.grid(below.xaxis.get_gridlines()[0].get_visible(), axis="x")  # none where every step has its symbol
    planes.set(xlabel="step t", ylabel="step s", title="overlap of the planes of $R(\\varepsilon, \\tau)$")
    first, last = float(arrays["at"][0]) + 0.5, float(arrays["at"][-1]) + 1.5
    colours = "magma" if is_dark() else "magma_r"
    bar = {"shrink": 0.7, "location": "bottom"}
    heat_map(planes, arrays[f"{name}/overlap"], bar, cmap=colours, vmin=0, vmax=1, extent=(first, last, last, first))
    figure.suptitle(title, fontsize=10)
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 0.96))  # a square of planes grows into the title's room
    return figure


def phases_figure(arrays: Arrays, title: str, task: Task) -> Figure:
    """The phases of R_t's eigenvalues as it reads, and its spectrum on the unit circle after the last step."""
    name = first_recurrence(arrays)
    phases, at = arrays[f"{name}/phases"], arrays["at"] + 1  # (P, H // 2), (P,)
    figure = Figure(figsize=(8.2, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.8, 1))
    size = 4 if len(at) <= READABLE else 2
    left.plot(
        np.repeat(at, phases.shape[1]),
        phases.ravel(),
        ".",
        color=SECOND,
        markersize=size,
        rasterized=True,  # thousands of dots: as shapes they would take half a megabyte
    )
    radians(left, "phases of $R_t$'s eigenvalues")
    mark_symbols(left, arrays.get("symbols"), task)
    turn = np.linspace(0, 2 * math.pi, 200)
    right.plot(np.cos(turn), np.sin(turn), color=ink(), linewidth=0.6, alpha=0.5)
    for place, colour, text in ((0, MAIN, f"after step {at[0]:.0f}"), (-1, SECOND, f"after step {at[-1]:.0f}")):
        angles = np.concatenate((phases[place], -phases[place]))
        right.plot(np.cos(angles), np.sin(angles), "o", color=colour, markersize=3.5, label=text)
    right.set(aspect="equal", xlabel="real part", ylabel="imaginary part", title="eigenvalues of $R_t$")
    right.legend(loc="center")
    figure.suptitle(title, fontsize=10)
    return figure


def radians(axes: Axes, label: str) -> None:
    """An axis from 0 to pi."""
    axes.set(ylabel=label, ylim=(-0.05, math.pi + 0.05), yticks=(0, math.pi / 2, math.pi))
    axes.set_yticklabels(("0", "π/2", "π"))


def symbol_names(task: Task) -> Callable[[int], str]:
    """Name the symbols of a task below an axis."""
    if isinstance(task, Recall):
        letters = "?" + "".join(chr(ord("a") + key) if key < 26 else "·" for key in range(task.pairs))
        return lambda symbol: letters[symbol] if symbol <= task.pairs else str(symbol - task.pairs - 1)
    if isinstance(task, Copying):
        return lambda symbol: {0: "·", task.symbols + 1: "cue"}.get(symbol, str(symbol))
    return str


def mark_symbols(axes: Axes, symbols: NDArray[np.float64] | None, task: Task) -> None:
    """Write the symbols below the axis where they are known and fit, else the steps; the cue of copying is marked."""
    if symbols is not None and len(symbols) <= READABLE:
        names, numbers = symbol_names(task), symbols.astype(int).tolist()
        axes.set_xticks(np.arange(1, len(numbers) + 1), [names(number) for number in numbers], fontsize=6)
        axes.set_xlabel("symbol read")
        axes.grid(False, axis="x")
        return
    axes.set_xlabel("step")
    if isinstance(task, Copying):
        for step in (task.length, task.delay + task.length):
            axes.axvline(step, color=ink(), linewidth=0.7, linestyle=":")
