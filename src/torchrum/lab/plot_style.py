"""The one style of every figure, on paper and on a dark screen."""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")  # files only: no window system is needed or looked for

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.files import write_atomic

Theme = Literal["light", "dark"]
PICTURES = (".png", ".svg", ".pdf")

LINE, LONG = re.compile(r'\bd="M[^"]*"'), re.compile(r"(\d\.\d\d)\d+")
"""In an SVG file: the points of a line or a glyph, and a number with more digits than a screen shows."""

STYLE: dict[Any, Any] = {
    "figure.dpi": 150,
    "savefig.dpi": 220,  # of what is a picture inside a figure
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "figure.constrained_layout.w_pad": 0.08,  # inches: ticks of neighbouring panels stay apart
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "torchrum",  # equal data give equal files
}

DARK: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#d8dadd"),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "#131416"),
    "axes.edgecolor": "#8c9096",
    "grid.color": "#2d3034",
}
"""Settings that differ on a dark screen."""

PALETTE = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#9467bd", "#808080")
"""Colours of a few lines without a label of their own."""

# Okabe and Ito's colours, which the colour-blind can tell apart, and a few more for the long list of baseline models;
# all are mid-tones, to be seen on white and on black, and the dashes tell neighbours apart in print
LOOKS: dict[str, tuple[str, str]] = {
    "RUM λ=0": ("#0072b2", "-"),
    "RUM λ=0, η=1": ("#56b4e9", "--"),
    "RUM λ=1": ("#d55e00", "-"),
    "RUM λ=1, η=1": ("#e69f00", "--"),
    "LSTM": ("#808080", "-"),
    "GRU": ("#808080", "--"),
    "EUNN": ("#009e73", "-"),
    "GORU": ("#cc79a7", "-"),
    "expRNN": ("#9467bd", "--"),
    "uRNN": ("#a0705f", "-."),
    "FW-LN": ("#44aa66", "-."),
    "NTM": ("#aa4499", ":"),
    "DeltaNet": ("#009e73", "-"),
    "2 × RUM λ=0, η=0.3": ("#0072b2", "-."),
    "2 × RUM λ=0, η=12": ("#0072b2", "-"),
    "FS-RUM-2": ("#d55e00", "--"),
    "FS-RUM-2 slim": ("#d55e00", "-"),
    "FS-LSTM-2": ("#009e73", "--"),
    "FS-LSTM-4": ("#009e73", ":"),
    "Zoneout LSTM": ("#808080", "-."),
    "LN-LSTM": ("#808080", ":"),
    "2 × HyperLSTM": ("#cc79a7", "-."),
    "2 × NASCell": ("#9467bd", "-."),
    "HM-LSTM": ("#a0705f", "-"),
    "RHN": ("#aa4499", "-."),
}


@contextmanager
def drawing(theme: Theme = "light") -> Iterator[None]:
    """Draw in the style of one theme."""
    with matplotlib.rc_context(STYLE | (DARK if theme == "dark" else {})):
        yield


def look(label: str) -> dict[str, Any]:
    """A model's colour and dashes, the same in every figure; the colour of text for one that has none."""
    colour, dashes = LOOKS.get(label, (matplotlib.rcParams["text.color"], ":"))
    return {"color": colour, "linestyle": dashes}


def ink() -> str:
    """The colour of text in the theme that is drawn."""
    return matplotlib.rcParams["text.color"]


def is_dark() -> bool:
    """Whether the dark theme is drawn."""
    return matplotlib.rcParams["axes.facecolor"] == DARK["axes.facecolor"]


def baseline(axes: Axes, value: float, text: str) -> None:
    """A dashed line at the score to beat; its name is in the legend, since beside the line it would hide curves."""
    axes.axhline(value, color=ink(), linestyle="--", linewidth=1, label=text)


def grid_of_panels(count: int, width: float, height: float, extra: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels, two in a row; ``extra`` is the height left for title and legend, in inches."""
    across = min(2, count)
    down = -(-count // across)
    figure = Figure(figsize=(width * across, height * down + extra), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False, **shared).flat)
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels[:count]


def count_steps(axes: Axes) -> None:
    """Write the steps below an axis short, as 20k."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def save(figure: Figure, path: Path) -> Path:
    """Write a figure; return its path."""
    if path.suffix not in PICTURES:
        raise ConfigError(f"{path} is not a picture; its name must end in {', '.join(PICTURES)}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    # no date and no version inside: equal data give equal files
    metadata = {"Software": None} if path.suffix == ".png" else {"Date": None}
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], metadata=metadata)
    content = buffer.getvalue()
    if path.suffix == ".svg":  # a hundredth of a point is enough, and halves the file; a path takes one line
        text = LINE.sub(lambda found: LONG.sub(r"\1", " ".join(found[0].split())), content.decode())
        content = text.encode()
    write_atomic(path, content)
    return path


def save_themes(draw: Callable[[], Figure], stem: Path) -> list[Path]:
    """Draw a figure in both themes and write ``<stem>.svg`` and ``<stem>-dark.svg``."""
    paths = []
    themes: tuple[tuple[Theme, str], ...] = (("light", ""), ("dark", "-dark"))
    for theme, ending in themes:
        with drawing(theme):
            paths.append(save(draw(), stem.with_name(f"{stem.name}{ending}.svg")))
    return paths
