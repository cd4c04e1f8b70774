"""Find, download, import and check the files of the data sets.

The data directory is ``--data-dir`` of a command, else ``TORCHRUM_DATA``, else ``$XDG_CACHE_HOME/torchrum``
(``~/.cache/torchrum``). ``TORCHRUM_OFFLINE=1`` forbids downloads.
"""

import bz2
import contextlib
import gzip
import http.client
import lzma
import os
import shutil
import socket
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torchrum.lab.data.corpora import CORPORA, Corpus, DataFile

ROOT_VARIABLE, OFFLINE_VARIABLE = "TORCHRUM_DATA", "TORCHRUM_OFFLINE"
MOST_BYTES = 2**26  # per file; the largest file of a corpus is far smaller
MOST_TOTAL = 2**29  # per archive or folder; the largest published archive holds about 100 MB
TIMEOUT = 30.0  # seconds without an answer from a mirror
ABANDONED = 24 * 3600.0  # seconds after which an unfinished download is removed
SHOWN = 3  # missing files named in an error; verify lists them all
BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, MemoryError)
"""Exceptions that the standard library raises for a damaged archive, besides ``OSError``."""


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
    """What the corpus says about a file with this hash."""


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
    failures: list[str] = []
    if offline():
        failures.append(f"{OFFLINE_VARIABLE} is set: nothing was downloaded")
    for source in () if offline() else corpus.sources:
        with _workplace(corpus) as work:
            try:
                if source.archive:
                    place = _download(source.url, work / "archive")
                else:
                    place = work / "files"
                    place.mkdir()
                    for name in (file.names[-1] for file in wanted):
                        _download(source.url.format(name=name), place / name)
                contents = _choose(corpus, wanted, place, keep_bad=True)
            except (OSError, http.client.HTTPException, DataError) as error:
                reason = getattr(error, "reason", None) or error
                reason = getattr(reason, "strerror", None) or reason  # without a number
                failures.append(f"tried {source.url.format(name=wanted[0].names[-1])}: {reason}")
                continue
            _install(corpus, contents, work)
            return
    raise _unavailable(corpus, wanted, failures)


def fetch_from(corpus: Corpus, origin: Path) -> None:
    """Import the files of a corpus from a tar, a zip, a folder or a single file."""
    if not origin.exists():
        raise DataError(f"{origin} does not exist; give a tar, a zip or a folder with the files of {corpus.name}.")
    wanted = list(corpus.files)
    if origin.is_file() and not (zipfile.is_zipfile(origin) or _is_tar(origin)):
        wanted = [file for file in wanted if origin.name in file.names]
        if not wanted:
            raise DataError(f"{origin} is not an archive, and no file of {corpus.name} has that name.")
    try:
        contents = _choose(corpus, wanted, origin, keep_bad=False)
    except DataError as error:
        raise DataError(f"{origin} cannot be imported as {corpus.name}: {str(error).rstrip('.')}.") from error
    with _workplace(corpus) as work:
        _install(corpus, contents, work)


@contextlib.contextmanager
def _workplace(corpus: Corpus) -> Iterator[Path]:
    """Make a temporary folder beside the data sets, so that files can be renamed into place."""
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


def _choose(corpus: Corpus, wanted: Iterable[DataFile], origin: Path, keep_bad: bool) -> dict[str, bytes]:
    """Find the content of each wanted file by its path: the entry with its name and the right hash."""
    by_name = {name: file for file in wanted for name in file.names}
    good: dict[str, bytes] = {}
    bad: dict[str, bytes] = {}
    total = 0
    for name, content in _entries(origin, set(by_name)):
        total += len(content)
        if total > MOST_TOTAL:
            raise _too_large(origin)
        file = by_name[name]
        if file.origin(content) is None:
            bad[file.path] = content
        else:
            good.setdefault(file.path, content)
    for file in wanted:
        if file.path not in good:
            raise DataError(_refusal(corpus, file, bad.get(file.path), keep_bad))
    return good


def _entries(origin: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of the entries with one of ``names`` in a folder, a tar or a zip, or of a plain file."""
    if not (origin.is_dir() or origin.is_file()):  # reading from a device might never end
        raise DataError(f"{origin} is not a plain file; give a tar, a zip or a folder.")
    try:
        if origin.is_dir():
            for path in sorted(origin.rglob("*.txt")):
                if path.name in names and path.is_file() and path.stat().st_size <= MOST_BYTES:
                    yield path.name, path.read_bytes()
        elif zipfile.is_zipfile(origin):
            with zipfile.ZipFile(origin) as archive:
                for info in archive.infolist():
                    name = info.filename.rpartition("/")[2]
                    if name in names and info.file_size <= MOST_BYTES:
                        yield name, _read_zipped(archive, info)
        elif _is_tar(origin):
            with _open_tar(origin) as tar:
                for member in tar:
                    name = member.name.rpartition("/")[2]
                    if name in names and member.isfile() and member.size <= MOST_BYTES:
                        file = tar.extractfile(member)
                        assert file is not None  # it is a regular file
                        yield name, file.read()
        elif origin.name in names and origin.stat().st_size <= MOST_BYTES:
            yield origin.name, origin.read_bytes()
    except BROKEN as error:
        raise DataError(f"{origin.name} is a damaged archive: {str(error) or type(error).__name__}.") from error
    except OSError as error:
        raise DataError(f"{origin.name} cannot be read: {error.strerror or error}.") from error


def _read_zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.flag_bits & 1:
        raise DataError(f"{info.filename} in it is encrypted; unpack the archive, and give the folder.")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # zipfile inflates others without a bound
        raise DataError(f"{info.filename} in it is not stored or deflated; unpack the archive, and give the folder.")
    with archive.open(info) as file:
        return file.read(MOST_BYTES)


class _Limited:
    """A file for ``tarfile`` that refuses to go beyond ``MOST_TOTAL``, whatever sizes the headers declare."""

    def __init__(self, file: IO[bytes], origin: Path) -> None:
        self.file, self.origin, self.tell = file, origin, file.tell

    def read(self, size: int) -> bytes:
        self._check(self.tell() + size)
        return self.file.read(size)

    def seek(self, position: int) -> int:
        self._check(position)
        return self.file.seek(position)

    def _check(self, position: int) -> None:
        if position > MOST_TOTAL:
            raise _too_large(self.origin)


@contextlib.contextmanager
def _open_tar(origin: Path) -> Iterator[tarfile.TarFile]:
    """Open a tar, compressed or not."""
    with open(origin, "rb") as file:
        start = file.read(6)
    openers: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open, b"": open}
    opener = next(opener for magic, opener in openers.items() if start.startswith(magic))
    with opener(origin, "rb") as stream:
        limited: Any = _Limited(stream, origin)
        with tarfile.open(fileobj=limited, mode="r:") as tar:
            yield tar


def _is_tar(origin: Path) -> bool:
    try:
        with _open_tar(origin):
            return True
    except tarfile.TarError:
        return False
    except (*BROKEN, OSError):  # a compressed file, but damaged
        return True


def _too_large(origin: Path) -> DataError:
    return DataError(f"{origin.name} holds more than {MOST_TOTAL >> 20} MiB, which no archive of a data set does.")


def _refusal(corpus: Corpus, file: DataFile, bad: bytes | None, keep_bad: bool) -> str:
    if bad is None:
        return f"{' or '.join(file.names)} is missing"
    kept = ""
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
