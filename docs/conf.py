"""Sphinx: ``make docs`` builds docs/_build/html; the tests build it with warnings as errors."""

import base64
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes

from torchrum import __version__
from torchrum.lab.trained import RECALL

project = "torchrum"
author = "The torchrum developers"
copyright = "2026, The torchrum developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # generated tables begin with a smaller heading

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the Args of a docstring say it in words, with shapes
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"torchrum {release}"
html_static_path = ["_static", "../src/torchrum/lab/page/assets"]  # the playground and the sorting are the report's
html_css_files = ["torchrum.css"]
html_js_files = ["sortable.js", "figures.js", "flags.js"]
pygments_style = "a11y-light"
pygments_dark_style = "github-dark"  # the default underlines names as if they were links
highlight_language = "none"  # fences name theirs; equations in docstrings are no Python
smartquotes_action = "qe"  # quotes and dots, not dashes: notes name flags, as in --steps 5000
html_copy_source = False
html_show_search_summary = False  # a page that is opened as a file cannot fetch the others
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#b34a00", "color-brand-content": "#0067a3"},
    "dark_css_variables": {"color-brand-primary": "#ff9a5c", "color-brand-content": "#6cc0f0"},
}


def copy_figures(app: Any, error: Exception | None) -> None:
    """Pages show figures in plain HTML, which a code host renders too; Sphinx copies only what its own markup names."""
    if error is None:
        shutil.copytree(Path(app.srcdir) / "figures", Path(app.outdir) / "figures", dirs_exist_ok=True)


def write_weights(app: Any) -> None:
    """Give the recall demonstration its weights: a page that is opened as a file may read scripts alone."""
    (weights,) = RECALL.glob("checkpoints/step-*/model.safetensors")
    content = base64.b64encode(weights.read_bytes()).decode()
    folder = Path(app.outdir) / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recall_weights.js").write_text(f'const RUM_RECALL = "{content}";\n')


def keep_sentences(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put an empty comment before the sentence about an attribute: napoleon takes words before a colon for its type."""
    if what == "attribute":
        lines[:0] = ["..", ""]


def keep_together(app: Any, tree: Any, name: str) -> None:
    """No line ends between a number and its percent sign, nor within T = 200."""
    for text in [*tree.findall(nodes.Text)]:
        if not isinstance(text.parent, nodes.literal | nodes.literal_block):
            joined = re.sub(r"(?<=\d) (?=%)|(?<=\b\w) (?== \d)|(?<=\b\w =) (?=\d)", "\N{NO-BREAK SPACE}", text)
            if joined != text:
                text.parent.replace(text, nodes.Text(joined))


def setup(app: Any) -> None:
    app.connect("doctree-resolved", keep_together)
    app.connect("autodoc-process-docstring", keep_sentences, priority=100)  # before napoleon
    app.connect("builder-inited", write_weights)
    app.connect("build-finished", copy_figures)
