"""What a trained RUM has learnt: its recurrent matrices, and its angles, planes, norms and phases over one sequence."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.image import AxesImage
from matplotlib.ticker import FixedLocator, NullFormatter, PercentFormatter
from numpy.typing import NDArray

from torchrum.lab.tasks import Copying, Recall
from torchrum.lab.tasks.base import Task
from torchrum.paper.plots.style import PALETTE, Axes, Figure, baseline, ink, is_dark

Arrays = Mapping[str, NDArray[np.float64]]

TITLES = {"tau": "$W_{hh}^{\\tau}$: generates the target τ", "u": "$W_{hh}^{u}$: generates the update gate u"}


def recurrences(arrays: Arrays) -> list[str]:
    """Names of the recurrences that a file of arrays holds, in the order of their names."""
    return sorted({name.rpartition("/")[0] for name in arrays if name.endswith("/tau")})


def kernels_figure(arrays: Arrays, title: str, recurrence: str | None = None) -> Figure:
    """The blocks of W_hh side by side, each with the block's name and how far its diagonal stands out.

    Where a block was too large to be kept, its first rows and columns are shown, and below them the root mean square of
    every tile of the whole.

    Args:
        arrays: what ``torchrum.paper.ledger.arrays.read_arrays`` returns.
        title: what was trained.
        recurrence: which of the model's recurrences; the first if None.
    """
    name = recurrence or recurrences(arrays)[0]
    blocks = [block for block in TITLES if f"{name}/{block}" in arrays]
    whole = f"{name}/tau_map" not in arrays
    figure = Figure(figsize=(3.5 * len(blocks), 3.9 if whole else 6.8), layout="constrained")
    grid = figure.subplots(1 if whole else 2, len(blocks), squeeze=False)
    for column, block in enumerate(blocks):
        _signed(grid[0, column], arrays[f"{name}/{block}"])
        diagonal = arrays[f"{name}/{block}_diagonal"]
        shown = "" if whole else f"\nfirst {len(arrays[f'{name}/{block}'])} of {len(diagonal)} units"
        grid[0, column].set_title(f"{TITLES[block]}\n{_contrast(arrays, name, block)}{shown}", fontsize=8.5)
        if not whole:
            _sizes(grid[1, column], arrays[f"{name}/{block}_map"], len(diagonal))
    figure.suptitle(title, fontsize=10)
    return figure


def _contrast(arrays: Arrays, name: str, block: str) -> str:
    """How far the diagonal stands out, from the whole block where there is one."""
    diagonal = np.abs(arrays[f"{name}/{block}_diagonal"])
    matrix = np.abs(arrays[f"{name}/{block}"])
    others = (matrix.sum() - matrix.diagonal().sum()) / max(matrix.size - len(matrix), 1)
    return f"mean |diagonal| is {diagonal.mean() / max(others, 1e-12):.2g} times the rest"


def _signed(axes: Axes, matrix: NDArray[np.float64]) -> None:
    # a few large entries must not wash out the others: the scale ends at the largest 0.5 %
    limit = float(np.quantile(np.abs(matrix), 0.995)) or 1.0
    image = axes.imshow(
        matrix,
        cmap="berlin" if is_dark() else "RdBu_r",  # a dark centre on a dark page
        norm=TwoSlopeNorm(0, -limit, limit),
        interpolation="nearest",
    )
    axes.set(xlabel="from unit", ylabel="to unit")
    _dress(axes, image, "extend")


def _sizes(axes: Axes, tiles: NDArray[np.float64], units: int) -> None:
    image = axes.imshow(
        tiles, cmap="viridis", interpolation="nearest", extent=(0.0, float(units), float(units), 0.0), vmin=0
    )
    axes.set(xlabel="from unit", ylabel="to unit", title="root mean square of each tile, all units")
    axes.title.set_fontsize(8.5)
    _dress(axes, image, "")


def _dress(axes: Axes, image: AxesImage, extend: str) -> None:
    axes.grid(False)
    axes.spines[:].set_visible(False)
    figure = axes.figure
    bar = figure.colorbar(image, ax=axes, shrink=0.75, extend="both" if extend else "neither")
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7)


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
            name = recurrences(arrays)[0]
            if f"{name}/{block}_dominance" in arrays:
                values = arrays[f"{name}/{block}_dominance"]
                steps = arrays["steps"]
                label = f"{label} ({steps[-1]:,.0f} steps)"
                axes.plot(steps / steps[-1], values, color=PALETTE[number % len(PALETTE)], label=label)
        baseline(axes, 1, "no structure", below=True)
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


def rotation_figure(arrays: Arrays, title: str, task: Task, recurrence: str | None = None) -> Figure:
    """Angle theta_t and norm of the state over the steps, and how far the planes of any two steps agree.

    Args:
        arrays: what ``torchrum.paper.ledger.arrays.read_arrays`` returns.
        title: what was trained.
        task: tells what the symbols are called.
        recurrence: which of the model's recurrences; the first if None.
    """
    name = recurrence or recurrences(arrays)[0]
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
    _planes(planes, arrays[f"{name}/overlap"], arrays["at"])
    figure.suptitle(title, fontsize=10)
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 0.96))  # a square of planes grows into the title's room
    return figure


def phases_figure(arrays: Arrays, title: str, task: Task, recurrence: str | None = None) -> Figure:
    """The phases of R_t's eigenvalues as it reads, and its spectrum on the unit circle after the last step."""
    name = recurrence or recurrences(arrays)[0]
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
    """What a task's symbols are called below an axis."""
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


def _planes(axes: Axes, overlap: NDArray[np.float64], at: NDArray[np.float64]) -> None:
    ends = (float(at[0]) + 0.5, float(at[-1]) + 1.5)
    image = axes.imshow(
        overlap,
        cmap="magma" if is_dark() else "magma_r",
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(*ends, ends[1], ends[0]),
    )
    axes.grid(False)
    axes.set(xlabel="step t", ylabel="step s", title="overlap of the planes of $R(\\varepsilon, \\tau)$")
    axes.title.set_fontsize(8.5)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.7, location="bottom")
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7)
