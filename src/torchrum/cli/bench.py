"""``torchrum bench --suite cpu --json results/bench/cpu.json``"""

import argparse
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Time the layers, print a table, write the numbers; or turn written numbers into a table and a plot."""
    parser = argparse.ArgumentParser(
        prog="torchrum bench", description="Time RUM beside the authors' way, nn.GRU and nn.LSTM on this machine."
    )
    parser.add_argument("--suite", choices=("cpu", "gpu"), default="cpu", help="what to measure (default: cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here, after every case")
    parser.add_argument("--cases", default="*", metavar="PATTERN", help="only the cases whose name matches, as lam1-*")
    parser.add_argument("--samples", type=int, metavar="COUNT", help="timed calls (default: 7 on a CPU, 30 on a GPU)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--memory", action="store_true", help="cpu: also the peak memory at T=1000 (needs about 12 GB)")
    parser.add_argument("--seconds", type=float, default=150, help="gpu: begin no case after this (default: 150)")
    parser.add_argument("--commit", help="commit of the code, if it is not run from a checkout")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing: read this JSON file")
    parser.add_argument("--write", type=Path, metavar="README", help="with --report: put its table between the markers")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="with --report: draw it")
    options = parser.parse_args(arguments)
    if options.samples is not None and options.samples < 1:
        parser.error(f"--samples is {options.samples}; it must be 1 or more")
    if (options.write or options.plot) and not options.report:
        parser.error("--write and --plot need --report FILE, the JSON that --json wrote")

    from torchrum.bench.records import Report, read_report
    from torchrum.bench.table import text_table

    if options.report:
        from torchrum.bench.report import write_markdown

        report = read_report(options.report)
        if options.write:
            print(f"{options.write}: table {'written' if write_markdown(options.write, report) else 'is up to date'}")
        if options.plot:
            from torchrum.bench.plot import draw_report

            print(draw_report(report, options.plot))
        if not options.write and not options.plot:
            print(text_table(report))
        return 0

    from torchrum.bench.environment import environment

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    report = Report(options.suite, environment(options.commit), path=options.json)
    if options.suite == "cpu":
        from torchrum.bench.cpu import run_cpu

        run_cpu(
            report,
            quick=options.quick,
            memory=options.memory,
            samples=options.samples or 7,
            cases=options.cases,
            log=log,
        )
    else:
        import torch

        if not torch.cuda.is_available():
            parser.error("--suite gpu needs a CUDA device, and torch sees none; --suite cpu runs here")
        from torchrum.bench.gpu import run_gpu

        run_gpu(
            report,
            quick=options.quick,
            samples=options.samples or 30,
            cases=options.cases,
            seconds=options.seconds,
            log=log,
        )
    if not report.rows:
        parser.error(f"no case of the {options.suite} suite matches {options.cases!r}")
    print(text_table(report))
    return 0
