"""Help comes at once, fits 80 columns, and breaks lines between words only."""

import contextlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from torchrum.cli import COMMANDS, main, usage

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def help_of(command: list[str], capsys, monkeypatch, columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with contextlib.suppress(SystemExit):  # argparse leaves this way
        main([*command, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=lambda command: " ".join(command))
def test_help_fits_80_columns_and_breaks_no_word(command, capsys, monkeypatch):
    wide = help_of(command, capsys, monkeypatch, 400)
    for columns in (60, 72, 80, 90):
        narrow = help_of(command, capsys, monkeypatch, columns)
        assert sorted(narrow.split()) == sorted(wide.split())
        assert columns != 80 or max(map(len, narrow.splitlines())) <= 80


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=lambda command: " ".join(command))
def test_help_needs_no_torch(command):
    """torch alone takes seconds to import; help has half a second of processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "torchrum", *command, "--help"], env=ENVIRONMENT, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "usage: torchrum" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_help_is_a_command_too(capsys):
    assert main(["help"]) == 0
    assert capsys.readouterr().out == f"{usage()}\n"


def test_the_command_has_the_public_names_when_it_asks_for_them():
    code = (
        "import sys; sys.argv = ['bin/torchrum']; import torchrum; assert 'torch' not in sys.modules\n"
        "for name in torchrum.__all__: assert callable(getattr(torchrum, name)), name\n"
        "assert 'torch' in sys.modules\n"
        "try: torchrum.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise SystemExit('an unknown name was found')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
