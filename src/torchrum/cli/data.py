"""``torchrum data fetch babi`` and ``torchrum data verify``"""

import os
from dataclasses import replace
from pathlib import Path

from torchrum.cli import complain
from torchrum.cli.parsing import Parser
from torchrum.lab.data.files import CORPORA, ROOT_VARIABLE, Corpus, data_root, fetch_from, read_files, verify
from torchrum.lab.tasks import CharLM
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.overrides import unknown_name

EPILOG = """The data folder is --data-dir, or else $TORCHRUM_DATA, or else $XDG_CACHE_HOME/torchrum (~/.cache/torchrum).
TORCHRUM_OFFLINE=1 forbids downloads. Training downloads what it needs by itself."""


def use_data_dir(folder: Path | None) -> None:
    """Use ``folder`` as the data directory of this process and its children."""
    if folder is not None:
        os.environ[ROOT_VARIABLE] = str(folder.absolute())


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


def main(arguments: list[str]) -> int:
    """Show, fetch or verify data sets."""
    parser = Parser(
        "data",
        "Print where the data sets are (path), download or import them (fetch), or check their hashes (verify).",
        epilog=EPILOG,
    )
    parser.add_argument("action", choices=("path", "fetch", "verify"))
    parser.add_argument("corpus", nargs="?", help="ptb or babi (default: both)")
    origin = "import from this tar, zip or folder instead of downloading"
    parser.add_argument("--from", dest="origin", type=Path, metavar="FILE", help=origin)
    parser.share("--data-dir")
    options = parser.parse_args(arguments)

    if options.corpus is not None and options.corpus not in CORPORA:
        raise unknown_name("data set", options.corpus, CORPORA)
    if options.origin is not None and (options.action != "fetch" or options.corpus is None):
        raise ConfigError("--from imports one data set, so name it: torchrum data fetch babi --from FILE.")
    use_data_dir(options.data_dir)
    corpora = [CORPORA[options.corpus]] if options.corpus else list(CORPORA.values())
    return max(_act(options.action, corpus, options.origin) for corpus in corpora)


def _act(action: str, corpus: Corpus, origin: Path | None) -> int:
    """Show, fetch or verify one data set; return the exit code."""
    if action == "path":
        print(data_root() / corpus.name)
        return 0
    if action == "fetch":
        if origin is not None:
            fetch_from(corpus, origin)
        else:
            read_files(corpus.name, [file.path for file in corpus.files])  # a wrong file is an error too
        print(f"{data_root() / corpus.name}: {corpus.title}")
        return 0
    states = verify(corpus)
    for path, state in states.items():
        print(f"{corpus.name}/{path}: {state}")
    return 3 if any(state == "missing" or state.startswith("wrong") for state in states.values()) else 0
