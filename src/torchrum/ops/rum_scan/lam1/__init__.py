"""lam = 1 on a GPU, up to 128 hidden units: the whole sequence in one launch, R in registers."""

from torchrum.ops.rum_scan.lam1.launcher import backward, empty_results, forward, obstacle

__all__ = ["backward", "empty_results", "forward", "obstacle"]
