"""Tables of a user: CSV, Parquet or columns in memory, as one numpy array per column.

A cell that does not fit its column is remembered with its row, and is an error only if the column is used.
"""

import csv
import math
import re
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from torchrum.lab.compare.problem import Array, BadDataError
from torchrum.ops._checks import nearest

MOST_VALUES = 2**25
"""Cells of a table, or symbols of a text, that are read; the rest of a larger file is left out."""
CHUNK = 2**9  # rows that are text at one time; with more, the garbage collector would slow reading by a factor of five
SAMPLE = 200  # cells that decide whether a column holds numbers, dates or text
MOST_LABELS = 2**20  # different texts of a column, beyond which it is of no use
DATES = ("%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d %b %Y", "%b %d %Y", "%b %d, %Y", "%d-%b-%Y")
TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
DATE_FORMS = (*(date + time for date in DATES for time in TIMES), "%Y-%m", "%b %Y")
"""Forms of dates besides ISO 8601, in the order to try."""

MARKED_NUMBER = re.compile(
    r"[-+(]?[$€£]?\s?(\d{1,3}([., '’]\d{3})+([.,]\d+)?|\d+([.,]\d+)?\s?[%$€£]|(?<=[$€£ ])\d+([.,]\d+)?)\s?[%$€£]?\)?"
)
"""A number with separators of thousands, a currency or a percent sign."""


@dataclass(kw_only=True, eq=False)
class Column:
    """One column, as numbers or as codes of its texts."""

    name: str
    values: Array
    """``(R,)`` float64 numbers, seconds since 1970, or int64 codes; NaN or -1 where a cell is bad."""
    labels: list[str] | None = None
    """Text of each code; None for numbers and dates."""
    dates: bool = False
    bad: tuple[int, str] | None = None
    """Index of the first row whose cell does not fit, and what is wrong with it."""
    num_bad: int = 0
    marked: bool = False
    """Whether its texts are numbers with separators of thousands, a currency or a percent sign."""

    @property
    def numeric(self) -> bool:
        """Whether it holds numbers that are not dates."""
        return self.labels is None and not self.dates

    def text(self, row: int) -> str:
        """Write the value of a row as an error shows it."""
        if self.labels is not None:
            return self.labels[int(self.values[row])]
        value = float(self.values[row])
        return str(datetime.fromtimestamp(value, UTC).replace(tzinfo=None)) if self.dates else f"{value:g}"


@dataclass(kw_only=True)
class Table:
    """Columns of equal length, with what an error needs to name a place in them."""

    name: str
    columns: dict[str, Column]
    first: int = 1
    """Number of the first row of values in errors; 2 where a header is row 1, as spreadsheets count."""
    guesses: list[str] = field(default_factory=list)
    reading: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())).values)

    def place(self, row: int, column: str) -> str:
        """Name a cell, for an error."""
        return f'{self.name}, row {row + self.first}, column "{column}"'

    def column(self, name: str, option: str) -> Column:
        """Look up a column that the user named."""
        if name not in self.columns:
            near = nearest(name, self.columns, 0.5)
            advice = f'did you mean "{near}"?' if near else f"it has: {', '.join(self.columns)}."
            raise BadDataError(f'{self.name} has no column "{name}" for {option}; {advice}')
        return self.columns[name]

    def require(self, column: Column, numbers: bool = False) -> None:
        """Raise the error of the first bad cell of a column that is used."""
        if numbers and not column.numeric:
            raise BadDataError(
                f'{self.place(0, column.name)}: "{column.text(0)}" is not a number; '
                "name a column of numbers, or another --kind."
            )
        if column.bad is not None:
            row, wrong = column.bad
            more = f" ({column.num_bad} such cells)" if column.num_bad > 1 else ""
            advice = "write all as such" if column.num_bad == self.rows else "fill or remove such rows"
            raise BadDataError(
                f"{self.place(row, column.name)}: {wrong}{more}; {advice}, or leave the column out with --inputs."
            )


