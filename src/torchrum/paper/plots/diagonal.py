"""How the diagonals of the recurrent blocks come to stand out in the course of training."""

from collections.abc import Mapping

import numpy as np
from matplotlib.ticker import FixedLocator, NullFormatter, PercentFormatter
from numpy.typing import NDArray

from torchrum.paper.plots.kernels import recurrences
from torchrum.paper.plots.style import Figure, baseline

PALETTE = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#9467bd", "#808080")
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
