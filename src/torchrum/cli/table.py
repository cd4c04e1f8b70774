"""``torchrum table copying`` and ``torchrum table --write README.md``"""

import sys
from pathlib import Path

from torchrum.cli.parsing import Parser
from torchrum.lab.recipes import RECIPES
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.overrides import unknown_name
from torchrum.paper.ledger import read_ledger
from torchrum.paper.ledger.tables import asked_table, write_tables


def main(arguments: list[str]) -> int:
    """Print the results, or write them into a file."""
    parser = Parser("table", "Print the results ledger as Markdown tables.")
    parser.add_argument("task", nargs="?", help="copying, recall, char or babi (default: all)")
    parser.add_results()
    parser.add_argument(
        "--best",
        type=int,
        nargs="?",
        const=sys.maxsize,
        metavar="STEPS",
        help="only the best setting of each model; with STEPS, the best within that many steps and the best beyond "
        "(STEPS makes no difference for bAbI)",
    )
    parser.add_argument(
        "--within",
        type=int,
        metavar="BUDGET",
        help="compare after BUDGET / T steps each, a matched step budget; T is the size of the problem",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="update the tables between the markers in this file")
    options = parser.parse_args(arguments)
    if options.best is not None and options.within is not None:
        parser.error("--best and --within make different tables; pass only one of them")
    words = ""
    for name in ("best", "within"):
        if (count := getattr(options, name)) is None:
            continue
        words = f" {name} {count}"
        if count < 1:
            parser.error(f"--{name} is {count}, but it must be at least 1")
        if options.write:
            marker = f"<!-- torchrum:table recall {name} 20000 -->"
            parser.error(f"--{name} cannot be combined with --write; put it in the marker instead: {marker}")

    known = {name.partition("-")[0] for name in RECIPES}
    if options.task is not None and options.task not in known:
        raise unknown_name("task", options.task, known)
    if not options.results.is_dir():
        raise ConfigError(f"{options.results} is not a folder; pass the folder of a results ledger with --results DIR.")
    entries = read_ledger(options.results)
    if options.write:
        changed = write_tables(options.write, entries)
        print(f"{options.write}: {'tables written' if changed else 'tables are up to date'}")
        return 0
    tasks = [options.task] if options.task else sorted({entry.task for entry in entries})
    title = "**{}**\n\n" if options.within else ""
    tables = [title.format(task) + asked_table(task + words, entries) for task in tasks]
    print("\n".join(tables) or f"{options.results} holds no run yet.")
    return 0
