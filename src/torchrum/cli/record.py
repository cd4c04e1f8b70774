"""``torchrum record runs/copying-rum-t200``"""

from pathlib import Path

from torchrum.cli import complain
from torchrum.cli.data import add_data_dir, use_data_dir
from torchrum.cli.parsing import Parser, in_clone
from torchrum.lab.training.run_folder import CONFIG
from torchrum.paper.ledger import LedgerError, record
from torchrum.paper.ledger.schema import arrays_path


def main(arguments: list[str]) -> int:
    """Enter runs in the ledger."""
    parser = Parser("record", "Copy finished runs into the results ledger. Nothing is evaluated: see torchrum eval.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders, or folders that contain them")
    parser.add_argument("--results", type=Path, help="folder of the ledger (default, in a clone of torchrum: results)")
    parser.add_argument("--note", default="", help="a remark to show beside the numbers")
    parser.add_argument("--commit", metavar="HASH", help="commit of the code, or HEAD, if the run did not record it")
    parser.add_argument("--replace", action="store_true", help="replace an entry of the same name")
    parser.add_argument(
        "--arrays",
        action="store_true",
        help="also store the data for the figures of a trained RUM, in the folder arrays",
    )
    add_data_dir(parser)
    options = parser.parse_args(arguments)
    if options.results is None and not in_clone():
        parser.error("name the folder of your ledger with --results DIR; only a clone of torchrum has one, in results")
    results = options.results or Path("results")
    use_data_dir(options.data_dir)

    found: list[Path] = []
    for folder in options.runs:
        inside = sorted(path.parent for path in folder.rglob(CONFIG)) if folder.is_dir() else []
        if inside or folder.suffix != ".json":  # the summary of a sweep beside its runs is passed over
            found += inside or [folder]
    code = 0
    chosen = {"note": options.note, "commit": options.commit, "replace": options.replace, "arrays": options.arrays}
    for run in found:
        try:
            entry = record(run, results, **chosen)
        except LedgerError as error:
            if len(found) == 1:
                raise
            complain(str(error))  # the others are still recorded
            code = error.exit_code
            continue
        print(f"{results / entry.task}.jsonl: {entry.name}")
        if options.arrays:
            arrays = arrays_path(results, entry)
            print(arrays if arrays.exists() else f"{run} has no RUM: no arrays to keep")
    return code
