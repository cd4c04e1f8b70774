"""The plots of a report: time against size on a GPU, one point per implementation on a CPU."""

from pathlib import Path

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from torchrum.paper.bench.gpu_cases import FEATURES, SHORT, STEPS
from torchrum.paper.bench.records import Report, Row
from torchrum.paper.bench.report import LABELS, short
from torchrum.paper.plots.style import drawing, ink, save, save_themes

COLOURS = {"authors": "#cc79a7", "reference": "#56b4e9", "torch": "#2f8fd0", "native": "#009e73", "fused": "#2f8fd0"}
COLOURS |= {"gru": "#d55e00", "gru=": "#e69f00", "lstm": "#808080", "lstm=": "#a6a6a6", "ln_lstm": "#009e73"}
LINES: dict[str, tuple[str, str]] = {
    "fused graphed": ("RUM, CUDA graph", "-o"),
    "gru graphed": (LABELS["gru graphed"], "-s"),
    "lstm graphed": (LABELS["lstm graphed"], "-^"),
    "fused": ("RUM, plain calls", ":"),
    "gru": ("nn.GRU, plain calls", ":"),
}
"""Of the sweep over N: the implementations that are drawn, their labels, and how."""


def draw_report(report: Report, path: Path) -> Path:
    """Draw ``report_figure`` into a file; an ``.svg`` gets a dark version beside it, with ``-dark`` in its name."""
    if path.suffix == ".svg":
        return save_themes(lambda: report_figure(report), path.with_suffix(""))[0]
    with drawing():
        return save(report_figure(report), path)


def report_figure(report: Report) -> Figure:
    """The forward and backward passes of a report, microseconds per step on logarithmic axes."""
    rows = [row for row in report.rows if row.mode == "forward_backward" and row.times is not None]
    if not rows:
        raise ValueError("draw_report: the report has no forward and backward pass to draw.")
    panels = _by_size(rows) if report.suite == "gpu" else {}
    figure = _sweep(panels) if panels else _cases(rows)
    place = report.environment
    shape = f"{rows[0].shape.B} rows" + (f", {STEPS} steps" if panels else "")
    machine = place.get("gpu") or place["cpu"]
    title = f"forward + backward, {shape}; {machine}, torch {place['torch']}"
    figure.suptitle(
        title + ("\nnumbers: RUM's time over the GRU's, both in a CUDA graph" if panels else ""), fontsize=9
    )
    return figure


def _cases(rows: list[Row]) -> Figure:
    panels = {case: [row for row in rows if row.case == case] for case in dict.fromkeys(row.case for row in rows)}
    figure = Figure(figsize=(3.6 * len(panels), 3.2), layout="constrained")
    for axes, (title, here) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
        _points(axes, here)
        axes.set_title(title)
    return figure


def _sweep(panels: dict[str, list[Row]]) -> Figure:
    """Two panels in a row, on common axes, so that they can be compared at a glance."""
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(4.4 * across, 0.7 + 2.8 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, here) in zip(grid.flat, panels.items(), strict=False):
        _lines(axes, here)
        axes.set_title(title)
        axes.label_outer()
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    return figure


def _by_size(rows: list[Row]) -> dict[str, list[Row]]:
    """The sweep over N, a panel for each kind of RUM and dtype that has two sizes or more."""
    panels = {}
    for features in FEATURES:
        for dtype, name in SHORT.items():
            here = [row for row in rows if row.case.startswith(f"{features}-{name}-") and row.shape.T == STEPS]
            here = [row for row in here if row.implementation in LINES]
            if len({row.shape.N for row in here if row.implementation.startswith("fused")}) > 1:
                panels[f"{_words(here)}, {dtype}"] = here
    return panels


def _words(rows: list[Row]) -> str:
    options = max((row.options for row in rows), key=len)
    words = [f"λ={options.get('lam', 0):g}"]
    words += [f"η={options['eta']:g}"] if options.get("eta") is not None else []
    words += ["layer norm"] if options.get("layer_norm") else []
    words += ["zoneout"] if options.get("zoneout") else []
    return "RUM " + ", ".join(words)


def _lines(axes: Axes, rows: list[Row]) -> None:
    found: dict[str, dict[int, float]] = {}
    for name, (label, style) in LINES.items():
        steps: dict[int, float] = {}
        for row in rows:
            if row.implementation == name and row.us_per_step is not None:
                steps[row.shape.N] = min(row.us_per_step, steps.get(row.shape.N, row.us_per_step))
        if not steps:
            continue
        found[name] = steps
        first = name == "fused graphed"
        colour = COLOURS[name.split()[0]]
        sizes = sorted(steps)
        axes.plot(
            sizes, [steps[N] for N in sizes], style, ms=4, color=colour, label=label,
            linewidth=2.2 if first else 1.2, zorder=3 if first else 2,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("units N")
    axes.set_ylabel("µs per step")
    ours, baseline = found.get("fused graphed", {}), found.get("gru graphed", {})
    near = {256 if 250 in ours else 0, 1024 if 1000 in ours else 0}  # too near to their neighbours to be written
    for N in sorted(ours.keys() & baseline.keys() - near):
        note = axes.annotate(
            f"{ours[N] / baseline[N]:.2f}", (N, ours[N]), (0, -13), textcoords="offset points", ha="center", fontsize=7,
            color=COLOURS["fused"], zorder=4,
        )  # fmt: skip
        note.set_path_effects([withStroke(linewidth=2.5, foreground=rcParams["axes.facecolor"])])
    ticks = (100, 250, 704, 1000, 2000)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(y=0.12)
    _plain_numbers(axes, "y")


def _points(axes: Axes, rows: list[Row]) -> None:
    rows = sorted(rows, key=lambda row: -(row.us_per_step or 0))
    for place, row in enumerate(rows):
        assert row.times is not None
        scale = 1e3 / row.shape.T
        colour = COLOURS.get(row.implementation.split()[0], ink())
        axes.plot([row.times.low * scale, row.times.high * scale], [place, place], color=colour, linewidth=4, alpha=0.4)
        axes.plot(row.times.median * scale, place, "o", color=colour)
        text = short(row.times.median * scale)
        axes.annotate(
            text, (row.times.median * scale, place), (0, 6), textcoords="offset points", ha="center", fontsize=7
        )
    axes.set_yticks(range(len(rows)), [LABELS.get(row.implementation, row.implementation) for row in rows], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("µs per step")
    axes.margins(x=0.15, y=0.15)
    _plain_numbers(axes, "x")


def _plain_numbers(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1e4 else f"{value / 1e3:g}k"))
    axis.set_minor_locator(NullLocator())
