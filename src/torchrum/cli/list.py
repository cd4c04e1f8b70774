"""``torchrum list`` and ``torchrum list copying-rum``"""

import ast
import inspect
import itertools
import os
import textwrap
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from torchrum.cli.parsing import Parser


def field_help(cls: type) -> dict[str, str]:
    """The docstring line under each field of a dataclass, its bases included."""
    lines: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                lines[ast.unparse(field.target)] = " ".join(str(text.value.value).split())  # it may be of several lines
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


def recipes(results: Path) -> list[tuple[str, ...]]:
    """Name, the paper's number, ours, what it is, and where the paper has it, of every recipe; a set is one line."""
    from torchrum.ledger import headline
    from torchrum.ledger.babi import paper_mean
    from torchrum.recipes import FAMILIES, RECIPES

    ours = headline(results)
    table: list[tuple[str, ...]] = []
    first = {members[0]: family for family, members in FAMILIES.items()}
    others = {member for members in FAMILIES.values() for member in members[1:]}
    for name, recipe in RECIPES.items():
        if name in others:
            continue
        config = recipe()
        if name in first:
            about = f"bAbI, one model per task: {config.about.partition(': ')[2]}"
            where = config.paper.where if config.paper else ""
            table.append((first[name], paper_mean(first[name]), ours.get(first[name], ""), about, where))
            continue
        text, where = (config.paper.text, config.paper.where) if config.paper else ("", "")
        table.append((name, text, ours.get(name, ""), config.about, where))
    return table


def main(arguments: list[str]) -> int:
    """List."""
    parser = Parser("list", "List the recipes, or every field of one.")
    parser.add_argument("recipe", nargs="?", help="show the fields of this recipe")
    parser.add_argument("--results", type=Path, default=Path("results"), help="the ledger (default: results)")
    parser.add_argument("--plain", action="store_true", help="tab-separated, for other programs")
    options = parser.parse_args(arguments)

    if options.recipe:
        from torchrum.recipes import load_recipe

        columns: tuple[str, ...] = ("field", "value", "meaning")
        content: list[tuple[str, ...]] = [*rows(load_recipe(options.recipe))]
    else:
        columns, content = ("recipe", "paper", "ours", "about", "where"), recipes(options.results)
    if options.plain:
        print("\n".join("\t".join(line) for line in (columns, *content)))
        return 0
    show(columns, content)
    if not options.recipe:
        print(where_ours_comes_from(options.results))
    return 0


def where_ours_comes_from(results: Path) -> str:
    """The note below the list of recipes."""
    if results.is_dir():
        return f"ours is read from the results ledger in {results}; torchrum table shows settings and commands"
    return (
        f"ours is empty: it is read from the results ledger, and {results} is no folder. "
        "Run this in a clone of the project, or pass --results DIR."
    )


def show(columns: tuple[str, ...], content: list[tuple[str, ...]]) -> None:
    """Print a table whose names are never cut; a narrow terminal shows its first columns only."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160
    width = console.width
    shown = 3 if width < 110 else 4 if width < 150 else 5
    columns, content = columns[:shown], [line[:shown] for line in content]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(columns[0], no_wrap=True, min_width=max(len(line[0]) for line in content))
    for name in columns[1:]:
        table.add_column(name, overflow="fold")
    for line in content:
        table.add_row(*line)
    console.print(table, crop=False)
