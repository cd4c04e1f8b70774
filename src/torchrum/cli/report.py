"""``torchrum report --out report.html``"""

import sys
from pathlib import Path

from torchrum.cli.parsing import Parser, use_recipe
from torchrum.paper.ledger import read_ledger


def main(arguments: list[str]) -> int:
    """Write the report of the ledger, or of run folders."""
    parser = Parser(
        "report",
        "Write a self-contained HTML page that sets the results ledger beside the paper's numbers and figures, or one "
        "about the given runs.",
    )
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="run folders (default: the results ledger)")
    parser.add_results()
    parser.add_argument("--out", type=Path, help="file to write (default: report.html)")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="write no page; update the headline numbers between the markers in this file",
    )
    parser.add_recipe()
    options = parser.parse_args(arguments)
    if options.write and options.runs:
        parser.error("--write uses the results ledger; leave the run folders out")
    if options.write and options.out:
        parser.error("--write makes no page; leave --out out")

    from torchrum.lab.page import write_page
    from torchrum.paper.report import ledger_page, runs_page
    from torchrum.paper.report.headline import write_headlines

    use_recipe(options.recipe)
    if options.write:
        changed = write_headlines(options.write, read_ledger(options.results), options.results)
        print(f"{options.write}: {'headlines written' if changed else 'headlines are up to date'}")
        return 0
    page = runs_page(options.runs) if options.runs else ledger_page(options.results, say)
    print(write_page(page, options.out or Path("report.html")))
    return 0


def say(line: str) -> None:
    """Print what takes time; the path of the page is all that goes to the output."""
    print(line, file=sys.stderr, flush=True)
