"""The CPU suite: the original implementation, our two backends, nn.GRU and nn.LSTM, side by side in one run."""

from collections.abc import Callable
from fnmatch import fnmatch

from .measure import time_cpu
from .memory import peak_memory
from .records import Report, Row, Target
from .work import MODES, Shape, Work, make_layer

IMPLEMENTATIONS = ("authors", "reference", "torch", "gru", "lstm")
RUMS = ("authors", "reference", "torch")

# the copying task's ten inputs, and a layer in the middle of a stack
CASES: dict[str, tuple[int, Shape]] = {
    "lam0-n100-t100": (0, Shape(N=100, T=100, I=10)),
    "lam1-n100-t100": (1, Shape(N=100, T=100, I=10)),
    "lam0-n100-t100-wide": (0, Shape(N=100, T=100, I=100)),
    "lam1-n100-t100-wide": (1, Shape(N=100, T=100, I=100)),
}
QUICK: dict[str, tuple[int, Shape]] = {
    "lam0-quick": (0, Shape(N=8, T=5, B=4)),
    "lam1-quick": (1, Shape(N=8, T=5, B=4)),
}
LONG = ("lam1-n100-t1000-memory", 1, Shape(N=100, T=1000, I=10))
"""The original implementation needs about 11 GB here."""


def run_cpu(
    report: Report,
    *,
    quick: bool = False,
    memory: bool = False,
    samples: int = 7,
    cases: str = "*",
    log: Callable[[str], None] = print,
) -> None:
    """Measure the suite into ``report``.

    Args:
        report: takes the rows and the targets.
        quick: tiny sizes, to see that everything runs.
        memory: also the peak memory at T = 1000.
        samples: calls of each implementation.
        cases: pattern that a case's name must match.
        log: told what is being measured.
    """
    for name, (lam, shape) in (QUICK if quick else CASES).items():
        if fnmatch(name, cases):
            log(f"{name}: {', '.join(IMPLEMENTATIONS)}")
            report.add(*_rows(name, lam, shape, samples))
    if memory and not quick and fnmatch(LONG[0], cases):
        name, lam, shape = LONG
        for implementation in ("authors", "torch"):
            log(f"{name}: {implementation}")
            report.add(_memory_row(name, implementation, lam, shape))
    report.targets = _targets(report)
    report.write()


def _rows(name: str, lam: int, shape: Shape, samples: int) -> list[Row]:
    works = {
        implementation: Work(lambda c=implementation: make_layer(c, shape, **_options(c, lam)), shape)  # type: ignore[misc]
        for implementation in IMPLEMENTATIONS
    }
    rows = []
    for mode in MODES:
        times = time_cpu({implementation: work.run(mode) for implementation, work in works.items()}, samples)
        for implementation, work in works.items():
            row = Row(name, implementation, mode, shape, _options(implementation, lam), times[implementation])
            row.num_parameters = work.num_parameters
            rows.append(row)
    works.clear()
    for row in rows:
        if row.mode == "forward_backward":
            row.peak_bytes = peak_memory(row.implementation, shape, lam)
    return rows


def _memory_row(name: str, implementation: str, lam: int, shape: Shape) -> Row:
    row = Row(name, implementation, "forward_backward", shape, _options(implementation, lam))
    try:
        row.peak_bytes = peak_memory(implementation, shape, lam)
    except Exception as error:  # most likely too little memory; the other rows stand
        row.failed = str(error)
    return row


def _options(implementation: str, lam: int) -> dict[str, int]:
    return {"lam": lam} if implementation in RUMS else {}


def _targets(report: Report) -> list[Target]:
    found = []
    for case, (lam, _) in CASES.items():
        limit = 4.0 if lam else 3.0
        ratio = report.ratio(case, "authors", "torch")
        if ratio is not None:
            name = f"{case}: torch faster than the original implementation"
            found.append(Target(name, limit, ratio, "x", at_least=True))
    peaks = {row.implementation: row.peak_bytes for row in report.rows if row.case == LONG[0]}
    if peaks:
        ours, theirs = peaks.get("torch"), peaks.get("authors")
        share = ours / theirs if ours and theirs else None
        found.append(Target(f"{LONG[0]}: torch's share of the authors' peak memory", 0.1, share))
    return found
