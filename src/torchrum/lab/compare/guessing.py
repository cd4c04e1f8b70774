"""Guess the roles of a table's columns, and the kind of its problem; each guess is noted in the table."""

from collections.abc import Sequence

import numpy as np

from torchrum.lab.compare.problem import Array, BadDataError, Kind
from torchrum.lab.compare.table import Column, Table

TARGET_NAMES = ("target", "label", "class", "y")
TIME_NAMES = ("time", "date", "datetime", "timestamp", "ds", "year", "step", "frame", "t")
GROUP_NAMES = ("group", "series", "sequence", "session", "subject", "patient", "trial", "id")
MOST_CLASSES = 20
"""Distinct whole numbers up to which a column of them is taken for classes."""
MOST_GROUPS = 0.8
"""Share of the rows up to which names are those of groups; if nearly all differ, each row has its own."""
MOST_ONE_HOT = 20
"""Texts of an input column up to which it is one-hot encoded beside numbers."""


def guess_group(table: Table, taken: set[str | None]) -> str | None:
    for column in table.columns.values():
        if column.name in taken or column.dates or column.bad or not _is_name(column):
            continue
        count = len(np.unique(column.values))
        if 2 <= count <= MOST_GROUPS * table.rows:
            table.guesses.append(f'group: "{column.name}", by its name; it has {count:,} groups')
            return column.name
    return None


def _is_name(column: Column) -> bool:
    """Whether a column names things, such as patients, by the look of its own name."""
    return column.name.lower() in GROUP_NAMES or column.name.lower().endswith("_id")


def guess_time(table: Table, taken: set[str | None], group: str | None) -> tuple[str | None, str | None]:
    """Find a column of times without duplicates in a group, and, if it needs one, the group."""
    for column in table.columns.values():
        named = column.name.lower() in TIME_NAMES and column.labels is None
        if column.name in taken or column.name == group or not (column.dates or named):
            continue
        if not column.dates and (column.bad is not None or not _rises(table, column, group)):
            continue
        table.require(column)
        why = "since it holds dates" if column.dates else "by its name"
        if _duplicate(table, column, group) is None:
            table.guesses.append(f'time: "{column.name}", {why}')
            return column.name, group
        if group is None:
            for other in table.columns.values():
                text = other.labels is not None and other.bad is None and other.name not in taken
                if text and len(other.labels or ()) <= table.rows / 2 and not _duplicate(table, column, other.name):
                    table.guesses.append(f'time: "{column.name}", {why}')
                    table.guesses.append(f'group: "{other.name}", since times repeat, but not within it')
                    return column.name, other.name
        if column.dates:
            check_duplicates(table, column, group)
    return None, group


def _rises(table: Table, column: Column, group: str | None) -> bool:
    """Whether numbers rise from row to row of each group."""
    values, starts = column.values, np.zeros(len(column.values) - 1, dtype=bool)
    if group is not None:
        order = np.argsort(table.columns[group].values, kind="stable")
        values, starts = values[order], np.diff(table.columns[group].values[order]) != 0
    return bool(np.all((np.diff(values) > 0) | starts))


def _duplicate(table: Table, time: Column, group: str | None) -> tuple[int, int] | None:
    """Find two rows with one time in one group."""
    keys = [time.values] if group is None else [time.values, table.columns[group].values]
    order = np.lexsort(keys)  # stable
    same = np.ones(len(order) - 1, dtype=bool)
    for values in keys:
        same &= values[order[1:]] == values[order[:-1]]
    places = np.flatnonzero(same)
    if not len(places):
        return None
    first = places[np.argmin(order[places + 1])]
    return int(order[first]), int(order[first + 1])


def check_duplicates(table: Table, time: Column, group: str | None) -> None:
    found = _duplicate(table, time, group)
    if found is not None:
        first, second = found
        where, advice = "", "name the column that tells series apart with --group, or remove one of the rows"
        if group is not None:
            where = f' in group "{table.columns[group].text(second)}"'
            advice = "remove one of the rows, or name other columns with --time and --group"
        raise BadDataError(
            f"{table.place(second, time.name)}: {time.text(second)} occurs twice{where}, first in row "
            f"{first + table.first}; {advice}."
        )


