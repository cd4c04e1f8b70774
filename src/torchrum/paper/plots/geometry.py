"""The rotation as two reflections, drawn in the plane of its two vectors."""

import math

import numpy as np

from torchrum.paper.plots.style import Axes, Figure, ink

COLOURS = {"a": "#d55e00", "b": "#2f8fd0", "h": "#009e73", "R h": "#cc79a7"}


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
        _arrow(axes, a, "a", COLOURS["a"])
        _arrow(axes, b, "b", COLOURS["b"])
        axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", title=title, xticks=(), yticks=())
        axes.title.set_fontsize(9)
        axes.spines[:].set_visible(False)
        axes.grid(False)
    _arrow(first, m, "m", ink())
    _angle(first, angle_a, angle_b, "θ")
    _mirror(second, a)
    _arrow(second, h, "h", COLOURS["h"])
    _arrow(second, g, "g", ink())
    _step(second, h, g)
    _mirror(third, m)
    _arrow(third, h, "h", COLOURS["h"], alpha=0.5)
    _arrow(third, g, "g", ink(), alpha=0.5)
    _arrow(third, turned, "R h", COLOURS["R h"])
    _step(third, g, turned)
    _angle(third, angle_h, angle_h + angle_b - angle_a, "θ")
    return figure


def _arrow(axes: Axes, tip: np.ndarray, label: str, colour: str, alpha: float = 1.0) -> None:
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
