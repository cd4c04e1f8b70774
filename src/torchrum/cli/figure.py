"""``torchrum figure copying``, ``torchrum figure kernels runs/recall-rum-lam1-t50``"""

from pathlib import Path

from torchrum.cli.parsing import Parser, in_clone, use_recipe
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.run_folder import holds_run


def main(arguments: list[str]) -> int:
    """Draw figures from the ledger or from a run."""
    parser = Parser(
        "figure",
        "Draw the paper's figures from the results ledger, or figures of one run. Each figure has a light and a dark "
        "version.",
    )
    parser.add_argument(
        "what",
        help="copying, recall, char (learning curves), babi (task by task), headline (recall), kernels (heat maps of "
        "W_hh), rotation (angles, planes, norms), phases (of R), diagonal (of W_hh over training), gradients (through "
        "time), all, or a run folder: its curve",
    )
    parser.add_argument(
        "run", type=Path, nargs="?", help="a run folder, for kernels, rotation, phases and diagonal of that run"
    )
    parser.add_results()
    parser.add_argument(
        "--out",
        type=Path,
        help="folder to write to (default: for a run, the run folder; else docs/figures in a clone of the project, and "
        "figures elsewhere)",
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="with all: update the figures and captions between the markers in this file",
    )
    parser.add_recipe()
    options = parser.parse_args(arguments)
    if options.write and options.what != "all":
        parser.error(f"--write needs all, the figures of a whole page; got {options.what!r}")
    if options.write and not options.write.is_file():
        parser.error(f"--write {options.write} is not a file; name a page with markers <!-- torchrum:figure recall -->")
    if options.out and options.out.is_file():
        parser.error(f"--out {options.out} is a file; name a folder for the figures")
    use_recipe(options.recipe)

    from torchrum.paper.plots.catalog import FIGURES, draw_figure, draw_run, write_gallery
    from torchrum.paper.plots.run import draw_curve

    run, out = Path(options.what), options.out or Path("docs/figures" if in_clone() else "figures")
    if options.run is not None:
        paths = draw_run(options.what, options.run, options.out or options.run)
    elif holds_run(run):
        paths = [draw_curve(run, options.out and options.out / "curve.png")]
    elif options.what in (*FIGURES, "all"):
        paths = draw_figure(options.what, options.results, out)
    else:
        raise ConfigError(f"{options.what!r} is neither a figure ({', '.join(FIGURES)}, all) nor a run folder.")
    print(*paths, sep="\n")
    if options.write:
        changed = write_gallery(options.write, options.results, out)
        print(f"{options.write}: {'figures written' if changed else 'figures are up to date'}")
    return 0
