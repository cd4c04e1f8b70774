"""Figures that need no run: the cell, the rotation as two reflections, gradients through time at initialisation."""

import math
from collections.abc import Mapping

import numpy as np
from matplotlib.patches import FancyBboxPatch
from numpy.typing import NDArray

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
        _box(axes, x, y, width, text, COLOURS.get(name, ink()))
    for start, end in (("x", "eps"), ("x", "tau"), ("x", "u"), ("h", "tau"), ("h", "u")):
        _arrow(axes, _right(start), _left(end))
    _arrow(axes, _right("eps"), _left("rotate", 0.2))
    _arrow(axes, _right("tau"), _left("rotate", -0.2))
    _arrow(axes, _right("rotate"), _left("R"))
    _arrow(axes, _right("R"), _left("new"))
    _arrow(axes, _right("u"), _left("mix"))
    _arrow(axes, (10.5, 3.3 - HEIGHT / 2), (10.5, 1.2 + HEIGHT / 2))
    _arrow(axes, _right("mix"), _left("out"))
    _path(axes, [_right("eps", 0.2), (10.5, 4.2), (10.5, 3.3 + HEIGHT / 2)])  # ε is added to the rotated state
    _path(axes, [_right("h", -0.2), (10.2, 0.2), (10.2, 1.2 - HEIGHT / 2)])  # the state itself
    _path(axes, [(6.9, 0.2), (6.9, 1.85), (9.3, 1.85), (9.3, 3.1), (9.55, 3.1)])  # and what R turns
    axes.text(8.2, 2.45, "$\\lambda = 1$: times\nthe last $R$", ha="center", va="center", fontsize=8)
    axes.text(13.0, 0.35, "with $\\eta$:\n$\\eta\\, h' / |h'|$", ha="center", va="center", fontsize=8)
    return figure


def _box(axes: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    corner, round_ = (x - width / 2, y - HEIGHT / 2), "round,pad=0,rounding_size=0.15"
    face = "#1c1e21" if is_dark() else "#f6f7f8"
    box = FancyBboxPatch(corner, width, HEIGHT, boxstyle=round_, facecolor=face, edgecolor=colour, linewidth=1.4)
    axes.add_patch(box)
    axes.text(x, y, text, ha="center", va="center", fontsize=9 if width > 1.2 else 11)


def _right(name: str, up: float = 0.0) -> tuple[float, float]:
    x, y, width, _ = BOXES[name]
    return x + width / 2, y + up


def _left(name: str, up: float = 0.0) -> tuple[float, float]:
    x, y, width, _ = BOXES[name]
    return x - width / 2, y + up


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": ink(), "linewidth": 1, "shrinkA": 0, "shrinkB": 0}
    )


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
    first, second, third = figure.subplots(1, 3)
    for axes, title in (
        (first, "bisector m of a and b"),
        (second, "1. reflect: $g = h - 2(e\\cdot h)\\,e$"),
        (third, "2. reflect: $Rh = g - 2(m\\cdot g)\\,m$"),
    ):
        _vector(axes, a, "a", VECTORS["a"])
        _vector(axes, b, "b", VECTORS["b"])
        axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", title=title, xticks=(), yticks=())
        axes.title.set_fontsize(9)
        axes.spines[:].set_visible(False)
        axes.grid(False)
    _vector(first, m, "m", ink())
    _angle(first, angle_a, angle_b, "θ")
    _mirror(second, a)
    _vector(second, h, "h", VECTORS["h"])
    _vector(second, g, "g", ink())
    _step(second, h, g)
    _mirror(third, m)
    _vector(third, h, "h", VECTORS["h"], alpha=0.5)
    _vector(third, g, "g", ink(), alpha=0.5)
    _vector(third, turned, "R h", VECTORS["R h"])
    _step(third, g, turned)
    _angle(third, angle_h, angle_h + angle_b - angle_a, "θ")
    return figure


def _vector(axes: Axes, tip: np.ndarray, label: str, colour: str, alpha: float = 1.0) -> None:
    x, y = tip.tolist()
    axes.annotate(
        "", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "alpha": alpha, "linewidth": 1.6}
    )
    axes.text(1.14 * x, 1.14 * y, label, color=colour, alpha=alpha, ha="center", va="center", style="italic")


def _mirror(axes: Axes, normal: np.ndarray) -> None:
    """The line that a reflection leaves in place: across its normal."""
    along = np.array((-normal[1], normal[0])) * 1.25
    axes.plot(*zip(-along, along, strict=True), color=ink(), linestyle="--", linewidth=0.8, alpha=0.6)


def _step(axes: Axes, start: np.ndarray, end: np.ndarray) -> None:
    axes.plot(*zip(start, end, strict=True), color=ink(), linestyle=":", linewidth=1)


def _angle(axes: Axes, start: float, end: float, label: str) -> None:
    turn = np.linspace(start, end, 40)
    axes.plot(0.35 * np.cos(turn), 0.35 * np.sin(turn), color=ink(), linewidth=0.9)
    middle = start + 0.25 * (end - start)  # off the bisector
    axes.text(0.47 * math.cos(middle), 0.47 * math.sin(middle), label, ha="center", va="center", fontsize=8)


def gradients_figure(norms: Mapping[str, NDArray[np.float64]], title: str) -> Figure:
    """Norm of the gradient that reaches each earlier state, relative to the last: median and range over sequences.

    Args:
        norms: for each label ``(T, B)``, row t being |dC/dh_t| / |dC/dh_T| of every sequence.
        title: sizes and inputs.
    """
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for label, values in norms.items():
        back = np.arange(len(values) - 1, -1, -1)  # steps back from the last
        axes.plot(back, np.median(values, 1), **look(label), label=label)
        low, high = np.quantile(values, (0.05, 0.95), 1)
        axes.fill_between(back, low, high, color=look(label)["color"], alpha=0.15, linewidth=0)
    baseline(axes, 1, "neither vanishes nor explodes")
    axes.set(yscale="log", xlabel="steps back from the loss", ylabel="$|dC/dh_{T-k}|\\,/\\,|dC/dh_T|$", title=title)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-12))
    axes.legend(loc="lower left")
    return figure
