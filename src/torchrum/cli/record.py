"""``torchrum record runs/copying-rum-t200``"""

from pathlib import Path

from torchrum.cli import complain
from torchrum.cli.data import add_data_dir, use_data_dir
from torchrum.cli.parsing import Parser


def runs_below(folders: list[Path]) -> list[Path]:
    """The run folders among ``folders`` and below them; a summary beside them is passed over."""
    from torchrum.lab.training.run_folder import CONFIG
    from torchrum.lab.training.sweep import SUMMARY

    found: list[Path] = []
    for folder in folders:
        below = sorted(path.parent for path in folder.rglob(CONFIG)) if folder.is_dir() else []
        if folder.name != SUMMARY:
            found += below or [folder]
    return found


def main(arguments: list[str]) -> int:
    """Enter runs in the ledger."""
    parser = Parser("record", "Add finished runs to the results ledger.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders, or folders that contain them")
    parser.add_results()
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
    use_data_dir(options.data_dir)

    from torchrum.paper.ledger import LedgerError, record
    from torchrum.paper.ledger.schema import arrays_path

    runs, code = runs_below(options.runs), 0
    for run in runs:
        try:
            entry = record(
                run,
                options.results,
                note=options.note,
                commit=options.commit,
                replace=options.replace,
                arrays=options.arrays,
            )
        except LedgerError as error:
            if len(runs) == 1:
                raise
            complain(str(error))  # the others are still recorded
            code = error.exit_code
            continue
        print(f"{options.results / entry.task}.jsonl: {entry.name}")
        if options.arrays:
            arrays = arrays_path(options.results, entry)
            print(arrays if arrays.exists() else f"{run} has no RUM: no arrays to keep")
    return code
