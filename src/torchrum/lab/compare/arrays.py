"""Sequences of arrays ``x`` and ``y``, and of texts."""

from typing import Any

import numpy as np

from torchrum.lab.compare.guessing import MOST_CLASSES
from torchrum.lab.compare.problem import Array, BadDataError, Kind
from torchrum.lab.compare.sequences import LEAST_WHOLE, Sequences, symbols_of_texts
from torchrum.lab.compare.table import MOST_VALUES

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
    classes = flat.dtype.kind in "biuU" or _whole_numbers(flat)
    if flat.dtype.kind == "f":
        for i, y in enumerate(targets):
            _check_finite(found.name, f"y[{i}]" if shape else "y", np.asarray(y) if shape else flat)
            if not shape:
                break
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


def _whole_numbers(values: Array) -> bool:
    if np.any(values != np.round(values)):
        return False
    return len(np.unique(values)) <= min(MOST_CLASSES, len(values) // 2)


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
