"""The place of tables in a README: between two comments, the first of which says what to show.

<!-- torchrum:table copying -->                  every run
<!-- torchrum:table copying best 10000 -->       of each model the best setting within these steps, and beyond
<!-- torchrum:table copying within 2000000 -->   every model after 2,000,000 / T steps, and notes
<!-- torchrum:table copying paper -->            the paper's numbers beside ours, with verdicts
"""

import re
from collections.abc import Sequence
from pathlib import Path

from torchrum.ledger.notes import comparison_section
from torchrum.ledger.schema import Entry, LedgerError
from torchrum.ledger.table import table
from torchrum.ledger.verdicts import verdict_table, verdicts
from torchrum.training.files import write_atomic

MARKED = re.compile(
    r"(<!-- torchrum:table (\S+)(?: (best|within|paper)(?: (\d+))?)? -->\n)(.*?)(<!-- /torchrum:table -->)", re.DOTALL
)


def fill_tables(text: str, entries: Sequence[Entry]) -> str:
    """``text`` with every table between its markers made anew from the ledger."""

    def filled(match: re.Match[str]) -> str:
        task, kind, number = match.group(2, 3, 4)
        if kind == "within":
            text = comparison_section(entries, task, int(number))
        elif kind == "paper":
            text = verdict_table(verdicts(entries, task))
        else:
            text = table(entries, task, int(number) if number else None)
        return f"{match[1]}\n{text}\n{match[6]}"

    return MARKED.sub(filled, text)


def write_tables(path: Path, entries: Sequence[Entry]) -> bool:
    """Make the tables of a file anew; says whether the file changed."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}.") from error
    if not MARKED.search(text):
        raise LedgerError(
            f"{path} has no place for a table; put <!-- torchrum:table copying --> and <!-- /torchrum:table --> in it."
        )
    filled = fill_tables(text, entries)
    if filled != text:
        write_atomic(path, filled.encode())
    return filled != text