def guess_target(table: Table, taken: set[str | None], inputs: Sequence[str]) -> Column:
    free = [column for column in table.columns.values() if column.name not in taken and column.name not in inputs]
    free = [column for column in free if not column.dates and not _is_counter(column)]
    telling = [column for column in free if column.marked or len(column.labels or ()) <= table.rows / 2]
    free = telling or free  # texts that are all different are no classes
    if not free:
        raise BadDataError(f"{table.name} has no column left to predict; name one with --target.")
    named = [column for column in free if column.name.lower() in TARGET_NAMES]
    chosen, why = (named[0], "by its name") if named else (free[-1], "the last column")
    if len(free) == 1:
        why = "the only column left"
    table.guesses.append(f'target: "{chosen.name}", {why}')
    return chosen


def _is_counter(column: Column) -> bool:
    """Whether a column counts rows; of fewer than three rows nothing can be said."""
    return column.numeric and len(column.values) > 2 and bool(np.all(np.diff(column.values) == 1))


def _is_categorical(column: Column, most: int) -> bool:
    if column.labels is not None:
        return True
    return not column.dates and len(np.unique(column.values)) > 1 and are_few_whole_numbers(column.values, most)


def are_few_whole_numbers(values: Array, most: int) -> bool:
    """Whether numbers are whole and repeat, so that they may be classes."""
    return np.array_equal(values, np.round(values)) and len(np.unique(values)) <= min(most, len(values) // 2)


def varies(column: Column, order: Array, bounds: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Find two rows of one group with different values."""
    values = column.values[order]
    for start, stop in bounds:
        other = np.flatnonzero(values[start:stop] != values[start])
        if len(other):
            return int(order[start]), int(order[start + other[0]])
    return None


def guess_kind(
    table: Table, target: Column, time: str | None, group: str | None, order: Array, bounds: list[tuple[int, int]]
) -> Kind:
    changes = varies(target, order, bounds) is not None
    if group is not None and not changes:
        categorical, why = _is_categorical(target, MOST_CLASSES), "has one value for each group"
        kind: Kind = "classification" if categorical else "regression"
    elif not _free(table, target, time, group):
        kind, why = ("symbols", "holds texts") if target.labels is not None else ("forecasting", "is numeric")
        why += ", and there are no other inputs"
    elif group is None and time is None and _is_categorical(target, MOST_CLASSES):
        kind, why = "classification", "holds classes, and no time or group joins the rows"
    elif group is None and time is None and series_columns(table, target):
        kind, why = "regression", "is numeric, and the other columns are numbered like the steps of a series"
    elif _is_categorical(target, MOST_CLASSES if time is None else 2):
        kind, why = "tagging", "holds classes that change from row to row"
    else:
        kind = "forecasting"
        why = f'is numeric and rows have a time column "{time}"' if time else "is numeric; the rows are taken in order"
    table.guesses.append(f'kind: {kind}, since "{target.name}" {why}')
    return kind


def series_columns(table: Table, target: Column) -> bool:
    """Whether the columns besides the target are numbered, as in t0, t1, t2, ...; then a row is a series."""
    names = [column.name for column in table.columns.values() if column is not target and column.numeric]
    stems = {name.rstrip("0123456789") for name in names}
    numbered = len(stems) == 1 and all(name[-1:].isdigit() for name in names)
    return numbered and len(names) >= 4


def guess_inputs(table: Table, target: Column, time: str | None, group: str | None, kind: Kind) -> list[Column]:
    free = _free(table, target, time, group)
    numbers = [column for column in free if column.numeric]
    texts = [column for column in free if column.labels is not None]
    if kind == "forecasting":
        numbers.append(target)
    if kind == "symbols":
        return [target]
    for column in texts:
        if column.marked:
            table.require(column)
    if not numbers and len(texts) == 1:
        return texts
    examples = kind in ("classification", "regression") and group is None
    few = [] if examples else [column for column in texts if len(column.labels or ()) <= MOST_ONE_HOT]
    left_out = [column.name for column in texts if column not in few]
    if left_out:
        table.guesses.append(f"inputs: without {_listing(left_out)}, which hold texts")
    if not numbers and not few:
        raise BadDataError(
            f'{table.name} has no input columns beside "{target.name}"; add some, or name others with --target, '
            "--time and --group."
        )
    chosen = numbers + few
    table.guesses.append(f"inputs: {_listing([column.name for column in chosen])}")
    return chosen


def _free(table: Table, target: Column, time: str | None, group: str | None) -> list[Column]:
    """Columns that may be inputs: those without another role, and no dates, row numbers or names of things."""
    free = [column for column in table.columns.values() if column.name not in (time, group, target.name)]
    return [column for column in free if not (column.dates or _is_counter(column) or _is_name(column))]


def _listing(names: Sequence[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    return ", ".join(quoted if len(quoted) <= 6 else [*quoted[:3], "...", quoted[-1]])
