"""``torchrum train copying-rum --steps 1000`` and ``torchrum sweep recall-rum --grid optimizer.lr=1e-3,1e-4``"""

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrum.cli import complain, is_first
from torchrum.cli.parsing import Parser, with_text
from torchrum.lab.recipes import FAMILIES, RECIPES, load_recipe
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.distributed import leave_together
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.evaluation import best_look
from torchrum.lab.training.files import first_run_inside
from torchrum.lab.training.overrides import override
from torchrum.lab.training.run_folder import CONFIG, read_config
from torchrum.lab.training.sweep import grid, run_sweep, search
from torchrum.lab.training.trainer import Trainer
from torchrum.paper.ledger.babi import trained_table

EPILOG = """Every field of the recipe can be set: --steps 1000, or --set steps=1000. Nested fields have dotted names:
--task.delay 200 --model.lam 1 --optimizer.clip 1. torchrum list RECIPE shows all fields. A recipe of your own is
given as MODULE:FUNCTION. babi-rum and similar recipes train one model per task; --task 7 or --task 1,2,3 selects tasks.

To train in several processes, pass --devices 2. With torchrun or SLURM, pass the same counts to both:
  torchrun --nproc-per-node 2 -m torchrum train RECIPE --devices 2
  srun --nodes 2 --ntasks-per-node 8 torchrum train RECIPE --devices 8 --nodes 2"""

MOST_RUNS = 10_000


def split_fields(arguments: list[str], options: list[argparse.Action]) -> tuple[list[str], list[str]]:
    """Take ``--steps 1000 --task.delay=200`` out of the arguments: the assignments to fields, and the rest.

    argparse would take the 1000 after an unknown option for the recipe.
    """
    own = {name: action for action in options for name in action.option_strings}
    fields: list[str] = []
    kept: list[str] = []
    words = [*arguments]
    while words:
        word = words.pop(0)
        if word == "--":  # no option follows
            return fields, [*kept, word, *words]
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in own or name == "--help":
            kept.append(word)
            if name in own and not equals and own[name].nargs != 0 and words:
                kept.append(words.pop(0))
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"{name} needs a value: {name} VALUE.")
            value = words.pop(0)
        fields.append(f"{name[2:].replace('-', '_')}={value}")
    return fields, kept


def add_common(parser: Parser) -> list[argparse.Action]:
    """Add the options that train and sweep share."""
    add = parser.add_argument
    at_once, field = "number of trainings to run at the same time (default: 1)", "set a field of the recipe"
    return [
        add("--out", type=Path, help="parent folder of the runs (default: runs)"),
        add("--resume", type=Path, metavar="FOLDER", help="resume the run, or the runs of a sweep, in this folder"),
        add("--seeds", type=int, metavar="N", help="train N times, with the seeds seed, seed + 1, ..."),
        add("--jobs", type=int, default=1, metavar="N", help=at_once),
        add("--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields", help=field),
        add("--quiet", action="store_true", help="do not show progress"),
        *parser.share("--data-dir", "--data"),
    ]


def main(arguments: list[str]) -> int:
    """Train a recipe, a set of recipes, or several seeds; or resume a run."""
    parser = Parser(
        "train",
        "Train a recipe, or resume a run.",
        epilog=EPILOG,
        usage="torchrum train RECIPE [--FIELD VALUE ...] [--out DIR] [--seeds N]\n       torchrum train --resume RUN",
    )
    parser.add_argument("recipe", nargs="?", help="a name from torchrum list, or MODULE:FUNCTION")
    fields, rest = split_fields(arguments, add_common(parser))
    options = parser.parse_args(rest)
    options.fields += fields
    check_counts(options)
    if options.recipe is None and options.resume is None:
        raise ConfigError("train needs a recipe, or --resume RUN; torchrum list shows the recipes.")
    if options.jobs > 1 and options.seeds is None and options.recipe not in FAMILIES:
        raise ConfigError("--jobs needs several trainings: add --seeds N, or name a set such as babi-rum.")
    recipe = load_recipe(options.recipe) if options.recipe is not None else None
    if options.recipe in FAMILIES:
        return run(train_family, options.recipe, options)
    if options.seeds is not None:
        if recipe is None:
            raise ConfigError("--seeds needs a recipe too: torchrum train RECIPE --seeds N --resume RUN.")
        return run(train_all, configured(recipe, options), [], options)
    if options.resume is not None:
        return run(resume_run, recipe, options)
    assert recipe is not None
    config = with_text(override(recipe, options.fields), options.data)
    trainer = Trainer(config, quiet=options.quiet, on_end=draw)
    return run(lambda: trainer.fit(chosen_folder(options, config.label), rename=True).exit_code)


