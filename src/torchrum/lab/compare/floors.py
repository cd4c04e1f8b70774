"""Scores of models without memory on the test part: what a recurrent layer has to beat."""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from torchrum.lab.compare.problem import Array, Part


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
