"""A prediction problem that is ready for training: three parts, a metric, and scores without memory."""

from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Kind = Literal["classification", "regression", "forecasting", "tagging", "symbols"]


class BadDataError(ValueError):
    """Data that cannot become a problem; the message names the place and the remedy."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Part:
    """Sequences with their targets."""

    inputs: list[Tensor]
    """Each ``(T, F)`` float32, scaled, or ``(T,)`` int64 symbols; T may differ between sequences."""
    targets: list[Tensor]
    """Classification ``()`` int64; regression ``(K,)`` float32; tagging ``(T,)`` int64; forecasting ``(T, K)`` float32;
    symbols ``(T,)`` int64, the next symbol."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What to predict from what, and how to score it."""

    kind: Kind
    train: Part
    validation: Part
    test: Part
    symbols: int | None
    """Size of the input alphabet; None if the inputs are numbers."""
    features: int
    """Numbers per step; 1 for symbols."""
    outputs: int
    """Classes, size of the alphabet, or target columns."""
    metric: str
    """``"error rate"``, ``"RMSE"`` or ``"bits per symbol"``; lower is better."""
    target_scale: Tensor | None
    """``(K,)``; the RMSE in the user's units is ``sqrt(mean(((prediction - target) * target_scale) ** 2))``."""
    floor: dict[str, float]
    """Scores of models without memory on the test part, in the metric."""
    guesses: tuple[str, ...]
    """What was not given and how it was guessed, a sentence each."""
    reading: dict[str, Any]
    """JSON data to prepare new data in the same way: columns, means, scales, classes, alphabet."""
