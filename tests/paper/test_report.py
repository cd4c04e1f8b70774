"""The report of the committed ledger: complete, self-contained, escaped; and in a real browser."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from browser import Browser
from drawing import draw_less
from sharing import made_once
from torchrum.cli import main
from torchrum.lab.page import Page, Section, render, write_page
from torchrum.lab.recipes import load_recipe
from torchrum.lab.training import RunError, Trainer, override
from torchrum.paper.ledger import LedgerError, read_ledger
from torchrum.paper.ledger.entries import Entry
from torchrum.paper.ledger.tables import condensed, runs_table, verdicts
from torchrum.paper.plots.catalog import FIGURES, plan
from torchrum.paper.report import (
    Headline,
    Side,
    compared,
    headline_table,
    headlines,
    ledger_page,
    runs_page,
    write_headlines,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """The page of the committed ledger."""

    def write(folder: Path) -> None:
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            draw_less(patch)
            write_page(ledger_page(RESULTS, said.append), folder / "report.html")
        assert {"drawing copying", "drawing char", "drawing rotation"} <= set(said)  # it takes a while

    return made_once(tmp_path_factory, "report", write) / "report.html"


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return read_ledger(RESULTS)


@pytest.fixture(scope="module")
def text(report) -> str:
    return report.read_text(encoding="utf-8")


def test_every_printed_number_and_every_run_is_on_the_page(text, entries):
    for item in verdicts(entries):
        assert f"<code>{item.recipe}</code>" in text or f"<code>{item.family}</code>" in text
    assert text.count(">torchrum train ") >= len(entries)  # the command of every run
    assert all(commit in text for commit in {entry.commit[:10] for entry in entries})


@pytest.mark.slow
def test_the_page_takes_less_than_30_seconds():
    start = time.process_time()
    ledger_page(RESULTS)
    assert time.process_time() - start < 30


def test_tasks_without_a_matched_budget_show_their_tables(text):
    for task, cells in (
        ("babi", ("19 path finding", "minutes of training per seed (NVIDIA H200)")),
        ("char", ("bits per character", "test, ptb.char")),
    ):
        start = text.index(f'<section id="{task}">')
        section = text[start : text.index("</section>", start)]
        assert all(f">{cell}<" in section for cell in cells)


def test_every_figure_that_can_be_drawn_is_on_the_page(text, entries):
    drawn = {drawing.name for name in FIGURES for drawing in plan(name, entries, RESULTS)}
    assert set(re.findall(r'<figure id="figure-([\w-]+)">', text)) == drawn | {"bench"}


def test_the_page_needs_no_network(text):
    linked = re.findall(r'(?:src|href|srcset|action)="([^"]*)"', text)
    assert linked
    assert not [link for link in linked if not link.startswith(("#", "data:"))]
    assert "@import" not in text
    assert "url(" not in re.sub(r'"data:[^"]*"', "", text)


def test_what_was_not_reproduced_is_said(text, entries):
    found = condensed(verdicts(entries))
    start = text.index('<section id="missing">')
    section = text[start : text.index("</section>", start)]
    for item in found:
        assert (f"<code>{item.recipe}</code>" in section) is (item.word in ("not reproduced", "not run")), item.recipe


def test_what_comes_from_the_ledger_is_escaped():
    page = Page("<i>title</i>", "lead & more", [Section("a < b", ["`<script>alert(1)</script>` **<b>**"])])
    html = render(page)
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<strong>&lt;b&gt;</strong>" in html
    assert "<h1>&lt;i&gt;title&lt;/i&gt;</h1>" in html


def test_runs_have_their_costs():
    entry = read_ledger(RESULTS, "recall")[0]
    row = runs_table([replace(entry, wall_seconds=1234.0)]).markdown().splitlines()[-1]
    assert f"| {entry.recipe} |" in row
    assert "| 1,234 |" in row
    assert entry.hardware in row


def test_an_empty_ledger_is_refused(tmp_path):
    with pytest.raises(LedgerError, match="holds no run yet; add one with torchrum record RUN"):
        ledger_page(tmp_path)


def test_headlines_come_from_the_ledger(entries):
    rows = {row.what: row for row in headlines(entries, RESULTS)}
    recall, window = (row for row in rows.values() if row.anchor == "associative-recall")
    lstm, rum = (
        [entry.test["accuracy"] for entry in entries if entry.recipe == f"recall-{name}-fresh-t50"]
        for name in ("lstm", "rum-lam1")
    )
    assert (recall.ours, recall.other) == (f"{fmean(rum):.1%} (lam=1)", f"{fmean(lstm):.1%} (LSTM)")
    assert (recall.equal, recall.verdict) == ("20,000 steps, 3 seeds each", "**ahead**")
    assert min(rum) > max(lstm)
    assert "DeltaNet" in window.other and window.verdict == "**behind**"  # the model that is ahead of us is named
    babi = next(row for what, row in rows.items() if "bAbI" in what)
    assert "(GRU)" in babi.other and babi.verdict == "**ahead**"
    speeds = [row for what, row in rows.items() if what.startswith("train ")]
    assert [row.verdict for row in speeds] == ["**faster**", "**slower**"]
    assert "slowest case" in speeds[1].what  # where RUM is behind the GRU, it is shown
    times = [float(text.partition(" ")[0]) for text in (speeds[1].ours, speeds[1].other)]
    assert times[0] > times[1]
    assert not any("Penn Treebank" in what for what in rows)  # FS-LSTM-2 is not recorded in that recipe
    for row in rows.values():
        assert (ROOT / "docs" / f"{row.page}.md").exists()
    assert headlines([], RESULTS / "nowhere") == []


def test_penn_treebank_is_compared_in_one_recipe(entries):
    (ours,) = [entry for entry in entries if entry.recipe == "char-ptb-fs-rum-2-slim"][:1]
    (other,) = [entry for entry in entries if entry.recipe == "char-ptb-fs-lstm-2-tuned"][:1]
    rest = [entry for entry in entries if not entry.recipe.startswith("char-ptb-fs")]

    def row(seeds: int, recipe: str, bpc: float) -> Headline | None:
        same = [
            *(replace(ours, seed=seed) for seed in range(seeds)),
            *(
                replace(other, seed=s, recipe=recipe, overrides=[], steps=ours.steps, test={"bpc": bpc})
                for s in range(seeds)
            ),
        ]
        return next((row for row in headlines([*rest, *same], RESULTS) if "Penn Treebank" in row.what), None)

    behind = row(3, "char-ptb-fs-lstm-2-constant", 1.15)
    assert (behind.other, behind.verdict) == ("1.150 (FS-LSTM-2)", "**behind**")
    assert behind.equal == "60,950 steps, 3 seeds each"
    assert row(3, "char-ptb-fs-lstm-2-constant", 1.2).verdict == "**ahead**"
    assert row(2, "char-ptb-fs-lstm-2-constant", 1.15).verdict == "open: too few seeds"
    assert row(3, "char-ptb-fs-lstm-2-tuned", 1.15) is None


def test_a_verdict_needs_equal_steps_three_seeds_and_ranges_apart():
    ours = Side("RUM", [0.8, 0.9, 0.85], [100, 100, 100])
    low, near = Side("GRU", [0.6, 0.7, 0.65], [100] * 3), Side("GRU", [0.6, 0.82, 0.65], [100] * 3)
    assert compared(ours, low) == ("100 steps, 3 seeds each", "**ahead**")
    assert compared(low, ours)[1] == compared(ours, low, least=True)[1] == "**behind**"
    assert compared(ours, near)[1] == "**level**"
    unequal = compared(ours, Side("GRU", [0.6, 0.7, 0.65], [50, 100, 100]))
    assert unequal == ("100 and 50 to 100 steps, 3 seeds each", "open: unequal steps")
    few = compared(ours, Side("GRU", [0.6, 0.7], [100, 100]))
    assert few == ("100 steps, 3 seeds and 2 seeds", "open: too few seeds")


def test_headlines_are_written_between_their_markers(tmp_path, entries):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- torchrum:headline -->\nold\n<!-- /torchrum:headline -->\nafter\n")
    assert write_headlines(page, entries, RESULTS)
    assert not write_headlines(page, entries, RESULTS)
    table = headline_table(headlines(entries, RESULTS)).markdown()
    assert page.read_text() == f"before\n<!-- torchrum:headline -->\n{table}<!-- /torchrum:headline -->\nafter\n"
    (tmp_path / "other.md").write_text("nothing")
    with pytest.raises(RunError, match="no markers to write between; put <!-- torchrum:headline --> and"):
        write_headlines(tmp_path / "other.md", entries, RESULTS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two short runs of one task."""
    folder = tmp_path_factory.mktemp("runs")
    tiny = ["task.length=6", "task.train_size=none", "task.validation_size=8", "task.test_size=8", "device=cpu"]
    tiny += ["model.hidden_size=6", "batch_size=4", "steps=4", "eval_every=2"]
    for name in ("recall-rum-lam1-t30", "recall-lstm-t30"):
        Trainer(override(load_recipe(name), tiny), quiet=True).fit(folder / name)
    return sorted(folder.iterdir())


