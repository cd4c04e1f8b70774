"""Read a user's data and make a prediction problem of it."""

import codecs
import re
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from torchrum.lab.compare.build import build
from torchrum.lab.compare.problem import BadDataError, Kind, Problem
from torchrum.lab.compare.sequences import (
    MOST_OF_A_TEXT,
    Sequences,
    sequences_of_arrays,
    sequences_of_table,
    symbols_of_texts,
)
from torchrum.lab.compare.table import MOST_VALUES, read_csv, read_parquet, table_of_columns

KINDS = get_args(Kind)
SHARED = "give a CSV, Parquet, .npz, .npy or text file, or a folder with a subfolder of texts for each class"
CONVERT = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as CSV"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".html", ".xml"), "write its rows as CSV"),
    **dict.fromkeys((".feather", ".arrow", ".orc", ".h5", ".hdf5", ".mat", ".pkl", ".pickle", ".pt"), "save it as CSV"),
    **dict.fromkeys((".gz", ".zip", ".bz2", ".xz", ".zst", ".tar", ".7z"), "unpack it first"),
}
"""Endings of files that are not read, and what to do; as symbols, text files can be read."""
MOST_CONTROLS = 0.01
"""Share of control characters beyond which a file is not text."""
SPLIT_NAMES = frozenset(("train", "test", "valid", "validation", "val", "dev"))


def read_problem(
    data: Any,
    *,
    target: str | None = None,
    time: str | None = None,
    group: str | None = None,
    inputs: Sequence[str] | None = None,
    kind: Kind | None = None,
) -> Problem:
    """Read data, find what is to be predicted from what, and prepare it for training.

    Args:
        data: the path of a CSV, Parquet, ``.npz``, ``.npy`` or text file, or of a folder with one subfolder of text
            files for each class; or a dict or data frame of columns, arrays ``(x, y)``, or an array of sequences.
        target, time, group: columns of a table; guessed if they are not given, as are all others.
        inputs: columns to predict from.
        kind: ``"classification"`` or ``"regression"`` of sequences, ``"forecasting"`` of the next value, ``"tagging"``
            of each step, or the next of ``"symbols"``.

    Raises:
        BadDataError: with the place of the fault and its remedy in one line.
    """
    if kind is not None and kind not in KINDS:
        raise BadDataError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}.")
    if isinstance(inputs, str):
        raise BadDataError(f"inputs is {inputs!r}; pass a list of columns.")
    options: dict[str, Any] = {"target": target, "time": time, "group": group, "inputs": inputs}
    if isinstance(data, str | Path):
        if re.match(r"[a-z]{2,}:/+[^/]", str(data)):
            raise BadDataError(f"{data} is an address; download the file, and give its path.")
        return build(_read_path(Path(data), options, kind))
    columns = dict(data.items()) if hasattr(data, "items") else None  # a dict, or a data frame
    if columns is not None and not (set(columns) <= {"x", "y"} and all(value is None for value in options.values())):
        return build(sequences_of_table(table_of_columns(columns), **options, kind=kind))
    _refuse_columns("data holds arrays", options)
    if columns is None:
        pair = isinstance(data, tuple) and len(data) == 2
        columns = {"x": data[0], "y": data[1]} if pair else {"x": data}
    return build(sequences_of_arrays("data", columns.get("x"), columns.get("y"), kind))


def _read_path(path: Path, options: dict[str, Any], kind: Kind | None) -> Sequences:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            _refuse_columns(f"{path.name} is a folder of texts", options)
            return _read_folder(path, kind)
        if not stat.S_ISREG(mode):
            raise BadDataError(f"{path} is not a regular file; {SHARED}.")
        suffix = path.suffix.lower()
        if path.stat().st_size == 0:
            raise BadDataError(f"{path.name} is empty; {SHARED}.")
        if suffix in (".parquet", ".pq"):
            return sequences_of_table(read_parquet(path), **options, kind=kind)
        if suffix in (".npz", ".npy"):
            _refuse_columns(f"{path.name} holds arrays", options)
            return _read_arrays(path, kind)
        if suffix in CONVERT and kind != "symbols":
            raise BadDataError(f"{path.name}: files that end in {suffix} are not read; {CONVERT[suffix]}.")
        _refuse_binary(path)
        if suffix in (".csv", ".tsv"):
            return sequences_of_table(read_csv(path), **options, kind=kind)
        _refuse_columns(f"{path.name} is read as text, since its name does not end in .csv", options)
        return _read_text(path, kind)
    except OSError as error:
        raise BadDataError(f"{error.filename or path} cannot be read: {error.strerror}.") from error


def _refuse_columns(what: str, options: dict[str, Any]) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise BadDataError(f"{what}, so there are no columns for {' and '.join(given)} to name; leave it out.")


