"""The parser and the options that the subcommands share; help breaks lines between words only."""

import argparse
import os
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from torchrum.cli import complain
from torchrum.lab.data.files import ROOT_VARIABLE
from torchrum.lab.recipes import load_recipe
from torchrum.lab.tasks import CharLM
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError

TEXT = "your own text, a file or a folder, for recipes such as char-rum"
RECIPE = "recipe that defines the task of the run, if torchrum does not"
SHARED: dict[str, dict[str, Any]] = {
    "--results": dict(type=Path, default=Path("results"), help="folder of the results ledger (default: %(default)s)"),
    "--recipe": dict(metavar="MODULE:FUNCTION", help=RECIPE),
    "--checkpoint": dict(choices=("best", "last"), default="best", help="checkpoint to load (default: %(default)s)"),
    "--device": dict(choices=("auto", "cpu", "cuda"), default="auto", help="device to run on (default: %(default)s)"),
    "--data-dir": dict(
        type=Path, metavar="DIR", help="folder of the data sets (default: $TORCHRUM_DATA, or else a cache folder)"
    ),
    "--data": dict(type=Path, metavar="PATH", help=TEXT),
}
"""Options that several commands have."""


class WholeWords(argparse.HelpFormatter):
    """Wrap help between words, not at hyphens: ``copying-rum`` and ``--data-dir`` stay whole.

    Paragraphs and lines that begin with a space (commands to type) are kept.
    """

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        paragraph: list[str] = []
        for line in [*text.strip().splitlines(), ""]:
            if line.strip() and not line.startswith(" "):
                paragraph.append(line)
                continue
            lines += self._split_lines(" ".join(paragraph), width - len(indent))
            lines.append(line.rstrip())
            paragraph = []
        return "\n".join(indent + line if line else "" for line in lines).rstrip()


class Parser(argparse.ArgumentParser):
    """The parser of ``torchrum COMMAND``; options are never abbreviated, and errors are one line.

    Args:
        command: name of the subcommand.
        description, epilog, usage: as in :class:`argparse.ArgumentParser`.
    """

    def __init__(self, command: str, description: str, epilog: str | None = None, usage: str | None = None) -> None:
        super().__init__(
            prog=f"torchrum {command}",
            description=description,
            epilog=epilog,
            usage=usage,
            formatter_class=WholeWords,
            allow_abbrev=False,
        )
        self.register("type", Path, _path)

    def share(self, *names: str) -> list[argparse.Action]:
        """Add options of ``SHARED``."""
        return [self.add_argument(name, **SHARED[name]) for name in names]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; ``--data-dir`` becomes the data directory of this process and its children."""
        options = super().parse_args(args, namespace)
        if folder := getattr(options, "data_dir", None):
            os.environ[ROOT_VARIABLE] = str(folder.absolute())
        return options

    def error(self, message: str) -> NoReturn:
        """Print the error on one line, without the usage, and exit."""
        complain(f"{message.rstrip('.')}; see {self.prog} --help.")
        raise SystemExit(2)


def in_clone() -> bool:
    """Whether the current folder is a clone of the project, whose own folders are the defaults of what is written."""
    return Path("src/torchrum/paper").is_dir()


def use_recipe(name: str | None) -> None:
    """Import the recipe of ``--recipe``, if given, which registers its task."""
    if name is not None:
        load_recipe(name)


def with_text(config: TrainConfig, path: Path | None) -> TrainConfig:
    """Set the user's own text in the task of a config; raise if the task reads no text."""
    if path is None:
        return config
    if not isinstance(config.task, CharLM):
        raise ConfigError(
            f"--data {path}: {config.name} cannot read your own text; use a recipe that can, such as char-rum."
        )
    try:
        task = config.task.reading(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if lost := sum(task.unseen()):
        complain(
            f"{task.corpus}: {lost} bytes of its validation and test parts never occur in training and are left out"
        )
    return replace(config, task=task)


def _path(text: str) -> Path:
    """Parse ``type=Path``; refuse empty text, such as an unset variable, which would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a file or a folder, or . for the current one")
    return Path(text)
