"""Enter targets and errors against float64 into a report of ``torchrum bench``, before it is committed.

python benchmarks/judge.py results/bench/gpu.json --errors
"""

import argparse
from pathlib import Path

from judging.errors import enter_errors
from judging.targets import TARGETS
from torchrum.paper.bench.records import describe_target, read_report


def main(arguments: list[str] | None = None) -> None:
    """Judge the reports that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT", help="files of torchrum bench --json")
    parser.add_argument("--errors", action="store_true", help="measure the errors of the kernels; needs a GPU")
    options = parser.parse_args(arguments)
    for path in options.reports:
        if not path.is_file():
            parser.error(f"{path} is not a file")
    for path in options.reports:
        report = read_report(path)
        if report.suite not in TARGETS:
            parser.error(f"{path} is of the suite {report.suite!r}; there are: {', '.join(TARGETS)}")
        if options.errors:
            enter_errors(report)
        report.targets = TARGETS[report.suite](report)
        report.write()
        print("\n".join([str(path), *map(describe_target, report.targets)]))


if __name__ == "__main__":
    main()
