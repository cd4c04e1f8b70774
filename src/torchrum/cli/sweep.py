"""``torchrum sweep recall-rum --seeds 3 --grid optimizer.lr=1e-3,1e-4``"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchrum.cli.data import use_data_dir, with_text
from torchrum.cli.parsing import Parser
from torchrum.cli.train import (
    add_common,
    check_count,
    check_resumed,
    chosen_folder,
    draw,
    leaving_at_once,
    split_fields,
)

if TYPE_CHECKING:
    from torchrum.lab.training import TrainConfig


def read_options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of ``torchrum sweep``, and the fields of the recipe that are set beside them."""
    parser = Parser(
        "sweep",
        "Train a recipe over several seeds, a grid of values, or a search. To resume a sweep, run the same command "
        "with --resume FOLDER.",
        epilog="Set the other fields as for torchrum train: --steps 1000.",
    )
    parser.add_argument("recipe", help="a name from torchrum list, or MODULE:FUNCTION")
    add = parser.add_argument
    own = [
        *add_common(parser),
        add(
            "--grid",
            action="append",
            default=[],
            metavar="FIELD=A,B,...",
            help="values to train with; several --grid are combined",
        ),
        add("--trials", type=int, metavar="N", help="search with Optuna, training N times"),
        add(
            "--search",
            action="append",
            default=[],
            metavar="FIELD=LOW:HIGH[:log]",
            help="range to search, or values: FIELD=A,B,...",
        ),
    ]
    fields, rest = split_fields(arguments, own)
    return parser.parse_args(rest), fields


def main(arguments: list[str]) -> int:
    """Train over seeds, a grid, or a search."""
    options, fields = read_options(arguments)
    use_data_dir(options.data_dir)

    with leaving_at_once():
        from torchrum.lab.recipes import FAMILIES, load_recipe
        from torchrum.lab.training import override, run_sweep
        from torchrum.lab.training.distributed import leave_together
        from torchrum.lab.training.errors import ConfigError
        from torchrum.lab.training.sweep import grid

    for name in ("seeds", "trials", "jobs"):
        check_count(name, getattr(options, name))
    if members := FAMILIES.get(options.recipe):
        raise ConfigError(
            f"{options.recipe} is a set of {len(members)} recipes, and a sweep takes one, such as {members[0]}; "
            f"to train the set with several seeds: torchrum train {options.recipe} --seeds N."
        )
    recipe = load_recipe(options.recipe)
    config = override(recipe, [*options.fields, *fields])
    check_resumed(options.resume, [config.name])
    config = with_text(config, options.data)
    folder = chosen_folder(options, config.label)
    if options.trials is not None or options.search:
        code = run_search(config, folder, options)
    elif not (options.seeds or options.grid):
        raise ConfigError(
            "a sweep needs --seeds N, --grid FIELD=A,B or --trials N with --search; to train once: "
            f"torchrum train {options.recipe}"
        )
    else:
        runs = grid(config, options.grid, options.seeds or 1)
        new = options.resume is None
        results = run_sweep(runs, folder, options.quiet, draw, rename=new, jobs=options.jobs)
        code = max(result.exit_code for result in results)
    leave_together()
    return code


def run_search(config: "TrainConfig", folder: Path, options: argparse.Namespace) -> int:
    """Search with Optuna, or resume a search; the exit code. What else a sweep takes is refused."""
    with leaving_at_once():
        from torchrum.lab.training.errors import ConfigError
        from torchrum.lab.training.sweep import search

    if options.grid or options.seeds or not (options.trials and options.search):
        raise ConfigError("a search needs --trials N and --search FIELD=LOW:HIGH, and no --grid or --seeds.")
    if options.jobs > 1:
        raise ConfigError("a search learns from each training before it begins the next; leave --jobs out.")
    new = options.resume is None
    return search(config, options.search, options.trials, folder, options.quiet, draw, rename=new)