def _refuse_binary(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(2**16)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return
    controls = sum(start.count(byte) for byte in range(32) if byte not in b"\t\n\x0b\x0c\r\x1b")
    if b"\0" in start or controls > MOST_CONTROLS * len(start):
        raise BadDataError(f"{path.name} is binary, in no format that is known; {SHARED}.")


def _read_arrays(path: Path, kind: Kind | None) -> Sequences:
    with path.open("rb") as start:
        if not start.read(6).startswith((b"\x93NUMPY", b"PK\3\4")):
            raise BadDataError(f"{path.name} was not written by numpy; use numpy.save or numpy.savez.")
    try:
        if path.suffix.lower() == ".npy":
            return sequences_of_arrays(path.name, np.load(path, mmap_mode="r", allow_pickle=False), None, kind)
        with np.load(path, allow_pickle=False) as file:
            if "x" not in file.files:
                there = ", ".join(file.files) or "nothing"
                raise BadDataError(f"{path.name} must hold an array x, and may hold y; it holds: {there}.")
            return sequences_of_arrays(path.name, file["x"], file["y"] if "y" in file.files else None, kind)
    except (ValueError, EOFError, zipfile.BadZipFile, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, BadDataError):
            raise
        if "Object arrays" in str(error) or "Python objects" in str(error):
            raise BadDataError(
                f"{path.name} holds Python objects, which are not loaded, since they could run code; save arrays of "
                "numbers."
            ) from error
        raise BadDataError(f"{path.name} is damaged: {error!s:.100}") from error


def _read_text(path: Path, kind: Kind | None) -> Sequences:
    if kind not in (None, "symbols"):
        raise BadDataError(f"{path.name} is read as text, of which only the next symbol can be predicted; not {kind}.")
    with path.open("rb") as file:
        content = file.read(4 * MOST_VALUES)  # a character has at most four bytes
    guesses = [] if kind else ["kind: symbols, since the file is text; the next symbol is predicted"]
    (text,), encoding = _decode([content])
    guesses.append(_name_encoding(encoding))
    if len(text) > MOST_VALUES or path.stat().st_size > len(content):
        text = text[:MOST_VALUES]
        guesses.append(f"text: only the first {len(text):,} symbols, since the file is larger")
    codes, alphabet = symbols_of_texts([text])
    return Sequences(
        name=path.name, kind="symbols", inputs=codes, targets=None, columns=["text"], target_columns=["text"],
        alphabet=alphabet, whole=False, guesses=guesses, reading={"source": "text", "encoding": encoding},
    )  # fmt: skip


def _read_folder(path: Path, kind: Kind | None) -> Sequences:
    if kind not in (None, "classification"):
        raise BadDataError(f"{path.name} is a folder of texts by class, which can only be classified; not {kind}.")
    folders = sorted(item for item in path.iterdir() if item.is_dir() and not item.name.startswith("."))
    if not folders:
        raise BadDataError(
            f"{path.name} has no classes: it must have a subfolder of text files for each class. To predict the next "
            "symbol, give one text file."
        )
    if {folder.name.lower() for folder in folders} <= SPLIT_NAMES:
        names = " and ".join(folder.name for folder in folders)
        raise BadDataError(
            f"{path.name} is divided into {names}, which are not classes; give one of them, or join them by class."
        )
    contents, labels = [], []
    for label, folder in enumerate(folders):
        files = sorted(file for file in folder.rglob("*") if not file.name.startswith(".") and not file.is_dir())
        if not files:
            raise BadDataError(f"{path.name}: the class {folder.name} has no files; add some, or remove the folder.")
        for file in files:
            if not file.is_file():
                raise BadDataError(f"{file} is not a regular file; remove it.")
            _refuse_binary(file)
            with file.open("rb") as opened:
                contents.append(opened.read(4 * MOST_OF_A_TEXT))
            labels.append(label)
    texts, encoding = _decode(contents)
    empty = next((i for i, text in enumerate(texts) if not text.strip()), None)
    if empty is not None:
        raise BadDataError(f"{path.name}: a file of the class {folders[labels[empty]].name} is empty; remove it.")
    guesses = [] if kind else ["kind: classification, since each subfolder is a class of texts"]
    guesses.append(_name_encoding(encoding))
    longest = max(map(len, texts))
    if longest > MOST_OF_A_TEXT:
        guesses.append(f"texts: only the first {MOST_OF_A_TEXT} symbols of each file")
    codes, alphabet = symbols_of_texts([text[:MOST_OF_A_TEXT] for text in texts])
    return Sequences(
        name=path.name, kind="classification", inputs=codes, targets=list(np.array(labels)), columns=["text"],
        target_columns=["class"], classes=[folder.name for folder in folders], alphabet=alphabet, guesses=guesses,
        reading={"source": "folder", "encoding": encoding, "longest": MOST_OF_A_TEXT},
    )  # fmt: skip


def _decode(contents: list[bytes]) -> tuple[list[str], str]:
    """Decode texts whose last character may be cut; bytes become the first 256 characters if an encoding is unknown."""
    utf16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = "utf-16" if contents[0].startswith(utf16) else "utf-8-sig"
    try:
        return [codecs.getincrementaldecoder(encoding)().decode(content) for content in contents], encoding
    except UnicodeDecodeError:
        return [content.decode("latin-1") for content in contents], "latin-1"


def _name_encoding(encoding: str) -> str:
    if encoding == "latin-1":
        return "symbols: bytes, since the encoding is not UTF-8"
    return f"symbols: characters, since the encoding is {'UTF-8' if encoding == 'utf-8-sig' else 'UTF-16'}"
