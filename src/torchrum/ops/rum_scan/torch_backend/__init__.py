"""The scan in plain PyTorch with a hand-written backward, on any device."""

from ..options import RumOptions
from ..types import ScanInputs
from .scan import backward, empty_results, forward

__all__ = ["backward", "empty_results", "forward", "obstacle"]


def obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """None: what the operator takes, this runs."""
    return None