def sweep(arguments: list[str]) -> int:
    """Train over seeds, a grid, or a search."""
    parser = Parser(
        "sweep",
        "Train a recipe over several seeds, a grid of values, or a search. To resume a sweep, run the same command "
        "with --resume FOLDER.",
        epilog="Set the other fields as for torchrum train: --steps 1000.",
    )
    parser.add_argument("recipe", help="a name from torchrum list, or MODULE:FUNCTION")
    own, add = add_common(parser), parser.add_argument
    grid_help, search_help = "values to train with; several --grid are combined", "range to search, or FIELD=A,B,..."
    own += [
        add("--grid", action="append", default=[], metavar="FIELD=A,B,...", help=grid_help),
        add("--trials", type=int, metavar="N", help="search with Optuna, training N times"),
        add("--search", action="append", default=[], metavar="FIELD=LOW:HIGH[:log]", help=search_help),
        add("--storage", metavar="URL", help="study that several machines share: a database, journal:// or grpc://"),
    ]
    fields, rest = split_fields(arguments, own)
    options = parser.parse_args(rest)
    options.fields += fields
    check_counts(options)
    if members := FAMILIES.get(options.recipe):
        raise ConfigError(
            f"{options.recipe} is a set of {len(members)} recipes, and a sweep takes one, such as {members[0]}; "
            f"to train the set with several seeds: torchrum train {options.recipe} --seeds N."
        )
    config = configured(load_recipe(options.recipe), options)
    folder, new = chosen_folder(options, config.label), options.resume is None
    if options.trials is None and not options.search and options.storage is None:
        if not (options.seeds or options.grid):
            raise ConfigError(
                "a sweep needs --seeds N, --grid FIELD=A,B or --trials N with --search; to train once: "
                f"torchrum train {options.recipe}"
            )
        return run(train_all, config, options.grid, options)
    if options.grid or options.seeds or not (options.trials and options.search):
        raise ConfigError("a search needs --trials N and --search FIELD=LOW:HIGH, and no --grid or --seeds.")
    if options.jobs > 1:
        raise ConfigError(
            "a search learns from each training before it begins the next; leave --jobs out. To search in several "
            "processes, start the command once for each, with one --storage."
        )
    trials, storage = options.trials, options.storage
    return run(search, config, options.search, trials, folder, options.quiet, draw, rename=new, storage=storage)


def run(train: Callable[..., int], *arguments: Any, **options: Any) -> int:
    """Train, and leave together with the other processes of a launcher; the exit code."""
    code = train(*arguments, **options)
    leave_together()
    # launchers kill the first process as soon as another one exits with an error code
    return code if is_first() else 0


def configured(recipe: TrainConfig, options: argparse.Namespace) -> TrainConfig:
    """The config of the options; the runs in the folder ``--resume`` must be of its recipe."""
    config = override(recipe, options.fields)
    check_resumed(options.resume, [config.name])
    return with_text(config, options.data)


def train_all(config: TrainConfig, choices: list[str], options: argparse.Namespace) -> int:
    """Train over a grid and ``--seeds``, or resume such a sweep; the exit code."""
    runs, new = grid(config, choices, options.seeds or 1), options.resume is None
    folder = chosen_folder(options, config.label)
    results = run_sweep(runs, folder, options.quiet, draw, rename=new, jobs=options.jobs)
    return max(result.exit_code for result in results)


def resume_run(recipe: TrainConfig | None, options: argparse.Namespace) -> int:
    """Resume the one run in the folder ``--resume``, which must be of the recipe if one is given; the exit code."""
    folder = options.resume
    if not (folder / CONFIG).exists() and (found := first_run_inside(folder, CONFIG)):
        raise ConfigError(
            f"{folder} contains several runs. To resume them all, run the command that started them with --resume "
            f"{folder}; to resume one: torchrum train --resume {found}"
        )
    config = with_text(override(read_config(folder), options.fields), options.data)
    named = [field for field in options.fields if field.partition("=")[0].strip() == "name"]
    if recipe is not None and (name := override(recipe, named).name) != config.name:
        raise ConfigError(
            f"{folder} is a run of {config.name}, not of {name}; leave the recipe out, or add --name "
            f"{shlex.quote(config.name)} if it is one of that name."
        )
    trainer = Trainer(config, quiet=options.quiet, on_end=draw)
    return trainer.fit(chosen_folder(options, config.label), resume=True).exit_code


def check_counts(options: argparse.Namespace) -> None:
    """Refuse a number of runs below 1 or above ``MOST_RUNS``."""
    for name in ("seeds", "trials", "jobs"):
        count = getattr(options, name, None)
        if count is not None and not 1 <= count <= MOST_RUNS:
            limit = "at least 1" if count < 1 else f"at most {MOST_RUNS:,}"
            raise ConfigError(f"--{name} is {count}, but it must be {limit}.")


