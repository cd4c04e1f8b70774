"""Grids of cases, of which the default run takes a sample."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], every: int) -> list[Any]:
    """Every ``every``-th case, and the others marked slow.

    Args:
        cases: values for ``pytest.mark.parametrize``; a tuple holds several arguments.
        every: for a grid of options a number that shares no factor with their counts: the sample then has every value.
    """
    return [
        case if number % every == 0 else pytest.param(*_arguments(case), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]


def form_of(lam: float | None, **options: Any) -> dict[str, Any]:
    """Options of a RUM: the gated form for None, else the paper's form with this lam and ``options``."""
    return {} if lam is None else {"form": "paper", "lam": lam, **options}


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