class ColumnBuilder:
    """A column that grows by parts; the first part decides what it holds."""

    def __init__(self, name: str, decimal_comma: bool = False) -> None:
        self.name, self.decimal_comma = name, decimal_comma
        self.form: str | None = None  # "number", "text", "iso" or a form of dates
        self.values = array("d")
        self.codes = array("q")
        self.labels: dict[str, int] = {}
        self.bad: tuple[int, str] | None = None
        self.num_bad = 0

    def add_cells(self, cells: Sequence[str]) -> None:
        """Add texts."""
        if self.form is None:
            self.form = self._choose_form(cells)
        if self.form == "text":
            self._add_labels(cells)
            return
        if self.form == "iso" and (moments := _iso_dates(cells)) is not None:
            self.add_numbers(moments)
            return
        parse, start = self._parser(), len(self.values)
        wrong: dict[int, str] = {}
        try:
            self.values.extend(map(parse, cells))  # the values before a cell that fails stay
        except (ValueError, OverflowError):
            for row, cell in enumerate(cells[len(self.values) - start :], len(self.values)):
                try:
                    self.values.append(parse(cell))
                except (ValueError, OverflowError):
                    self.values.append(math.nan)
                    what = "a number" if self.form == "number" else "a date of the same form as the others"
                    wrong[row] = f'"{cell:.40}" is not {what}' if cell.strip() else "the cell is empty"
        self._note_not_finite(start, wrong)

    def add_numbers(self, values: Array, dates: bool = False) -> None:
        """Add numbers, or seconds since 1970."""
        self.form = self.form or ("iso" if dates else "number")
        start = len(self.values)
        self.values.frombytes(np.ascontiguousarray(values, dtype=np.float64).tobytes())
        self._note_not_finite(start, {})

    def finish(self) -> Column:
        """Make the column."""
        if self.form == "text":
            values: Array = np.frombuffer(self.codes, dtype=np.int64)
            labels = list(self.labels)
            found = Column(name=self.name, values=values, labels=labels, bad=self.bad, num_bad=self.num_bad)
            sample = [label for label in labels[:SAMPLE] if MARKED_NUMBER.fullmatch(label)]
            if len(sample) > len(labels[:SAMPLE]) / 2:
                first = int(np.argmax(values >= 0))
                found.bad = first, f'"{labels[values[first]]:.40}" is not a plain number, such as 1234.5'
                found.num_bad, found.marked = len(values), True
            return found
        values = np.frombuffer(self.values, dtype=np.float64)
        dates = self.form != "number"
        return Column(name=self.name, values=values, dates=dates, bad=self.bad, num_bad=self.num_bad)

    def _choose_form(self, cells: Sequence[str]) -> str:
        sample = [cell for cell in islice(cells, SAMPLE) if cell.strip()]
        best, most = "text", len(sample) // 2
        for form in ("number", "iso", *DATE_FORMS):
            self.form = form
            parse, good = self._parser(), 0
            for place, cell in enumerate(sample):
                if good == 0 and place == 20:
                    break  # strptime is slow
                try:
                    parse(cell)
                    good += 1
                except (ValueError, OverflowError):
                    pass
            if good > most:
                best, most = form, good
        return best

    def _parser(self) -> Callable[[str], float]:
        if self.form == "number":
            return (lambda cell: float(cell.replace(",", "."))) if self.decimal_comma else float
        form = self.form or ""

        def seconds(cell: str) -> float:
            text = cell.strip()
            moment = datetime.fromisoformat(text) if form == "iso" else datetime.strptime(text, form)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

        return seconds

    def _add_labels(self, cells: Sequence[str]) -> None:
        labels, start = self.labels, len(self.codes)
        try:
            self.codes.extend(map(labels.__getitem__, cells))
            return
        except KeyError:  # a new text, or one with blanks around it
            pass
        for row, cell in enumerate(cells[len(self.codes) - start :], len(self.codes)):
            text = cell.strip()
            if not text:
                self._note(row, "the cell is empty")
                self.codes.append(-1)
            elif text in labels or len(labels) < MOST_LABELS:
                self.codes.append(labels.setdefault(text, len(labels)))
            else:
                self._note(row, f"the column has more than {MOST_LABELS:,} different texts")
                self.codes.append(-1)

    def _note_not_finite(self, start: int, wrong: dict[int, str]) -> None:
        values = np.frombuffer(self.values, dtype=np.float64)[start:]
        for index in np.flatnonzero(~np.isfinite(values)):
            row, value = start + int(index), values[index]
            self._note(row, wrong.get(row, "the value is missing" if np.isnan(value) else f"{value:g} is not finite"))

    def _note(self, row: int, wrong: str) -> None:
        self.bad = self.bad or (row, wrong)
        self.num_bad += 1