def check_resumed(folder: Path | None, names: Sequence[str]) -> None:
    """Refuse to resume a sweep in a folder that is missing, is a single run, or has runs of other recipes."""
    if folder is None:
        return
    if not folder.is_dir():
        raise ConfigError(f"--resume {folder} is not a folder; leave --resume out to start a new run.")
    if (folder / CONFIG).exists():
        raise ConfigError(f"{folder} is a single run; resume it with: torchrum train --resume {folder}")
    run = first_run_inside(folder, CONFIG)
    if run is not None and (name := read_config(run).name) not in names:
        wanted = names[0] if len(names) == 1 else f"{names[0]} and so on"
        raise ConfigError(f"{folder} contains runs of {name}, not of {wanted}; leave --resume out to start new ones.")


def chosen_folder(options: argparse.Namespace, label: str) -> Path:
    """Choose where to train: the folder ``--resume``, or one named ``label`` in ``--out``.

    ``--out`` beside ``--resume`` may only repeat where the folder is, as in the command that started the runs.
    """
    folder, out = options.resume, options.out
    if folder is None:
        return (out or Path("runs")) / label
    if out is not None and out.resolve() not in (folder.resolve(), *folder.resolve().parents):
        raise ConfigError(
            f"--out {out} does not contain {folder}, and a resumed run stays in its folder; leave --out out, or "
            "--resume to start a new run there."
        )
    return folder


def draw(run: Path) -> None:
    """Draw the curve of a finished run; report a failure without failing the run."""
    try:
        from torchrum.paper.plots.run import draw_curve
    except ImportError as error:
        complain(f"the curve of {run} was not drawn: {error}")
        return
    try:
        draw_curve(run)
    except RunError as error:
        complain(f"the curve of {run} was not drawn: {error}")
    except OSError as error:
        complain(f"the curve of {run} was not drawn: {error.strerror}; draw it later with: torchrum figure {run}")


def choose(name: str, fields: list[str]) -> tuple[list[str], list[str]]:
    """The members of a set that ``task=7`` or ``task=1,2`` among the fields asks for, and the other fields."""
    members = {member.removeprefix(f"{name}-qa"): member for member in FAMILIES[name]}
    keys = [field.partition("=")[0].strip() for field in fields]
    for key, instead in (("task.task", "--task 7 selects a task"), ("name", "--out DIR names the folder")):
        if key in keys:
            raise ConfigError(f"--{key} would be the same for every model of {name}; {instead}.")
    asked = [field.partition("=")[2] for field, key in zip(fields, keys, strict=True) if key == "task"]
    others = [field for field, key in zip(fields, keys, strict=True) if key != "task"]
    if not asked:
        return list(members.values()), others
    tasks = [part.strip() for part in asked[-1].split(",")]
    for task in tasks:
        if task not in members:
            raise ConfigError(f"--task is {asked[-1]!r}, but {name} has the tasks 1 to {len(members)}.")
    return [members[task] for task in dict.fromkeys(tasks)], others


def train_family(name: str, options: argparse.Namespace) -> int:
    """Train the members that were asked for, each in its folder, and print their test scores beside the paper's."""
    members, fields = choose(name, options.fields)
    check_resumed(options.resume, FAMILIES[name])
    runs, places = {}, {}
    for extra in range(options.seeds or 1):
        for member in members:
            config = with_text(override(RECIPES[member](), fields), options.data)
            config = replace(config, seed=config.seed + extra)
            label = member.removeprefix(f"{name}-")
            label = label if options.seeds is None else f"seed-{config.seed}/{label}"
            runs[label], places[label] = config, (config.seed, int(member.rpartition("-qa")[2]))
    new = options.resume is None
    results = run_sweep(runs, chosen_folder(options, name), options.quiet, rename=new, jobs=options.jobs)
    code = max(result.exit_code for result in results)
    interrupted = len(results) < len(runs) or any(result.stopped.startswith("SIG") for result in results)
    if interrupted or not is_first():  # the test set is scored only when its run is done
        return code
    scores: dict[int, dict[int, float]] = {}
    for result, (seed, task) in zip(results, places.values(), strict=True):
        if result.stopped != "diverged":
            look = best_look(result.folder)
            scores.setdefault(seed, {})[task] = look.scores["accuracy"]
    tasks = [task for _, task in places.values()]
    provenance = [config.task.provenance() for config in runs.values()]
    print(trained_table(name, tasks, scores, provenance).markdown())
    return code
