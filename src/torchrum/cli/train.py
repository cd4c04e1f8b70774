"""``torchrum train copying-rum --steps 1000 --task.delay 200``"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

EPILOG = """Every field of the recipe can be set, as --steps 1000 or --set steps=1000; fields inside others have dotted
names: --task.delay 200 --model.lam 1 --optimizer.clip 1. torchrum list RECIPE shows them all. A recipe of your own is
MODULE:FUNCTION.

Several processes: --devices 2 starts them; torchrun --nproc-per-node 2 -m torchrum train ... --devices 2 and, under
SLURM, srun torchrum train ... --devices 8 --nodes 2 use those that are there."""


def split_fields(unknown: list[str]) -> list[str]:
    """Turn ``--steps 1000 --task.delay=200`` into assignments ``steps=1000``, ``task.delay=200``."""
    from torchrum.training.errors import ConfigError

    assignments, rest = [], list(unknown)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise ConfigError(f"{word!r} is not understood here; fields are set as --field value.")
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} needs a value: --{name} VALUE.")
            value = rest.pop(0)
        assignments.append(f"{name.replace('-', '_')}={value}")
    return assignments


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options that train and sweep share."""
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the run folders (default: runs)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run folder")
    parser.add_argument("--seeds", type=int, metavar="N", help="train N times, with seed, seed + 1, ...")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields", help="set a field")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def free_folder(parent: Path, name: str) -> Path:
    """``parent/name``, or with -2, -3, ... if a run is there."""
    folder, count = parent / name, 1
    while folder.exists() and any(folder.iterdir()):
        count += 1
        folder = parent / f"{name}-{count}"
    return folder


def main(arguments: list[str]) -> int:
    """Train."""
    parser = argparse.ArgumentParser(
        prog="torchrum train",
        description="Train a recipe, or resume a run.",
        usage="torchrum train RECIPE [--FIELD VALUE ...] [--out DIR] [--seeds N] | torchrum train --resume RUN",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", help="a name from torchrum list, or MODULE:FUNCTION")
    add_common(parser)
    options, unknown = parser.parse_known_args(arguments)

    from torchrum.recipes import load_recipe
    from torchrum.training import Trainer, override, read_config, run_sweep
    from torchrum.training.errors import ConfigError

    fields = [*options.fields, *split_fields(unknown)]
    if options.recipe is None and options.resume is None:
        raise ConfigError("train needs a recipe, or --resume RUN; torchrum list shows the recipes.")
    recipe = load_recipe(options.recipe) if options.recipe else None
    if options.seeds is not None:
        if recipe is None:
            raise ConfigError("--seeds needs a recipe too: torchrum train RECIPE --seeds N --resume RUN.")
        config = override(recipe, fields)
        runs = {f"seed-{seed}": replace(config, seed=seed) for seed in range(config.seed, config.seed + options.seeds)}
        results = run_sweep(runs, options.resume or free_folder(options.out, config.name), quiet=options.quiet)
        code = max(result.exit_code for result in results)
    elif options.resume is not None:
        config = override(read_config(options.resume), fields)
        code = Trainer(config, quiet=options.quiet).fit(options.resume, resume=True).exit_code
    else:
        assert recipe is not None
        config = override(recipe, fields)
        code = Trainer(config, quiet=options.quiet).fit(free_folder(options.out, config.name)).exit_code
    # a further process that leaves with a code would make the first one be killed before it is done
    return code if os.environ.get("LOCAL_RANK", "0") == "0" else 0
