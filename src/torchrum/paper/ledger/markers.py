"""Generated parts of a Markdown file: each between two comments, the first of which says what to show.

<!-- torchrum:table copying -->                  every run
<!-- torchrum:table babi best -->                of each model the best setting
<!-- torchrum:table copying best 10000 -->       of each model the best setting within these steps, and beyond
<!-- torchrum:table copying within 2000000 -->   every model after 2,000,000 / T steps, and notes
<!-- torchrum:table copying paper -->            the paper's numbers beside ours, with verdicts
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torchrum.lab.training.files import MAX_BYTES, read_bytes, write_atomic
from torchrum.paper.ledger.notes import comparison_section
from torchrum.paper.ledger.schema import Entry, LedgerError
from torchrum.paper.ledger.table import table
from torchrum.paper.ledger.verdicts import verdict_table, verdicts


def write_marked(path: Path, kind: str, example: str, content: Callable[[str], str | None]) -> bool:
    """Replace what stands between the markers of one kind; says whether the file changed.

    Args:
        path: a Markdown file with ``<!-- torchrum:KIND WORDS -->`` and ``<!-- /torchrum:KIND -->``.
        kind: table, figure, bench or headline.
        example: words to propose where there is nothing to fill; empty for a kind that takes none.
        content: the words of a marker -> the text that belongs there, or None to leave it as it is.
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
    """``text`` with new content between the markers of one kind, and how many of them were filled."""
    count = 0

    def filled(match: re.Match[str]) -> str:
        nonlocal count
        new = content(match["words"] or "")
        count += new is not None
        return match[0] if new is None else f"{match['begin']}{new}{match['end']}"

    marked = rf"(?P<begin><!-- torchrum:{kind}(?: (?P<words>[^\n]+?))? -->\n).*?(?P<end><!-- /torchrum:{kind} -->)"
    return re.sub(marked, filled, text, flags=re.DOTALL), count


def write_tables(path: Path, entries: Sequence[Entry]) -> bool:
    """Make the tables of a file anew from the ledger; says whether the file changed."""
    return write_marked(path, "table", "copying", lambda words: marked_table(words, entries))


def marked_table(words: str, entries: Sequence[Entry]) -> str:
    """The table that the words of a marker ask for, with an empty line before and after it."""
    match words.split():
        case [task]:
            text = table(entries, task)
        case [task, "paper"]:
            text = verdict_table(verdicts(entries, task))
        case [task, "best"]:
            text = table(entries, task, sys.maxsize)
        case [task, "best", number] if number.isdecimal():
            text = table(entries, task, int(number))
        case [task, "within", number] if number.isdecimal():
            text = comparison_section(entries, task, int(number))
        case _:
            raise LedgerError(
                f"there is no table {words!r}; write <!-- torchrum:table TASK -->, or after TASK one of: best, best "
                "STEPS, within BUDGET, paper."
            )
    return f"\n{text}\n"
