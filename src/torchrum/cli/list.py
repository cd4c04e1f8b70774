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


def recipes(results: Path) -> list[tuple[str, ...]]:
    """Name, the paper's number, ours, what it is, and where the paper has it, of every recipe; a set is one line."""
    from torchrum.lab.recipes import FAMILIES, RECIPES
    from torchrum.paper.ledger import headline
    from torchrum.paper.ledger.babi import paper_family, paper_mean

    ours = headline(results)
    table: list[tuple[str, ...]] = []
    first = {members[0]: family for family, members in FAMILIES.items()}
    others = {member for members in FAMILIES.values() for member in members[1:]}
    for name, recipe in RECIPES.items():
        if name in others:
            continue
        config = recipe()
        text, where = (config.paper.text, config.paper.where) if config.paper else ("", "")
        about = config.about
        if name in first:
            name = first[name]
            text, about = (
                paper_family(name).text if paper_mean(name) else "",
                f"bAbI, one model per task: {about.partition(': ')[2]}",
            )
        table.append((name, text, ours.get(name, ""), about, where))
    return table


def families(results: Path) -> list[tuple[str, ...]]:
    """``recipes``, with one line for those that differ in their size alone, which is a column of its own.

    copying-rum stands for copying-rum-t200, -t500 and so on; its numbers are in the order of the sizes.
    """
    from torchrum.lab.recipes import FAMILIES
    from torchrum.paper.ledger import headline

    brief = headline(results, brief=True)
    groups: dict[str, dict[str, tuple[str, ...]]] = {}
    for line in recipes(results):
        name, size = re.fullmatch(r"(.*?)(?:-t(\d+))?", line[0]).groups("")  # type: ignore[union-attr]  # it always fits
        groups.setdefault(name, {})[size] = line
    table: list[tuple[str, ...]] = []
    for name, lines in groups.items():
        sizes = sorted(lines, key=lambda size: int(size or 0))
        *_, about, where = lines[sizes[0]]
        told = [text for text, _ in itertools.groupby(lines[size][1] for size in sizes)]
        paper = joined(told, "; ")
        full = [name] if sizes == [""] else [f"{name}-t{size}" for size in sizes]
        ours = joined([brief.get(recipe, "") for recipe in full], " ")
        shown = f"{len(FAMILIES[name])} tasks" if name in FAMILIES else " ".join(sizes)
        table.append((name, shown, paper, ours, about, where))
    return table


def joined(parts: list[str], mark: str) -> str:
    """The parts in a row, a dash for each that is empty; nothing if all are."""
    return mark.join(part or "-" for part in parts) if any(parts) else ""


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

        if options.all:
            raise ConfigError(f"--all lists the recipes; leave it out to see the fields of {options.recipe}.")
        columns: tuple[str, ...] = ("field", "value", "meaning")
        content: list[tuple[str, ...]] = [*rows(load_recipe(options.recipe))]
    elif options.all or options.plain:
        columns, content = ("recipe", "paper", "ours", "about", "where"), recipes(options.results)
    else:
        columns, content = ("recipe", "sizes", "paper", "ours", "about", "where"), families(options.results)
    if options.plain:
        print("\n".join("\t".join(line) for line in (columns, *content)))
        return 0
    show(columns, content)
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


def show(columns: tuple[str, ...], content: list[tuple[str, ...]]) -> None:
    """Print a table whose names are never cut; a narrow terminal leaves out what recipes are about and where."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160
    width = console.width
    dropped = ("about", "where") if width < 110 else ("where",) if width < 150 else ()  # the last ones
    columns = tuple(name for name in columns if name not in dropped)
    content = [line[: len(columns)] for line in content]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(columns[0], no_wrap=True, min_width=max(len(line[0]) for line in content))
    for name in columns[1:]:
        widest = WIDEST.get(name) if width < 110 and "sizes" in columns else None
        table.add_column(name, overflow="fold", min_width=LEAST.get(name), max_width=widest)
    for line in content:
        table.add_row(*line)
    console.print(table, crop=False)
