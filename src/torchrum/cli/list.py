"""``torchrum list`` and ``torchrum data``: the recipes, and the data sets that they read."""

import ast
import inspect
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchrum.cli.parsing import Parser
from torchrum.lab.data.files import CORPORA, Corpus, data_root, fetch_from, read_files, verify
from torchrum.lab.recipes import FAMILIES, RECIPES, load_recipe
from torchrum.lab.tables import spread
from torchrum.lab.training.config import field_names
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.overrides import unknown_name
from torchrum.layers.registry import LAYERS
from torchrum.paper.ledger import read_ledger
from torchrum.paper.ledger.babi import family_headlines, paper_family
from torchrum.paper.ledger.runs import changed_settings, final_loss, score_names, table_rows

Line = dict[str, str]
GROUPS = LAPTOP, PAPER, MORE = ("minutes on a laptop", "paper", "more")
LAPTOP_SECONDS = 15 * 60
"""Training time on a processor up to which a recipe is listed under ``LAPTOP``."""
PLAIN = ("recipe", "paper", "ours", "minutes", "hardware", "about", "where")
SIZES = (
    "Where a recipe has several sizes T, the numbers are listed in that order: copying-rum-t500 is one of them, and "
    "copying-rum is the smallest. The column ours shows the metric of the task, for runs with the recipe's own "
    "settings: for copying the loss over that of a memoryless baseline, for recall and bAbI the accuracy, for text "
    "the bits per character. A number of bAbI with (1k) is from 1,000 training questions; the others are "
    "from 10,000. Minutes are those of training one seed, on the hardware beside them. --all lists every size on a "
    "line of its own, with the range over seeds."
)


def main(arguments: list[str]) -> int:
    """List the recipes, or the fields of one."""
    parser = Parser("list", "List the recipes, or all fields of one.")
    parser.add_argument("recipe", nargs="?", help="show all fields of this recipe")
    parser.share("--results")
    parser.add_argument("--all", action="store_true", help="show every size of a recipe on its own line")
    parser.add_argument("--plain", action="store_true", help="like --all, but tab-separated, for scripts")
    options = parser.parse_args(arguments)
    if options.recipe is not None and options.all:
        parser.error(f"--all lists the recipes; leave it out to see the fields of {options.recipe}")
    if options.recipe is not None:
        header: tuple[str, ...] = ("field", "value", "meaning")
        groups = {"": [dict(zip(header, row, strict=True)) for row in rows(load_recipe(options.recipe))]}
    else:
        header, groups = PLAIN, {group: [] for group in GROUPS}
        for line in recipe_lines(options.results):
            groups[line["group"]].append(line)
        if not options.all and not options.plain:
            header = ("recipe", "sizes", *PLAIN[1:])
            groups = {group: joined_sizes(lines) for group, lines in groups.items()}
    if options.plain:
        lines = [line for group in groups.values() for line in group]
        print("\n".join("\t".join(row) for row in (header, *([line[name] for name in header] for line in lines))))
        return 0
    show(header, groups)
    if options.recipe is None:
        print(fitted(where_ours_comes_from(options.results)))
        if not options.all and options.results.is_dir():
            print(fitted(SIZES))
    return 0


