import errno
import hashlib
import math
import os
from pathlib import Path

import pytest
import torch

from texts import penn_treebank, small_text
from torchrum.lab.data import DataError
from torchrum.lab.data.text import KNOWN, Parts, describe, encode, read_known, read_own


@pytest.fixture
def ptb(monkeypatch):
    monkeypatch.setenv("TORCHRUM_DATA", str(penn_treebank()))


@pytest.mark.parametrize("name", KNOWN)
def test_constants_are_those_of_the_text(name, ptb):
    found, known = describe(read_known(name)), KNOWN[name]
    assert (found.symbols, found.sizes) == (known.symbols, known.sizes)
    assert len(known.symbols) == 50
    assert found.memoryless == pytest.approx(known.memoryless, abs=1e-12)
    lines = [part.count(b"\n") for part in read_known(name)]
    assert tuple(words + ends for words, ends in zip(found.words, lines, strict=True)) == known.words


def as_published(text: bytes) -> bytes:
    """A part of ``ptb.char`` as its files write it: blanks between symbols, and ``_`` where the text has a blank."""
    lines = (b" ".join(b"_" if byte == 32 else bytes([byte]) for byte in line) for line in text.split(b"\n"))
    return b" \n ".join(lines)


def test_the_other_convention_is_the_published_one(ptb):
    """The hashes are those of the ptb.char.valid.txt and ptb.char.test.txt in circulation."""
    text = read_known("ptb.char")
    digests = [hashlib.sha256(as_published(part)).hexdigest()[:8] for part in (text.valid, text.test)]
    assert digests == ["21661f63", "1ef5607a"]
    assert len(as_published(text.test).split(b" ")) - 1 == KNOWN["ptb.char"].sizes[2]


def test_ids_go_by_frequency_and_ties_by_value():
    facts = describe(Parts(b"bbbaac\nba", b"ab", b"ba"))
    assert facts.symbols == b"ba\nc"
    assert encode(b"abc\n", facts.symbols).tolist() == [1, 0, 3, 2]


def test_bytes_that_training_lacks_are_left_out():
    facts = describe(Parts(b"abab", b"axb", b"bya"))
    assert facts.sizes == (4, 2, 2)
    assert encode(b"axb", facts.symbols).tolist() == [0, 1]


def test_memoryless_loss_is_that_of_the_bigrams():
    """After a comes b in two of three cases and a in one; after b always a: 3/5 of the cases cost h(1/3)."""
    facts = describe(Parts(b"abaaba", b"ab", b"ab"))
    h = -(math.log(2 / 3) * 2 + math.log(1 / 3)) / 3
    assert facts.memoryless == pytest.approx(3 / 5 * h)


def test_counting_in_chunks_changes_nothing(monkeypatch):
    parts = Parts(small_text(3000), small_text(300, 1), small_text(300, 2))
    whole = describe(parts)
    monkeypatch.setattr("torchrum.lab.data.text.CHUNK", 7)
    assert describe(parts) == whole


def test_a_file_is_cut_at_its_end(tmp_path):
    text = small_text(1000)
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbf" + text)  # the mark is no text
    parts = read_own(tmp_path / "book.txt", heldout=0.1)
    assert b"".join(parts) == text
    assert len(parts.valid) == len(parts.test) == len(text) // 10


def test_a_folder_is_its_files_in_order_or_its_three_parts(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in {"b.txt": b"second ", "a.txt": b"first ", "sub/c.txt": b"third", "notes.md": b"not this"}.items():
        (tmp_path / name).write_bytes(text)
    assert b"".join(read_own(tmp_path, heldout=0.2)) == b"first second third"
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_bytes(name.encode())
    with pytest.raises(DataError, match=r"has no test\.txt; train\.txt, valid\.txt and test\.txt go together\. Add"):
        read_own(tmp_path, heldout=0.2)
    (tmp_path / "test.txt").write_bytes(b"test")
    assert read_own(tmp_path, heldout=0.2) == (b"train", b"valid", b"test")


def test_a_folder_that_cannot_be_read_leaves_no_gap(tmp_path, monkeypatch):
    (tmp_path / "secret").mkdir()
    (tmp_path / "a.txt").write_bytes(small_text(100))
    scan = os.scandir

    def locked(path):  # permissions do not hold for root
        if Path(path).name == "secret":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(DataError, match="secret cannot be read: Permission denied"):
        read_own(tmp_path, heldout=0.2)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "empty.txt is empty; it must hold text"),
        (b" \n\n", "empty.txt is empty"),
        (
            bytes(torch.randint(256, (4096,), generator=torch.Generator().manual_seed(0)).tolist()),
            "not text: .* control characters",
        ),
        (
            "ein Buch".encode("utf-16"),
            "not text: .* control characters. If it is UTF-16, convert it",
        ),
        (b"\x01\x02text" * 100, "not text: 33.3% of its bytes are control characters"),
        (b"tiny", "has 4 bytes, and 0.05 of it leaves nothing"),
    ],
    ids=["empty", "blank", "noise", "utf-16", "controls", "short"],
)
def test_what_is_no_text_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_own(path, heldout=0.05)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "Все счастливые семьи похожи друг на друга.\n".encode("koi8-r") * 20,
        "Toutes les familles heureuses se ressemblent déjà.\n".encode("latin-1") * 20,
        ("幸福な家庭はすべて互いに似かよっている。" * 40).encode()[1:-1],  # cut inside a letter at both ends
        "\N{BLACK CHESS KNIGHT}".encode() * 400,
    ],
    ids=["koi8-r", "latin-1", "utf-8, cut", "no letters"],
)
def test_text_of_any_language_is_text(tmp_path, text):
    (tmp_path / "book.txt").write_bytes(text)
    assert b"".join(read_own(tmp_path / "book.txt", heldout=0.05)) == text


def test_a_missing_text_says_what_is_taken(tmp_path):
    with pytest.raises(DataError, match="does not exist; --data takes a text file or a folder"):
        read_own(tmp_path / "nothing", heldout=0.05)
    with pytest.raises(DataError, match=r"holds no \.txt files"):
        read_own(tmp_path, heldout=0.05)


def test_a_part_without_known_symbols_is_refused():
    with pytest.raises(DataError, match="the valid part of the text has 0 symbols that occur in the training part"):
        describe(Parts(b"aaaa", b"bbb", b"aa"))


def test_a_text_of_one_symbol_is_still_a_text():
    facts = describe(Parts(b"a" * 50, b"aa", b"aa"))
    assert (facts.symbols, facts.memoryless) == (b"a", 0.0)


def test_pipes_devices_and_looping_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop/again").symlink_to(tmp_path / "loop")
    (tmp_path / "one").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "one")
    (tmp_path / "parts").mkdir()
    for part in ("train", "valid", "test"):
        os.mkfifo(tmp_path / f"parts/{part}.txt")
    for path, message in (
        (tmp_path / "pipe", "pipe is not a regular file"),
        (Path("/dev/zero"), "/dev/zero is not a regular file"),
        (tmp_path / "loop", "loop holds no .txt files"),
        (tmp_path / "one", "one does not exist"),
        (tmp_path / "parts", "train.txt is not a regular file"),
    ):
        with pytest.raises(DataError, match=message):
            read_own(path, 0.1)