def _iso_dates(cells: Sequence[str]) -> Array | None:
    """Read dates by numpy, ten times as fast as one by one; None if a cell is empty, wrong or has a time zone."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy warns of a time zone
            moments = np.array(cells, dtype="datetime64[us]")
    except (ValueError, Warning):
        return None
    return None if np.isnat(moments).any() else moments.astype(np.int64) / 1e6


def read_csv(path: Path) -> Table:
    """Read a text file of rows, in chunks; the delimiter is the one that divides its first rows evenly."""
    encoding = "utf-16" if path.open("rb").read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    csv.field_size_limit(2**17)
    try:
        with path.open(newline="", encoding=encoding) as file:
            sample = file.read(2**16).splitlines()
            lines = [line for line in sample[: 20 if len(sample) == 1 else len(sample) - 1][:20] if line]
            if not any(line.strip() for line in sample):
                raise BadDataError(f"{path.name} is empty; give a file with a header and rows.")
            delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(lines)
            file.seek(0)
            return _read_rows(path.name, file, delimiter, _has_decimal_comma(lines, delimiter))
    except UnicodeError as error:
        raise BadDataError(_place_of_bad_byte(path, encoding)) from error


def _delimiter(lines: Sequence[str]) -> str:
    best, most = ",", 0.0
    for delimiter in ",;\t| ":
        if delimiter == " " and (best != "," or most or not _are_numbers(lines)):
            break
        widths = [len(row) for row in csv.reader(lines, delimiter=delimiter)]
        score = widths.count(widths[0]) / len(widths) if widths[0] > 1 else 0.0
        if score > most:
            best, most = delimiter, score
    return best


def _are_numbers(lines: Sequence[str]) -> bool:
    """Whether the rows below a header are numbers between blanks, as many as the header has names."""
    rows = [line.split() for line in lines]
    numbers = all(_is_number(cell, True) for row in rows[1:] for cell in row)
    return len(rows) > 1 and numbers and len({len(row) for row in rows}) == 1


def _has_decimal_comma(lines: Sequence[str], delimiter: str) -> bool:
    cells = [cell.strip().lstrip("+-") for row in csv.reader(lines[1:], delimiter=delimiter) for cell in row]
    commas, points = (
        sum(cell.count(mark) == 1 and cell.replace(mark, "").isdigit() for cell in cells) for mark in ",."
    )
    return commas > points


def _place_of_bad_byte(path: Path, encoding: str) -> str:
    if encoding == "utf-16":
        return f"{path.name} begins as UTF-16 but is damaged; convert it to UTF-8."
    with path.open("rb") as file:
        for row, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                byte = line[error.start]
                return (
                    f"{path.name}, row {row}: byte 0x{byte:02x} is not UTF-8; convert the file from its encoding, "
                    f"such as: iconv -f WINDOWS-1252 -t UTF-8 {path.name} > utf8.csv"
                )
    return f"{path.name} is not UTF-8; convert it."


def _read_rows(name: str, file: Iterable[str], delimiter: str, decimal_comma: bool) -> Table:
    reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
    rows = _checked(name, reader)
    head = next(rows)
    guesses = [f"delimiter: {delimiter!r}"] if delimiter not in ",\t" else []
    if decimal_comma:
        guesses.append('numbers: a decimal comma, as in "3,14"')
    builders = [ColumnBuilder(cell.strip() or f"column {i}", decimal_comma) for i, cell in enumerate(head, 1)]
    first = 2
    if all(_is_number(cell, decimal_comma) for cell in head):
        guesses.append(f"header: none, since the first row is numbers; the columns are named 1 to {len(head)}")
        builders = [ColumnBuilder(str(i), decimal_comma) for i in range(1, len(head) + 1)]
        rows, first = chain([head], rows), 1
    names = [builder.name for builder in builders]
    twice = next((given for given in names if names.count(given) > 1), None)
    if twice is not None:
        raise BadDataError(f'{name} has two columns "{twice}"; rename one of them.')
    most, num_rows = MOST_VALUES // len(builders), 0
    while chunk := list(islice(rows, min(CHUNK, most - num_rows))):
        num_rows += len(chunk)
        for builder, cells in zip(builders, zip(*chunk, strict=True), strict=True):
            builder.add_cells(cells)
    if num_rows == 0:
        raise BadDataError(f"{name} has a header and no rows; give at least 50.")
    if num_rows == most and next(rows, None) is not None:
        guesses.append(_cut_short(num_rows))
    table = Table(name=name, columns={b.name: b.finish() for b in builders}, first=first, guesses=guesses)
    table.reading = {"delimiter": delimiter, "decimal_comma": decimal_comma, "header": first == 2}
    return table


def _checked(name: str, reader: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield rows of equal length; blank lines are allowed at the end only."""
    blank = width = 0
    number = 0
    try:
        for number, row in enumerate(reader, 1):
            if not row:
                blank = blank or number
                continue
            width = width or len(row)
            if blank:
                raise BadDataError(f"{name}, row {blank} is blank; remove it.")
            if len(row) != width:
                quoted = any("\n" in cell for cell in row)
                advice = "look for a quotation mark that is not closed" if quoted else "all rows must be equally long"
                cells = f"{len(row)} cell{'s' * (len(row) > 1)}"
                raise BadDataError(f"{name}, row {number} has {cells}, but row 1 has {width}; {advice}.")
            yield row
    except csv.Error as error:
        raise BadDataError(
            f"{name}, row {number + 1}: {error}; look for a quotation mark that is not closed, or a file that is "
            "not text."
        ) from error


