"""Texts as streams of symbols: Penn Treebank in its two conventions, and any text of the user's own.

A symbol is a byte; its id is its rank by frequency in the training part, the commonest first. Bytes that do not occur
there are left out of the other parts, and counted.
"""

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from torchrum.lab.data.files import DataError, read_files

PARTS = ("train", "valid", "test")
CHUNK = 2**22  # symbols that are counted at once: memory does not grow with the text
MOST_CONTROLS = 0.01  # share of control bytes beyond which a file is not text
ALLOWED_CONTROLS = b"\t\n\x0b\x0c\r\x1b"


@dataclass(frozen=True)
class Facts:
    """Properties of a text that a model and its results need, without the text itself."""

    symbols: bytes
    """The byte of each id, by descending frequency in the training part; equal counts by value."""
    sizes: tuple[int, ...]
    """Symbols of the training, validation and test part."""
    words: tuple[int, ...]
    """Words of each part; in Penn Treebank the ends of lines count too, as word-level models have it."""
    memoryless: float
    """Nats per symbol of the best bigram model."""
    sha256: str = ""
    """Hash of the three parts one after the other, for a text of the user's own."""


PTB_SYMBOLS = b" etanoisrhludcmfpkgybw<>\nvN.'xj$-qz&0193#285\\764/*"
PTB_WORDS = (929_589, 73_760, 82_430)
KNOWN = {
    "ptb": Facts(PTB_SYMBOLS, (5_101_618, 399_782, 449_945), PTB_WORDS, 2.3154111409956473),
    "ptb.char": Facts(PTB_SYMBOLS, (5_017_482, 393_042, 442_423), PTB_WORDS, 2.3515771066975497),
}
"""Texts with known facts. ``ptb`` is the word-level file byte for byte; ``ptb.char`` lacks the two
spaces at the ends of each line, which are nearly free to predict: for the same total of bits its bits per character are
1.7 % higher."""


class Parts(NamedTuple):
    """The bytes of a text, cut in three."""

    train: bytes
    valid: bytes
    test: bytes


def read_known(name: str) -> Parts:
    """Read a text of ``KNOWN`` from the data directory; download it if it is missing."""
    contents = [checked.content for checked in read_files("ptb", [f"{part}.txt" for part in PARTS]).values()]
    convert: Callable[[bytes], bytes] = strip_lines if name == "ptb.char" else bytes
    return Parts(*map(convert, contents))


def strip_lines(text: bytes) -> bytes:
    """Strip the spaces around each line, which gives the symbols of ``ptb.char``."""
    return b"".join(line.strip() + b"\n" for line in text.splitlines())


def read_own(path: Path, heldout: float) -> Parts:
    """Read the user's own text.

    Args:
        path: a file; a folder with ``train.txt``, ``valid.txt`` and ``test.txt``; or a folder whose ``.txt`` files,
            sorted by path, make one text.
        heldout: share of an undivided text, at its end, for the validation part, and again for the test part.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; --data takes a text file or a folder of .txt files.")
    if path.is_dir():
        given = [path / f"{part}.txt" for part in PARTS]
        missing = [file.name for file in given if not file.exists()]
        if not missing:
            return Parts(*map(_read_file, given))
        if len(missing) < len(given):  # do not train on the validation part of an incomplete division
            raise DataError(
                f"{path} has no {' and no '.join(missing)}; train.txt, valid.txt and test.txt go together. Add what is "
                "missing, or rename the files to read them as one text."
            )
        files = _text_files(path)
        if not files:
            raise DataError(f"{path} holds no .txt files; --data takes a text file or a folder of .txt files.")
    else:
        files = [path]
    text = b"".join(map(_read_file, files))
    size = int(len(text) * heldout)
    if size < 1:
        raise DataError(
            f"{path.name} has {len(text)} bytes, and {heldout:g} of it leaves nothing to validate and test on; "
            "take a longer text or a larger --task.heldout."
        )
    return Parts(text[: -2 * size], text[-2 * size : -size], text[-size:])


def _text_files(folder: Path) -> list[Path]:
    """List the ``.txt`` files below a folder, sorted; raise if a folder in it cannot be read."""

    def refuse(error: OSError) -> NoReturn:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error

    found = (
        Path(where) / name
        for where, _, names in os.walk(folder, onerror=refuse)
        for name in names
        if name.endswith(".txt")
    )
    return sorted(file for file in found if file.is_file())


def _read_file(path: Path) -> bytes:
    if not path.is_file():
        raise DataError(f"{path} is not a regular file; --data takes a text file or a folder of .txt files.")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    if not text.strip():
        raise DataError(f"{path} is empty; it must hold text.")
    controls = sum(text.count(byte) for byte in range(32) if byte not in ALLOWED_CONTROLS) + text.count(127)
    if b"\0" in text or controls > MOST_CONTROLS * len(text):
        share = f"{controls / len(text):.1%} of its bytes are control characters"
        raise DataError(f"{path} is not text: {share}. If it is UTF-16, convert it: iconv -f UTF-16 -t UTF-8.")
    return text.removeprefix(b"\xef\xbb\xbf")  # remove the byte order mark


def describe(parts: Parts) -> Facts:
    """Compute the facts of the user's own text."""
    counts = sum(torch.bincount(piece.long(), minlength=256) for piece in _bytes(parts.train).split(CHUNK))
    assert isinstance(counts, Tensor)
    order = sorted((byte for byte in range(256) if counts[byte]), key=lambda byte: (-int(counts[byte]), byte))
    symbols = bytes(order)
    ids = [encode(part, symbols) for part in parts]
    sizes = tuple(map(len, ids))
    for name, size in zip(PARTS, sizes, strict=True):
        if size < 2:
            raise DataError(
                f"the {name} part of the text has {size} symbols that occur in the training part; it must have at "
                "least 2. Take a longer text, or a larger --task.heldout."
            )
    words = tuple(len(part.split()) for part in parts)
    return Facts(symbols, sizes, words, _memoryless(ids[0], len(symbols)), fingerprint(parts))


def fingerprint(parts: Parts) -> str:
    """Hash the three parts, one after the other, with sha256."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def encode(text: bytes, symbols: bytes) -> Tensor:
    """Encode a text as ids, ``(N,)`` uint8; bytes that are not among ``symbols`` are left out."""
    ids = torch.full((256,), -1, dtype=torch.int16)
    ids[_bytes(symbols).long()] = torch.arange(len(symbols), dtype=torch.int16)
    pieces = []
    for piece in _bytes(text).split(CHUNK):
        found = ids[piece.long()]
        pieces.append(found[found >= 0].to(torch.uint8))
    return torch.cat(pieces)


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _memoryless(ids: Tensor, V: int) -> float:
    counts = torch.zeros(V * V, dtype=torch.float64)
    for start in range(0, len(ids) - 1, CHUNK):
        piece = ids[start : start + CHUNK + 1].long()
        counts += torch.bincount(piece[:-1] * V + piece[1:], minlength=V * V)
    pairs = counts.view(V, V)
    share = pairs / pairs.sum(1, keepdim=True)
    nats = -(pairs * share.log()).nan_to_num(0.0).sum() / pairs.sum()  # 0 log 0 is 0
    return max(0.0, float(nats)) if math.isfinite(nats) else 0.0
