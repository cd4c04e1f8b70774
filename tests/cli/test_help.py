"""Help of the command line: every command has it, and words are not broken."""

import subprocess
import sys

import pytest

from torchrum.cli import COMMANDS, main, usage


def help_of(command: list[str], capsys, monkeypatch, columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*command, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=lambda command: " ".join(command))
def test_help_breaks_no_word(command, capsys, monkeypatch):
    wide, narrow = (help_of(command, capsys, monkeypatch, columns) for columns in (400, 60))
    assert wide.startswith(" ".join(["usage: torchrum", *command]))
    assert sorted(narrow.split()) == sorted(wide.split())


def test_help_is_a_command_too(capsys):
    assert main(["help"]) == 0
    text = capsys.readouterr().out
    assert text == f"{usage()}\n"
    assert all(name in text for name in COMMANDS)


def test_the_help_of_the_command_does_not_wait_for_torch():
    code = (
        "import sys, torchrum_command\n"
        "sys.argv = ['torchrum', '--help']\n"
        "assert torchrum_command.main() == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"{usage()}\n"
