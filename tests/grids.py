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


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
