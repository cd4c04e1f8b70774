"""What ``torch.utils.flop_counter`` counts for operators of this package.

Its module takes a while to import (it imports Triton), so the formulas are registered once somebody else has done so.
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
    """Make the counter know the operators, if it is loaded; cheap, and called before every scan."""
    if len(_registered) < len(_formulas) and _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])


def _register(counter: Any) -> None:
    new = {getattr(torch.ops.torchrum, name): _formulas[name] for name in _formulas.keys() - _registered}
    _registered.update(_formulas)
    for operator, formula in new.items():
        counter.register_flop_formula(operator)(formula)
    # a counter that is counting already has taken its own copy of the formulas
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, counter._FlopCounterMode):
            mode.counter.flop_registry.update({key: counter.flop_registry[key] for key in new})
