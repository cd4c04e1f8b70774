"""From the JSON of a run to the tables and plots of the docs."""

import shlex
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from torchrum.paper.bench.gpu import FEATURES, SHORT, STEPS, target_cases
from torchrum.paper.bench.records import Report, Row, target_words
from torchrum.paper.plots.style import drawing, ink, save, save_themes
from torchrum.paper.table import Table, code, markdown_tables, write_marked

MATMULS: dict[str | None, str] = {"high": " (TF32 matmul)", "highest": " (FP32 matmul)"}
LABELS = {
    "authors": "original implementation",
    "authors graphed": "original implementation, CUDA graph",
    "reference": "RUM, reference",
    "torch": "RUM, torch",
    "native": "RUM, native",
    "fused": "RUM, fused",
    "fused graphed": "RUM, fused, CUDA graph",
    "fused stepwise": "RUM, fused step by step",
    "fused stepwise graphed": "RUM, fused step by step, CUDA graph",
    "gru": "nn.GRU",
    "gru graphed": "nn.GRU, CUDA graph",
    "lstm": "nn.LSTM",
    "lstm graphed": "nn.LSTM, CUDA graph",
    "gru= graphed": "nn.GRU of as many weights, CUDA graph",
    "lstm= graphed": "nn.LSTM of as many weights, CUDA graph",
}

OURS, BASELINES = ("fused", "fused graphed", "native", "torch"), ("gru", "gru graphed", "lstm", "lstm graphed")
COLUMNS = (*OURS[:-1], *BASELINES, "torch", "reference", "authors", "authors graphed")
"""Implementations in the docs' table, plain calls and CUDA graphs apart. The JSON has the others."""


def report_tables(report: Report) -> list[Table]:
    """Make a table of the training passes, microseconds per step, and one of the targets."""
    rows = [row for row in report.rows if row.mode != "forward" and row.times is not None]
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:  # some baselines of a case with a target are timed separately, and are in its line here
        name = row.case.removesuffix("-baselines")
        cases.setdefault(name, {}).setdefault(row.implementation, row)
    wanted = {case.name for case in target_cases()} | {name for name in cases if name.endswith("-authors")}
    cases = {name: found for name, found in cases.items() if name in wanted} or cases
    columns = [name for name in COLUMNS if any(name in found for found in cases.values())]
    header, cells = ["case", "RUM / GRU", *(LABELS[name] for name in columns)], []
    for found in cases.values():
        times = [_cell(found.get(name)) for name in columns]
        if any(times):
            cells.append([describe_case(found), _ratio(found), *times])
    place = report.environment
    machine = place.get("gpu") or f"{place['cpu']}, {place['threads']} threads"
    commit = (place.get("commit") or "unknown")[:10]
    caption = (
        "Forward and backward, median microseconds per time step, input projection included; RUM / GRU is the fastest "
        f"of ours over the fastest GRU. Sizes, quartiles and more implementations are in the JSON. {machine}, "
        f"torch {place['torch']}, commit {commit}. Command: {code(typed(report))}"
    )
    if report.tests:
        caption += f" {describe_tests(report.tests)}"
    times_table = Table(header, cells, caption=caption, right=range(1, len(header)))
    return [times_table, _target_table(report)] if report.targets else [times_table]


def typed(report: Report) -> str:
    """The command of a report as a user would type it, without what stands beside it and with the file's own name."""
    command = report.environment["command"].replace("python -m torchrum", "torchrum", 1)
    try:
        words = iter(shlex.split(command))
    except ValueError:  # no command of ours
        return command
    kept: list[str] = []
    for word in words:
        if word in ("--commit", "--tests"):
            next(words, None)
        elif word == "--json":
            name = next(words, "")
            kept += [word, Path(name).name if report.path is None else report.path.name]
        else:
            kept.append(word)
    return shlex.join(kept)


def _target_table(report: Report) -> Table:
    """Make the table of the targets; a case is described as in the table of times."""
    rows: dict[str, dict[str, Row]] = {}
    for row in report.rows:
        rows.setdefault(row.case, {})[row.implementation] = row
    cells = []
    for target in report.targets:
        case, _, what = target.name.partition(": ")
        name = f"{what}: {describe_case(rows[case])}" if case in rows else target.name
        measured, limit = target_words(target)
        cells.append((name, measured, limit, "yes" if target.reached else "**no**"))
    return Table(("target", "measured", "limit", "reached"), cells, right=(1, 2))


def describe_case(found: dict[str, Row]) -> str:
    """What a case is: options, sizes and dtype."""
    options = max((row.options for row in found.values()), key=len)
    row = next(iter(found.values()))
    words = [name if value is True else f"{name}={value:g}" for name, value in options.items()]
    words += [f"I={row.shape.I}"] if row.shape.I is not None else []
    words += [f"N={row.shape.N}", f"T={row.shape.T}", row.shape.dtype + MATMULS.get(_precision(row), "")]
    words += ["1 thread"] if row.threads == 1 else []
    return ", ".join(words) + (f" ({row.case}, whole training step)" if row.mode == "training_step" else "")


def _precision(row: Row) -> str | None:
    return row.precision if row.shape.dtype == "float32" else None


def _fastest(found: dict[str, Row], names: tuple[str, ...]) -> Row | None:
    there = [found[name] for name in names if name in found and found[name].times is not None]
    return min(there, key=lambda row: row.us_per_step or 0, default=None)


def _ratio(found: dict[str, Row]) -> str:
    """The faster of our ways over the faster GRU."""
    ours, theirs = _fastest(found, OURS), _fastest(found, ("gru", "gru graphed"))
    return f"{ours.times.median / theirs.times.median:.2f}" if ours and theirs and ours.times and theirs.times else ""


def _cell(row: Row | None) -> str:
    if row is None or row.times is None or row.us_per_step is None:
        return ""
    return f"{short(row.times.median)} ms" if row.mode == "training_step" else short(row.us_per_step)


def short(value: float) -> str:
    """Three digits, or whole numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def describe_tests(tests: dict[str, Any]) -> str:
    """One sentence for a reader."""
    words = ("passed", "failed", "errors", "skipped")
    counts = ", ".join(f"{tests[word]} {word}" for word in words if tests.get(word) or word == "passed")
    return f"Tests on this machine: {counts}" + (f" (`{tests['command']}`)." if tests.get("command") else ".")


def write_markdown(path: Path, report: Report) -> bool:
    """Put the tables between ``<!-- torchrum:bench cpu -->`` (or gpu) and its end; return whether the file changed."""
    text = markdown_tables(report_tables(report))
    return write_marked(path, "bench", report.suite, lambda suite: text if suite == report.suite else None)


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