def test_run_folders_have_a_page_of_their_own(runs, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    html = out.read_text(encoding="utf-8")
    figures = ["side-by-side", "kernels", "rotation", "phases", "diagonal"]
    assert sorted(re.findall(r'<figure id="figure-([\w-]+)">', html)) == sorted(figures)
    assert "model.hidden_size" in html
    assert 'class="rum-playground"' in html


def test_a_run_without_scores_has_no_page(runs, tmp_path):
    (tmp_path / "config.json").write_text((runs[0] / "config.json").read_text())
    with pytest.raises(RunError, match="has no validation scores to report yet"):
        runs_page([tmp_path])


@pytest.mark.parametrize("content", ["{}", "[]", '{"command": 3}', "{"])
def test_an_environment_that_is_none_is_named(runs, tmp_path, content, capsys):
    run = Path(shutil.copytree(runs[0], tmp_path / "run"))
    (run / "environment.json").write_text(content)
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "environment.json" in line


def test_names_from_a_run_folder_are_shown_as_they_are(runs, tmp_path):
    name, command = "loss\n\n| two\n<script>alert(1)</script>", "`<img src=x onerror=alert(1)>`"
    run = Path(shutil.copytree(runs[0], tmp_path / "run"))
    metrics, environment = run / "metrics.jsonl", run / "environment.json"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps({**line, name: 0.25}) + "\n" for line in lines))
    environment.write_text(json.dumps({**json.loads(environment.read_text()), "command": ["train", command]}))
    html = render(runs_page([run, runs[1]]))
    assert "<script>alert" not in html and "<img src=x" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;</th>" in html and "<td>0.25</td>" in html


