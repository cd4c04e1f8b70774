"""What a trained RUM does as it reads one sequence: angles, planes, the norm of its state, the phases of R."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrum.lab.tasks import Copying, Recall
from torchrum.lab.tasks.base import Task
from torchrum.paper.plots.kernels import Arrays, recurrences
from torchrum.paper.plots.style import Axes, Figure, ink, is_dark

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
