"""``torchrum bench --suite cpu --json results/bench/cpu.json``"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torchrum.cli.parsing import Parser

if TYPE_CHECKING:
    from torchrum.paper.bench.records import Report


def main(arguments: list[str]) -> int:
    """Time the layers, print a table, write the numbers; or turn written numbers into a table and a plot."""
    parser = bench_parser()
    options = parser.parse_args(arguments)
    check_together(parser, options)
    if options.report:
        show_report(options)
        return 0

    from torchrum.paper.bench.measure import conditions
    from torchrum.paper.bench.records import Report, read_report, text_table

    report = Report(options.suite, conditions(options.commit), path=options.json)
    if options.resume and options.json.exists():
        report = continued(read_report(options.json), report)
    if options.suite == "cpu":
        measure_cpu(report, options)
    else:
        measure_gpu(report, parser, options, arguments)
    if not report.rows:
        parser.error(f"no case of the {options.suite} suite matches {options.cases!r}")
    print(text_table(report))
    return 0


def bench_parser() -> Parser:
    """The options of ``torchrum bench``."""
    parser = Parser("bench", "Time RUM beside the original implementation, nn.GRU and nn.LSTM on this machine.")
    parser.add_argument("--suite", choices=("cpu", "gpu"), default="cpu", help="device to measure (default: cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, after every case")
    parser.add_argument(
        "--cases", default="*", metavar="PATTERN", help="only the cases whose name matches, for example 'lam1-*'"
    )
    parser.add_argument(
        "--samples", type=int, metavar="COUNT", help="number of timed calls (default: 21 on a CPU, 30 on a GPU)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    parser.add_argument(
        "--memory", action="store_true", help="cpu: also measure peak memory at T=1000 (needs about 12 GB)"
    )
    parser.add_argument("--seconds", type=float, help="gpu: start no new case after this many seconds (default: 150)")
    parser.add_argument("--designs", action="store_true", help="gpu: compare the stepwise with the persistent kernels")
    parser.add_argument(
        "--resume", action="store_true", help="gpu: keep the rows in the --json file and measure the missing ones"
    )
    parser.add_argument("--commit", metavar="HASH", help="commit of the code, if not run from a checkout")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="measure nothing; read the results from this JSON file"
    )
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="with --report: update the table between the markers in this file"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="with --report: plot the results to this file")
    return parser


def check_together(parser: Parser, options: argparse.Namespace) -> None:
    """Refuse numbers out of range, and options that do not go together."""
    if options.samples is not None and options.samples < 1:
        parser.error(f"--samples is {options.samples}; it must be 1 or more")
    if options.seconds is not None and not options.seconds >= 0:
        parser.error(f"--seconds is {options.seconds}; it must be 0 or more")
    if options.report:
        for name in ("suite", "json", "cases", "samples", "quick", "memory", "seconds", "designs", "resume", "commit"):
            if getattr(options, name) != parser.get_default(name):
                parser.error(f"--report measures nothing, so --{name} has no effect; leave one of them out")
    if (options.write or options.plot) and not options.report:
        parser.error("--write and --plot need --report FILE, the JSON that --json wrote")
    for name, suite in (("designs", "gpu"), ("resume", "gpu"), ("seconds", "gpu"), ("memory", "cpu")):
        if getattr(options, name) not in (None, False) and options.suite != suite:
            parser.error(f"--{name} needs --suite {suite}, but the suite is {options.suite}")
    if options.resume and not options.json:
        parser.error("--resume needs --json FILE, whose rows it keeps")
    if options.json and options.json.is_dir():
        parser.error(f"--json {options.json} is a folder; name a file")


def show_report(options: argparse.Namespace) -> None:
    """Turn the numbers of ``--report`` into what is asked for: a table in a page, a plot, or else a printed table."""
    from torchrum.paper.bench.records import read_report, text_table

    report = read_report(options.report)
    if options.write:
        from torchrum.paper.bench.report import write_markdown

        print(f"{options.write}: table {'written' if write_markdown(options.write, report) else 'is up to date'}")
    if options.plot:
        from torchrum.paper.bench.report import draw_report

        print(draw_report(report, options.plot))
    if not options.write and not options.plot:
        print(text_table(report))


def measure_cpu(report: "Report", options: argparse.Namespace) -> None:
    """Add the rows of the CPU suite to the report."""
    from torchrum.paper.bench.cpu import run_cpu

    run_cpu(
        report,
        quick=options.quick,
        memory=options.memory,
        samples=options.samples or 21,
        cases=options.cases,
        log=log,
    )


def measure_gpu(report: "Report", parser: Parser, options: argparse.Namespace, arguments: list[str]) -> None:
    """Add the rows of the GPU suite to the report; where the device is lost, a new process resumes the ``--json``."""
    import torch

    if not torch.cuda.is_available():
        parser.error("--suite gpu needs a CUDA device, but torch sees none; pass --suite cpu")
    from torchrum.paper.bench.gpu import run_gpu

    start, seconds = time.perf_counter(), 150.0 if options.seconds is None else options.seconds
    alive = run_gpu(
        report,
        quick=options.quick,
        samples=options.samples or 30,
        cases=options.cases,
        seconds=seconds,
        designs=options.designs,
        log=log,
    )
    if not alive and options.json:  # the row that did it is on file: a fresh process continues after it
        begin_anew(arguments, seconds - (time.perf_counter() - start))


def log(text: str) -> None:
    """Tell what is being measured, beside the table."""
    print(text, file=sys.stderr, flush=True)


def continued(earlier: "Report", now: "Report") -> "Report":
    """The earlier report, which this run adds to; what differs between the two runs is noted."""
    if earlier.suite != now.suite:
        raise SystemExit(f"torchrum bench: {earlier.path} has the {earlier.suite} suite; --resume needs the same one.")
    note = {name: now.environment[name] for name in ("date", "command", "commit")}
    earlier.environment.setdefault("continued", []).append(note)
    return earlier


def begin_anew(arguments: list[str], seconds: float) -> NoReturn:
    """Replace this process, whose device is lost, by one that resumes."""
    sys.stdout.flush()
    sys.stderr.flush()
    again = [*arguments, "--resume", "--seconds", f"{max(seconds, 0):.0f}"]  # the last of two counts
    os.execv(sys.executable, [sys.executable, "-m", "torchrum", "bench", *again])
