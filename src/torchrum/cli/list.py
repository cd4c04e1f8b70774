"""``torchrum list`` and ``torchrum list copying-rum``"""

import argparse
import ast
import inspect
import itertools
import statistics
import textwrap
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any


def field_help(cls: type) -> dict[str, str]:
    """The docstring line under each field of a dataclass, its bases included."""
    lines: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                lines[ast.unparse(field.target)] = str(text.value.value)
    return lines


def rows(owner: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """Dotted name, value and meaning of every field of a config."""
    from torchrum.training.overrides import field_names

    helps, table = field_help(type(owner)), []
    for name in field_names(owner):
        value = getattr(owner, name)
        if is_dataclass(value):
            table += rows(value, f"{prefix}{name}.")
        elif name == "options":
            table += [(f"{prefix}{option}", repr(chosen), "option of the layer") for option, chosen in value.items()]
        else:
            table.append((prefix + name, str(value), helps.get(name, "")))
    return table


def ours(results: Path) -> dict[str, str]:
    """Our result of each recipe without overrides: the mean of the metric over the seeds in the ledger."""
    from torchrum.ledger import read_ledger
    from torchrum.recipes import load_recipe

    values: dict[str, list[float]] = {}
    for entry in read_ledger(results):
        if not entry.overrides:
            values.setdefault(entry.recipe, []).append(entry.final[load_recipe(entry.recipe).task.metric])
    return {
        recipe: f"{load_recipe(recipe).task.metric} {statistics.fmean(scores):.4g} ({len(scores)} seeds)"
        for recipe, scores in values.items()
    }


def main(arguments: list[str]) -> int:
    """List."""
    parser = argparse.ArgumentParser(prog="torchrum list", description="List the recipes, or every field of one.")
    parser.add_argument("recipe", nargs="?", help="show the fields of this recipe")
    parser.add_argument("--results", type=Path, default=Path("results"), help="the ledger (default: results)")
    parser.add_argument("--plain", action="store_true", help="tab-separated, for other programs")
    options = parser.parse_args(arguments)

    from rich.console import Console
    from rich.table import Table

    from torchrum.recipes import RECIPES, load_recipe

    if options.recipe:
        columns: tuple[str, ...] = ("field", "value", "meaning")
        content: list[tuple[str, ...]] = [*rows(load_recipe(options.recipe))]
    else:
        columns = ("recipe", "paper", "ours", "about")
        mine = ours(options.results)
        content = []
        for name, recipe in RECIPES.items():
            config = recipe()
            paper = f"{config.paper.text} ({config.paper.where})" if config.paper else ""
            content.append((name, paper, mine.get(name, ""), config.about))
    if options.plain:
        print("\n".join("\t".join(line) for line in (columns, *content)))
        return 0
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for line in content:
        table.add_row(*line)
    console = Console(markup=False)
    console.print(table, width=None if console.is_terminal else 160)
    return 0
