"""From raw sequences to a problem: split without leakage, scale by the training part, cut in windows, score floors."""

import itertools
import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from torchrum.lab.compare.problem import Array, BadDataError, Part, Problem
from torchrum.lab.compare.sequences import Sequences

HELD_OUT = 0.15
"""Share of the validation part, and of the test part."""
LEAST_EXAMPLES = 20
"""Sequences that a problem with one target for each needs."""
LEAST_ROWS = 50
"""Rows or symbols that a problem with a target for each step needs, if they are cut by time."""
LONGEST_WINDOW = 128
"""Steps of a window, if sequences are cut by time."""
LONGEST_WHOLE = 512
"""Steps up to which a sequence with a target for each step stays in one piece, if the parts get whole ones."""
MANY_STEPS = 2**18
"""Steps of a training sequence from which its windows no longer overlap."""
MOST_SYMBOLS = 4096
"""Size of an alphabet; rarer symbols become one."""
TRENDING = 0.2
"""Share of validation values outside the range of training from which a column is read as changes."""

PARTS = ("training", "validation", "test")
Pieces = list[list[tuple[int, slice]]]
"""For each part, its sequences and their rows."""
Arrays = list[list[Array]]
"""For each part, an array per piece."""


def build(given: Sequences) -> Problem:
    """Split, scale, cut and score."""
    pieces = _split(given)
    raw = [[given.inputs[i][rows] for i, rows in part] for part in pieces]
    scale: Tensor | None = None
    floor: dict[str, float] = {}
    if given.alphabet is not None:
        symbols: int | None
        inputs, symbols = _encode(given, raw)
        features = 1
    else:
        inputs, symbols, features = _scale_inputs(given, raw), None, 1 if given.turned else raw[0][0].shape[1]
    if given.kind == "symbols":
        assert symbols is not None
        targets, outputs = [[x[1:] for x in part] for part in inputs], symbols
    elif given.classes is not None:
        targets, outputs = _given_targets(given, pieces), len(given.classes)
        _check_classes(given, targets[0])
    else:
        if given.ahead is None:
            levels, last = _given_targets(given, pieces), None
        else:
            ahead = [[x[:, given.ahead] for x in part] for part in raw]
            levels, last = ([[x[steps] for x in part] for part in ahead] for steps in (np.s_[1:], np.s_[:-1]))
        targets, scale, floor = _scale_targets(given, levels, last)
        outputs = len(scale)
    if given.kind == "symbols" or given.ahead is not None:
        inputs = [[x[:-1] for x in part] for part in inputs]
    train, validation, test = _cut(given, inputs, targets)
    if given.kind == "classification":
        floor = classification_floor(train, test, outputs, symbols)
    elif given.kind == "tagging":
        floor = tagging_floor(train, test, outputs, symbols)
    elif given.kind == "symbols":
        floor = symbols_floor(train, test, outputs)
    metric = {"classification": "error rate", "tagging": "error rate", "symbols": "bits per symbol"}
    return Problem(
        kind=given.kind, train=train, validation=validation, test=test, symbols=symbols, features=features,
        outputs=outputs, metric=metric.get(given.kind, "RMSE"), target_scale=scale, floor=floor,
        guesses=tuple(given.guesses), reading={"kind": given.kind, "columns": given.columns, **given.reading},
    )  # fmt: skip


def _split(given: Sequences) -> Pieces:
    """Deal whole sequences to the parts, or cut each by time."""
    if not given.whole:
        return _split_by_time(given)
    count = len(given.inputs)
    if given.kind in ("classification", "regression") and count < LEAST_EXAMPLES:
        raise BadDataError(f"{given.name} has {count} sequences; at least {LEAST_EXAMPLES} are needed.")
    everything = np.arange(count)
    groups = [everything]
    if given.kind == "classification" and given.shuffle:
        labels = np.array(given.targets)
        groups = [everything[labels == label] for label in np.unique(labels)]
        _check_class_sizes(given, groups)
    generator = np.random.default_rng(0)
    chosen: list[list[int]] = [[], [], []]
    for group in groups:
        order = generator.permutation(group) if given.shuffle else group
        held_out = max(1, round(HELD_OUT * len(group)))
        edges = [0, len(group) - 2 * held_out, len(group) - held_out, len(group)]
        for part, start, stop in zip(chosen, edges[:-1], edges[1:], strict=True):
            part += order[start:stop].tolist()
    how = "at random" if given.shuffle else "in the order of time"
    if given.kind == "classification" and given.shuffle:
        how = "at random in each class"
    sizes = " / ".join(f"{len(part):,}" for part in chosen)
    given.guesses.append(f"parts: {sizes} whole sequences for training / validation / test, {how}")
    return [[(i, slice(0, len(given.inputs[i]))) for i in sorted(part)] for part in chosen]


