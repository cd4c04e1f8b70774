"""From the JSON of a run to the tables of the docs."""

import shlex
from pathlib import Path
from typing import Any

from torchrum.paper.bench.gpu_cases import target_cases
from torchrum.paper.bench.records import Report, Row
from torchrum.paper.bench.table import target_words
from torchrum.paper.ledger.cells import table_lines
from torchrum.paper.ledger.markers import write_marked

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


def markdown(report: Report) -> str:
    """A Markdown table of the training passes, microseconds per step, and the targets below it."""
    rows = [row for row in report.rows if row.mode != "forward" and row.times is not None]
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:  # some baselines of a case with a target are timed by themselves, and stand in its line here
        name = row.case.removesuffix("-baselines")
        cases.setdefault(name, {}).setdefault(row.implementation, row)
    wanted = {case.name for case in target_cases()} | {name for name in cases if name.endswith("-authors")}
    cases = {name: found for name, found in cases.items() if name in wanted} or cases
    columns = [name for name in COLUMNS if any(name in found for found in cases.values())]
    header, table = ["case", "RUM / GRU", *(LABELS[name] for name in columns)], []
    for found in cases.values():
        cells = [_cell(found.get(name)) for name in columns]
        if any(cells):
            table.append([describe_case(found), _ratio(found), *cells])
    lines = table_lines(header, table, right=range(1, len(header)))
    place = report.environment
    machine = place.get("gpu") or f"{place['cpu']}, {place['threads']} threads"
    commit = (place.get("commit") or "unknown")[:10]
    lines += [
        "",
        "Forward and backward, median microseconds per time step, input projection included; RUM / GRU is the fastest "
        f"of ours over the fastest GRU. Sizes, quartiles and more implementations are in the JSON. {machine}, "
        f"torch {place['torch']}, commit {commit}. Command: `{typed(report)}`",
    ]
    if report.tests:
        lines[-1] += f" {describe_tests(report.tests)}"
    if report.targets:
        lines += ["", *_targets(report)]
    return "\n".join(lines) + "\n"


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


def _targets(report: Report) -> list[str]:
    """The targets as a table; a case is described as in the table of times."""
    rows: dict[str, dict[str, Row]] = {}
    for row in report.rows:
        rows.setdefault(row.case, {})[row.implementation] = row
    cells = []
    for target in report.targets:
        case, _, what = target.name.partition(": ")
        name = f"{what}: {describe_case(rows[case])}" if case in rows else target.name
        measured, limit = target_words(target)
        cells.append((name, measured, limit, "yes" if target.reached else "**no**"))
    return table_lines(("target", "measured", "limit", "reached"), cells, right=(1, 2))


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
    """Put the table between ``<!-- torchrum:bench cpu -->`` (or gpu) and its end; true if the file changed."""
    return write_marked(path, "bench", report.suite, lambda suite: markdown(report) if suite == report.suite else None)
