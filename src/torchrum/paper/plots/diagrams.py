"""Figures that need no run: the cell, the rotation as two reflections, gradients through time at initialisation."""

import functools
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.patches import FancyBboxPatch
from numpy.typing import NDArray

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.lab.tasks import Copying
from torchrum.layers.introspection import gradient_norms
from torchrum.layers.registry import build_layer
from torchrum.paper.plots.style import Axes, Figure, baseline, ink, is_dark, look

BOXES: dict[str, tuple[float, float, float, str]] = {
    "x": (0.0, 3.0, 1.0, "$x$"),
    "h": (0.0, 0.4, 1.0, "$h$"),
    "eps": (2.6, 4.0, 2.7, "$\\varepsilon = W_\\varepsilon x + b_\\varepsilon$"),
    "tau": (2.6, 2.6, 2.7, "$\\tau = W_\\tau x + U_\\tau h + b_\\tau$"),
    "u": (2.6, 1.2, 2.7, "$u = \\sigma(W_u x + U_u h + b_u)$"),
    "rotate": (5.7, 3.3, 1.9, "rotation that\ntakes $\\varepsilon$ to $\\tau$"),
    "R": (8.2, 3.3, 1.4, "$R$"),
    "new": (10.5, 3.3, 1.9, "$\\tilde{h} = f(\\varepsilon + R h)$"),
    "mix": (10.5, 1.2, 1.9, "$u h + (1 - u)\\,\\tilde{h}$"),
    "out": (13.0, 1.2, 1.3, "$h'$"),
}
"""Middle, width and text of each box."""
COLOURS = {"eps": "#d55e00", "tau": "#2f8fd0", "u": "#808080", "rotate": "#cc79a7", "R": "#cc79a7"}
HEIGHT = 0.9


def cell_figure() -> Figure:
    """From the input and the state to the new state, in the order of the equations."""
    figure = Figure(figsize=(8.4, 3.1), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(-0.7, 13.8), ylim=(-0.4, 4.6), xticks=(), yticks=())
    axes.spines[:].set_visible(False)
    axes.grid(False)
    for name, (x, y, width, text) in BOXES.items():
        corner, rounded = (x - width / 2, y - HEIGHT / 2), "round,pad=0,rounding_size=0.15"
        style: dict[str, Any] = {
            "facecolor": "#1c1e21" if is_dark() else "#f6f7f8",
            "edgecolor": COLOURS.get(name, ink()),
        }
        axes.add_patch(FancyBboxPatch(corner, width, HEIGHT, boxstyle=rounded, linewidth=1.4, **style))
        axes.text(x, y, text, ha="center", va="center", fontsize=9 if width > 1.2 else 11)
    for start, end, up in (
        *(("x", "eps", 0.0), ("x", "tau", 0.0), ("x", "u", 0.0), ("h", "tau", 0.0), ("h", "u", 0.0)),
        *(("eps", "rotate", 0.2), ("tau", "rotate", -0.2), ("rotate", "R", 0.0), ("R", "new", 0.0), ("u", "mix", 0.0)),
    ):
        _arrow(axes, _side(start, "right"), _side(end, "left", up))
    _arrow(axes, (10.5, 3.3 - HEIGHT / 2), (10.5, 1.2 + HEIGHT / 2))
    _arrow(axes, _side("mix", "right"), _side("out", "left"))
    _path(axes, [_side("eps", "right", 0.2), (10.5, 4.2), (10.5, 3.3 + HEIGHT / 2)])  # ε is added to the rotated state
    _path(axes, [_side("h", "right", -0.2), (10.2, 0.2), (10.2, 1.2 - HEIGHT / 2)])  # the state itself
    _path(axes, [(6.9, 0.2), (6.9, 1.85), (9.3, 1.85), (9.3, 3.1), (9.55, 3.1)])  # and what R turns
    axes.text(8.2, 2.45, "$\\lambda = 1$: times\nthe last $R$", ha="center", va="center", fontsize=8)
    axes.text(13.0, 0.35, "with $\\eta$:\n$\\eta\\, h' / |h'|$", ha="center", va="center", fontsize=8)
    return figure


def _side(name: str, side: str, up: float = 0.0) -> tuple[float, float]:
    """The middle of a box's left or right side, or a little above it."""
    x, y, width, _ = BOXES[name]
    return x + (width if side == "right" else -width) / 2, y + up


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": ink(), "shrinkA": 0, "shrinkB": 0, **style})


