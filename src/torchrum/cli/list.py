"""``torchrum list`` and ``torchrum list copying-rum``"""

import ast
import inspect
import itertools
import os
import re
import shutil
import sys
import textwrap
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrum.cli.parsing import Parser

if TYPE_CHECKING:
    from torchrum.paper.table import Table


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


def option_help(layer: str) -> dict[str, str]:
    """What the docstring of a layer says about each of its options; those of RUM are explained at its cell."""
    from torchrum import RUMCell
    from torchrum.layers.registry import LAYERS

    if layer not in LAYERS:
        return {}
    described = inspect.getdoc(RUMCell if layer == "rum" else LAYERS[layer].load()) or ""
    arguments = described.partition("Args:\n")[2].partition("\n\n")[0]
    lines: dict[str, str] = {}
    for names, text in re.findall(r"^ {4}(\w[\w, ]*): (.*?)(?=^ {4}\w|\Z)", arguments, re.DOTALL | re.MULTILINE):
        words = re.sub(r"(?::\w+:)?`+(?:~?[\w.]*\.)?([^`]*)`+", r"\1", " ".join(text.split()))
        lines |= dict.fromkeys(names.split(", "), words[:1].upper() + words[1:])
    return lines


def rows(owner: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """Dotted name, value and meaning of every field of a config."""
    from torchrum.lab.training.config import field_names

    helps, table = field_help(type(owner)), []
    for name in field_names(owner):
        value = getattr(owner, name)
        if is_dataclass(value):
            table += rows(value, f"{prefix}{name}.")
        elif name == "options":
            meanings = option_help(owner.layer)
            for option, chosen in value.items():
                table.append((f"{prefix}{option}", str(chosen), meanings.get(option, "An option of the layer.")))
        else:
            table.append((prefix + name, str(value), helps.get(name, "")))
    return table


def main(arguments: list[str]) -> int:
    """List."""
    parser = Parser("list", "List the recipes, or all fields of one.")
    parser.add_argument("recipe", nargs="?", help="show all fields of this recipe")
    parser.add_results()
    parser.add_argument("--all", action="store_true", help="show every size of a recipe on its own line")
    parser.add_argument("--plain", action="store_true", help="like --all, but tab-separated, for scripts")
    options = parser.parse_args(arguments)

    if options.recipe is not None:
        from torchrum.lab.recipes import load_recipe
        from torchrum.lab.training.errors import ConfigError
        from torchrum.paper.table import Table

        if options.all:
            raise ConfigError(f"--all lists the recipes; leave it out to see the fields of {options.recipe}.")
        table = Table(("field", "value", "meaning"), rows(load_recipe(options.recipe)))
    else:
        from torchrum.paper.ledger.tables import recipe_table, short_recipe_table

        table = (recipe_table if options.all or options.plain else short_recipe_table)(options.results)
    if options.plain:
        print("\n".join("\t".join(map(str, line)) for line in (table.header, *table.rows)))
        return 0
    show(table)
    if options.recipe is None:
        print(fitted(where_ours_comes_from(options.results)))
        if not options.all:
            print(fitted(SIZES))
    return 0


SIZES = (
    "Where a recipe has several sizes T, the numbers are listed in that order: copying-rum-t500 is one of them, and "
    "copying-rum is the smallest. The column ours shows the metric of the task, for runs with the recipe's own "
    "settings: for copying the loss over that of a memoryless baseline, for recall and bAbI the accuracy, for text "
    "the bits per character. A number of bAbI with (1k) is from 1,000 training questions; the others are "
    "from 10,000. --all lists every size on a line of its own, with the range over seeds."
)


def fitted(text: str) -> str:
    """Wrapped between words to the terminal's width; whole in a pipe."""
    return textwrap.fill(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text


def where_ours_comes_from(results: Path) -> str:
    """The note below the list of recipes."""
    if results.is_dir():
        return (
            f"The column ours comes from the results ledger in {results}; torchrum table shows settings and commands."
        )
    return (
        f"The column ours is empty: it comes from the results ledger, and {results} is not a folder. "
        "Run this in a clone of the project, or pass --results DIR."
    )


LEAST = {"sizes": len("200 500 1000"), "ours": len("0.0012 0.0017 0.0040")}
"""Widths below which a column is not squeezed: three sizes and their numbers stand on one line."""
WIDEST = {"sizes": LEAST["sizes"], "paper": 16}
"""Widths that leave room for that in 80 columns."""


def show(table: "Table") -> None:
    """Print a table whose names are never cut; a narrow terminal leaves out what recipes are about and where."""
    from rich import table as rich_table
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160
    width = console.width
    dropped = ("about", "where") if width < 110 else ("where",) if width < 150 else ()  # the last ones
    columns = [name for name in table.header if name not in dropped]
    content = [[str(cell) for cell in line[: len(columns)]] for line in table.rows]
    grid = rich_table.Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column(columns[0], no_wrap=True, min_width=max(len(line[0]) for line in content))
    for name in columns[1:]:
        widest = WIDEST.get(name) if width < 110 and "sizes" in columns else None
        grid.add_column(name, overflow="fold", min_width=LEAST.get(name), max_width=widest)
    for line in content:
        grid.add_row(*line)
    console.print(grid, crop=False)
