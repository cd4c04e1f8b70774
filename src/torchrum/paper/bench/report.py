"""From the JSON of a run to the tables and plots of the docs."""

import re
from pathlib import Path

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from torchrum.lab.plot_style import drawing, grid_of_panels, save, save_themes
from torchrum.lab.tables import Table, code, markdown_tables, write_marked
from torchrum.lab.training.errors import ConfigError
from torchrum.paper.bench.records import Report, Row, target_words
from torchrum.paper.bench.suites import FEATURES, SHORT, STEPS, target_cases

MATMULS: dict[str | None, str] = {"high": " (TF32 matmul)", "highest": " (FP32 matmul)"}
LABELS = {
    "fused": "RUM, fused",
    "fused graphed": "RUM, fused, CUDA graph",
    "native": "RUM, native",
    "gru": "nn.GRU",
    "gru graphed": "nn.GRU, CUDA graph",
    "lstm": "nn.LSTM",
    "lstm graphed": "nn.LSTM, CUDA graph",
    "torch": "RUM, torch",
    "reference": "RUM, reference",
    "authors": "original implementation",
    "authors graphed": "original implementation, CUDA graph",
}
"""Implementations in the docs' table, plain calls and CUDA graphs apart. The JSON has the others."""
OURS = ("fused", "fused graphed", "native", "torch")


def report_tables(report: Report) -> list[Table]:
    """Make a table of the training passes, microseconds per step, and one of the targets."""
    rows = [row for row in report.rows if row.mode != "forward" and row.times is not None]
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:  # some baselines of a case with a target are timed separately, and are in its line here
        name = row.case.removesuffix("-baselines")
        cases.setdefault(name, {}).setdefault(row.implementation, row)
    wanted = {case.name for case in target_cases()} | {name for name in cases if name.endswith("-authors")}
    cases = {name: found for name, found in cases.items() if name in wanted} or cases
    columns = [name for name in LABELS if any(name in found for found in cases.values())]
    header, cells = ["case", "RUM / GRU", *(LABELS[name] for name in columns)], []
    for found in cases.values():
        times = [_cell(found.get(name)) for name in columns]
        if any(times):
            cells.append([describe_case([*found.values()]), _ratio(found), *times])
    place = report.environment
    machine = place.get("gpu") or f"{place['cpu']}, {place['threads']} threads"
    commit = (place.get("commit") or "unknown")[:10]
    caption = (
        "Forward and backward, median microseconds per time step, input projection included; RUM / GRU is the fastest "
        f"of ours over the fastest GRU. Sizes, quartiles and more implementations are in the JSON. {machine}, "
        f"torch {place['torch']}, commit {commit}. Command: {code(typed(report))}"
    )
    times_table = Table(header, cells, caption=caption, right=range(1, len(header)))
    return [times_table, _target_table(report)] if report.targets else [times_table]


def typed(report: Report) -> str:
    """The command of a report as a user would type it, without ``--commit`` and with the file's own name."""
    name = report.path.name if report.path else r"\g<0>"
    command = report.environment["command"].replace("python -m torchrum", "torchrum", 1)
    return re.sub(r"(?<=--json )\S+", name, re.sub(r" --commit \S+", "", command))


def _target_table(report: Report) -> Table:
    """Make the table of the targets; a case is described as in the table of times."""
    cells = []
    for target in report.targets:
        case, _, what = target.name.partition(": ")
        rows = [row for row in report.rows if row.case == case]
        name = f"{what}: {describe_case(rows)}" if rows else target.name
        measured, limit = target_words(target)
        cells.append((name, measured, limit, "yes" if target.reached else "**no**"))
    return Table(("target", "measured", "limit", "reached"), cells, right=(1, 2))


def describe_case(rows: list[Row]) -> str:
    """Describe a case: options, sizes and dtype."""
    options, row = max((row.options for row in rows), key=len), rows[0]
    words = [name if value is True else f"{name}={value:g}" for name, value in options.items()]
    words += [f"I={row.shape.I}"] if row.shape.I is not None else []
    matmul = MATMULS.get(row.precision, "") if row.shape.dtype == "float32" else ""
    words += [f"N={row.shape.N}", f"T={row.shape.T}", row.shape.dtype + matmul]
    words += ["1 thread"] if row.threads == 1 else []
    return ", ".join(words) + (f" ({row.case}, whole training step)" if row.mode == "training_step" else "")


def _fastest(found: dict[str, Row], names: tuple[str, ...]) -> Row | None:
    there = [found[name] for name in names if name in found and found[name].times is not None]
    return min(there, key=lambda row: row.us_per_step or 0, default=None)


def _ratio(found: dict[str, Row]) -> str:
    """Divide the time of our fastest implementation by that of the faster GRU."""
    ours, theirs = _fastest(found, OURS), _fastest(found, ("gru", "gru graphed"))
    return f"{ours.times.median / theirs.times.median:.2f}" if ours and theirs and ours.times and theirs.times else ""


