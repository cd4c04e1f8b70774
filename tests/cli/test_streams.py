"""What the shell does to input and output: closed streams, encodings that lack a letter, empty texts."""

import io
import os
import sys

import pytest

from lab.training.processes import start
from torchrum.cli import COMMANDS, main, open_streams


def close_and_run(arguments: list[str], *handles: int) -> None:
    """In a process of its own: run a command as a shell does that has closed some of the streams 0, 1 and 2."""
    for handle in handles:
        os.close(handle)
        setattr(sys, ("stdin", "stdout", "stderr")[handle], None)
    sys.exit(main(arguments))


@pytest.mark.parametrize(
    "arguments, handles, code",
    [
        (["--version"], (1,), 0),
        (["--help"], (0, 1, 2), 0),
        (["train", "--help"], (1,), 0),
        (["train", "--seeds", "x"], (2,), 2),
    ],
)
def test_a_closed_stream_is_no_failure_of_its_own(arguments, handles, code):
    process = start(close_and_run, arguments, *handles)
    process.join(60)
    assert process.exitcode == code


def close_and_open(path: str) -> None:
    os.close(2)
    sys.stderr = None
    open_streams()
    sys.exit(os.open(path, os.O_CREAT))


def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path):
    process = start(close_and_open, str(tmp_path / "x"))
    process.join(60)
    assert process.exitcode > 2


def test_letters_that_the_terminal_cannot_show_are_written_out(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["λ\udcff"]) == 2
    stream.flush()
    assert stream.buffer.getvalue().startswith(b"torchrum: no command '\\u03bb\\udcff'")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_call_that_cannot_be_parsed_is_one_line(name, capsys):
    assert main([name, "one", "two", "three", "--data-dir"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("torchrum: ") and error.endswith(f"see torchrum {name} --help.\n")


@pytest.mark.parametrize(
    "arguments",
    [["train", "x", "--out", ""], ["eval", ""], ["record", ""], ["table", "--results="], ["eval", "x", "--data", ""]],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_current_folder(arguments, capsys):
    assert main(arguments) == 2
    assert "it is empty; name a file or a folder, or . for the current one" in capsys.readouterr().err
