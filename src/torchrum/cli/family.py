"""Train a set of recipes, such as babi-rum: one model per task, and one table."""

import argparse
from collections.abc import Iterable
from dataclasses import replace


def choose(name: str, fields: list[str]) -> tuple[list[str], list[str]]:
    """The members of a set that ``task=7`` or ``task=1,2`` among the fields asks for, and the other fields."""
    from torchrum.lab.recipes import FAMILIES
    from torchrum.lab.training.errors import ConfigError

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


def train_family(name: str, fields: list[str], options: argparse.Namespace) -> int:
    """Train the members that were asked for, each in its folder, and print their test scores beside the paper's."""
    from torchrum.cli import is_first
    from torchrum.cli.data import with_text
    from torchrum.cli.train import check_count, check_resumed, chosen_folder
    from torchrum.lab.recipes import FAMILIES, RECIPES
    from torchrum.lab.training import override, run_sweep
    from torchrum.lab.training.evaluation_log import best_look
    from torchrum.paper.ledger.babi import Column, babi_table

    members, fields = choose(name, fields)
    check_count("seeds", options.seeds)
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
    if interrupted or not is_first():  # a test set is looked at when its run is done
        return code
    scores: dict[int, dict[int, float]] = {}
    for result, (seed, task) in zip(results, places.values(), strict=True):
        if result.stopped != "diverged":
            look = best_look(result.folder)
            scores.setdefault(seed, {})[task] = look.scores["accuracy"]
    tasks = sorted({task for _, task in places.values()})
    print(babi_table([Column(name, name, scores, paper=True)], tasks))
    rule = "the checkpoint that was best on validation, of equal ones the earliest"
    print(f"- Test accuracy in % of {rule}; {seeds(scores)}.")
    for note in sorted({config.task.provenance() for config in runs.values()} - {""}):
        print(f"- {note[0].upper()}{note[1:]}.")
    return code


def seeds(numbers: Iterable[int]) -> str:
    """The seeds of the runs in words."""
    listed = sorted(numbers)
    return f"seed{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
