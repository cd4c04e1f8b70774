"""The page: sections of tables, figures and words, rendered from one template."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from torchrum import __version__
from torchrum.lab.training.files import write_atomic
from torchrum.paper.report.blocks import Block


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: Sequence[Block]
    key: str = ""
    """Of its address on the page; made from the title if empty."""

    @property
    def anchor(self) -> str:
        """The part of the address behind #."""
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


@cache
def _template() -> Environment:
    return Environment(
        loader=PackageLoader("torchrum.paper.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def asset(name: str) -> Markup:
    """A script or style sheet of the package, to stand in the page as it is."""
    return Markup(resources.files("torchrum.paper.report").joinpath("assets", name).read_text(encoding="utf-8"))


def render(page: Page) -> str:
    """The page as HTML; whatever comes from the ledger is escaped."""
    template = _template().get_template("page.html")
    styles = [asset(name) for name in ("page.css", "playground.css")]
    scripts = [asset(name) for name in ("sortable.js", "playground.js", "page.js")]
    return template.render(page=page, styles=styles, scripts=scripts, version=__version__)


def write_page(page: Page, path: Path) -> Path:
    """Write the page; says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, render(page).encode())
    return path
