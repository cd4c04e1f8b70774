"""The README keeps its word: its code runs, its links lead somewhere, its commands parse."""

import re
import shlex
from pathlib import Path

import pytest

from torchrum.cli import COMMANDS
from torchrum.lab.recipes import load_recipe
from torchrum.lab.tables import fill_marked
from torchrum.paper.ledger import read_ledger
from torchrum.paper.plots.catalog import gallery
from torchrum.paper.report import headline_table, headlines

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "results" / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "rotation"),  # its playground is no file
    *sorted((ROOT / "src" / "torchrum" / "ops").glob("*/README.md")),
]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def python_blocks() -> list[tuple[int, str]]:
    """First line and text of every Python block."""
    found = re.finditer(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [(README[: match.start(1)].count("\n") + 1, match[1]) for match in found]


def commands() -> list[list[str]]:
    """Words of every line that calls ``torchrum``, comments left out."""
    lines = re.findall(r"^    (?:torchrun .*-m |srun .*?)?(torchrum .*)$", README, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("line, code", python_blocks(), ids=lambda part: str(part) if isinstance(part, int) else "")
def test_python_block_runs(line: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = compile("\n" * (line - 1) + code, "README.md", "exec")  # errors show the README's line
    exec(program, {"__name__": "readme"})


def test_the_swap_comes_first_and_is_short() -> None:
    _, first = python_blocks()[0]
    assert "nn.GRU(" in first
    assert "RUM(" in first
    assert len([line for line in first.splitlines() if line.strip()]) <= 10


def test_commands_exist_and_their_recipes_load() -> None:
    called = commands()
    assert {words[1] for words in called} >= {"list", "train", "eval", "report"}  # the docs have the others
    for words in called:
        assert words[1] in COMMANDS
        if words[1] in ("train", "sweep") and words[2] not in ("RECIPE", "--resume"):
            load_recipe(words[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    here = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    here += re.findall(r'(?:src|srcset)="([^"]+)"', text)
    missing = [link for link in here if link and not (page.parent / link).exists()]
    assert not missing


def test_generated_parts_have_their_places() -> None:
    places = {
        "README.md": ("headline",),
        "docs/results.md": (
            "table copying within 2000000",
            "table copying best 10000",
            "table recall within 600000",
            "table recall best 20000",
            "table babi best",
            "table char",
        ),
        "docs/findings.md": ("table copying paper", "table recall paper", "table babi paper", "table char paper"),
        "docs/benchmarks.md": ("bench gpu", "bench cpu"),
    }
    for page, wanted in places.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        for place in wanted:
            kind = place.split()[0]
            found = re.search(rf"<!-- torchrum:{place} -->\n(.*?)<!-- /torchrum:{kind} -->", text, re.DOTALL)
            assert found is not None, f"{page}: {place}"
            assert found[1].strip(), f"{page}: {place} is empty"


def test_the_headlines_are_those_of_the_ledger() -> None:
    results = ROOT / "results"
    table = headline_table(headlines(read_ledger(results), results)).markdown()
    assert f"<!-- torchrum:headline -->\n{table}<!-- /torchrum:headline -->" in README, "run make pages"


def unfair(table: str) -> list[str]:
    """Rows that compare unequal budgets, or fewer than three seeds of a model, without saying that they are open."""
    found = []
    for line in table.splitlines()[2:]:
        *_, equal, verdict = line.strip("| ").split(" | ")
        fair = re.fullmatch(r"(?:[\d,]+(?: to [\d,]+)? steps|until [^,]+), ([3-9]|\d\d+) seeds each", equal)
        timing = equal.endswith("NVIDIA H200")  # has neither seeds nor training
        if not fair and not timing and not verdict.startswith("open"):
            found.append(line)
    return found


def test_a_row_of_unequal_budgets_or_few_seeds_says_that_it_is_open() -> None:
    start = README.index("<!-- torchrum:headline -->\n") + len("<!-- torchrum:headline -->\n")
    table = README[start : README.index("<!-- /torchrum:headline -->")]
    assert unfair(table) == []
    assert table.count("seeds each") >= 3

    def row(equal: str, verdict: str) -> str:
        return f"head\nrule\n| [recall](x) | 99% (lam=1) | 55% (LSTM) | {equal} | {verdict} |"

    for equal in ("20,000 and 500 steps, 3 seeds each", "20,000 steps, 2 seeds each", "20,000 steps", "3 seeds each"):
        assert unfair(row(equal, "**ahead**")) and not unfair(row(equal, "open: unequal steps")), equal
    assert not unfair(row("20,000 steps, 3 seeds each", "**ahead**"))
    assert unfair(row("20,000 steps, 3 seeds and 1 seed", "**behind**"))


def test_symbols_are_explained_before_they_are_used() -> None:
    """A reader of the first screen knows neither the paper nor its letters."""
    text = re.sub(r"<picture>.*?</picture>", "", README, flags=re.DOTALL)
    for name, explained in {"lam": "keeps the product", "λ": "λ=1 in the picture", "η": "η is `eta`, the"}.items():
        assert text.index(explained) - text.index(name) < 100, name
    assert "calibrated" not in README


def test_the_captions_are_those_of_the_ledger() -> None:
    text = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    entries = read_ledger(ROOT / "results")
    new, count = fill_marked(text, "figure", lambda name: gallery(name, entries, ROOT / "results", "figures"))
    assert count >= 9
    assert new == text, "run make pages"


def test_the_first_screen_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 170
    assert lines.index("## On your data") <= 45  # one sentence, the swap, one picture, one table
    first = README[: README.index("## On your data")]
    assert first.count("<picture>") == 1
    assert 4 <= len(re.findall(r"^\| \[", first, re.MULTILINE)) <= 8


def test_the_headline_links_to_sections_that_are_there() -> None:
    found = re.findall(r"^\| \[[^\]]+\]\(([\w/.-]+)#([\w-]+)\)", README, re.MULTILINE)
    assert found
    for page, anchor in found:
        heads = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in ["-".join(re.sub(r"[^\w\s-]", "", head.lower()).split()) for head in heads], (page, anchor)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"^    make (\w+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_citation_has_its_fields() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for field in ("cff-version", "message", "title", "authors", "license"):
        assert re.search(rf"^{field}: *\S*", text, re.MULTILINE), field
    title = re.search(r'^  title: "(.+)"', text, re.MULTILINE)
    assert title is not None
    assert title[1] in README.replace("{", "").replace("}", "")
    assert re.search(r"^  year: 2019$", text, re.MULTILINE)
