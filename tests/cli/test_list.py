"""``torchrum list``: recipes with the paper's numbers, ours and their cost, and the fields of one recipe."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from paper.ledger.test_tables import LSTM, RUM, entry
from torchrum.cli import main
from torchrum.cli.list import GROUPS, recipe_lines
from torchrum.lab.recipes import FAMILIES, RECIPES
from torchrum.paper.ledger.entries import write_entry

ROOT = Path(__file__).parents[2]
TINY = "lab.training.tiny:tiny"


@pytest.mark.parametrize("width", [None, "80"])
def test_list_shows_recipes_and_fields(width, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", width)
    assert main(["list", "--plain", "--results", "/nonexistent"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["recipe", "paper", "ours", "minutes", "hardware", "about", "where"]
    assert [
        "copying-rum-t200",
        "solved, loss near 0",
        "",
        "",
        "",
        "RUM, lam 0, no time normalization",
        "Figure 2",
    ] in lines
    assert main(["list", TINY, "--plain"]) == 0
    fields = dict(line.split("\t")[:2] for line in capsys.readouterr().out.splitlines())
    assert fields["task.length"] == "4"
    assert fields["optimizer.lr"] == "0.01"
    assert main(["list", TINY]) == 0
    assert "Steps of a sequence." in capsys.readouterr().out
    assert main(["list", "recall-rum-lam1-t30", "--plain"]) == 0
    options = {line.split("\t")[0]: line.split("\t")[1:] for line in capsys.readouterr().out.splitlines()}
    assert options["model.activation"][0] == "relu"
    assert options["model.lam"][1].startswith("Exponent of the accumulated rotation R. 0 keeps none")
    assert options["model.update_bias_init"][1].startswith("Initial value of b_u in the paper's form")
    assert options["model.gate_scale"][1].endswith("Only in form 'paper'. Default: 1.0.")


def listed() -> set[str]:
    """Names that ``list`` shows: sets, and the recipes that are in none."""
    return set(RECIPES) - {member for members in FAMILIES.values() for member in members} | set(FAMILIES)


def test_list_says_where_ours_comes_from(tmp_path, capsys, monkeypatch):
    assert main(["list", "--results", str(ROOT / "results")]) == 0
    assert (
        f"The column ours comes from the results ledger in {ROOT / 'results'}"
        in capsys.readouterr().out.splitlines()[-2]
    )
    monkeypatch.chdir(tmp_path)  # outside a clone
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["list"]) == 0
    header, *_, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["recipe", "sizes", "paper", "about", "where"]
    assert "they come from the results ledger, and results is not a folder." in last
    assert "pass --results DIR" in last


@pytest.mark.parametrize("width", [40, 80, 120, 160, 200])
def test_list_never_cuts_a_name(width, capsys, monkeypatch):
    """A user copies it from there."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes it a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["list", "--results", str(ROOT / "results")]) == 0
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    words, header = printed.split(), printed.splitlines()[0].split()
    assert {re.sub(r"-t\d+$", "", name) for name in listed()} <= set(words)
    assert {"200", "500", "1000", "20", "tasks"} <= set(words)
    shown = [name in header for name in ("minutes", "hardware", "about", "where")]
    assert shown == [width >= 110, width >= 110, width >= 150, width >= 190]


def test_list_in_a_pipe_has_room_for_every_column(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["list", "--results", str(ROOT / "results")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == "recipe sizes paper ours minutes hardware about where".split()
    assert 160 < max(len(line) for line in lines[:-2]) <= 200  # the notes below are one line each


def test_list_shows_sizes_and_sets_on_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list", "--results", str(ROOT / "results")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 120 and max(map(len, lines[:-2])) <= 80
    (copying,) = (line for line in lines if line.startswith("copying-rum "))
    brief = {line["recipe"]: line["brief"] for line in recipe_lines(ROOT / "results")}
    scores = [brief[f"copying-rum-t{size}"] for size in (200, 500, 1000)]
    assert copying.split()[1:4] == ["200", "500", "1000"] and copying.split()[-3:] == scores
    (babi,) = (line for line in lines if line.startswith("babi-rum "))
    assert babi.split()[1:3] == ["20", "tasks"] and babi.rstrip().endswith(brief["babi-rum"])
    assert main(["list", "--all", "--results", str(ROOT / "results")]) == 0
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].strip()}
    assert listed() <= names


def test_list_has_groups_with_time_and_hardware(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["list", "--results", str(ROOT / "results")]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = [[line.strip() for line in lines].index(f"{group}:") for group in GROUPS]
    names = ("char-rum", "copying-rum", "copying-urnn")
    shown = [next(number for number, line in enumerate(lines) if line.startswith(f"{name} ")) for name in names]
    assert at[0] < shown[0] < at[1] < shown[1] < at[2] < shown[2]
    assert re.search(r" 1\.7 1\.4 3\.0 +NVIDIA H200 ", lines[shown[1]])


def test_list_tells_our_score_of_each_recipe(tmp_path):
    worse = entry("recall-lstm-t30", 0, loss=2.0, accuracy=0.2)
    better = replace(LSTM, overrides=["compile=true", "eval_every=50"])
    tuned = replace(entry("recall-lstm-t30", 0, loss=0.5, accuracy=0.9), overrides=["optimizer.lr=0.01"])
    elsewhere = replace(entry("recall-lstm-t30", 0, loss=0.1, accuracy=1.0), overrides=["task.length=20"])
    elsewhere = replace(elsewhere, baseline=elsewhere.config().task.baseline())
    for item in (*RUM, worse, better, tuned, elsewhere):  # the last two are not what the recipe runs
        write_entry(tmp_path, item)
    found = {line["recipe"]: (line["ours"], line["brief"]) for line in recipe_lines(tmp_path) if line["ours"]}
    assert found == {
        "recall-rum-lam1-t30": ("accuracy 99.00% (98.00% to 100.00%), 3 seeds", "99.00%"),
        "recall-lstm-t30": ("accuracy 25.00%", "25.00%"),
    }