def _is_number(cell: str, decimal_comma: bool) -> bool:
    try:
        float(cell.replace(",", ".") if decimal_comma else cell)
    except ValueError:
        return False
    return True


def _cut_short(rows: int) -> str:
    return f"rows: only the first {rows:,}, since the file holds more than {MOST_VALUES:,} values"


def read_parquet(path: Path) -> Table:
    """Read a Parquet file, in batches."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise BadDataError(
            f"{path.name} needs pyarrow, which is not installed: pip install pyarrow, or save the data as CSV."
        ) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        fields = file.schema_arrow
        builders: dict[str, ColumnBuilder] = {}
        most = MOST_VALUES // max(1, len(fields))
        num_rows = 0
        for batch in file.iter_batches(batch_size=CHUNK):
            batch = batch.slice(0, most - num_rows)
            num_rows += batch.num_rows
            for field_, cells in zip(fields, batch.columns, strict=True):
                _add_arrow(builders.setdefault(field_.name, ColumnBuilder(field_.name)), cells, pyarrow)
            if num_rows == most:
                break
    except pyarrow.ArrowException as error:
        raise BadDataError(f"{path.name} is not a Parquet file that can be read: {error!s:.200}") from error
    columns = {name: builder.finish() for name, builder in builders.items() if builder.form is not None}
    if not columns:
        raise BadDataError(f"{path.name} has no rows with numbers, dates or texts; give at least 50.")
    table = Table(name=path.name, columns=columns)
    if file.metadata.num_rows > num_rows:
        table.guesses.append(_cut_short(num_rows))
    left_out = [field_.name for field_ in fields if field_.name not in columns]
    if left_out:
        table.guesses.append(f"columns: without {', '.join(left_out)}, which hold neither numbers, dates nor texts")
    return table


def _add_arrow(builder: ColumnBuilder, cells: Any, pyarrow: Any) -> None:
    types, kind = pyarrow.types, cells.type
    if types.is_dictionary(kind):
        cells, kind = cells.dictionary_decode(), kind.value_type
    if types.is_timestamp(kind) or types.is_date(kind):
        micros = cells.cast(pyarrow.timestamp("us"), safe=False).cast(pyarrow.int64())
        builder.add_numbers(micros.to_numpy(zero_copy_only=False) / 1e6, dates=True)
    elif types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        builder.add_numbers(cells.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False))
    elif types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind):
        builder.add_cells(["" if cell is None else str(cell) for cell in cells.to_pylist()])


def table_of_columns(columns: Mapping[str, Any]) -> Table:
    """Make a table of columns in memory, such as a dict of arrays or a data frame."""
    finished: dict[str, Column] = {}
    for name, given in columns.items():
        values = np.asarray(given)
        if values.ndim != 1:
            raise BadDataError(f'data: column "{name}" has shape {values.shape}; a column must be (rows,).')
        first = next(iter(finished.values()), None)
        if first is not None and len(first.values) != len(values):
            raise BadDataError(
                f'data: column "{name}" has {len(values)} rows, but column "{first.name}" has {len(first.values)}.'
            )
        builder = ColumnBuilder(str(name))
        if values.dtype.kind in "iuf":
            builder.add_numbers(values)
        elif values.dtype.kind == "M":
            seconds = values.astype("datetime64[us]").astype(np.float64) / 1e6
            builder.add_numbers(np.where(np.isnat(values), np.nan, seconds), dates=True)
        else:
            builder.add_cells(["" if value is None else str(value) for value in values.tolist()])
        finished[str(name)] = builder.finish()
    if not finished or not len(next(iter(finished.values())).values):
        raise BadDataError("data has no rows; give at least 50.")
    return Table(name="data", columns=finished)
