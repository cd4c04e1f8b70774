"""The plots of a report: time against size on a GPU, one point a contestant on a CPU."""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ..plots.style import STYLE, save
from .gpu_cases import FEATURES, SHORT, STEPS
from .records import Report, Row
from .report import LABELS, short

COLOURS = {"authors": "#cc79a7", "reference": "#56b4e9", "torch": "#0072b2", "fused": "#0072b2"}
COLOURS |= {"gru": "#d55e00", "gru=": "#e69f00", "lstm": "#595959", "lstm=": "#a6a6a6", "ln_lstm": "#009e73"}
LINES = ("fused graphed", "fused", "gru graphed", "gru", "gru= graphed", "lstm graphed", "lstm= graphed")


def draw_report(report: Report, path: Path) -> Path:
    """Draw the forward and backward passes of a report, microseconds a step on logarithmic axes."""
    rows = [row for row in report.rows if row.mode == "forward_backward" and row.times is not None]
    if not rows:
        raise ValueError("draw_report: the report has no forward and backward pass to draw.")
    panels = _by_size(rows) if report.suite == "gpu" else {}
    draw = _lines if panels else _points
    panels = panels or {case: [row for row in rows if row.case == case] for case in dict.fromkeys(r.case for r in rows)}
    place = report.environment
    with rc_context(STYLE):
        figure = Figure(figsize=(3.6 * len(panels), 3.2), layout="constrained")
        for axes, (title, here) in zip(
            figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True
        ):
            draw(axes, here)
            axes.set_title(title)
        if draw is _lines:
            handles = {
                label: line
                for axes in figure.axes
                for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
            }
            figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
        figure.suptitle(f"forward + backward; {place.get('gpu') or place['cpu']}, torch {place['torch']}", fontsize=9)
        return save(figure, path)


def _by_size(rows: list[Row]) -> dict[str, list[Row]]:
    """The sweep over N, a panel for each kind of RUM and dtype that has two sizes or more."""
    panels = {}
    for features in FEATURES:
        for dtype, name in SHORT.items():
            here = [row for row in rows if row.case.startswith(f"{features}-{name}-") and row.shape.T == STEPS]
            here = [row for row in here if row.contestant in LINES]
            if len({row.shape.N for row in here if row.contestant.startswith("fused")}) > 1:
                panels[f"{_words(here)}, {dtype}"] = here
    return panels


def _words(rows: list[Row]) -> str:
    options = max((row.options for row in rows), key=len)
    return (
        "RUM "
        + ", ".join(f"{name}={value:g}" for name, value in options.items() if not isinstance(value, bool))
        + (", layer norm" if options.get("layer_norm") else "")
    )


def _lines(axes: Axes, rows: list[Row]) -> None:
    for name in LINES:
        line = sorted((row for row in rows if row.contestant == name), key=lambda row: row.shape.N)
        line = list({row.shape.N: row for row in line}.values())
        if not line:
            continue
        style = "-o" if name.endswith("graphed") else ":o"
        steps = [row.us_per_step or 0 for row in line]
        axes.plot([r.shape.N for r in line], steps, style, ms=3, color=COLOURS[name.split()[0]], label=LABELS[name])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("units N")
    axes.set_ylabel("µs a step")
    sizes = {row.shape.N for row in rows}
    ticks = sorted(sizes - {256 if 250 in sizes else 0, 1024})  # too near to their neighbours to be written
    axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7)
    axes.xaxis.set_minor_formatter(NullFormatter())
    _plain_numbers(axes, "y")


def _points(axes: Axes, rows: list[Row]) -> None:
    rows = sorted(rows, key=lambda row: -(row.us_per_step or 0))
    for place, row in enumerate(rows):
        assert row.times is not None
        scale = 1e3 / row.shape.T
        colour = COLOURS.get(row.contestant.split()[0], "#000000")
        axes.plot([row.times.low * scale, row.times.high * scale], [place, place], color=colour, linewidth=4, alpha=0.4)
        axes.plot(row.times.median * scale, place, "o", color=colour)
        text = short(row.times.median * scale)
        axes.annotate(
            text, (row.times.median * scale, place), (0, 6), textcoords="offset points", ha="center", fontsize=7
        )
    axes.set_yticks(range(len(rows)), [LABELS.get(row.contestant, row.contestant) for row in rows], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("µs a step")
    axes.margins(x=0.15, y=0.15)
    _plain_numbers(axes, "x")


def _plain_numbers(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1e4 else f"{value / 1e3:g}k"))
    axis.set_minor_formatter(NullFormatter())
