"""The installed command ``torchrum``: it prints its help without importing torchrum, and so without torch."""

import sys

COMMANDS: dict[str, tuple[str, str]] = {
    "compare": ("torchrum.cli.compare:main", "compare GRU, LSTM and RUM on your data"),
    "train": ("torchrum.cli.train:main", "train a recipe, or resume a run"),
    "eval": ("torchrum.cli.trained:evaluate", "score a run on its validation or test set"),
    "sample": ("torchrum.cli.trained:sample", "generate text with a trained language model"),
    "list": ("torchrum.cli.list:main", "list the recipes, or all fields of one"),
    "sweep": ("torchrum.cli.train:sweep", "train over seeds, a grid, or a search"),
    "record": ("torchrum.cli.results:record", "add a run to the results ledger"),
    "table": ("torchrum.cli.results:table", "print the results ledger as a table"),
    "figure": ("torchrum.cli.results:figure", "draw a figure from the results ledger"),
    "report": ("torchrum.cli.results:report", "write an HTML page that compares results and paper"),
    "bench": ("torchrum.cli.bench:main", "time the layers on this machine"),
    "ask": ("torchrum.cli.trained:ask", "ask a model trained on bAbI about a story"),
    "data": ("torchrum.cli.list:data", "show, fetch or verify the data sets"),
    "demo": ("torchrum.cli.demo:main", "watch RUM and an LSTM learn associative recall"),
}
"""Each subcommand: ``module:function`` (arguments -> exit code) and what it does."""


def usage() -> str:
    """Text of ``torchrum --help``."""
    commands = "\n".join(f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: torchrum COMMAND [ARGUMENTS]\n\nThe Rotational Unit of Memory: train it, score it, compare it.\n\n"
        f"commands:\n{commands}\n\nRun torchrum COMMAND --help for the options of a command."
    )


def main() -> int:
    """Print the help, or run a command and return its exit code."""
    if sys.argv[1:] in (["-h"], ["--help"], ["help"]):
        print(usage())
        return 0
    from torchrum.cli import main

    return main()
