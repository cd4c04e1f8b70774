"""Tests of recipes/recall.py: the demonstration."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from torchrum.cells.rum import RELU_OPTIONS
from torchrum.cli import main
from torchrum.lab.recipes.recall import demo


def test_both_models_have_one_task_and_one_budget():
    rum, lstm = demo("rum"), demo("lstm")
    assert rum.task == lstm.task
    assert (rum.steps, rum.batch_size, rum.optimizer) == (lstm.steps, lstm.batch_size, lstm.optimizer)
    assert rum.model.hidden_size == lstm.model.hidden_size
    assert rum.model.options == {**RELU_OPTIONS, "lam": 1}


def test_the_demo_trains_both_and_compares_them(tmp_path, capsys):
    assert main(["demo", "--steps", "20", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "a3d7b1c0??d -> 7" in printed
    assert "RUM λ=1" in printed
    assert "LSTM" in printed
    assert "38.4%" in printed
    following = printed.partition("Where to go next\n")[2].splitlines()
    assert " compare mydata.csv  " in following[0]
    assert len({re.search(r"\S  +(?=\w)", line).end() for line in following}) == 1  # the meanings are aligned
    assert (tmp_path / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "demo" / "report.html"
    assert str(page) in printed.replace("\n", "")
    assert "<h1>torchrum demo</h1>" in page.read_text(encoding="utf-8")
    for model in ("rum", "lstm"):
        assert json.loads((tmp_path / "demo" / f"demo-{model}" / "result.json").read_text())["step"] == 20


@pytest.mark.slow
def test_an_interrupted_demo_leaves_no_process(tmp_path):
    command = [sys.executable, "-m", "torchrum", "demo", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    metrics = tmp_path / "demo" / "demo-lstm" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"interrupted" in errors
    assert gone(process.pid, within=30)


def gone(group: int, within: float) -> bool:
    """Whether a process group has no member; those of multiprocessing itself leave a moment after their parent."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_rum_learns_and_the_lstm_does_not(tmp_path):
    start = time.monotonic()
    assert main(["demo", "--out", str(tmp_path)]) == 0
    seconds = time.monotonic() - start
    accuracy = {
        model: json.loads((tmp_path / "demo" / f"demo-{model}" / "result.json").read_text())["scores"]["accuracy"]
        for model in ("rum", "lstm")
    }
    assert accuracy["rum"] == 1
    assert accuracy["lstm"] < 0.5  # the plateau is 0.384
    assert seconds < 180
