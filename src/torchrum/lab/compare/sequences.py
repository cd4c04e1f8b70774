"""Sequences before they are split and scaled: of a table by the roles of its columns, of arrays, and of texts."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchrum.lab.compare.guessing import (
    MOST_CLASSES,
    MOST_ONE_HOT,
    are_few_whole_numbers,
    check_duplicates,
    guess_group,
    guess_inputs,
    guess_kind,
    guess_target,
    guess_time,
    series_columns,
    varies,
)
from torchrum.lab.compare.problem import Array, BadDataError, Kind
from torchrum.lab.compare.table import MOST_VALUES, Column, Table

MOST_OF_A_TEXT = 512
"""Symbols of each text that are read where a text has one class."""
LEAST_WHOLE = 5
"""Sequences from which the parts get whole ones; fewer are cut by time."""


@dataclass(kw_only=True)
class Sequences:
    """Sequences with raw values; ``build`` splits, scales and scores them."""

    name: str
    kind: Kind
    inputs: list[Array]
    """Each ``(T, F)`` numbers, or ``(T,)`` int64 codes."""
    targets: list[Array] | None
    """One per sequence, as in ``Part`` but not scaled; None if the targets are later inputs."""
    columns: list[str]
    """Name of each input number."""
    target_columns: list[str]
    """Name of each target."""
    ahead: list[int] | None = None
    """Forecasting: the input columns to predict one step ahead."""
    classes: list[Any] | None = None
    """Name of each class or tag."""
    alphabet: list[Any] | None = None
    """Name of each code of the inputs; None if they are numbers."""
    whole: bool = True
    """Whether sequences belong to one part as a whole; else each is cut by time."""
    shuffle: bool = True
    """Whether whole sequences are dealt to the parts at random; else the last ones are the test part."""
    times: list[Array] | None = None
    """Time of each row, to cut all sequences at the same moments."""
    one_hot: int = 0
    """The last so many input columns are 0 or 1, and are not scaled."""
    turned: bool = False
    """Whether the F numbers of the only step become F steps of one number, once they are scaled."""
    guesses: list[str] = field(default_factory=list)
    reading: dict[str, Any] = field(default_factory=dict)


def sequences_of_table(
    table: Table,
    target: str | None,
    time: str | None,
    group: str | None,
    inputs: Sequence[str] | None,
    kind: Kind | None,
) -> Sequences:
    """Find the role of each column, and make sequences of the rows."""
    guesses = table.guesses
    for option, given in {"--target": target, "--time": time, "--group": group}.items():
        if given is not None:
            table.column(given, option)
    chosen = [table.column(name, "--inputs") for name in inputs] if inputs is not None else None
    _check_roles(table, target, time, group, inputs or ())
    taken = {target, time, group} - {None}
    if group is None:
        group = guess_group(table, taken)
    rows_are_examples = kind in ("classification", "regression") and group is None
    if time is None and not rows_are_examples:
        time, group = guess_time(table, taken, group)
    target_column = table.columns[target] if target else guess_target(table, {time, group}, inputs or ())
    order, bounds = _order(table, time, group, unique=not rows_are_examples)
    table.require(target_column)
    if kind is None:
        kind = guess_kind(table, target_column, time, group, order, bounds)
    rows_are_examples = kind in ("classification", "regression") and group is None
    _check_target(table, target_column, kind, group, order, bounds)
    if chosen is None:
        chosen = guess_inputs(table, target_column, time, group, kind)
    elif kind != "forecasting" and target_column in chosen:
        raise BadDataError(f'{table.name}: "{target_column.name}" is the target, so it cannot be among --inputs.')
    reading = {**table.reading, "source": "table", "target": target_column.name, "time": time, "group": group}
    found = Sequences(
        name=table.name, kind=kind, inputs=[], targets=None, columns=[], target_columns=[target_column.name],
        guesses=guesses, reading=reading,
    )  # fmt: skip
    if rows_are_examples:
        found.shuffle = time is None
        _fill_rows(found, table, chosen, target_column, order)
        return found
    _fill_inputs(found, table, chosen, target_column, order, bounds)
    _fill_targets(found, target_column, order, bounds)
    if time is not None:
        found.times = [table.columns[time].values[order[a:b]] for a, b in bounds]
    found.whole = len(bounds) >= LEAST_WHOLE and not (kind == "forecasting" and time is not None)
    return found


def _check_roles(table: Table, target: str | None, time: str | None, group: str | None, inputs: Sequence[str]) -> None:
    roles = {"--target": target, "--time": time, "--group": group}
    names = [name for name in roles.values() if name is not None]
    for name in names:
        if names.count(name) > 1:
            options = " and ".join(option for option, given in roles.items() if given == name)
            raise BadDataError(f'{table.name}: {options} both name "{name}"; give each its own column.')
    for option in ("--time", "--group"):
        if roles[option] in inputs:
            raise BadDataError(f'{table.name}: "{roles[option]}" is {option}, so it cannot be among --inputs.')


def _order(table: Table, time: str | None, group: str | None, unique: bool) -> tuple[Array, list[tuple[int, int]]]:
    """Sort rows by group and time; the groups are slices of the order."""
    keys = []
    if time is not None:
        column = table.columns[time]
        if column.labels is not None:
            raise BadDataError(
                f'{table.place(0, time)}: "{column.text(0)}" is neither a number nor a date that is known; '
                "write dates as 2024-12-31 or 2024-12-31 23:59:59."
            )
        table.require(column)
        if unique:
            check_duplicates(table, column, group)
        keys.append(column.values)
    codes = np.zeros(table.rows, dtype=np.int64)
    if group is not None:
        table.require(table.columns[group])
        _, codes = np.unique(table.columns[group].values, return_inverse=True)
    order = np.lexsort([*keys, codes])  # stable
    changes = np.diff(codes[order]) != 0
    if time is not None and unique:
        column = table.columns[time]
        _note_unequal_steps(table, column, np.diff(column.values[order])[~changes])
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), table.rows]
    return order, list(itertools.pairwise(edges))


def _note_unequal_steps(table: Table, time: Column, steps: Array) -> None:
    if len(steps) and steps.max() > 1.5 * np.median(steps):
        shortest, longest = (_duration(step) if time.dates else f"{step:g}" for step in (steps.min(), steps.max()))
        table.guesses.append(
            f'steps: rows are taken as equally spaced, but "{time.name}" goes in steps of {shortest} to {longest}'
        )


def _duration(seconds: float) -> str:
    unit, size = next(pair for pair in (("d", 86400), ("h", 3600), ("min", 60), ("s", 0)) if seconds >= pair[1])
    return f"{seconds / max(size, 1):g} {unit}"


def _check_target(
    table: Table, target: Column, kind: Kind, group: str | None, order: Array, bounds: list[tuple[int, int]]
) -> None:
    if kind in ("regression", "forecasting"):
        table.require(target, numbers=True)
    else:
        distinct = len(np.unique(target.values))
        if distinct > max(2, table.rows / 2) or (target.labels is None and distinct > 1000):
            what = "numbers" if target.labels is None else "texts"
            advice = "; try --kind regression or forecasting" if target.labels is None else ""
            raise BadDataError(
                f'{table.name}, column "{target.name}" has {distinct:,} different {what} in {table.rows:,} rows; '
                f"{kind} needs classes that occur several times{advice}."
            )
    found = varies(target, order, bounds) if kind in ("classification", "regression") and group else None
    if found is not None:
        first, second = found
        raise BadDataError(
            f"{table.place(second, target.name)}: {target.text(second)} differs from row {first + table.first} of the "
            f'same group ({target.text(first)}); {kind} needs one value for each "{group}". '
            "Try --kind tagging or forecasting."
        )


def _fill_inputs(
    found: Sequences, table: Table, chosen: list[Column], target: Column, order: Array, bounds: list[tuple[int, int]]
) -> None:
    if found.kind == "symbols":
        chosen = [target]
    if found.kind == "forecasting" and target not in chosen:
        chosen = [*chosen, target]
    for column in chosen:
        table.require(column)
    if found.kind == "symbols" or (len(chosen) == 1 and chosen[0].labels is not None):
        codes, found.alphabet = _codes(chosen[0])
        found.inputs = [codes[order[a:b]] for a, b in bounds]
        found.columns = [chosen[0].name]
        return
    numbers = [column for column in chosen if column.labels is None]
    texts = [column for column in chosen if column.labels is not None]
    pieces = [column.values for column in numbers]
    found.columns = [column.name for column in numbers]
    for column in texts:
        labels = column.labels or []
        if len(labels) > MOST_ONE_HOT:
            raise BadDataError(
                f'{table.name}, column "{column.name}" has {len(labels):,} different texts; beside numbers an input '
                f"may have {MOST_ONE_HOT}. Leave it out of --inputs."
            )
        for label in sorted(labels):
            pieces.append(column.values == labels.index(label))
            found.columns.append(f"{column.name}={label}")
            found.one_hot += 1
    matrix = np.stack(pieces, 1, dtype=np.float64)[order]
    found.inputs = [matrix[a:b] for a, b in bounds]
    if found.kind == "forecasting":
        found.ahead = [numbers.index(target)]


def _codes(column: Column) -> tuple[Array, list[Any]]:
    """Number the classes of a column in their order."""
    values, codes = np.unique(column.values, return_inverse=True)
    if column.labels is None:
        return codes.astype(np.int64), [int(value) if value == int(value) else float(value) for value in values]
    names = [column.labels[int(value)] for value in values]
    ranks = sorted(range(len(names)), key=names.__getitem__)
    place = np.empty(len(names), dtype=np.int64)
    place[ranks] = np.arange(len(names))
    return place[codes], [names[i] for i in ranks]


def _fill_targets(found: Sequences, target: Column, order: Array, bounds: list[tuple[int, int]]) -> None:
    if found.kind in ("forecasting", "symbols"):
        return
    if found.kind == "regression":
        found.targets = [target.values[order[a], None] for a, _ in bounds]
        return
    codes, found.classes = _codes(target)
    if found.kind == "tagging":
        found.targets = [codes[order[a:b]] for a, b in bounds]
    else:
        found.targets = [codes[order[a]] for a, _ in bounds]


def symbols_of_texts(texts: Sequence[str]) -> tuple[list[Array], list[str]]:
    """Number the characters of texts by their code points."""
    points = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    present = np.flatnonzero(np.bincount(points))
    codes = np.searchsorted(present, points).astype(np.int64)
    edges = np.cumsum([0, *map(len, texts)]).tolist()
    pieces = [codes[start:stop] for start, stop in itertools.pairwise(edges)]
    return pieces, [chr(point) for point in present]


def _fill_rows(found: Sequences, table: Table, chosen: list[Column], target: Column, order: Array) -> None:
    """Make each row a sequence of its numbers, or of the characters of its only text."""
    if len(chosen) == 1 and chosen[0].labels is not None:
        table.require(chosen[0])
        labels = [text[:MOST_OF_A_TEXT] for text in chosen[0].labels]
        by_label, found.alphabet = symbols_of_texts(labels)
        found.inputs = [by_label[code] for code in chosen[0].values[order]]
        found.columns = [chosen[0].name]
        cut = f"; only the first {MOST_OF_A_TEXT} of each" if max(map(len, labels)) == MOST_OF_A_TEXT else ""
        found.guesses.append(f'sequences: the characters of "{chosen[0].name}" in each row{cut}')
        _fill_targets(found, target, order, [(row, row + 1) for row in range(table.rows)])
        return
    for column in chosen:
        table.require(column, numbers=True)
    found.columns = [column.name for column in chosen]
    matrix = np.stack([column.values for column in chosen], 1)[order]
    found.turned = not series_columns(table, target)
    scale = "each scaled by itself" if found.turned else "scaled together, since they are numbered"
    found.guesses.append(f"sequences: each row is one of {len(chosen)} steps, its numbers from left to right, {scale}")
    found.inputs = list(matrix[:, None, :] if found.turned else matrix[:, :, None])
    _fill_targets(found, target, order, [(row, row + 1) for row in range(table.rows)])


WIDE = 16
"""Columns of a matrix without targets beyond which its rows are sequences, not steps."""
MOST_LABELS = 1000
"""Whole numbers up to which integer targets are classes."""
SHAPES = "it must be (N, T, F), (N, T) or (T,), or a list of (T, F) or (T,)"


def sequences_of_arrays(name: str, x: Any, y: Any, kind: Kind | None) -> Sequences:
    """Make sequences of arrays.

    Args:
        name: their file, for errors.
        x: ``(N, T, F)``, ``(N, T)`` or ``(T,)``; or a list of ``(T, F)`` or ``(T,)``, where T may differ; or a list of
            strings. Integers of more than 8 bits in ``(N, T)`` and ``(T,)`` are symbols.
        y: one target per sequence, ``(N,)`` or ``(N, K)``, or one per step, ``(N, T)`` or ``(N, T, K)``; None to
            predict what follows.
        kind: guessed if None.
    """
    guesses: list[str] = []
    xs, ys = _as_arrays(name, "x", x), None if y is None else _as_arrays(name, "y", y)
    if isinstance(xs, np.ndarray) and xs.dtype.kind == "U" and xs.ndim == 1:
        alphabet: list[Any] | None
        inputs, alphabet = symbols_of_texts([str(text) for text in xs])
    else:
        if isinstance(xs, np.ndarray):
            one = _is_one_sequence(xs, ys, kind, guesses)
            xs, ys = ([xs], None if ys is None else [np.asarray(ys)]) if one else (list(xs), ys)
        inputs, alphabet = _inputs(name, xs, kind, ys is None, guesses)
    targets = None if ys is None else list(ys)
    if targets is not None and len(targets) != len(inputs):
        raise BadDataError(f"{name}: y has {len(targets)} targets, but x has {len(inputs)} sequences; both must agree.")
    inputs, targets = _shorten(inputs, targets, guesses)
    found = Sequences(
        name=name, kind="symbols", inputs=inputs, targets=None, columns=["x"], target_columns=["x"], alphabet=alphabet,
        whole=len(inputs) >= LEAST_WHOLE, guesses=guesses, reading={"source": "arrays"},
    )  # fmt: skip
    if alphabet is None:
        found.columns = [f"x[{i}]" for i in range(inputs[0].shape[1])]
    if targets is None:
        _predict_what_follows(found, kind)
    else:
        _predict_targets(found, targets, kind)
    return found


def _as_arrays(name: str, which: str, given: Any) -> Array | list[Array]:
    """Make one array, or a list of arrays if their shapes differ."""
    if isinstance(given, list | tuple) and any(isinstance(item, list | tuple) or np.ndim(item) for item in given):
        arrays = [_as_array(name, f"{which}[{i}]", item) for i, item in enumerate(given)]
        if len({(array.shape, array.dtype.kind) for array in arrays}) > 1:
            return arrays
        return np.stack(arrays)
    return _as_array(name, which, given)


def _as_array(name: str, which: str, given: Any) -> Array:
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise BadDataError(f"{name}: {which} has rows of unequal lengths; {SHAPES}.") from error
    if array.dtype.kind not in "biufU":
        raise BadDataError(f"{name}: {which} has dtype {array.dtype}; it must hold real numbers or strings.")
    if array.size == 0:
        raise BadDataError(f"{name}: {which} has shape {array.shape}, which is empty.")
    return array


def _is_one_sequence(x: Array, y: Array | list[Array] | None, kind: Kind | None, guesses: list[str]) -> bool:
    if x.ndim != 2:
        return x.ndim == 1
    if y is not None:
        return kind in ("tagging", "forecasting") and len(y) == len(x) and np.ndim(y[0]) == 0
    one = not _holds_symbols(x, kind) and x.shape[1] <= WIDE < x.shape[0]
    what = "steps of one sequence" if one else "sequences"
    guesses.append(f"sequences: the {x.shape[0]:,} rows of x are {what}; for others give x as (N, T, F)")
    return one


def _holds_symbols(x: Array, kind: Kind | None) -> bool:
    return x.dtype.kind == "U" or (x.dtype.kind in "iu" and (x.dtype.itemsize > 1 or kind == "symbols"))


def _inputs(
    name: str, xs: list[Array], kind: Kind | None, following: bool, guesses: list[str]
) -> tuple[list[Array], list[Any] | None]:
    """Check the arrays of sequences, and number their symbols if that is what they hold."""
    for i, x in enumerate(xs):
        if x.ndim not in (1, 2) or x.size == 0:
            raise BadDataError(f"{name}: x[{i}] has shape {x.shape}; {SHAPES}, without empty ones.")
        if x.shape[1:] != xs[0].shape[1:]:
            raise BadDataError(f"{name}: x[{i}] has shape {x.shape}, but x[0] has {xs[0].shape}; only T may differ.")
    symbols = xs[0].ndim == 1 and all(_holds_symbols(x, kind) for x in xs)
    if symbols and not (following and kind == "forecasting"):
        values, codes = np.unique(np.concatenate(xs), return_inverse=True)
        guesses.append(f"inputs: {len(values):,} symbols, since x holds whole numbers or words; for numbers use floats")
        return np.split(codes.astype(np.int64), np.cumsum([len(x) for x in xs])[:-1]), values.tolist()
    for i, x in enumerate(xs):
        if x.dtype.kind == "U":
            raise BadDataError(f"{name}: x[{i}] holds texts; {SHAPES} of numbers, or words in (T,) everywhere.")
        _check_finite(name, f"x[{i}]", x)
    return [np.asarray(x if x.ndim == 2 else x[:, None], dtype=np.float64) for x in xs], None


def _check_finite(name: str, which: str, values: Array) -> None:
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        place = ", ".join(map(str, wrong[0]))
        more = f" ({len(wrong)} such values in it)" if len(wrong) > 1 else ""
        raise BadDataError(f"{name}: {which}[{place}] is {values[tuple(wrong[0])]}{more}; fill or remove it.")


def _shorten(
    inputs: list[Array], targets: list[Array] | None, guesses: list[str]
) -> tuple[list[Array], list[Array] | None]:
    """Keep the first sequences, or the first steps of a single one."""
    sizes = np.cumsum([x.size for x in inputs])
    if sizes[-1] <= MOST_VALUES:
        return inputs, targets
    if len(inputs) == 1:
        steps = MOST_VALUES // max(1, inputs[0].size // len(inputs[0]))
        guesses.append(f"sequences: only the first {steps:,} steps, since x holds more than {MOST_VALUES:,} values")
        return [inputs[0][:steps]], None if targets is None else [targets[0][:steps]]
    count = max(1, int(np.searchsorted(sizes, MOST_VALUES, side="right")))
    guesses.append(f"sequences: only the first {count:,}, since x holds more than {MOST_VALUES:,} values")
    return inputs[:count], None if targets is None else targets[:count]


def _predict_what_follows(found: Sequences, kind: Kind | None) -> None:
    if kind not in (None, "forecasting", "symbols"):
        raise BadDataError(f"{found.name} has no array y; {kind} needs a target for each sequence or step.")
    found.kind = "forecasting" if found.alphabet is None else "symbols"
    if kind == "symbols" and found.alphabet is None:
        raise BadDataError(f"{found.name}: x holds numbers, but symbols must be integers in (N, T) or (T,).")
    if found.kind == "forecasting":
        found.ahead, found.target_columns = list(range(len(found.columns))), found.columns
        if any(len(x) < 2 for x in found.inputs):
            raise BadDataError(f"{found.name}: a sequence has 1 step; forecasting needs at least 2.")
    elif any(len(x) < 2 for x in found.inputs):
        raise BadDataError(f"{found.name}: a sequence has 1 symbol; the next one needs at least 2.")
    if kind is None:
        found.guesses.append(f"kind: {found.kind}, since there is no array y; the next step is predicted")


def _predict_targets(found: Sequences, targets: list[Array], kind: Kind | None) -> None:
    stepwise = all(np.ndim(y) > 0 and len(y) == len(x) for x, y in zip(found.inputs, targets, strict=True))
    stepwise = stepwise and kind not in ("classification", "regression")
    flat = np.concatenate([np.ravel(y) for y in targets])
    shape = np.shape(targets[0])
    classes = flat.dtype.kind in "biuU" or are_few_whole_numbers(flat, MOST_CLASSES)
    if flat.dtype.kind == "f":
        parts = {f"y[{i}]": y for i, y in enumerate(targets)} if shape else {"y": flat}
        for which, values in parts.items():
            _check_finite(found.name, which, values)
    if stepwise:
        guess: Kind = "tagging" if classes and len(shape) == 1 else "forecasting"
    else:
        guess = "classification" if classes and not shape else "regression"
    if kind is None:
        what = "class" if guess in ("classification", "tagging") else "number"
        found.guesses.append(f"kind: {guess}, since y has a {what} for each {'step' if stepwise else 'sequence'}")
    found.kind = kind or guess
    allowed = ("tagging", "forecasting") if stepwise else ("classification", "regression")
    if found.kind not in allowed:
        raise BadDataError(
            f"{found.name}: y has shape {(len(targets), *shape)}, which fits {' or '.join(allowed)}; {found.kind} "
            f"needs a target for each {'sequence' if stepwise else 'step'}."
        )
    if found.kind in ("classification", "tagging"):
        _fill_classes(found, targets, flat, shape)
        return
    if flat.dtype.kind == "U":
        raise BadDataError(f"{found.name}: y holds texts; {found.kind} needs numbers.")
    most = 2 if stepwise else 1
    if len(shape) > most or len({np.shape(y)[most - 1 :] for y in targets}) > 1:
        raise BadDataError(f"{found.name}: y has shape {(len(targets), *shape)}; a target must have up to {most} axes.")
    axis = -1 if len(shape) == most else None
    rows = [np.asarray(y, dtype=np.float64) for y in targets]
    found.targets = [y if axis is not None else y[..., None] for y in rows]
    found.target_columns = [f"y[{k}]" for k in range(found.targets[0].shape[-1])]


def _fill_classes(found: Sequences, targets: list[Array], flat: Array, shape: tuple[int, ...]) -> None:
    if len(shape) > (1 if found.kind == "tagging" else 0):
        raise BadDataError(f"{found.name}: y has shape {(len(targets), *shape)}; {found.kind} needs one class in each.")
    values, codes = np.unique(flat, return_inverse=True)
    if len(values) > min(MOST_LABELS, max(2, len(flat) // 2)):
        raise BadDataError(
            f"{found.name}: y has {len(values):,} different values in {len(flat):,}; {found.kind} needs classes that "
            "occur several times."
        )
    found.classes = values.tolist()
    codes = codes.astype(np.int64)
    if found.kind == "tagging":
        found.targets = np.split(codes, np.cumsum([len(y) for y in targets])[:-1])
    else:
        found.targets = list(codes)
