"""Read a user's data and make a prediction problem of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrum.lab.compare.problem import Kind, Problem

Data = str | Path | Mapping[str, Any] | Sequence[Any]


def read_problem(
    data: Data,
    *,
    target: str | None = None,
    time: str | None = None,
    group: str | None = None,
    inputs: Sequence[str] | None = None,
    kind: Kind | None = None,
) -> Problem:
    """Read ``data`` and make a prediction problem of it."""
    raise NotImplementedError
