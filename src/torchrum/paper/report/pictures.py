"""Figures inside a page, as data URIs in both themes."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from torchrum.paper.ledger.schema import Entry
from torchrum.paper.plots.catalog import FIGURES
from torchrum.paper.plots.style import Figure, save_themes
from torchrum.paper.report.blocks import Picture


def pictures(name: str, entries: Sequence[Entry], results: Path) -> list[Picture]:
    """Every figure of one name that the ledger has runs for."""
    command = f"torchrum figure {name}"
    return [
        picture(drawing.name, drawing.draw, drawing.caption, command) for drawing in FIGURES[name](entries, results)
    ]


def picture(name: str, draw: Callable[[], Figure], caption: str, command: str = "") -> Picture:
    """Draw a figure and keep it as text."""
    with tempfile.TemporaryDirectory() as folder:
        light, dark = (uri(path) for path in save_themes(draw, Path(folder) / name))
    return Picture(name, light, dark, caption, command)


def uri(path: Path) -> str:
    """An SVG file as a data URI; escaped text is smaller than base64. Spaces are escaped too: srcset ends at them."""
    return "data:image/svg+xml," + quote(path.read_text(encoding="utf-8"), safe="()/:;=,.-_'!*~@&?+$")
