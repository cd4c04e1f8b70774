"""A self-contained HTML page of texts, tables and figures, from one template."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from torchrum import __version__
from torchrum.lab.plot_style import Figure, save_themes
from torchrum.lab.tables import Table, html_flags, html_text
from torchrum.lab.training.files import write_atomic


@dataclass(frozen=True)
class Items:
    """A list of texts."""

    items: Sequence[str]
    kind: ClassVar = "items"


@dataclass(frozen=True)
class Picture:
    """A figure in both themes, as data URIs, with its caption and the command that draws it."""

    name: str
    light: str
    dark: str
    caption: str
    command: str = ""
    kind: ClassVar = "picture"


@dataclass(frozen=True)
class Playground:
    """The rotation playground."""

    kind: ClassVar = "playground"


Block = str | Items | Table | Picture | Playground
"""A text is a paragraph; it may have `` `code` `` and ``**strong**`` parts."""


@dataclass(frozen=True)
class Section:
    """A heading with the blocks below it."""

    title: str
    blocks: Sequence[Block]
    key: str = ""
    """Address on the page; made from the title if empty."""

    @property
    def anchor(self) -> str:
        """The part of the address after #."""
        words = "".join(letter if letter.isalnum() else " " for letter in (self.key or self.title).lower())
        return "-".join(words.split())


@dataclass(frozen=True)
class Page:
    """Everything on one page."""

    title: str
    lead: str
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]] = field(default_factory=tuple)
    """Name and value, shown below the lead."""


def picture(name: str, draw: Callable[[], Figure], caption: str, command: str = "") -> Picture:
    """Draw a figure in both themes and keep it as data URIs."""
    with tempfile.TemporaryDirectory() as folder:
        files = [path.read_text(encoding="utf-8") for path in save_themes(draw, Path(folder) / name)]
    # escaped text is smaller than base64, and srcset ends at a bare space
    light, dark = ("data:image/svg+xml," + quote(file, safe="()/:;=,.-_'!*~@&?+$") for file in files)
    return Picture(name, light, dark, caption, command)


def render(page: Page) -> str:
    """Render the page as HTML; texts from the ledger are escaped."""
    environment = Environment(
        loader=PackageLoader("torchrum.lab.page", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {  # each escapes the text it is given
        "inline": lambda text: Markup(html_text(text)),
        "flags": lambda text: Markup(html_flags(text)),
        "rows": lambda table: Markup(table.html()),
    }
    assets = resources.files("torchrum.lab.page") / "assets"
    styles, scripts = (
        [Markup(assets.joinpath(name).read_text(encoding="utf-8")) for name in names]  # as they are
        for names in (("page.css", "playground.css"), ("sortable.js", "playground.js", "page.js"))
    )
    return environment.get_template("page.html").render(page=page, styles=styles, scripts=scripts, version=__version__)


def write_page(page: Page, path: Path) -> Path:
    """Write the page; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, render(page).encode())
    return path
