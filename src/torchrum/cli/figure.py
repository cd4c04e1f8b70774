"""``torchrum figure copying``, ``torchrum figure kernels runs/recall-rum-lam1-t50``"""

import argparse
from pathlib import Path

from torchrum.cli.parsing import Parser, use_recipe

FOLDER = Path("docs/figures")


def main(arguments: list[str]) -> int:
    """Draw figures from the ledger or from a run."""
    options = figure_parser().parse_args(arguments)
    use_recipe(options.recipe)
    check_page(options)
    for path in draw(options):
        print(path)
    if options.write:
        from torchrum.paper.plots.catalog import write_gallery

        changed = write_gallery(options.write, options.results, options.out or FOLDER)
        print(f"{options.write}: {'figures written' if changed else 'figures are up to date'}")
    return 0


def figure_parser() -> Parser:
    """The options of ``torchrum figure``."""
    parser = Parser(
        "figure",
        "Draw the paper's figures from the results ledger, or figures of one run. Each figure has a light "
        "and a dark version.",
    )
    parser.add_argument(
        "what",
        help="copying, recall, char (learning curves), babi (task by task), headline (recall), kernels (heat "
        "maps of W_hh), rotation (angles, planes, norms), "
        "phases (of R), diagonal (of W_hh over training), gradients (through time), reflections (the rotation itself), "
        "cell (as a diagram), all, or a run folder: its curve",
    )
    parser.add_argument(
        "run", type=Path, nargs="?", help="a run folder, for kernels, rotation, phases and diagonal of that run"
    )
    parser.add_results()
    parser.add_argument(
        "--out", type=Path, help="folder to write to (default: docs/figures; for a run, the run folder)"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="with all: update the figures and captions between the markers in this file",
    )
    parser.add_recipe()
    return parser


def check_page(options: argparse.Namespace) -> None:
    """Refuse a ``--write`` or an ``--out`` that cannot be done, before anything is drawn."""
    from torchrum.lab.training.errors import ConfigError

    if options.write and options.what != "all":
        raise ConfigError(f"--write needs all, the figures of a whole page; got {options.what!r}.")
    if options.write and not options.write.is_file():
        marker = "<!-- torchrum:figure recall -->"
        raise ConfigError(f"--write {options.write} is not a file; name a page with markers such as {marker}.")
    if options.out and options.out.is_file():
        raise ConfigError(f"--out {options.out} is a file; name a folder for the figures.")


def draw(options: argparse.Namespace) -> list[Path]:
    """Draw what is asked for; the files that were written."""
    from torchrum.lab.training.errors import ConfigError
    from torchrum.lab.training.run_folder import holds_run
    from torchrum.paper.plots.catalog import FIGURES, draw_all, draw_figure, draw_run
    from torchrum.paper.plots.curves import draw_curve

    if options.run is not None:
        return draw_run(options.what, options.run, options.out or options.run)
    if holds_run(Path(options.what)):
        return [draw_curve(Path(options.what), options.out and options.out / "curve.png")]
    if options.what == "all":
        return draw_all(options.results, options.out or FOLDER)
    if options.what in FIGURES:
        return draw_figure(options.what, options.results, options.out or FOLDER)
    raise ConfigError(f"{options.what!r} is neither a figure ({', '.join(FIGURES)}, all) nor a run folder.")