def _check_class_sizes(given: Sequences, groups: list[Array]) -> None:
    assert given.classes is not None
    if len(groups) == 1:
        raise BadDataError(f"{given.name} has one class only, {given.classes[0]!r}; there is nothing to tell apart.")
    for group in groups:
        if len(group) < 3:
            label = given.classes[int(np.array(given.targets)[group[0]])]
            raise BadDataError(
                f"{given.name}: class {label!r} has {len(group)} sequences; each class needs at least 3, "
                "one for each part."
            )


def _split_by_time(given: Sequences) -> Pieces:
    rows = sum(map(len, given.inputs))
    if rows < LEAST_ROWS:
        what = "symbols" if given.alphabet is not None else "rows"
        raise BadDataError(f"{given.name} has {rows} {what}; at least {LEAST_ROWS} are needed.")
    shares = (1 - 2 * HELD_OUT, 1 - HELD_OUT)
    moments = None
    if given.times is not None and len(given.times) > 1:
        moments = np.quantile(np.concatenate(given.times), shares, method="higher")
    pieces: Pieces = [[], [], []]
    least = 1 if given.kind == "tagging" else 2
    for i, x in enumerate(given.inputs):
        if moments is not None and given.times is not None:
            cuts = np.searchsorted(given.times[i], moments).tolist()
        else:
            cuts = [int(share * len(x)) for share in shares]
        edges = [0, *cuts, len(x)]
        for part, start, stop in zip(pieces, edges[:-1], edges[1:], strict=True):
            if stop - start >= least:
                part.append((i, slice(start, stop)))
    for name, part in zip(PARTS, pieces, strict=True):
        if not part:
            raise BadDataError(f"{given.name}: no series has {least} rows in the {name} part; give longer series.")
    sizes = " / ".join(f"{sum(rows.stop - rows.start for _, rows in part):,}" for part in pieces)
    what = "symbols" if given.alphabet is not None else "rows"
    given.guesses.append(f"parts: {sizes} {what} for training / validation / test, in the order of time")
    return pieces


def _encode(given: Sequences, raw: Arrays) -> tuple[Arrays, int]:
    """Number the symbols that occur twice in training; all others are one more."""
    assert given.alphabet is not None
    counts = sum((np.bincount(codes, minlength=len(given.alphabet)) for codes in raw[0]), np.zeros(1, dtype=np.int64))
    common = np.argsort(-counts, kind="stable")[:MOST_SYMBOLS]
    kept = np.sort(common[counts[common] > 1])
    if len(kept) < 2:
        raise BadDataError(f"{given.name} has fewer than 2 symbols that occur twice; there is nothing to predict.")
    place = np.full(len(given.alphabet), len(kept), dtype=np.int64)
    place[kept] = np.arange(len(kept))
    given.reading["alphabet"] = [given.alphabet[i] for i in kept]
    return [[place[codes] for codes in part] for part in raw], len(kept) + 1


def _scale_inputs(given: Sequences, raw: Arrays) -> Arrays:
    """Scale by mean and standard deviation of the training part; trending columns become changes first."""
    trending = _trending(given, raw)
    if trending.any():
        names = ", ".join(f'"{name}"' for name, is_so in zip(given.columns, trending, strict=True) if is_so)
        given.guesses.append(
            f"changes: the inputs have the changes of {names} from row to row, since later values leave the range of "
            "the training part"
        )
        raw = [[np.where(trending, np.diff(x, axis=0, prepend=x[:1]), x) for x in part] for part in raw]
    mean, scale = _mean_and_scale(given, raw[0])
    if given.one_hot:
        mean[-given.one_hot :], scale[-given.one_hot :] = 0, 1
    given.reading |= {
        "changes": trending.tolist(),
        "means": mean.tolist(),
        "scales": scale.tolist(),
        "turned": given.turned,
    }
    scaled = [[((x - mean) / scale).astype(np.float32) for x in part] for part in raw]
    return [[x.T for x in part] for part in scaled] if given.turned else scaled


def _mean_and_scale(given: Sequences, arrays: list[Array]) -> tuple[Array, Array]:
    values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, scale = values.mean(0), values.std(0)
    if not np.isfinite(scale).all():
        raise BadDataError(f"{given.name} has numbers too large to square; divide them first.")
    return mean, np.where(scale > 1e-12 * np.abs(mean), scale, 1.0)


