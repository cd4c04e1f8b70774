"""What the shell does to input and output: closed streams, encodings that lack a letter, empty texts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrum.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
TORCHRUM = [sys.executable, "-m", "torchrum"]
LIGHT = "import sys; sys.argv = ['bin/torchrum']"  # the command imports torch only where it needs it


def run(command: str) -> subprocess.CompletedProcess[bytes]:
    """A command line of a shell, with ``torchrum`` in it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    line = command.replace("torchrum", " ".join(TORCHRUM), 1)
    return subprocess.run(["sh", "-c", line], env=environment, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    "command, code",
    [
        ("torchrum --version >&-", 0),
        ("torchrum --help <&- >&- 2>&-", 0),
        ("torchrum train --help >&-", 0),
        ("torchrum train --seeds x 2>&-", 2),
        ("torchrum --version > /dev/full", 1),
    ],
)
def test_a_closed_stream_is_no_failure_of_its_own(command, code):
    done = run(command)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    assert not done.stdout


def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path):
    (tmp_path / "child.py").write_text(
        f"{LIGHT}; import os; from torchrum.cli import open_streams; open_streams(); print(os.open('x', os.O_CREAT))"
    )
    line = f'"{sys.executable}" child.py 2>&-'
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(["sh", "-c", line], env=environment, cwd=tmp_path, capture_output=True, timeout=60)
    assert int(done.stdout) > 2


def test_letters_that_the_terminal_cannot_show_are_written_out():
    code = LIGHT + "; from torchrum.cli import open_streams; open_streams(); print('\\u03bb \\udcff')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60)
    assert done.stdout == b"\\u03bb \\udcff\n", done.stderr


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
