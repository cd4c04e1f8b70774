"""Tables: one type with three renderers."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import ClassVar, NamedTuple

PIECE = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*")
MARKS = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": r"\|", "[": r"\[", "]": r"\]"})
LONG_CODE = 40
"""Characters of code beyond which a page may break it."""


class Link(NamedTuple):
    """A cell that links to a page."""

    text: str
    target: str


@dataclass(frozen=True)
class Table:
    """Rows of cells below a header, with the text around them.

    Texts may have `` `code` `` and ``**strong**`` parts; everything else is shown as it is, in every format.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str | Link]]
    title: str = ""
    """A line above the table."""
    caption: str = ""
    """A paragraph below it."""
    notes: Sequence[str] = ()
    """A list below it."""
    right: Collection[int] = ()
    """Numbers of the columns that are aligned to the right."""
    kind: ClassVar = "table"

    def markdown(self) -> str:
        """Render as Markdown; the text ends with a newline."""
        rule = ["---:" if column in self.right else "---" for column in range(len(self.header))]
        lines = [markdown_text(self.title), ""] if self.title else []
        cells = [[markdown_text(text) for text in row] for row in (self.header, *self.rows)]
        lines += ["| " + " | ".join(row) + " |" for row in (cells[0], rule, *cells[1:])]
        lines += ["", markdown_text(self.caption)] if self.caption else []
        lines += ["", *(f"- {markdown_text(note)}" for note in self.notes)] if self.notes else []
        return "\n".join([*lines, ""])

    def html(self) -> str:
        """Render as HTML, without title and notes."""
        head, *body = (
            "".join(f"<{tag}>{html_text(cell)}</{tag}>" for cell in row)
            for row, tag in [(self.header, "th"), *((row, "td") for row in self.rows)]
        )
        lines = [f"<thead><tr>{head}</tr></thead>", "<tbody>", *(f"<tr>{cells}</tr>" for cells in body), "</tbody>"]
        return "\n".join(["<table>", *lines, "</table>"])

    def text(self) -> str:
        """Render as plain text in aligned columns, without title and notes."""
        rows = [[plain_text(cell) for cell in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sides = [">" if column in self.right else "<" for column in range(len(widths))]
        lines = (
            "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)


def markdown_tables(tables: Iterable[Table]) -> str:
    """Render several tables as Markdown, with an empty line between them."""
    return "\n".join(table.markdown() for table in tables)


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """Split a text into its ``code``, ``strong`` and ``plain`` parts."""
    place = 0
    for found in PIECE.finditer(text):
        if found.start() > place:
            yield "plain", text[place : found.start()]
        yield ("code", found[1]) if found[1] is not None else ("strong", found[2])
        place = found.end()
    if place < len(text):
        yield "plain", text[place:]


def markdown_text(text: str | Link) -> str:
    """Render a text in Markdown: no HTML, no further column, no link, no second line."""
    if isinstance(text, Link):
        return f"[{markdown_text(text.text)}]({text.target})"
    shown = {
        "code": lambda part: "`" + part.replace("|", r"\|") + "`",
        "strong": lambda part: f"**{part.translate(MARKS)}**",
        "plain": lambda part: part.translate(MARKS),
    }
    return "".join(shown[kind](part) for kind, part in pieces(" ".join(text.split())))


def html_text(text: str | Link) -> str:
    """Render a text in HTML; a long code may break before its flags."""
    if isinstance(text, Link):
        return f'<a href="{escape(text.target)}">{html_text(text.text)}</a>'
    return "".join(_html_piece(kind, part) for kind, part in pieces(text))


def _html_piece(kind: str, part: str) -> str:
    if kind == "code":
        opening = '<code class="long">' if len(part) > LONG_CODE else "<code>"
        return f"{opening}{html_flags(part)}</code>"
    return f"<strong>{escape(part)}</strong>" if kind == "strong" else escape(part)


def html_flags(command: str) -> str:
    """Render a command in HTML; each flag stays on one line."""
    words = (escape(word) for word in command.split(" "))
    return " ".join(f'<span class="flag">{word}</span>' if word.startswith("--") else word for word in words)


def plain_text(text: str | Link) -> str:
    """Drop the marks of code and strong text."""
    return "".join(part for _, part in pieces(text.text if isinstance(text, Link) else text))


def code(text: str) -> str:
    """Mark a text as code; a backtick, which would end it, becomes an apostrophe."""
    return "`" + " ".join(text.split()).replace("`", "'") + "`"
