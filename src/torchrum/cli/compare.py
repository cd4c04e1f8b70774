"""``torchrum compare load.csv --target load --minutes 10``"""

from pathlib import Path

from torchrum.cli.parsing import Parser

KINDS = ("classification", "regression", "forecasting", "tagging", "symbols")


def main(arguments: list[str]) -> int:
    """Compare GRU, LSTM and RUM on a user's data."""
    parser = Parser(
        "compare",
        "Train GRU, LSTM and RUM on your data with the same search of learning rates, the same number of steps and "
        "three seeds, and say whether RUM is worth it. What is not given is guessed, and the guesses are printed. "
        "Ctrl-C keeps what was done; the same command again goes on.",
    )
    parser.add_argument(
        "data",
        type=Path,
        nargs="?",
        metavar="DATA",
        help="CSV or Parquet file, .npz or .npy file of sequences, text file, or folder of text files by class",
    )
    parser.add_argument("--target", metavar="COLUMN", help="column to predict")
    parser.add_argument("--time", metavar="COLUMN", help="column that orders the rows")
    parser.add_argument("--group", metavar="COLUMN", help="column that tells sequences apart")
    parser.add_argument("--inputs", nargs="+", metavar="COLUMN", help="columns to predict from")
    parser.add_argument("--kind", choices=KINDS, help="kind of problem")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit (default: 10)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder to write (default: runs/NAME)")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with the comparison in this folder")
    options = parser.parse_args(arguments)
    given = {name: value for name, value in vars(options).items() if value is not None}
    if options.resume is not None and given.keys() - {"resume", "minutes"}:
        parser.error("--resume has the data and the settings in its folder; give it no more than --minutes")
    if options.resume is None and options.data is None:
        parser.error("name the data, such as mydata.csv, or a folder to --resume")

    from torchrum.lab.compare import compare, resume

    if options.resume is not None:
        resume(options.resume, minutes=options.minutes)
        return 0
    compare(**given)
    return 0
