"""Whether the native scan may pass torch's dispatcher by."""

import torch
from torch import Tensor

from ...kernels import watching
from .build import load_library

DTYPES = (torch.float32, torch.float64)


def is_unwatched(x: Tensor, weight: Tensor) -> bool:
    """Whether plain tensors of one dtype meet on a CPU, nobody looks at what is done with them, and C can run."""
    if not watching.is_unwatched(x, weight) or torch.is_autocast_enabled("cpu"):
        return False
    if x.dtype not in DTYPES or x.dtype is not weight.dtype or not x.is_cpu or not weight.is_cpu:
        return False
    return not isinstance(load_library(x.dtype is torch.float64), str)
