"""``torchrum bench --suite cpu --json results/bench/cpu.json``"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

from torchrum.cli.parsing import Parser
from torchrum.paper.bench.measure import conditions
from torchrum.paper.bench.records import Report, read_report, text_table
from torchrum.paper.bench.suites import CASES, QUICK, gpu_cases, quick_cases, run_cpu, run_gpu


def main(arguments: list[str]) -> int:
    """Time the layers, print a table, write the numbers; or turn written numbers into a table and a plot."""
    parser = bench_parser()
    options = parser.parse_args(arguments)
    if options.report:
        for name in ("suite", "json", "cases", "samples", "quick", "memory", "seconds", "commit"):
            if getattr(options, name) != parser.get_default(name):
                parser.error(f"--report measures nothing, so --{name} has no effect; leave one of them out")
        show_report(options.report, options.write, options.plot)
        return 0
    if options.write or options.plot:
        parser.error("--write and --plot need --report FILE, the JSON that --json wrote")
    if options.samples is not None and options.samples < 1:
        parser.error(f"--samples is {options.samples}; it must be 1 or more")
    if options.seconds is not None and not options.seconds >= 0:
        parser.error(f"--seconds is {options.seconds}; it must be 0 or more")
    for name, suite in (("seconds", "gpu"), ("memory", "cpu")):
        if getattr(options, name) not in (None, False) and options.suite != suite:
            parser.error(f"--{name} needs --suite {suite}, but the suite is {options.suite}")
    if options.json and options.json.is_dir():
        parser.error(f"--json {options.json} is a folder; name a file")

    report = Report(options.suite, conditions(options.commit), path=options.json)
    begin = time.perf_counter()

    def log(text: str) -> None:
        print(f"{time.perf_counter() - begin:6.1f} s  {text}", file=sys.stderr, flush=True)

    shared: dict[str, Any] = {"cases": options.cases, "log": log}
    if options.suite == "cpu":
        memory = options.memory and not options.quick
        run_cpu(report, QUICK if options.quick else CASES, memory=memory, samples=options.samples or 21, **shared)
    elif not torch.cuda.is_available():
        parser.error("--suite gpu needs a CUDA device, but torch sees none; pass --suite cpu")
    else:
        shared |= {"samples": options.samples or 30, "seconds": 150.0 if options.seconds is None else options.seconds}
        run_gpu(report, quick_cases() if options.quick else gpu_cases(), **shared)
    if not report.rows:
        parser.error(f"no case of the {options.suite} suite matches {options.cases!r}")
    print(text_table(report))
    return 0


def bench_parser() -> Parser:
    """The options of ``torchrum bench``."""
    parser = Parser("bench", "Time RUM beside the original implementation, nn.GRU and nn.LSTM on this machine.")
    add = parser.add_argument
    add("--suite", choices=("cpu", "gpu"), default="cpu", help="device to measure (default: cpu)")
    add("--json", type=Path, metavar="FILE", help="write the results to this file, after every case")
    add("--cases", default="*", metavar="PATTERN", help="only the cases whose name matches, for example 'lam1-*'")
    add("--samples", type=int, metavar="COUNT", help="number of timed calls (default: 21 on a CPU, 30 on a GPU)")
    add("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    add("--memory", action="store_true", help="cpu: also measure peak memory at T=1000 (needs about 12 GB)")
    add("--seconds", type=float, help="gpu: start no new case after this many seconds (default: 150)")
    add("--commit", metavar="HASH", help="commit of the code, if not run from a checkout")
    add("--report", type=Path, metavar="FILE", help="measure nothing; read the results from this JSON file")
    add("--write", type=Path, metavar="PAGE", help="with --report: update the table between the markers in this file")
    add("--plot", type=Path, metavar="PNG", help="with --report: plot the results of the GPU suite to this file")
    return parser


def show_report(path: Path, page: Path | None, plot: Path | None) -> None:
    """Turn written numbers into a table in a page, a plot, or else a printed table."""
    report = read_report(path)
    if page:
        from torchrum.paper.bench.report import write_markdown

        print(f"{page}: table {'written' if write_markdown(page, report) else 'is up to date'}")
    if plot:
        from torchrum.paper.bench.report import draw_report

        print(draw_report(report, plot))
    if not page and not plot:
        print(text_table(report))
