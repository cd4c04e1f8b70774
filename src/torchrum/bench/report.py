"""From the JSON of a run to the README's table and plot."""

import re
from pathlib import Path

from .records import Report, Row
from .table import MODE_WORDS, describe_target

MARKED = re.compile(r"(<!-- torchrum:bench (\S+) -->\n)(.*?)(<!-- /torchrum:bench -->)", re.DOTALL)
LABELS = {
    "authors": "authors' code",
    "authors graphed": "authors' code, CUDA graph",
    "reference": "RUM, reference",
    "torch": "RUM, torch",
    "fused": "RUM, fused",
    "fused graphed": "RUM, fused, CUDA graph",
    "gru": "nn.GRU",
    "gru graphed": "nn.GRU, CUDA graph",
    "lstm": "nn.LSTM",
    "lstm graphed": "nn.LSTM, CUDA graph",
    "gru= graphed": "nn.GRU of as many weights, CUDA graph",
    "lstm= graphed": "nn.LSTM of as many weights, CUDA graph",
}
COLOURS = {"authors": "#cc79a7", "reference": "#56b4e9", "torch": "#0072b2", "fused": "#0072b2"}
COLOURS |= {"gru": "#a6a6a6", "gru=": "#d0d0d0", "lstm": "#595959", "lstm=": "#8c8c8c"}


def markdown(report: Report) -> str:
    """A Markdown table of the training passes, microseconds a step, and the promises below it."""
    rows = [row for row in report.rows if row.mode != "forward" and row.times is not None]
    names = [name for name in LABELS if any(row.contestant == name for row in rows)]
    names += sorted({row.contestant for row in rows} - set(names))
    lines = [
        "| case | " + " | ".join(LABELS.get(name, name) for name in names) + " |",
        "| --- |" + " ---: |" * len(names),
    ]
    for case in dict.fromkeys(row.case for row in rows):
        found = {row.contestant: row for row in rows if row.case == case}
        cells = [_cell(found.get(name)) for name in names]
        lines.append(
            f"| {describe_case(max(found.values(), key=lambda row: len(row.options)))} | " + " | ".join(cells) + " |"
        )
    place = report.environment
    machine = place.get("gpu") or f"{place['cpu']}, {place['threads']} threads"
    commit = (place.get("commit") or "unknown")[:10]
    lines += [
        "",
        f"Median microseconds a time step (quartiles in the JSON), input projection included; {machine}, "
        f"torch {place['torch']}, commit {commit}. Command: `{place['command']}`",
    ]
    if report.targets:
        lines += ["", *(f"- {describe_target(target)}" for target in report.targets)]
    return "\n".join(lines) + "\n"


def describe_case(row: Row) -> str:
    """What a case is, in words: options, sizes and dtype."""
    shape = row.shape
    words = [f"{name}={value}" for name, value in row.options.items()]
    words += [f"N={shape.N}", f"T={shape.T}", f"B={shape.B}", shape.dtype, MODE_WORDS[row.mode]]
    return f"`{row.case}`: {', '.join(words)}"


def _cell(row: Row | None) -> str:
    return "" if row is None or row.us_per_step is None else f"{row.us_per_step:.3g}"


def write_markdown(path: Path, report: Report) -> bool:
    """Put the table between ``<!-- torchrum:bench cpu -->`` (or gpu) and its end; true if the file changed."""
    text = path.read_text()
    suites = [match[1] for match in MARKED.findall(text)]
    if report.suite not in suites:
        raise ValueError(
            f"{path} has no place for the table; put <!-- torchrum:bench {report.suite} --> and "
            "<!-- /torchrum:bench --> in it."
        )
    table = markdown(report)
    new = MARKED.sub(lambda m: m[1] + table + m[4] if m[2] == report.suite else m[0], text)
    if new != text:
        path.write_text(new)
    return new != text


def draw_report(report: Report, path: Path) -> Path:
    """Bars of the training passes, one panel a case: microseconds a step on a logarithmic axis, with quartiles."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from ..plots.style import STYLE, save

    rows = [row for row in report.rows if row.mode == "forward_backward" and row.times is not None]
    cases = list(dict.fromkeys(row.case for row in rows))
    if not cases:
        raise ValueError("draw_report: the report has no forward and backward pass to draw.")
    columns = min(4, len(cases))
    lines = -(-len(cases) // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(3.2 * columns, 2.2 * lines + 0.4), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False)
        for panel, case in zip(panels.flat, cases, strict=False):
            here = [row for row in rows if row.case == case]
            _bars(panel, here)
            panel.set_title(case)
        for panel in list(panels.flat)[len(cases) :]:
            panel.set_axis_off()
        place = report.environment
        figure.suptitle(f"forward + backward, µs a step; {place.get('gpu') or place['cpu']}, torch {place['torch']}")
        return save(figure, path)


def _bars(panel, rows: list[Row]) -> None:
    rows = sorted(rows, key=lambda row: -(row.us_per_step or 0))
    for place, row in enumerate(rows):
        assert row.times is not None
        assert row.us_per_step is not None
        scale = 1e3 / row.shape.T
        spread = [[(row.times.median - row.times.low) * scale], [(row.times.high - row.times.median) * scale]]
        kind = row.contestant.split()[0]
        hatch = "" if row.contestant.endswith("graphed") or row.shape.device == "cpu" else "//"
        panel.barh(
            place,
            row.us_per_step,
            xerr=spread,
            color=COLOURS.get(kind, "#dddddd"),
            hatch=hatch,
            edgecolor="white",
            height=0.8,
            error_kw={"linewidth": 0.8},
        )
        panel.annotate(
            f" {row.us_per_step:.3g}",
            (row.us_per_step, place),
            va="center",
            fontsize=6,
            xytext=(3, 0),
            textcoords="offset points",
        )
    panel.set_yticks(range(len(rows)), [row.contestant for row in rows], fontsize=7)
    panel.set_xscale("log")
    panel.margins(x=0.15)