def recipe_lines(results: Path) -> list[Line]:
    """Every recipe with the paper's number, ours and its cost; a set of recipes is one line."""
    entries = read_ledger(results)
    own = [entry for entry in entries if not changed_settings(entry)]
    sets = family_headlines(entries)
    family_of = {member: family for family, members in FAMILIES.items() for member in members}
    lines: dict[str, Line] = {}
    for recipe, build in RECIPES.items():
        name, config = family_of.get(recipe, recipe), build()
        if name in lines:
            continue
        line = dict.fromkeys(("group", "ours", "brief", "minutes", "hardware"), "")
        line |= {"recipe": name, "about": config.about, "where": config.paper.where if config.paper else ""}
        line["paper"] = config.paper.text if config.paper else ""
        runs = [entry for entry in own if family_of.get(entry.recipe, entry.recipe) == name]
        if runs and name not in FAMILIES:
            runs = min(table_rows(runs, runs[0].task), key=final_loss)
        count = len({entry.seed for entry in runs})
        seeds = f", {count} seeds" if count > 1 else ""
        if name in FAMILIES:
            line["paper"] = found.text if (found := paper_family(name)) else ""
            line["about"] = f"bAbI, one model per task: {config.about.partition(': ')[2]}"
            if name in sets:
                line |= {"ours": f"test accuracy {sets[name]}{seeds}", "brief": sets[name].partition(" (")[0]}
        elif runs:
            label, key = next(iter(score_names(runs[0]).items()))
            tested = all(entry.test for entry in runs)
            values = [(entry.test if tested else entry.final)[key] for entry in runs]
            line["ours"] = f"{'test ' * tested}{label} {spread(values, key)}{seeds}"
            line["brief"] = spread([fmean(values)], key)
        if runs:
            seconds = sum(entry.wall_seconds for entry in runs) / count
            hardware = sorted({entry.hardware for entry in runs})
            line |= {"minutes": f"{seconds / 60:.1f}", "hardware": " and ".join(hardware)}
            if seconds <= LAPTOP_SECONDS and not any("NVIDIA" in name for name in hardware):
                line["group"] = LAPTOP
        line["group"] = line["group"] or (PAPER if line["paper"] else MORE)
        lines[name] = line
    groups: dict[str, str] = {}  # the sizes of a recipe stay together
    for name, line in lines.items():
        stem = re.sub(r"-t\d+$", "", name)
        groups[stem] = min(groups.get(stem, MORE), line["group"], key=GROUPS.index)
    return [{**line, "group": groups[re.sub(r"-t\d+$", "", name)]} for name, line in lines.items()]


def joined_sizes(lines: list[Line]) -> list[Line]:
    """Put the recipes that differ only in their size on one line, with their numbers in the order of the sizes."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(re.sub(r"-t\d+$", "", line["recipe"]), []).append(line)
    joined = []
    for name, same in groups.items():
        same.sort(key=_size)
        tasks = len(FAMILIES.get(name, ()))
        sizes = f"{tasks} tasks" if tasks else " ".join(str(_size(line) or "") for line in same)
        paper = _joined([text for text, _ in itertools.groupby(line["paper"] for line in same)], "; ")
        ours, minutes = (_joined([line[key] for line in same], " ") for key in ("brief", "minutes"))
        hardware = " and ".join(dict.fromkeys(line["hardware"] for line in same if line["hardware"]))
        numbers = {"paper": paper, "ours": ours, "minutes": minutes, "hardware": hardware}
        joined.append({**same[0], "recipe": name, "sizes": sizes, **numbers})
    return joined


def _size(line: Line) -> int:
    found = re.search(r"-t(\d+)$", line["recipe"])
    return int(found[1]) if found else 0


def _joined(parts: list[str], mark: str) -> str:
    """Join the parts, with a dash for each that is empty; nothing if all are."""
    return mark.join(part or "-" for part in parts) if any(parts) else ""


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
    """Read the meaning of each option from the docstring of a layer."""
    if layer not in LAYERS:
        return {}
    described = inspect.getdoc(LAYERS[layer].load()) or ""
    arguments = described.partition("Args:\n")[2].partition("\n\n")[0]
    lines: dict[str, str] = {}
    for names, text in re.findall(r"^ {4}(\w[\w, ]*): (.*?)(?=^ {4}\w|\Z)", arguments, re.DOTALL | re.MULTILINE):
        words = re.sub(r"(?::\w+:)?`+(?:~?[A-Za-z_][\w.]*\.)?([^`]*)`+", r"\1", " ".join(text.split()))
        lines |= dict.fromkeys(names.split(", "), words[:1].upper() + words[1:])
    return lines


def rows(owner: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """List dotted name, value and meaning of every field of a config."""
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


def fitted(text: str) -> str:
    """Wrap a text to the width of the terminal; leave it whole in a pipe."""
    return textwrap.fill(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text


def where_ours_comes_from(results: Path) -> str:
    """The note below the list of recipes."""
    if results.is_dir():
        return (
            f"The column ours comes from the results ledger in {results}; torchrum table shows settings and commands."
        )
    return (
        f"The results and times of our own runs are left out: they come from the results ledger, and {results} is not "
        "a folder. Run this in a clone of the project, or pass --results DIR."
    )


LEAST = {"sizes": len("200 500 1000"), "ours": len("0.0012 0.0017 0.0040")}
"""Widths below which a column is not squeezed: three sizes and their numbers stand on one line."""
WIDEST = {"sizes": LEAST["sizes"], "paper": 16}
"""Widths that leave room for that in 80 columns."""


def show(header: Sequence[str], groups: dict[str, list[Line]]) -> None:
    """Print a table whose names are never cut; a narrow terminal leaves out the last columns."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200
    width = console.width
    wide = {"minutes": 110, "hardware": 110, "about": 150, "where": 190}
    found = {name for lines in groups.values() for line in lines for name in header if line[name]}
    columns = [name for name in header if width >= wide.get(name, 0) and name in found]
    grid = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    names = [line[header[0]] for lines in groups.values() for line in lines]
    grid.add_column(columns[0], no_wrap=True, min_width=max(map(len, names)))
    for name in columns[1:]:
        widest = WIDEST.get(name) if width < 110 and "sizes" in columns else None
        grid.add_column(name, overflow="fold", min_width=LEAST.get(name), max_width=widest)
    nothing = "-" if header[0] == "recipe" else ""
    for group, lines in groups.items():
        if group and lines:
            grid.add_row(Text(f"{group}:", style="bold"))
        for line in lines:
            grid.add_row(*(line[name] or nothing for name in columns))
    console.print(grid, crop=False)


