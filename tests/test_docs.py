"""The documentation keeps its word: it builds without a warning, its code runs, its commands exist."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from browser import Browser
from sharing import made_once
from torchrum.cli import COMMANDS
from torchrum.cli.bench import bench_parser
from torchrum.cli.parsing import Parser
from torchrum.cli.train import add_common, choose, split_fields
from torchrum.lab.recipes import FAMILIES, load_recipe
from torchrum.lab.training import override
from torchrum.paper.ledger import read_ledger
from torchrum.paper.plots.catalog import FIGURES, plan

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WIDTH = 86
"""Characters of code that stand side by side in the site's column of text."""
OWN = ("RECIPE", "--resume", "my_recipes:largest")  # stand for a recipe of the reader's


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """First line and text of every fenced block of one language."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text[: match.start(1)].count("\n") + 1, match[1]) for match in found]


WITH_CODE = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_code_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "training":
        pytest.importorskip("pytorch_lightning", reason="its last part is for Lightning: pip install --group docs")
    monkeypatch.chdir(tmp_path)
    module = type(sys)("docs_page")  # pickling and dataclasses look their module up
    monkeypatch.setitem(sys.modules, "docs_page", module)
    for line, code in blocks(page, "python"):
        program = compile("\n" * (line - 1) + code, str(page), "exec")  # errors show the page's line
        exec(program, module.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_fits_the_column_of_text(page: Path) -> None:
    lines = [
        line for name in ("python", "console", "text") for _, code in blocks(page, name) for line in code.splitlines()
    ]
    assert [line for line in lines if len(line) > WIDTH] == []


def test_the_readers_file_of_recipes_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied to a file of its own, without the imports of the blocks before."""
    (code,) = [code for _, code in blocks(DOCS / "training.md", "python") if "def largest()" in code]
    (tmp_path / "my_recipes.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_recipes", raising=False)
    assert load_recipe("my_recipes:largest").name == "largest"


def test_the_guides_have_code() -> None:
    assert {page.stem for page in WITH_CODE} >= {
        "index", "tutorial", "training", "beyond-gru", "rotation", "performance", "extending", "errors", "reproducing",
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist_and_their_recipes_load(page: Path) -> None:
    texts = [text.replace("\\\n", "") for _, text in blocks(page, "console")]  # a command may go on in the next line
    lines = [line for text in texts for line in text.splitlines() if "torchrum" in line]
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        words = words[words.index("torchrum") :] if "torchrum" in words else words
        if words[0] != "torchrum":
            continue
        assert words[1] in COMMANDS, line
        if words[1] in ("train", "sweep") and words[2] not in OWN:
            load_recipe(words[2])


def documented(command: str) -> list[list[str]]:
    """Words of every call of ``torchrum COMMAND`` in any page, in a block or in a sentence."""
    pages = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "results").glob("*.md")]
    texts = [page.read_text(encoding="utf-8").replace("\\\n", "") for page in pages]
    found = {line for text in texts for line in re.findall(rf"torchrum {command} [^`\n|]+", text)}
    return [shlex.split(line, comments=True)[2:] for line in sorted(found)]


def test_trainings_of_every_page_have_such_fields() -> None:
    called = [words for words in documented("train") if words and words[0] not in (*OWN, "my_module:my_recipe")]
    assert len(called) > 70
    for words in called:
        parser = Parser("train", "")
        parser.add_argument("recipe")
        fields, rest = split_fields(words, add_common(parser))
        recipe = parser.parse_args(rest).recipe
        override(load_recipe(recipe), choose(recipe, fields)[1] if recipe in FAMILIES else fields)


def test_timings_of_a_suite_go_to_its_file() -> None:
    called = [bench_parser().parse_args(words) for words in documented("bench") if "--json" in words]
    assert {options.suite for options in called} == {"cpu", "gpu"}
    assert [options for options in called if options.json.stem != options.suite] == []


def test_launchers_are_called_as_the_help_says() -> None:
    from torchrum.cli.train import EPILOG

    lines = [line.strip() for line in EPILOG.splitlines() if line.strip().startswith(("torchrun", "srun"))]
    assert len(lines) == 2
    page = (DOCS / "reproducing.md").read_text(encoding="utf-8")
    for line in lines:
        assert f"\n$ {line}\n" in page


def test_every_command_is_in_the_docs() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "README.md"])
    commands = set(COMMANDS) - {"demo"}  # make demo runs that one
    assert not [name for name in commands if f"torchrum {name}" not in text]


def test_figures_and_the_pages_that_show_them_agree() -> None:
    """Pages show files that are there, and no file is left that no page shows."""
    text = "".join(page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "README.md"])
    shown = set(re.findall(r"figures/([\w-]+\.svg)", text))
    assert {path.name for path in (DOCS / "figures").glob("*.svg")} == shown
    entries = read_ledger(ROOT / "results")
    known = {drawing.name for name in FIGURES for drawing in plan(name, entries, ROOT / "results")}
    assert {name.removesuffix(".svg").removesuffix("-dark") for name in shown} <= known | {
        "bench_gpu",
        "cell",
        "compare",
        "reflections",
    }


