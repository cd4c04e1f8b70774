"""From the JSON of a run to the README's table and plot."""

import re
from pathlib import Path

from .records import Report, Row
from .table import describe_target

MARKED = re.compile(r"(<!-- torchrum:bench (\S+) -->\n)(.*?)(<!-- /torchrum:bench -->)", re.DOTALL)
LABELS = {
    "authors": "authors' way",
    "authors graphed": "authors' way, CUDA graph",
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

HEADLINE = (
    "authors",
    "authors graphed",
    "reference",
    "torch",
    "fused",
    "fused graphed",
    "gru",
    "gru graphed",
    "lstm",
    "lstm graphed",
)
"""Columns of the README's table; the JSON has the others."""


def markdown(report: Report) -> str:
    """A Markdown table of the training passes, microseconds a step, and the promises below it."""
    rows = [row for row in report.rows if row.mode != "forward" and row.times is not None]
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:  # the rivals of a promised case are timed by themselves, and stand in its line here
        cases.setdefault(row.case.removesuffix("-rivals"), {})[row.contestant] = row
    names = [name for name in HEADLINE if any(name in found for found in cases.values())]
    lines = [
        "| case | " + " | ".join(LABELS[name] for name in names) + " | RUM / GRU |",
        "| --- |" + " ---: |" * (len(names) + 1),
    ]
    for found in cases.values():
        if found.keys() & set(names):
            cells = [_cell(found.get(name)) for name in names]
            lines.append(f"| {describe_case(found)} | " + " | ".join([*cells, _ratio(found)]) + " |")
    place = report.environment
    machine = place.get("gpu") or f"{place['cpu']}, {place['threads']} threads"
    commit = (place.get("commit") or "unknown")[:10]
    lines += [
        "",
        "Forward and backward, median microseconds a time step, input projection included; sizes, quartiles and more "
        f"contestants are in the JSON. {machine}, "
        f"torch {place['torch']}, commit {commit}. Command: `{place['command']}`",
    ]
    if report.targets:
        lines += ["", *(f"- {describe_target(target)}" for target in report.targets)]
    return "\n".join(lines) + "\n"


def describe_case(found: dict[str, Row]) -> str:
    """What a case is: options, sizes and dtype."""
    options = max((row.options for row in found.values()), key=len)
    row = next(iter(found.values()))
    words = [name if value is True else f"{name}={value:g}" for name, value in options.items()]
    words += [f"N={row.shape.N}", f"T={row.shape.T}", row.shape.dtype]
    return ", ".join(words) + (f" ({row.case}, whole training step)" if row.mode == "training_step" else "")


def _ratio(found: dict[str, Row]) -> str:
    """The faster of our ways over the faster GRU."""

    def best(*names: str) -> float | None:
        times = [found[name].us_per_step for name in names if name in found]
        return min((time for time in times if time is not None), default=None)

    ours, theirs = best("torch", "fused", "fused graphed"), best("gru", "gru graphed")
    return "" if ours is None or theirs is None else f"{ours / theirs:.2f}"


def _cell(row: Row | None) -> str:
    return "" if row is None or row.us_per_step is None else short(row.us_per_step)


def short(value: float) -> str:
    """Three digits, or whole numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


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
