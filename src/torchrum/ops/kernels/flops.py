"""Formulas of ``torch.utils.flop_counter`` for the operators of this package.

Importing that module is slow (it imports Triton), so the formulas are registered only once it is loaded.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[str, Callable[..., int]] = {}
_registered: set[str] = set()


def counts_flops(operator: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Declare the formula of an operator of the namespace ``torchrum``."""

    def declare(formula: Callable[..., int]) -> Callable[..., int]:
        _formulas[operator] = formula
        return formula

    return declare


def register_flops() -> None:
    """Register the formulas if torch's counter is loaded; cheap, since every scan calls it."""
    if len(_registered) < len(_formulas) and _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])


def _register(counter: Any) -> None:
    new = {getattr(torch.ops.torchrum, name): _formulas[name] for name in _formulas.keys() - _registered}
    _registered.update(_formulas)
    for operator, formula in new.items():
        counter.register_flop_formula(operator)(formula)
    # an active counter has its own copy of the formulas
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, counter._FlopCounterMode):
            mode.counter.flop_registry.update({key: counter.flop_registry[key] for key in new})
