"""Figures in a page of Markdown, between ``<!-- torchrum:figure NAME -->`` and its end."""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from torchrum.paper.ledger.markers import write_marked
from torchrum.paper.ledger.schema import Entry, LedgerError, read_ledger
from torchrum.paper.plots.catalog import FIGURES

IMAGE = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}-dark.svg">
  <img src="{folder}/{name}.svg" alt="{caption}">
</picture>
"""


def write_gallery(page: Path, results: Path, folder: Path) -> bool:
    """Put figures and captions between the markers of a page; says whether it changed.

    Args:
        page: a Markdown file of the documentation.
        results: the ledger, from which the captions come.
        folder: where the figures lie.
    """
    entries, place = read_ledger(results), os.path.relpath(folder, page.parent)
    return write_marked(page, "figure", "recall", lambda name: gallery(name, entries, results, place))


def gallery(name: str, entries: Sequence[Entry], results: Path, folder: str) -> str:
    """The figures of one name, light and dark, with caption and command; says so where there is no run yet."""
    if name not in FIGURES:
        raise LedgerError(f"no figure {name!r}; there are: {', '.join(FIGURES)}.")
    parts = []
    for drawing in FIGURES[name](entries, results):
        parts.append(IMAGE.format(folder=folder, name=drawing.name, caption=escape(drawing.caption)))
        parts.append(f"{drawing.caption}\n")
    parts.append(f"`torchrum figure {name}`\n" if parts else f"No run recorded for `torchrum figure {name}` yet.\n")
    return "\n" + "\n".join(parts) + "\n"
