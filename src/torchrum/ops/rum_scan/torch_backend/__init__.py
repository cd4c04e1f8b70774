"""The scan in plain PyTorch with a hand-written backward, on any device."""

from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.torch_backend.scan import empty_results, forward
from torchrum.ops.rum_scan.torch_backend.scan_backward import backward
from torchrum.ops.rum_scan.types import ScanInputs

__all__ = ["backward", "empty_results", "forward", "obstacle"]


def obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """None: what the operator takes, this runs."""
    return None