def _cell(row: Row | None) -> str:
    if row is None or row.times is None or row.us_per_step is None:
        return ""
    return f"{short(row.times.median)} ms" if row.mode == "training_step" else short(row.us_per_step)


def short(value: float) -> str:
    """Format a time with three digits, or as a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write_markdown(path: Path, report: Report) -> bool:
    """Put the tables between ``<!-- torchrum:bench cpu -->`` (or gpu) and its end; return whether the file changed."""
    text = markdown_tables(report_tables(report))
    return write_marked(path, "bench", report.suite, lambda suite: text if suite == report.suite else None)


COLOURS = {"fused": "#2f8fd0", "gru": "#d55e00", "lstm": "#808080"}
LINES: dict[str, tuple[str, str]] = {
    "fused graphed": ("RUM, CUDA graph", "-o"),
    "gru graphed": (LABELS["gru graphed"], "-s"),
    "lstm graphed": (LABELS["lstm graphed"], "-^"),
    "fused": ("RUM, plain calls", ":"),
    "gru": ("nn.GRU, plain calls", ":"),
}
"""Implementations in the plot over N, with their labels and line styles."""


def draw_report(report: Report, path: Path) -> Path:
    """Draw ``report_figure`` into a file; an ``.svg`` gets a dark version beside it, with ``-dark`` in its name."""
    if path.suffix == ".svg":
        return save_themes(lambda: report_figure(report), path.with_suffix(""))[0]
    with drawing():
        return save(report_figure(report), path)


def report_figure(report: Report) -> Figure:
    """The forward and backward passes of a GPU report over the number of units, microseconds per step.

    A panel for each kind of RUM and dtype, on common logarithmic axes. Of two sizes within 5 %, such as 1000 and 1024,
    only the larger one is drawn: cuDNN pads the other, and the line would zigzag.
    """
    panels = panels_by_size(report.rows)
    if not panels:
        raise ConfigError("bench: the report has no case of the GPU suite at two sizes, so there is nothing to plot.")
    figure, grid = grid_of_panels(len(panels), 4.4, 2.8, 0.7, sharex=True, sharey=True)
    for axes, (title, here) in zip(grid, panels.items(), strict=True):
        _draw_sizes(axes, here)
        axes.set_title(title)
        axes.label_outer()
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    place = report.environment
    figure.suptitle(
        f"forward + backward, {next(iter(panels.values()))[0].shape.B} rows, {STEPS} steps; {place['gpu']}, "
        f"torch {place['torch']}\nnumbers: RUM's time over the GRU's, both in a CUDA graph",
        fontsize=9,
    )
    return figure


def panels_by_size(rows: list[Row]) -> dict[str, list[Row]]:
    """The sweep over N by kind of RUM and dtype, each with two sizes or more."""
    rows = [row for row in rows if row.mode == "forward_backward" and row.times and row.implementation in LINES]
    panels = {}
    for features in FEATURES:
        for dtype, name in SHORT.items():
            here = [row for row in rows if row.case.startswith(f"{features}-{name}-") and row.shape.T == STEPS]
            if len({row.shape.N for row in here if row.implementation.startswith("fused")}) > 1:
                options = max((row.options for row in here), key=len)
                words = ["default form" if options.get("form") == "gated" else f"λ={options.get('lam', 0):g}"]
                words += [f"η={options['eta']:g}"] if options.get("eta") is not None else []
                words += [name.replace("_", " ") for name in ("layer_norm", "zoneout") if options.get(name)]
                panels[f"RUM {', '.join(words)}, {dtype}"] = here
    return panels


def _draw_sizes(axes: Axes, rows: list[Row]) -> None:
    found: dict[str, dict[int, float]] = {}
    for name, (label, style) in LINES.items():
        steps: dict[int, float] = {}
        for row in rows:
            if row.implementation == name and row.us_per_step is not None:
                steps[row.shape.N] = min(row.us_per_step, steps.get(row.shape.N, row.us_per_step))
        steps = {N: time for N, time in steps.items() if not any(N < other <= 1.05 * N for other in steps)}
        if not steps:
            continue
        found[name] = steps
        width, front = (2.2, 3) if name == "fused graphed" else (1.2, 2)
        points = zip(*sorted(steps.items()), strict=True)
        axes.plot(*points, style, ms=4, color=COLOURS[name.split()[0]], label=label, linewidth=width, zorder=front)
    axes.set(xscale="log", yscale="log", xlabel="units N", ylabel="µs per step")
    ours, baseline = found.get("fused graphed", {}), found.get("gru graphed", {})
    for N in sorted(ours.keys() & baseline.keys()):
        note = axes.annotate(
            f"{ours[N] / baseline[N]:.2f}", (N, min(ours[N], baseline[N])), (0, -13), textcoords="offset points",
            ha="center", fontsize=7, color=COLOURS["fused"], zorder=4,
        )  # fmt: skip
        note.set_path_effects([withStroke(linewidth=2.5, foreground=rcParams["axes.facecolor"])])
    ticks = (100, 256, 704, 1024, 2000)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7)
    axes.margins(y=0.18)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1e4 else f"{value / 1e3:g}k"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
