"""Where data sets live, and how files get there: mirrors, hashes, offline use, nothing half-written.

The data directory is ``--data-dir`` of a command, else ``TORCHRUM_DATA``, else ``$XDG_CACHE_HOME/torchrum``
(``~/.cache/torchrum``). ``TORCHRUM_OFFLINE=1`` forbids downloads.
"""

import contextlib
import http.client
import os
import shutil
import socket
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torchrum.lab.data.corpora import CORPORA, Corpus, DataFile
from torchrum.lab.data.errors import DataError, DataUnavailableError

ROOT_VARIABLE, OFFLINE_VARIABLE = "TORCHRUM_DATA", "TORCHRUM_OFFLINE"
MOST_BYTES = 2**26  # no file of a corpus is near this: what inflates beyond it is not ours
TIMEOUT = 30.0  # seconds without an answer from a mirror
ABANDONED = 24 * 3600.0  # seconds after which an unfinished download is nobody's
SHOWN = 3  # missing files named in an error; verify lists them all


@dataclass(frozen=True)
class Checked:
    """A file whose hash is right."""

    content: bytes
    origin: str
    """What the corpus says about a file with this hash."""


def data_root() -> Path:
    """The folder that holds a folder per corpus."""
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
    """The content of files of a corpus, each with the right hash; what is not there is downloaded.

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
    """Where a file lies, or will lie."""
    return data_root() / corpus.name / file.path


def _read(corpus: Corpus, file: DataFile) -> Checked:
    path = location(corpus, file)
    if not path.is_file():  # a pipe would never end
        raise DataError(f"{path} is not a plain file. Move it away, then: torchrum data fetch {corpus.name}")
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
    """Each file of a corpus and its state: what it is if it is right, else ``missing`` or the hash that it has."""
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
    failures: list[str] = []
    if offline():
        failures.append(f"{OFFLINE_VARIABLE} is set: nothing was downloaded")
    for source in () if offline() else corpus.sources:
        with _workplace(corpus) as work:
            try:
                if source.archive:
                    found = dict(_entries(_download(source.url, work / "archive")))
                else:
                    found = {}
                    for file in wanted:
                        name = file.names[-1]
                        found[name] = _download(source.url.format(name=name), work / name).read_bytes()
                contents = _choose(corpus, wanted, found.items(), keep_bad=True)
            except (OSError, http.client.HTTPException, DataError) as error:
                reason = getattr(error, "reason", None) or error
                reason = getattr(reason, "strerror", None) or reason  # without a number
                failures.append(f"tried {source.url.format(name=wanted[0].names[-1])}: {reason}")
                continue
            _install(corpus, contents, work)
            return
    raise _unavailable(corpus, wanted, failures)


def fetch_from(corpus: Corpus, origin: Path) -> None:
    """Take the files of a corpus from a tar, a zip, a folder or a single file that the user got elsewhere."""
    if not origin.exists():
        raise DataError(f"{origin} does not exist; give a tar, a zip or a folder with the files of {corpus.name}.")
    wanted = list(corpus.files)
    if origin.is_file() and not (tarfile.is_tarfile(origin) or zipfile.is_zipfile(origin)):
        wanted = [file for file in wanted if origin.name in file.names]
        if not wanted:
            raise DataError(f"{origin} is not an archive, and no file of {corpus.name} has that name.")
    try:
        contents = _choose(corpus, wanted, _entries(origin), keep_bad=False)
    except DataError as error:
        raise DataError(f"{origin} cannot be imported as {corpus.name}: {str(error).rstrip('.')}.") from error
    with _workplace(corpus) as work:
        _install(corpus, contents, work)


@contextlib.contextmanager
def _workplace(corpus: Corpus) -> Iterator[Path]:
    """A folder beside the files, so that they can be renamed into place; it goes away with what is in it."""
    parent = data_root()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for old in parent.glob(f".{corpus.name}-*"):  # left by processes that were killed
            with contextlib.suppress(FileNotFoundError):  # another process has just finished with it
                if time.time() - old.stat().st_mtime > ABANDONED:
                    shutil.rmtree(old, ignore_errors=True)
        place = tempfile.TemporaryDirectory(dir=parent, prefix=f".{corpus.name}-", ignore_cleanup_errors=True)
    except OSError as error:
        reason = "it is a file" if parent.is_file() else error.strerror
        raise DataUnavailableError(
            f"{parent} cannot hold the data: {reason}. Pass another folder with --data-dir, or set {ROOT_VARIABLE}."
        ) from error
    with place as name:
        yield Path(name)


def _download(url: str, path: Path) -> Path:
    from torch.hub import download_url_to_file

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        download_url_to_file(url, str(path), progress=sys.stderr.isatty())
    finally:
        socket.setdefaulttimeout(before)
    return path


def _entries(origin: Path) -> Iterator[tuple[str, bytes]]:
    """Path and content of every small regular file in a folder, a tar or a zip; a plain file is its own entry."""
    try:
        if origin.is_dir():
            for path in sorted(origin.rglob("*.txt")):
                if path.is_file() and path.stat().st_size <= MOST_BYTES:
                    yield path.as_posix(), path.read_bytes()
        elif not origin.is_file():  # a device, which might never end
            raise DataError(f"{origin} is not a plain file; give a tar, a zip or a folder.")
        elif zipfile.is_zipfile(origin):
            with zipfile.ZipFile(origin) as archive:
                for info in archive.infolist():
                    if not info.is_dir() and info.file_size <= MOST_BYTES:
                        yield info.filename, _bounded(archive.open(info))
        elif tarfile.is_tarfile(origin):
            with tarfile.open(origin) as archive:
                for member in archive:
                    file = archive.extractfile(member) if member.isfile() and member.size <= MOST_BYTES else None
                    if file is not None:
                        yield member.name, _bounded(file)
        else:
            yield origin.name, origin.read_bytes()
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DataError(f"{origin.name} is a damaged archive: {error}.") from error


def _bounded(file: IO[bytes]) -> bytes:
    with file:
        return file.read(MOST_BYTES)


def _choose(
    corpus: Corpus, wanted: Iterable[DataFile], entries: Iterable[tuple[str, bytes]], keep_bad: bool
) -> dict[str, bytes]:
    """The content of each wanted file, by its path: of the entries with its name, the one with the right hash."""
    by_name: dict[str, list[bytes]] = {}
    names = {name for file in wanted for name in file.names}
    for path, content in entries:
        name = path.rpartition("/")[2]
        if name in names:
            by_name.setdefault(name, []).append(content)
    contents = {}
    for file in wanted:
        candidates = [content for name in file.names for content in by_name.get(name, [])]
        good = next((content for content in candidates if file.origin(content) is not None), None)
        if good is None:
            raise DataError(_refusal(corpus, file, candidates, keep_bad))
        contents[file.path] = good
    return contents


def _refusal(corpus: Corpus, file: DataFile, candidates: list[bytes], keep_bad: bool) -> str:
    if not candidates:
        return f"{' or '.join(file.names)} is missing"
    bad, kept = candidates[-1], ""
    if keep_bad:
        path = location(corpus, file)
        path = path.with_name(path.name + ".bad")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bad)
        kept = f"; it is kept as {path}"
    return f"{file.names[-1]} has {file.found(bad)}, but it must have {' or '.join(file.accepted)}{kept}"


def _install(corpus: Corpus, contents: dict[str, bytes], work: Path) -> None:
    try:
        for number, (path, content) in enumerate(contents.items()):
            temporary = work / f"{number}.new"
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            target = location(corpus, corpus.file(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, target)
    except OSError as error:
        raise DataUnavailableError(
            f"{error.filename2 or error.filename or data_root()} cannot be written: {error.strerror}. "
            f"Make space, or set {ROOT_VARIABLE} to another folder."
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
