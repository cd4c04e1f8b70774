"""``torchrum compare``: what it prints, and what it refuses."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from torchrum.cli import main
from torchrum.lab.compare import run


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random walk, one row per day."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "plan_steps", lambda *_: 3)
    days = np.arange("2024-01-01", "2025-01-01", dtype="datetime64[D]")
    walk = np.random.default_rng(0).normal(size=len(days)).cumsum()
    path = tmp_path / "walk.csv"
    path.write_text("day,level\n" + "".join(f"{day},{level:.3f}\n" for day, level in zip(days, walk, strict=True)))
    return path


def test_guesses_table_verdict_and_page_are_printed(table, capsys):
    assert main(["compare", str(table), "--minutes", "5"]) == 0
    said = capsys.readouterr().out
    guesses, rest = said.split("everything is written to runs/walk\n")
    assert 'time: "day", since it holds dates' in guesses
    assert 'kind: forecasting, since "level" is numeric' in guesses
    assert "RUM lam=1, window" in rest and "last value" in rest
    assert "\nNo recurrent model beats the last value; none is worth it here.\n" in rest  # nothing is better on a walk
    assert rest.endswith("The page: runs/walk/report.html\n")
    assert (table.parent / "runs/walk/report.html").exists()
    assert (table.parent / "runs/walk/best.safetensors").exists()


def test_ctrl_c_keeps_what_was_done_and_says_how_to_go_on(table, capsys, monkeypatch):
    add = run.add_training

    def interrupt(folder: Path, row: run.Finished) -> None:
        add(folder, row)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run, "add_training", interrupt)
    assert main(["compare", str(table), "--kind", "forecasting", "--minutes", "5"]) == 130
    said = capsys.readouterr().out
    assert said.endswith("To go on: torchrum compare --resume runs/walk\n")
    assert len(run.read_trainings(Path("runs/walk"))) >= 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name the data, such as mydata.csv, or a folder to --resume"),
        (["walk.csv", "--resume", "runs/walk"], "--resume has the data and the settings in its folder"),
        (["--resume", "runs/walk", "--kind", "tagging"], "--resume has the data and the settings in its folder"),
        (["--resume", "nowhere"], "nowhere is not a folder of torchrum compare: it has no problem.pt."),
        (["missing.csv"], "missing.csv cannot be read: No such file or directory."),
        (["walk.csv", "--target", "levle"], 'walk.csv has no column "levle" for --target; did you mean "level"?'),
        (["walk.csv", "--minutes", "0"], "minutes is 0; it must be a positive number."),
    ],
)
def test_wrong_calls_have_one_line_and_change_nothing(table, capsys, arguments, message):
    assert main(["compare", *arguments]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1 and message in said.err
    assert [path.name for path in table.parent.iterdir()] == ["walk.csv"]