def test_a_call_that_makes_no_sense_is_refused(tmp_path, capsys):
    assert main(["report", "nowhere"]) == 1
    assert "nowhere is not a run folder: it does not exist" in capsys.readouterr().err
    assert main(["report", "runs/x", "--write", "README.md"]) == 2
    assert "leave the run folders out" in capsys.readouterr().err


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_loads_and_fits(browser, report, width, dark):
    browser.problems.clear()
    browser.open(report, width, dark=dark)
    assert browser.problems == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.overflowing() == []
    assert all(browser.evaluate("Array.from(document.images, image => image.naturalWidth)"))
    assert shown_figures(browser) == {"dark" if dark else "light"}


def shown_figures(browser: Browser) -> set[str]:
    return set(
        browser.evaluate("Array.from(document.images).filter(image => image.offsetWidth).map(image => image.className)")
    )


def test_a_dark_page_prints_light(browser, report):
    browser.open(report, dark=True)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert shown_figures(browser) == {"light"}
    widths = "Array.from(document.querySelectorAll('td.word'), cell => cell.scrollWidth - cell.clientWidth)"
    assert max(browser.evaluate(widths)) <= 0  # a verdict is not cut
    pdf = browser.call("Page.printToPDF", printBackground=True)["data"]
    pages = len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(pdf)))
    assert 10 < pages < 60  # of several hundred runs, each in a line or two
    browser.call("Emulation.setEmulatedMedia", media="")


def test_a_table_sorts_by_numbers(browser, report):
    browser.open(report)
    column = """(() => {
      const table = document.querySelector("#runs table");
      const heads = Array.from(table.tHead.rows[0].cells);
      const index = heads.findIndex((head) => head.textContent.startsWith("seconds"));
      if (CLICK) heads[index].click();
      return Array.from(table.tBodies[0].rows).map((row) => Number(row.cells[index].textContent.replace(/,/g, "")));
    })()"""
    before = browser.evaluate(column.replace("CLICK", "false"))
    up = browser.evaluate(column.replace("CLICK", "true"))
    down = browser.evaluate(column.replace("CLICK", "true"))
    assert before != up
    assert up == sorted(before)
    assert down == sorted(before, reverse=True)