def _trending(given: Sequences, raw: Arrays) -> Array:
    """Which columns leave the range of training in the validation part."""
    columns = raw[0][0].shape[1]
    if given.whole or given.ahead is None:
        return np.zeros(columns, dtype=bool)
    train, validation = (np.concatenate(part) for part in raw[:2])
    outside = (validation < train.min(0)) | (validation > train.max(0))
    return outside.mean(0) > TRENDING


def _given_targets(given: Sequences, pieces: Pieces) -> Arrays:
    assert given.targets is not None
    stepwise = given.kind not in ("classification", "regression")
    return [[given.targets[i][rows] if stepwise else given.targets[i] for i, rows in part] for part in pieces]


def _check_classes(given: Sequences, targets: list[Array]) -> None:
    assert given.classes is not None
    given.reading["classes"] = given.classes
    first = targets[0].flat[0]
    if all(np.all(target == first) for target in targets):
        raise BadDataError(
            f"{given.name}: the training part has one class only, {given.classes[int(first)]!r}; there is nothing to "
            "tell apart."
        )


def _scale_targets(given: Sequences, levels: Arrays, last: Arrays | None) -> tuple[Arrays, Tensor, dict[str, float]]:
    """Scale targets; if the last value predicts better than the mean, the target is the change from it."""
    stack = np.concatenate if levels[0][0].ndim == 2 else np.stack  # (N, K)
    train, test = stack(levels[0]), stack(levels[2])
    constant = np.flatnonzero(np.ptp(train, axis=0) == 0)
    if len(constant):
        name = given.target_columns[constant[0]]
        raise BadDataError(
            f'{given.name}: target "{name}" is {train[0, constant[0]]:g} in all of the training part; there is nothing '
            "to predict."
        )
    mean = train.mean(0)
    predictions = {"training mean": mean}
    change = np.zeros(len(mean), dtype=bool)
    targets = levels
    if last is not None:
        before = np.concatenate(last[0])
        change = ((train - before) ** 2).mean(0) < ((train - mean) ** 2).mean(0)
        predictions["last value"] = np.concatenate(last[2])
        targets = [[y - change * x for y, x in zip(*part, strict=True)] for part in zip(levels, last, strict=True)]
        if change.any():
            names = ", ".join(f'"{name}"' for name, is_so in zip(given.target_columns, change, strict=True) if is_so)
            given.guesses.append(
                f"target: models predict the change of {names} from the last value, since in training the last value "
                "predicts better than the mean; errors are those of the value"
            )
    mean, scale = _mean_and_scale(given, [stack(targets[0])])
    given.reading |= {
        "targets": given.target_columns,
        "target_changes": change.tolist(),
        "target_means": mean.tolist(),
        "target_scales": scale.tolist(),
    }
    scaled = [[((y - mean) / scale).astype(np.float32) for y in part] for part in targets]
    return scaled, torch.tensor(scale, dtype=torch.float32), squared_floor(test, predictions)


