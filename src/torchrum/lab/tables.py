"""Tables: one type with three renderers, scores as their cells, and the generated parts of Markdown files."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import ClassVar, NamedTuple

from torchrum.lab.training.errors import RunError
from torchrum.lab.training.files import read_text, write_atomic

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


def with_best(values: Sequence[float], bests: Sequence[float], name: str) -> str:
    """Format a score over seeds as :func:`spread` does, and add the mean of their best values where it differs."""
    mean = spread([sum(bests) / len(bests)], name)
    return spread(values, name) + ("" if mean == spread([sum(values) / len(values)], name) else f", best {mean}")


def spread(values: Sequence[float], name: str) -> str:
    """Format the mean of a score over seeds and, where they differ, its range."""
    if not values:
        return ""
    form = "{:.2%}" if name == "accuracy" else "{:.4f}"
    mean, ends = form.format(sum(values) / len(values)), span(values, form)
    return mean if mean == ends else f"{mean} ({ends})"


def span(values: Sequence[float], form: str) -> str:
    """Format the range of some values, or the value if they are equal."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def write_marked(path: Path, kind: str, example: str, content: Callable[[str], str | None]) -> bool:
    """Replace the text between the markers of one kind in a file.

    Args:
        path: a Markdown file with ``<!-- torchrum:KIND WORDS -->`` and ``<!-- /torchrum:KIND -->``.
        kind: table, figure, bench or headline.
        example: words to propose where there is nothing to fill; empty for a kind that takes none.
        content: the words of a marker -> the text that belongs there, or None to leave it as it is.

    Returns:
        Whether the file changed.
    """
    old = read_text(path).replace("\r\n", "\n")
    new, count = fill_marked(old, kind, content)
    if not count:
        marker = f"<!-- torchrum:{kind}{' ' + example if example else ''} -->"
        raise RunError(f"{path} has no markers to write between; put {marker} and <!-- /torchrum:{kind} --> in it.")
    if new != old:
        write_atomic(path, new.encode())
    return new != old


def fill_marked(text: str, kind: str, content: Callable[[str], str | None]) -> tuple[str, int]:
    """Replace the content between the markers of one kind; also return how many of them were filled."""
    count = 0

    def filled(match: re.Match[str]) -> str:
        nonlocal count
        new = content(match["words"] or "")
        count += new is not None
        return match[0] if new is None else f"{match['begin']}{new}{match['end']}"

    marked = rf"(?P<begin><!-- torchrum:{kind}(?: (?P<words>[^\n]+?))? -->\n).*?(?P<end><!-- /torchrum:{kind} -->)"
    return re.sub(marked, filled, text, flags=re.DOTALL), count
