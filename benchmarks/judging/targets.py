"""What the suites of ``torchrum bench`` must reach on one H200 and on two cores, and what they reached."""

import math

from torchrum.paper.bench.records import Report, Row, Target
from torchrum.paper.bench.suites import CASES, LONG

OURS = ("fused", "fused graphed")
NATIVE_TARGETS: dict[str, tuple[str, str, float]] = {
    "lam0-n100-t100": ("gru", "forward_backward", 0.7),
    "lam0-n256-t100": ("gru", "forward_backward", 0.9),
    "lam1-n100-t100": ("gru", "forward_backward", 1.5),
    "lam1-n50-t53": ("lstm", "forward_backward", 1.2),
    "step-n256": ("gru", "forward", 1.0),
}
"""Native's time over a baseline's, and the most that it may be."""


def gpu_targets(report: Report) -> list[Target]:
    """The targets whose cases were measured; ours counts as the better of its own graphs and one outer graph."""
    found = []
    for N in (704, 1000, 1024, 2000):
        found += _against_gru(report, f"eta-bf16-n{N}", 0.8)
    found += _against_gru(report, "eta-bf16-n256", 1.0)
    for N in (256, 704, 1000, 1024, 2000):
        found += _against_gru(report, f"norms-bf16-n{N}", 1.0)
    found += _against_gru(report, "eta-fp32-n250-t220", 0.8)
    long = [row for row in _ours(report, "lam1-fp32-n100-t1020") if row.us_per_step is not None]
    if long:
        found.append(Target("lam1-fp32-n100-t1020: time per step", 25, min(_steps(long)), " µs"))
        peak = [row.peak_bytes / 1e9 for row in long if row.peak_bytes and row.implementation == "fused"]
        found.append(Target("lam1-fp32-n100-t1020: peak memory", 0.6, min(peak, default=None), " GB"))
    for case, limit in (("recall-n50", 1.5), ("ptb-fs-rum", 14.0)):
        steps = [row.times.median for row in _ours(report, case) if row.times]
        if steps:
            found.append(Target(f"{case}: time per training step", limit, min(steps), " ms"))
    found += _plain_calls(report)
    ours = [row for row in report.rows if row.implementation in OURS]
    first = [row.first_call_seconds for row in ours if row.first_call_seconds]
    if first:
        found.append(Target("slowest first call of a shape", 20, max(first), " s"))
    for name, dtype, limit in (("bfloat16", "bfloat16", 2e-2), ("float32 with TF32 matmuls", "float32", 5e-3)):
        errors = [
            row.error
            for row in report.rows
            if row.error is not None and row.shape.dtype == dtype and row.precision != "highest"
        ]
        if errors:
            found.append(Target(f"largest relative error in {name}", limit, _largest(errors)))
    smooth = [row.error_smooth for row in report.rows if row.error_smooth is not None]
    if smooth:
        found.append(Target("largest relative error in float32 (TF32), with tanh for relu", 5e-3, _largest(smooth)))
    exact = [row.error_ieee for row in report.rows if row.error_ieee is not None]
    if exact:
        found.append(Target("largest relative error in float32 (TF32 off)", 2e-5, _largest(exact)))
    apart = [row.error_apart for row in report.rows if row.error_apart is not None]
    if apart:
        name = "largest relative error in float32 (TF32 off), excluding samples near the ReLU threshold"
        found.append(Target(name, 2e-5, _largest(apart)))
    return found


def _plain_calls(report: Report) -> list[Target]:
    """Calls without a CUDA graph, RUM's over ``nn.GRU``'s, and one step of one row."""
    found = []
    for case in ("plain-lam1-n50", "plain-n100", "plain-n128-b16"):
        ratio = report.ratio(case, "fused", "gru")
        if ratio is not None:
            found.append(Target(f"{case}: share of nn.GRU's time in a plain call", 1.0, ratio))
    steps = [row.times.median for row in _ours(report, "plain-step") if row.times]
    if steps:
        found.append(Target("plain-step: time of one step of one row", 0.15, min(steps), " ms"))
    return found


def _largest(errors: list[float]) -> float:
    """Not a number if one of them is none, which ``max`` might pass over."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _ours(report: Report, case: str) -> list[Row]:
    return [row for row in report.rows if row.case == case and row.implementation in OURS]


def _steps(rows: list[Row]) -> list[float]:
    return [row.us_per_step for row in rows if row.us_per_step is not None]


def _against_gru(report: Report, case: str, limit: float) -> list[Target]:
    ratios = [report.ratio(case, name, "gru graphed") for name in OURS]
    measured = [ratio for ratio in ratios if ratio is not None]
    if not any(row.case == case for row in report.rows):
        return []
    return [Target(f"{case}: share of cuDNN GRU's time", limit, min(measured, default=None))]


def cpu_targets(report: Report) -> list[Target]:
    """The targets whose cases were measured."""
    found = []
    for case in CASES:
        limit = 4.0 if case.options["lam"] else 3.0
        ratio = report.ratio(case.name, "authors", "torch")
        if ratio is not None:
            text = f"{case.name}: torch faster than the original implementation"
            found.append(Target(text, limit, ratio, "x", at_least=True))
    for name, (baseline, mode, limit) in NATIVE_TARGETS.items():
        ratio = report.ratio(name, "native", baseline, mode)
        if ratio is not None:
            found.append(Target(f"{name}: native over nn.{baseline.upper()}", limit, ratio))
    peaks = {row.implementation: row.peak_bytes for row in report.rows if row.case == LONG[0]}
    if peaks:
        ours, theirs = peaks.get("torch"), peaks.get("authors")
        share = ours / theirs if ours and theirs else None
        found.append(Target(f"{LONG[0]}: torch's share of the original implementation's peak memory", 0.1, share))
    return found


TARGETS = {"gpu": gpu_targets, "cpu": cpu_targets}
"""The targets of each suite."""