DATA = """The data folder is --data-dir, or else $TORCHRUM_DATA, or else $XDG_CACHE_HOME/torchrum (~/.cache/torchrum).
TORCHRUM_OFFLINE=1 forbids downloads. Training downloads what it needs by itself."""


def data(arguments: list[str]) -> int:
    """Show, fetch or verify data sets."""
    parser = Parser(
        "data",
        "Print where the data sets are (path), download or import them (fetch), or check their hashes (verify).",
        epilog=DATA,
    )
    parser.add_argument("action", choices=("path", "fetch", "verify"))
    parser.add_argument("corpus", nargs="?", help="ptb or babi (default: both)")
    origin = "import from this tar, zip or folder instead of downloading"
    parser.add_argument("--from", dest="origin", type=Path, metavar="FILE", help=origin)
    parser.share("--data-dir")
    options = parser.parse_args(arguments)

    if options.corpus is not None and options.corpus not in CORPORA:
        raise unknown_name("data set", options.corpus, CORPORA)
    if options.origin is not None and (options.action != "fetch" or options.corpus is None):
        raise ConfigError("--from imports one data set, so name it: torchrum data fetch babi --from FILE.")
    corpora = [CORPORA[options.corpus]] if options.corpus else list(CORPORA.values())
    return max(_act(options.action, corpus, options.origin) for corpus in corpora)


def _act(action: str, corpus: Corpus, origin: Path | None) -> int:
    """Show, fetch or verify one data set; return the exit code."""
    if action == "path":
        print(data_root() / corpus.name)
        return 0
    if action == "fetch":
        if origin is not None:
            fetch_from(corpus, origin)
        else:
            read_files(corpus.name, [file.path for file in corpus.files])  # a wrong file is an error too
        print(f"{data_root() / corpus.name}: {corpus.title}")
        return 0
    states = verify(corpus)
    for path, state in states.items():
        print(f"{corpus.name}/{path}: {state}")
    return 3 if any(state == "missing" or state.startswith("wrong") for state in states.values()) else 0