def test_rows_that_sum_up_stay_last(browser, report):
    browser.open(report)
    names = browser.evaluate("""(() => {
      const tables = Array.from(document.querySelectorAll("#babi table"));
      const table = tables.find((table) => table.textContent.includes("path finding"));
      table.tHead.rows[0].cells[1].click();
      return Array.from(table.tBodies[0].rows, (row) => row.cells[0].textContent);
    })()""")
    assert not names[0].startswith("1 ")  # it was sorted
    last = [
        "mean",
        "mean, best seed by validation",
        "solved (95% or more)",
        "seeds",
        "minutes of training per seed (NVIDIA H200)",
    ]
    assert names[20:] == last


def test_rows_are_filtered(browser, report):
    browser.open(report)
    shown = browser.evaluate("""(() => {
      const input = document.querySelector("#runs input[type=search]");
      input.value = "recall-lstm";
      input.dispatchEvent(new Event("input"));
      return Array.from(document.querySelectorAll("#runs tbody tr")).filter((row) => !row.hidden)
        .map((row) => row.cells[0].textContent);
    })()""")
    assert shown
    assert all("recall-lstm" in name for name in shown)


def test_a_figure_enlarges_and_closes(browser, report):
    browser.open(report)
    browser.evaluate("document.querySelector('figure .zoom').click()")
    assert browser.evaluate("document.getElementById('zoom').open")
    browser.press("Escape")
    assert not browser.evaluate("document.getElementById('zoom').open")


def numbers(text: str) -> list[float]:
    return [float(part.replace("−", "-")) for part in re.findall(r"[−-]?\d+\.\d+", text)]


@pytest.mark.parametrize("dimensions", [2, 3])
def test_the_playground_turns_as_it_is_dragged(browser, report, dimensions):
    browser.open(report)
    browser.evaluate(f"document.querySelector('[data-dim=\"{dimensions}\"]').click()")
    before = browser.terms()
    x, y = browser.handle("b")
    browser.drag((x, y), (x - 60, y + 45))
    after = browser.terms()
    assert after != before
    assert browser.handle("b") == pytest.approx([x - 60, y + 45], abs=1)
    h, out = numbers(after[-1])
    assert h == out  # a rotation keeps lengths
    browser.evaluate("document.querySelector('.rp-handle[data-name=h]').focus()")
    browser.press("ArrowRight")
    assert browser.terms()[4:] != after[4:]  # and the keyboard moves it too
    assert browser.problems == []


def test_the_playground_computes_what_the_package_does(browser, report):
    import torch

    from torchrum import rotate

    browser.open(report)
    a, b, h = torch.tensor([1.1, 0.2]), torch.tensor([0.35, 1.0]), torch.tensor([0.3, -1.0])  # where it starts
    shown = numbers(browser.terms()[5])
    assert shown == pytest.approx(rotate(a, b, h).tolist(), abs=0.006)


@pytest.mark.slow
def test_runs_of_a_task_of_your_own_are_drawn_and_reported(tmp_path):
    """Their folders import nothing: the command is told where the task is defined."""
    (tmp_path / "own_task.py").write_text(
        "from dataclasses import dataclass, replace\n"
        "from torchrum.lab.recipes import load_recipe\n"
        "from torchrum.lab.tasks import Recall\n"
        "from torchrum.lab.training import override\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Mine(Recall):\n    pass\n"
        "def mine():\n"
        "    config = override(load_recipe('recall-rum-lam1-t30'), ['steps=2', 'eval_every=2', 'batch_size=4',\n"
        "                      'model.hidden_size=6', 'device=cpu'])\n"
        "    task = Mine(length=6, train_size=None, validation_size=8, test_size=8)\n"
        "    return replace(config, name='mine', task=task)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}

    def torchrum(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torchrum", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)

    assert torchrum("train", "own_task:mine", "--out", str(tmp_path / "runs")).returncode == 0
    run = tmp_path / "runs" / "mine"
    assert "name its recipe too" in torchrum("report", str(run)).stderr
    done = torchrum("report", str(run), "--recipe", "own_task:mine", "--out", "page.html")
    assert done.returncode == 0, done.stderr
    assert "figure-phases" in (tmp_path / "page.html").read_text(encoding="utf-8")