@pytest.mark.parametrize(
    "script, page",
    [("latency", "deploying"), ("serve_load", "deploying"), ("scaling", "scaling"), ("onnx_speed", "beyond-gru")],
)
def test_a_page_has_the_table_of_its_record(script: str, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    record = json.loads((ROOT / f"results/bench/{script}.json").read_text(encoding="utf-8"))
    table = importlib.import_module(script).table(record["measured"])
    assert table in (DOCS / f"{page}.md").read_text(encoding="utf-8"), table


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built with warnings as errors."""
    pytest.importorskip("furo", reason="the documentation needs: pip install --group docs")
    options = ["-W", "--keep-going", "-q", "-b", "html"]
    path = os.pathsep.join(
        [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )  # this checkout's package

    def build(folder: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "sphinx", *options, "-d", str(folder / "trees"), str(DOCS), str(folder / "html")],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "site", build) / "html"


def test_the_docs_build_without_a_warning(site: Path) -> None:
    assert {page.stem for page in PAGES} <= {page.stem for page in site.glob("*.html")}
    api = (site / "api.html").read_text(encoding="utf-8")
    assert "Type<" not in api  # a sentence with a colon is not taken for a type
    assert "Return type<" not in api
    assert 'class="rum-playground"' in (site / "rotation.html").read_text(encoding="utf-8")


def test_the_api_page_has_what_the_pages_import(site: Path) -> None:
    api = (site / "api.html").read_text(encoding="utf-8")
    texts = [page.read_text(encoding="utf-8") for page in (*PAGES, ROOT / "README.md")]
    imports = re.findall(r"^from (torchrum[\w.]*) import ([\w, ]+)", "\n".join(texts), re.MULTILINE)
    names = {f"{module}.{name.strip()}" for module, listed in imports for name in listed.split(",")}
    assert len(names) > 20
    assert {name for name in names if f'id="{name}"' not in api} == set()
    for name in ("torchrum.cells.rum.PAPER_OPTIONS", "torchrum.hub.TrainedModel", "torchrum.rl.RUMModule"):
        assert f'id="{name}"' in api


def test_the_site_reads_without_a_network(site: Path) -> None:
    """No script, style, font or image comes from elsewhere; links may lead there."""
    pages = {page.name: page.read_text(encoding="utf-8") for page in site.glob("*.html")}
    loads = re.compile(r"""<(?:script|img|source|iframe|link)\b[^>]*?(?:src|srcset|href)=["'](?:https?:)?//[^"']*""")
    assert {name: found for name, text in pages.items() if (found := loads.findall(text))} == {}
    loads = re.compile(r"(@import|url\()\s*['\"(]*(https?:)?//")
    styles = [path for path in site.rglob("*.css") if loads.search(path.read_text())]
    assert styles == []


def test_every_page_loads_and_fits(site: Path, browser: Browser) -> None:
    for page in PAGES:
        for width, dark in ((390, True), (1440, False)):
            browser.open(site / f"{page.stem}.html", width, dark=dark)
            assert browser.problems == [], page.stem
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, page.stem
            assert browser.overflowing() == [], page.stem
            sizes = browser.evaluate("Array.from(document.images).map(image => image.naturalWidth)")
            assert all(sizes), page.stem


def test_the_theme_button_chooses_the_figures_too(site: Path, browser: Browser) -> None:
    shown = "document.querySelector('picture img').currentSrc"
    for dark, theme, ending in (
        (False, "dark", "-dark.svg"),
        (True, "light", "headline.svg"),
        (True, "auto", "-dark.svg"),
    ):
        browser.open(site / "index.html", dark=dark)
        browser.evaluate(f"document.body.dataset.theme = '{theme}'")
        browser.evaluate("new Promise(done => setTimeout(done, 200))")
        assert browser.evaluate(shown).endswith(ending), theme


def test_the_recall_model_binds_and_finds_in_the_browser(site: Path, browser: Browser) -> None:
    def typed(name: str, text: str) -> None:
        browser.evaluate(
            f"(() => {{ const field = document.querySelector('.rr-{name}'); field.value = '{text}';"
            " field.dispatchEvent(new Event('input')); })()"
        )

    answer = "document.querySelector('.rr-answer').textContent"
    for width in (390, 1440):
        browser.open(site / "rotation.html", width)
        assert browser.evaluate(answer).startswith("d → 7 (")
        typed("pairs", "h1 b5 c9 a2 f4")
        assert not browser.evaluate("document.querySelector('.rr-message').hidden")  # d is no longer there
        typed("key", "c")
        assert browser.evaluate(answer).startswith("c → 9 (") and browser.evaluate(answer).endswith("right")
        told = browser.evaluate("Array.from(document.querySelectorAll('.rr-true')).map(cell => cell.textContent)")
        assert told == list("15924")
        wrong = 0
        browser.evaluate("document.querySelector('[data-erase]').click()")
        for key in "hbcaf":
            typed("key", key)
            wrong += "wrong" in browser.evaluate(answer)
        assert wrong >= 3  # the pairs were in R
        typed("pairs", "a1 a2")
        assert "Each key may stand once" in browser.evaluate("document.querySelector('.rr-message').textContent")
    assert browser.problems == []


def test_tables_of_words_do_not_sort(site: Path, browser: Browser) -> None:
    browser.open(site / "errors.html")
    assert browser.evaluate("document.querySelectorAll('table').length")
    assert not browser.evaluate("document.querySelectorAll('th.sortable').length")


def test_tables_sort_and_the_playground_turns(site: Path, browser: Browser) -> None:
    browser.open(site / "results.html")
    browser.evaluate("document.querySelector('th.sortable').click()")
    assert browser.evaluate("document.querySelector('th.sortable').getAttribute('aria-sort')") == "ascending"
    for width in (390, 1440):
        browser.open(site / "rotation.html", width)
        before = browser.terms()
        x, y = browser.handle("b")
        browser.drag((x, y), (x - 40, y + 30))
        assert browser.terms() != before
        assert browser.handle("b") == pytest.approx((x - 40, y + 30), abs=1)
    assert browser.problems == []
