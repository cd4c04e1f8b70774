"""The little Markdown that the tables of the ledger and of the benchmark are written in, as blocks for a template."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

Inline = list[tuple[str, str]]
"""Pieces of a line: ``("code", ...)``, ``("strong", ...)`` or ``("text", ...)``."""

PIECE = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*")


@dataclass(frozen=True)
class Table:
    """A table; every cell is inline text."""

    header: list[Inline]
    rows: list[list[Inline]]
    kind: str = "table"


@dataclass(frozen=True)
class Items:
    """A list."""

    items: list[Inline]
    kind: str = "items"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    pieces: Inline
    kind: str = "text"


@dataclass(frozen=True)
class Picture:
    """A figure in both themes, as data URIs, with its caption and the command that draws it."""

    name: str
    light: str
    dark: str
    caption: str
    command: str = ""
    kind: str = "picture"


@dataclass(frozen=True)
class Playground:
    """The rotation playground."""

    kind: str = "playground"


Block = Table | Items | Text | Picture | Playground


def inline(text: str) -> Inline:
    """Split a line into text, code and strong text."""
    pieces: Inline = []
    place = 0
    for found in PIECE.finditer(text):
        if found.start() > place:
            pieces.append(("text", text[place : found.start()]))
        pieces.append(("code", found[1]) if found[1] is not None else ("strong", found[2]))
        place = found.end()
    return [*pieces, ("text", text[place:])] if place < len(text) else pieces


def blocks(text: str) -> Iterator[Block]:
    """Blocks of a text: tables, lists, paragraphs."""
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        lines = [line for line in part.splitlines() if line.strip()]
        if not lines:
            continue
        if all(line.startswith("|") for line in lines):
            header, _, *rows = [cells(line) for line in lines]
            yield Table(header, rows)
        elif all(line.startswith("- ") for line in lines):
            yield Items([inline(line[2:]) for line in lines])
        else:
            yield Text(inline(" ".join(lines)))


def cells(line: str) -> list[Inline]:
    """The cells of one line of a table."""
    return [inline(cell.strip()) for cell in line.strip().strip("|").split(" | ")]
