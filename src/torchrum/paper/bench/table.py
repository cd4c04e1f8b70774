"""A report as text: one line per row, aligned."""

from torchrum.paper.bench.floor import share_of_floor
from torchrum.paper.bench.records import Report, Row, Target

HEAD = (
    "case",
    "implementation",
    "mode",
    "ms",
    "quartiles",
    "CPU ms",
    "us/step",
    "vs original",
    "/ GRU",
    "floor",
    "MB",
    "first s",
    "design",
)
LAST = "error"
MODE_WORDS = {"forward": "fwd", "forward_backward": "fwd+bwd", "training_step": "train step"}


def text_table(report: Report) -> str:
    """The rows and, below them, the targets."""
    lines = [[*HEAD, LAST], *(_cells(report, row) for row in report.rows)]
    used = [i for i in range(len(HEAD) + 1) if i < 5 or any(line[i] for line in lines[1:])]
    widths = [max(len(line[i]) for line in lines) for i in used]
    text = []
    for line in lines:
        parts = [line[i].ljust(w) if i < 3 else line[i].rjust(w) for i, w in zip(used, widths, strict=True)]
        text.append("  ".join(parts).rstrip())
    text += [f"{row.case} {row.implementation} {row.mode}: {row.failed}" for row in report.rows if row.failed]
    text += [describe_target(target) for target in report.targets]
    return "\n".join(text)


def describe_target(target: Target) -> str:
    """One line: reached or not, and the number beside its limit."""
    measured, limit = target_words(target)
    return f"[{'reached' if target.reached else 'missed'}] {target.name}: {measured}, {limit}"


def target_words(target: Target) -> tuple[str, str]:
    """What was measured, and the limit."""
    bound = "at least" if target.at_least else "at most"
    value = "not measured" if target.value is None else f"{target.value:.3g}{target.unit}"
    return value, f"{bound} {target.limit:g}{target.unit}"


def baseline_of(implementation: str) -> str:
    """The GRU that an implementation is compared with: the graphed one for what runs in a graph, ours included."""
    return "gru graphed" if implementation.endswith("graphed") or implementation == "fused" else "gru"


def _cells(report: Report, row: Row) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    times = row.times
    original = report.ratio(row.case, "authors", row.implementation, row.mode)
    gru = report.ratio(row.case, row.implementation, baseline_of(row.implementation), row.mode)
    return [
        row.case,
        row.implementation.replace("authors", "original"),
        MODE_WORDS.get(row.mode, row.mode),
        "failed" if row.failed else number(times.median if times else None, ".3f"),
        f"{times.low:.3f}-{times.high:.3f}" if times else "",
        number(times.cpu if times else None, ".1f"),
        number(row.us_per_step, ".2f"),
        "" if original is None else f"{original:.2f}x",
        number(gru, ".2f"),
        number(share_of_floor(row), ".0%"),
        number(row.peak_bytes and row.peak_bytes / 1e6, ".1f"),
        number(row.first_call_seconds, ".1f"),
        row.design or "",
        number(row.error, ".1e"),
    ]
