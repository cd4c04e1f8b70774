"""Data sets on disk: where they are looked for, what is fetched, what is refused, and what is left behind."""

import concurrent.futures
import functools
import gzip
import hashlib
import http.server
import io
import os
import resource
import socket
import tarfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from torchrum.cli import main
from torchrum.lab.data import CORPORA, Corpus, DataError, DataFile, DataUnavailableError, data_root, read_files
from torchrum.lab.data.files import BABI, COMPOSITE, PTB, digest, offline

ROOT = Path(__file__).parents[3]
ONE, TWO = b"the first file\n", b"the second file\n"


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


TOY = Corpus(
    "toy",
    "Two lines of text",
    "public domain",
    (
        DataFile("one.txt", {sha256(ONE): "official"}),
        DataFile("deep/two.txt", {sha256(TWO): "official"}, "toy.two.txt"),
    ),
)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """An empty data directory, with the toy corpus in the registry."""
    monkeypatch.setenv("TORCHRUM_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("TORCHRUM_OFFLINE", raising=False)
    monkeypatch.setitem(CORPORA, "toy", TOY)
    return tmp_path / "data"


@pytest.fixture
def server(tmp_path):
    """A folder that is served, and its address."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield folder, f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def tar(path: Path, **contents: bytes) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(name.replace("__", "/") + ".txt")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def offer(monkeypatch, *urls: str) -> None:
    monkeypatch.setitem(CORPORA, "toy", replace(TOY, sources=urls))


def read() -> dict[str, bytes]:
    return {path: file.content for path, file in read_files("toy", ["one.txt", "deep/two.txt"]).items()}


def left(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_the_data_directory(monkeypatch):
    monkeypatch.setenv("TORCHRUM_DATA", "/given")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data_root() == Path("/given")
    monkeypatch.delenv("TORCHRUM_DATA")
    assert data_root() == Path("/cache/torchrum")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_root() == Path.home() / ".cache" / "torchrum"
    monkeypatch.setenv("TORCHRUM_DATA", "~/data")
    assert data_root() == Path.home() / "data"
    monkeypatch.setenv("TORCHRUM_DATA", "~nobody-has-this-name/data")
    with pytest.raises(DataUnavailableError, match="~nobody-has-this-name/data names no home folder"):
        data_root()


def test_an_archive_and_its_cache(root, server, monkeypatch):
    folder, address = server
    tar(folder / "toy.tgz", x__one=b"another file of that name", y__one=ONE, y__two=TWO)
    offer(monkeypatch, f"{address}/toy.tgz")
    assert read() == {"one.txt": ONE, "deep/two.txt": TWO}
    assert left(root) == {"toy/one.txt", "toy/deep/two.txt"}
    offer(monkeypatch)  # the second time nothing is downloaded
    assert read() == {"one.txt": ONE, "deep/two.txt": TWO}


def test_mirrors_are_tried_in_turn(root, server, monkeypatch):
    folder, address = server
    (folder / "broken.tgz").write_bytes(b"this is no archive")
    tar(folder / "half.tgz", one=ONE)
    (folder / "one.txt").write_bytes(ONE)
    (folder / "toy.two.txt").write_bytes(TWO)
    offer(monkeypatch, *(f"{address}/{name}" for name in ("absent.tgz", "broken.tgz", "half.tgz", "{name}")))
    assert read() == {"one.txt": ONE, "deep/two.txt": TWO}


def test_a_wrong_hash_names_both(root, server, monkeypatch):
    folder, address = server
    tar(folder / "toy.tgz", one=b"changed", two=TWO)
    offer(monkeypatch, f"{address}/toy.tgz")
    with pytest.raises(DataUnavailableError) as error:
        read()
    for text in (sha256(b"changed"), sha256(ONE), "public domain", "--from FILE", f"{address}/toy.tgz"):
        assert text in str(error.value)
    assert not root.exists()


@pytest.mark.parametrize("value, expected", [("1", True), ("yes", True), ("", False), ("0", False), ("OFF", False)])
def test_offline_is_said_in_words_too(value, expected, monkeypatch):
    monkeypatch.setenv("TORCHRUM_OFFLINE", value)
    assert offline() == expected


def test_offline_opens_no_socket(root, monkeypatch):
    offer(monkeypatch, "http://127.0.0.1:9/toy.tgz")
    monkeypatch.setenv("TORCHRUM_OFFLINE", "1")

    def refuse(*arguments, **options):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(DataUnavailableError, match="TORCHRUM_OFFLINE is set"):
        read()
    assert not left(root) if root.exists() else True


def test_no_network_is_one_message_and_exit_code_3(root, monkeypatch, capsys):
    offer(monkeypatch, "http://127.0.0.1:9/toy.tgz", "http://127.0.0.1:9/{name}")
    assert main(["data", "fetch", "toy"]) == 3
    first, *details = capsys.readouterr().err.splitlines()
    assert first == f"torchrum: {CORPORA['toy'].title}: not in {root / 'toy'}, and could not be downloaded."
    assert details[:3] == [
        "  tried http://127.0.0.1:9/toy.tgz: Connection refused",
        "  tried http://127.0.0.1:9/one.txt: Connection refused",
        "  To import a copy from elsewhere, a tar, zip or folder: torchrum data fetch toy --from FILE",
    ]
    assert f"  wanted: {root / 'toy/one.txt'}, {sha256(ONE)}" in details
    assert details[-1].endswith("torchrum train copying-rum, or torchrum train char-rum --data FILE on your own text")


def test_a_damaged_file_of_the_users_is_named_and_left_alone(root, capsys):
    (root / "toy/deep").mkdir(parents=True)
    (root / "toy/one.txt").write_bytes(b"mine")
    (root / "toy/deep/two.txt").write_bytes(TWO)
    with pytest.raises(DataError, match=r"one\.txt has sha256:\w+, but it must have sha256:\w+"):
        read()
    assert main(["data", "fetch", "toy"]) == 1  # it would not be fetched, and must not pass for it
    assert f"one.txt has {sha256(b'mine')}, but it must have {sha256(ONE)}" in capsys.readouterr().err
    assert (root / "toy/one.txt").read_bytes() == b"mine"


def test_a_folder_in_the_way_of_a_file_is_named(root, tmp_path, capsys):
    (root / "toy/one.txt").mkdir(parents=True)
    tar(tmp_path / "copy", one=ONE, two=TWO)
    assert main(["data", "fetch", "toy", "--from", str(tmp_path / "copy")]) == 3
    assert f"{root / 'toy/one.txt'} cannot be written: Is a directory" in capsys.readouterr().err


def test_downloads_at_the_same_time_do_not_meet(root, server, monkeypatch):
    folder, address = server
    tar(folder / "toy.tgz", one=ONE, two=TWO)
    offer(monkeypatch, f"{address}/toy.tgz")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: read(), range(24)))
    assert found == [{"one.txt": ONE, "deep/two.txt": TWO}] * 24
    assert left(root) == {"toy/one.txt", "toy/deep/two.txt"}


@pytest.mark.parametrize("kind", ["tar", "zip", "folder"])
def test_a_copy_from_elsewhere(kind, root, tmp_path, capsys):
    origin = tmp_path / "copy"
    if kind == "folder":
        (origin / "inner").mkdir(parents=True)
        (origin / "inner/one.txt").write_bytes(ONE)
        (origin / "toy.two.txt").write_bytes(TWO)
    elif kind == "tar":
        tar(origin, a__one=ONE, b__two=TWO)
    else:
        with zipfile.ZipFile(origin, "w") as archive:
            archive.writestr("a/one.txt", ONE)
            archive.writestr("a/two.txt", TWO)
    assert main(["data", "fetch", "toy", "--from", str(origin)]) == 0
    assert read() == {"one.txt": ONE, "deep/two.txt": TWO}
    assert main(["data", "verify", "toy"]) == 0
    assert "toy/deep/two.txt: official" in capsys.readouterr().out


def test_a_single_file_from_elsewhere(root, tmp_path):
    (tmp_path / "toy.two.txt").write_bytes(TWO)
    assert main(["data", "fetch", "toy", "--from", str(tmp_path / "toy.two.txt")]) == 0
    assert left(root) == {"toy/deep/two.txt"}


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["fetch", "toy", "--from", "nowhere.tgz"], 1, "nowhere.tgz does not exist"),
        (["fetch", "--from", "x"], 2, "--from imports one data set"),
        (["verify", "babbi"], 2, "did you mean 'babi'"),
        (["fetch", "toy", "--from", "odd.txt"], 1, "no file of toy has that name"),
        (["fetch", "toy", "--from", "."], 1, ". cannot be imported as toy: one.txt is missing."),
        (["fetch", "toy", "--from", "/dev/zero"], 1, "/dev/zero does not exist; give a tar, a zip or a folder"),
    ],
)
def test_mistakes_have_a_message(arguments, code, message, root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.txt").write_text("odd")
    assert main(["data", *arguments]) == code
    assert message in capsys.readouterr().err


def zipped(path: Path, compression: int = zipfile.ZIP_DEFLATED, copies: int = 1, content: bytes = ONE) -> bytes:
    """Write ``copies`` entries with the name and the wrong content of a wanted file."""
    with zipfile.ZipFile(path, "w", compression, compresslevel=1) as archive:
        for number in range(copies):
            archive.writestr(f"{number}/one.txt", content)
    return path.read_bytes()


def bomb(path: Path) -> None:
    zipped(path, copies=9, content=bytes(2**26))


def encrypted(path: Path) -> None:
    content = zipped(path)
    for mark, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):  # the flags in the local header and in the directory
        place = content.index(mark) + offset
        content = content[:place] + b"\1" + content[place + 1 :]
    path.write_bytes(content)


def lzma_zip(path: Path) -> None:
    content = bytearray(zipped(path, zipfile.ZIP_LZMA))
    content[50:60] = bytes(10)
    path.write_bytes(content)


def bzip2_zip(path: Path) -> None:
    zipped(path, zipfile.ZIP_BZIP2, content=bytes(2**20))


def damaged_tar(path: Path, mode: str) -> None:
    with tarfile.open(path, f"w:{mode}") as archive:
        info = tarfile.TarInfo("one.txt")
        info.size = 2**22
        archive.addfile(info, io.BytesIO(os.urandom(2**22)))
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half] + (b"" if mode == "gz" else bytes(200) + content[half + 200 :]))


def endless_tar(path: Path, kind: bytes) -> None:
    """Declare 2^60 bytes in the first header, for a file or for an extended header."""
    info = tarfile.TarInfo("one.txt")
    info.size, info.type = 2**60, kind
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def inflating_tar(path: Path) -> None:
    """Put the wanted file after a gigabyte of zeros, in about a megabyte."""
    info = tarfile.TarInfo("zeros")
    info.size = 2**30
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        for _ in range(2**9 + 1):
            file.write(bytes(2**20))


@pytest.mark.parametrize(
    "make, message",
    [
        (bomb, "copy holds more than 512 MiB"),
        (encrypted, "0/one.txt in it is encrypted; unpack the archive"),
        (lzma_zip, "0/one.txt in it is not stored or deflated; unpack the archive"),
        (bzip2_zip, "0/one.txt in it is not stored or deflated; unpack the archive"),
        (functools.partial(damaged_tar, mode="gz"), "copy is a damaged archive: Compressed file ended before"),
        (functools.partial(damaged_tar, mode="bz2"), "copy cannot be read: Invalid data stream"),
        (functools.partial(damaged_tar, mode="xz"), "copy is a damaged archive: Corrupt input data"),
        (functools.partial(endless_tar, kind=tarfile.REGTYPE), "copy holds more than 512 MiB"),
        (functools.partial(endless_tar, kind=tarfile.XHDTYPE), "copy is a damaged archive: "),
        (inflating_tar, "copy holds more than 512 MiB"),
    ],
)
def test_hostile_and_damaged_archives_are_refused_in_one_line(make, message, root, tmp_path, capsys):
    make(tmp_path / "copy")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["data", "fetch", "toy", "--from", str(tmp_path / "copy")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not root.exists() or not any(root.rglob("*"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # in kB: less than the archive declares


def test_a_file_in_the_way_of_the_data_directory(root, tmp_path, capsys):
    tar(tmp_path / "copy", one=ONE, two=TWO)
    root.write_text("a file")
    assert main(["data", "fetch", "toy", "--from", str(tmp_path / "copy")]) == 3
    assert "cannot be written: Not a directory. Make space, or pass another folder" in capsys.readouterr().err


def test_verify_tells_every_file(root, capsys):
    (root / "toy").mkdir(parents=True)
    (root / "toy/one.txt").write_bytes(b"mine")
    assert main(["data", "verify", "toy"]) == 3
    assert capsys.readouterr().out.splitlines() == [
        f"toy/one.txt: wrong: {sha256(b'mine')}",
        "toy/deep/two.txt: missing",
    ]
    assert main(["data", "path", "toy", "--data-dir", str(root / "other")]) == 0
    assert capsys.readouterr().out.strip() == str(root / "other" / "toy")


def test_git_blob_ids():
    assert digest(b"hello\n", "git") == "git:ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object prints it


def test_the_composite_of_task_3_is_told_from_the_official_file():
    (file,) = [file for file in BABI.files if "qa3" in file.path and "train" in file.path]
    assert set(file.accepted.values()) == {"official", COMPOSITE}
    assert len(BABI.files) == 40 and len(PTB.files) == 3
    assert all(len(item.accepted) == 1 for item in BABI.files if item != file)