def _cut(given: Sequences, inputs: Arrays, targets: Arrays) -> list[Part]:
    """Make tensors, and cut long sequences with a target for each step into windows."""
    if given.kind in ("classification", "regression"):
        return [
            Part(inputs=[torch.tensor(x) for x in xs], targets=[torch.tensor(y) for y in ys])
            for xs, ys in zip(inputs, targets, strict=True)
        ]
    length, longest = LONGEST_WHOLE, max(len(x) for part in inputs for x in part)
    if not given.whole:
        length = max(16, min(LONGEST_WINDOW, sum(map(len, inputs[0])) // 8))
    overlap = not given.whole and given.kind != "symbols"
    if longest > length:
        given.guesses.append(
            f"windows: sequences are cut in windows of up to {length} steps"
            + ", half overlapping in training" * overlap
        )
    parts = []
    for number, both in enumerate(zip(inputs, targets, strict=True)):
        part = Part(inputs=[], targets=[])
        for x, y in zip(*both, strict=True):
            xs, ys = (torch.from_numpy(np.ascontiguousarray(values)) for values in (x, y))
            for start, stop in _windows(len(x), length, overlap and number == 0 and len(x) < MANY_STEPS):
                part.inputs.append(xs[start:stop])
                part.targets.append(ys[start:stop])
        parts.append(part)
    return parts


def _windows(steps: int, length: int, overlap: bool) -> list[tuple[int, int]]:
    """Cut steps evenly, or in windows of one length that half overlap."""
    if overlap and steps > length:
        count = math.ceil((steps - length) / (length // 2)) + 1
        starts = np.linspace(0, steps - length, count).round().astype(int).tolist()
        return [(start, start + length) for start in starts]
    edges = np.linspace(0, steps, math.ceil(steps / length) + 1).round().astype(int).tolist()
    return list(itertools.pairwise(edges))


def squared_floor(targets: Array, predictions: dict[str, Array]) -> dict[str, float]:
    """RMSE of constant or copied predictions, all in the user's units and broadcast to ``(N, K)``."""
    return {name: math.sqrt(np.mean((value - targets) ** 2)) for name, value in predictions.items()}


def classification_floor(train: Part, test: Part, classes: int, symbols: int | None) -> dict[str, float]:
    """Error rates of the commonest class, and of the class with the nearest mean of the inputs over time."""
    labels, wanted = torch.stack(train.targets), torch.stack(test.targets)
    bags = [(_bag(x, symbols)[None], label[None]) for x, label in zip(train.inputs, labels, strict=True)]
    centroids = _centroids(bags, classes)
    found = torch.cat([_nearest(_bag(x, symbols)[None], centroids) for x in test.inputs])
    return {
        "majority class": _error_rate(torch.bincount(labels).argmax(), wanted),
        "bag of inputs": _error_rate(found, wanted),
    }


def tagging_floor(train: Part, test: Part, classes: int, symbols: int | None) -> dict[str, float]:
    """Error rates of the commonest tag, and of a tag chosen by the input of the same step."""
    tags, wanted = torch.cat(train.targets), torch.cat(test.targets)
    majority = torch.bincount(tags).argmax()
    if symbols is None:
        centroids = _centroids(zip(train.inputs, train.targets, strict=True), classes)
        name, found = "nearest mean input", torch.cat([_nearest(x, centroids) for x in test.inputs])
    else:
        counts = torch.bincount(torch.cat(train.inputs) * classes + tags, minlength=symbols * classes)
        counts = counts.view(symbols, classes)
        best = torch.where(counts.sum(1) > 0, counts.argmax(1), majority)
        name, found = "tag of the symbol", best[torch.cat(test.inputs)]
    return {"majority tag": _error_rate(majority, wanted), name: _error_rate(found, wanted)}


def symbols_floor(train: Part, test: Part, symbols: int) -> dict[str, float]:
    """Bits per symbol of n-grams with add-one smoothing; the first step of a window has one symbol of context."""
    known, wanted = (np.concatenate([y.numpy() for y in part.targets]) for part in (train, test))
    bits = []
    for n in (1, 2, 3):
        before, now = _contexts(train, n, symbols), _contexts(test, n, symbols)
        pairs = _count(before * symbols + known, now * symbols + wanted)
        bits.append(-np.log2((pairs + 1) / (_count(before, now) + symbols)))
        if n == 3:
            bits[2] = np.where(now < 0, bits[1], bits[2])
    return {name: float(b.mean()) for name, b in zip(("unigram", "bigram", "trigram"), bits, strict=True)}


def _contexts(part: Part, n: int, symbols: int) -> Array:
    """Number the ``n - 1`` symbols up to each step; below zero where a window has fewer."""
    now = np.concatenate([x.numpy() for x in part.inputs])
    if n < 3:
        return now if n == 2 else np.zeros_like(now)
    context = np.roll(now, 1) * symbols + now
    context[np.cumsum([0, *map(len, part.inputs[:-1])])] = -1
    return context


def _count(known: Array, wanted: Array) -> Array:
    """Count how often each wanted value is known."""
    values, counts = np.unique(known, return_counts=True)
    places = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    return np.where(values[places] == wanted, counts[places], 0)


def _bag(x: Tensor, symbols: int | None) -> Tensor:
    """Mean of a sequence over time; of symbols, their shares."""
    return x.mean(0) if symbols is None else torch.bincount(x, minlength=symbols) / len(x)


def _centroids(batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> Tensor:
    """Mean of the inputs ``(N, F)`` of each class; infinity for a class without any."""
    sums, counts = torch.zeros(0), torch.zeros(classes)
    for x, labels in batches:
        sums = sums if len(sums) else torch.zeros(classes, x.shape[1])
        sums.index_add_(0, labels, x)
        counts += torch.bincount(labels, minlength=classes)
    means = sums / counts[:, None].clamp(min=1)
    return torch.where(counts[:, None] > 0, means, torch.inf)


def _nearest(x: Tensor, centroids: Tensor) -> Tensor:
    return torch.cdist(x, centroids).argmin(1)


def _error_rate(found: Tensor, wanted: Tensor) -> float:
    return (found != wanted).double().mean().item()
