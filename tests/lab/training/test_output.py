"""Output may break, training may not. Tests of training/progress.py."""

import errno
import io
import json
import os
import sys
import time

import pytest

from lab.training.processes import run_command, start
from torchrum.cli import complain, main
from torchrum.lab.training.progress import Lenient

TRAIN = ["train", "lab.training.tiny:tiny", "--steps", "24", "--log_every", "1", "--eval_every", "2", "--out"]


@pytest.fixture
def full():
    with open("/dev/full", "w") as file:
        yield file


def test_a_full_standard_error_does_not_end_a_sweep(tmp_path):
    process = start(run_command, [*TRAIN, str(tmp_path), "--seeds", "2"], "/dev/full")
    process.join(60)
    assert process.exitcode == 0
    assert json.loads((tmp_path / "tiny" / "seed-1" / "result.json").read_text())["step"] == 24


def test_a_pipe_that_closes_does_not_end_a_run(tmp_path):
    """As ``torchrum train ... 2>&1 | head -1``."""
    os.mkfifo(tmp_path / "pipe")
    process = start(run_command, [*TRAIN, str(tmp_path)], str(tmp_path / "pipe"))
    with open(tmp_path / "pipe") as pipe:
        assert pipe.readline().startswith("tiny")
    process.join(60)
    assert process.exitcode == 0
    assert json.loads((tmp_path / "tiny" / "result.json").read_text())["step"] == 24


def test_a_closed_terminal_saves_and_leaves(tmp_path):
    """The kernel sends SIGHUP, and whatever is written to the terminal from then on fails."""
    ours, theirs = os.openpty()
    arguments = ["train", "lab.training.tiny:longer", "--out", str(tmp_path)]
    process = start(run_command, arguments, os.ttyname(theirs), True)
    run = tmp_path / "longer"
    os.set_blocking(ours, False)
    while not (run / "checkpoints" / "index.json").exists():
        assert process.is_alive()
        drain(ours)
        time.sleep(0.02)
    os.close(theirs)
    os.close(ours)
    process.join(60)
    assert process.exitcode == 129
    last = json.loads((run / "checkpoints" / "index.json").read_text())["last"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert int(last.removeprefix("step-")) >= lines[-1]["step"]  # saved at the end, not at the last regular moment


def drain(handle):
    """Read what a terminal shows, or the one who writes there waits."""
    try:
        while os.read(handle, 65536):
            pass
    except BlockingIOError:
        pass


def test_a_stream_that_fails_falls_silent(full):
    stream = Lenient(full)
    stream.write("x" * 100_000)
    stream.flush()
    stream.write("more")
    stream.flush()
    assert stream.fileno() == full.fileno()
    full.flush()  # what was buffered goes nowhere
    closed = io.StringIO()
    closed.close()
    Lenient(closed).write("x")


def test_an_error_that_nobody_can_read_keeps_its_exit_code(full, monkeypatch):
    monkeypatch.setattr(sys, "stderr", full)
    assert main(["trian"]) == 2
    complain("once more")


def test_an_error_is_one_line_without_commands_for_the_terminal(capsys):
    complain("a name\nwith \x1b[31mcolour\r and a \x00")
    assert capsys.readouterr().err == "torchrum: a name with \\x1b[31mcolour and a \\x00\n"


def test_a_full_standard_output_is_one_line(full, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", full)
    assert main(["list", "--plain", "--results", "/nonexistent"]) == 1
    assert capsys.readouterr().err == f"torchrum: the output cannot be written: {os.strerror(errno.ENOSPC)}.\n"