def _path(axes: Axes, points: list[tuple[float, float]]) -> None:
    """A line through several points, with a head at its end."""
    axes.plot(*zip(*points[:-1], strict=True), color=ink(), linewidth=1, solid_joinstyle="round")
    _arrow(axes, points[-2], points[-1])


VECTORS = {"a": "#d55e00", "b": "#2f8fd0", "h": "#009e73", "R h": "#cc79a7"}


def reflections_figure(angle_a: float = 0.2, angle_b: float = 1.25, angle_h: float = -0.55) -> Figure:
    """Three panels: the vectors and their bisector, the reflection across a, the reflection across the bisector."""
    a, b, h = (np.array((math.cos(t), math.sin(t))) * size for t, size in ((angle_a, 1), (angle_b, 1), (angle_h, 0.9)))
    m = (a + b) / np.linalg.norm(a + b)
    g = h - 2 * (a @ h) * a
    turned = g - 2 * (m @ g) * m
    figure = Figure(figsize=(8.4, 3.1), layout="constrained")
    panels: tuple[tuple[str, Any, Any, Any], ...] = (  # title, mirror's normal, vectors with their opacity, angle
        ("bisector m of a and b", None, ((m, "m", 1),), (angle_a, angle_b)),
        ("1. reflect: $g = h - 2(e\\cdot h)\\,e$", a, ((h, "h", 1), (g, "g", 1)), None),
        (
            "2. reflect: $Rh = g - 2(m\\cdot g)\\,m$",
            m,
            ((h, "h", 0.5), (g, "g", 0.5), (turned, "R h", 1)),
            (angle_h, angle_h + angle_b - angle_a),
        ),
    )
    for axes, (title, normal, vectors, turn) in zip(figure.subplots(1, 3), panels, strict=True):
        axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", title=title, xticks=(), yticks=())
        axes.title.set_fontsize(9)
        axes.spines[:].set_visible(False)
        axes.grid(False)
        for tip, label, alpha in ((a, "a", 1), (b, "b", 1), *vectors):
            colour = VECTORS.get(label, ink())
            _arrow(axes, (0, 0), tip.tolist(), color=colour, linewidth=1.6, alpha=alpha)
            axes.text(*(1.14 * tip), label, color=colour, alpha=alpha, ha="center", va="center", style="italic")
        if normal is not None:  # the line that the reflection leaves in place, and what it moves
            along = np.array((-normal[1], normal[0])) * 1.25
            axes.plot(*zip(-along, along, strict=True), color=ink(), linestyle="--", linewidth=0.8, alpha=0.6)
            axes.plot(*zip(vectors[-2][0], vectors[-1][0], strict=True), color=ink(), linestyle=":", linewidth=1)
        if turn is not None:
            start, end = turn
            arc, middle = np.linspace(start, end, 40), start + 0.25 * (end - start)  # off the bisector
            axes.plot(0.35 * np.cos(arc), 0.35 * np.sin(arc), color=ink(), linewidth=0.9)
            place = 0.47 * math.cos(middle), 0.47 * math.sin(middle)
            axes.text(*place, "θ", ha="center", va="center", fontsize=8)
    return figure


def gradients_figure(delay: int = 200, units: int = 100, sequences: int = 32) -> Figure:
    """Norm of the gradient that reaches each earlier state, relative to the last, on sequences of the copying task.

    A line is the median over the sequences, a band the middle 90%; the models are as their recipes initialise them.
    """
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for label, values in initial_gradients(delay, units, sequences).items():
        back = np.arange(len(values) - 1, -1, -1)  # steps back from the last
        axes.plot(back, np.median(values, 1), **look(label), label=label)
        low, high = np.quantile(values, (0.05, 0.95), 1)
        axes.fill_between(back, low, high, color=look(label)["color"], alpha=0.15, linewidth=0)
    baseline(axes, 1, "neither vanishes nor explodes")
    title = f"Gradients through time at initialisation, {units} units, copying T = {delay}"
    axes.set(yscale="log", xlabel="steps back from the loss", ylabel="$|dC/dh_{T-k}|\\,/\\,|dC/dh_T|$", title=title)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-12))
    axes.legend(loc="lower left")
    return figure


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
    norms, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of tiny calls: waiting for a second thread costs more than it gives
    try:
        for label, (name, options) in models.items():
            with torch.random.fork_rng(devices=()):  # the global random state stays as it was
                torch.manual_seed(0)
                layer = build_layer(name, task.input_size, units, **options).double()
            norms[label] = gradient_norms(layer, x, generator).numpy()
    finally:
        torch.set_num_threads(threads)
    return norms
