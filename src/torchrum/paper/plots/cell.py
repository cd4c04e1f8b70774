"""The RUM cell as a diagram: what of the input and the state goes where."""

from matplotlib.patches import FancyBboxPatch

from torchrum.paper.plots.style import Axes, Figure, ink, is_dark

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
