"""The one style of every figure."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: no window system is needed or looked for

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter

STYLE: dict[Any, Any] = {
    "figure.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "torchrum",  # equal data give equal files
}

# Okabe and Ito's colours, which the colour-blind can tell apart, and a few more for the long list of rivals
COLOURS = {
    "RUM λ=0": "#0072b2",
    "RUM λ=0, η=1": "#56b4e9",
    "RUM λ=1": "#d55e00",
    "RUM λ=1, η=1": "#e69f00",
    "LSTM": "#595959",
    "GRU": "#a6a6a6",
    "EUNN": "#009e73",
    "GORU": "#cc79a7",
    "expRNN": "#6a3d9a",
    "uRNN": "#8c564b",
    "FW-LN": "#117733",
    "NTM": "#aa4499",
}
BASELINE_COLOUR = "#222222"


def colour(label: str) -> str:
    """A model's colour, the same in every figure; black for one that has none."""
    return COLOURS.get(label, "#000000")


def baseline(axes: Axes, value: float, text: str) -> None:
    """A dashed line at the score to beat, with its name on it."""
    axes.axhline(value, color=BASELINE_COLOUR, linestyle="--", linewidth=1)
    note = axes.annotate(
        text,
        (1, value),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        fontsize=7,
        color=BASELINE_COLOUR,
    )
    note.set_path_effects([withStroke(linewidth=2, foreground="white")])


def count_steps(axes: Axes) -> None:
    """Write the steps below an axis short, as 20k."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def save(figure: Figure, path: Path) -> Path:
    """Write a figure and close it; says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # no date and no version inside: equal data give equal files
    metadata = {"Software": None} if path.suffix == ".png" else {"Date": None}
    figure.savefig(path, bbox_inches="tight", metadata=metadata)
    return path
