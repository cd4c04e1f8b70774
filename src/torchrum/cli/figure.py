"""``torchrum figure copying --out docs/figures``"""

import argparse
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Draw figures from the ledger, or the curve of a run."""
    parser = argparse.ArgumentParser(
        prog="torchrum figure", description="Redraw the paper's figures from the ledger, or the curve of one run."
    )
    parser.add_argument("what", help="copying, recall, or a run folder")
    parser.add_argument("--results", type=Path, default=Path("results"), help="the ledger (default: results)")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="a folder (default: docs/figures)")
    options = parser.parse_args(arguments)

    from torchrum.ledger import read_ledger
    from torchrum.plots.curve import draw_curve
    from torchrum.plots.figures import FIGURES, draw_figure
    from torchrum.training.errors import ConfigError
    from torchrum.training.records import holds_run

    if holds_run(Path(options.what)):
        print(draw_curve(Path(options.what)))
        return 0
    if options.what not in FIGURES:
        raise ConfigError(f"{options.what!r} is neither a figure ({', '.join(FIGURES)}) nor a run folder.")
    for path in draw_figure(options.what, read_ledger(options.results), options.out):
        print(path)
    return 0
