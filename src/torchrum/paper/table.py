"""Scores over seeds as cells of a table, and the generated parts of Markdown files that hold tables."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from torchrum.lab.training.files import MAX_BYTES, read_bytes, write_atomic
from torchrum.paper.ledger.schema import LedgerError


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
    try:
        old = read_bytes(path, MAX_BYTES).decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise LedgerError(f"{path} cannot be read: {reason}.") from error
    new, count = fill_marked(old, kind, content)
    if not count:
        marker = f"<!-- torchrum:{kind}{' ' + example if example else ''} -->"
        raise LedgerError(f"{path} has no markers to write between; put {marker} and <!-- /torchrum:{kind} --> in it.")
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
