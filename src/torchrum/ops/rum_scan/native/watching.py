"""Whether a call may pass torch's dispatcher by: it saves as much time as a small scan takes, and is seen by nobody."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from .build import load_library

PLAIN = (Tensor, Parameter)
DTYPES = (torch.float32, torch.float64)


def is_unwatched(x: Tensor, weight: Tensor) -> bool:
    """Whether plain tensors of one dtype meet on a CPU, no compiler, tracer, transform or mode is on, and C can run."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN or type(weight) not in PLAIN:
        return False
    if x.dtype not in DTYPES or x.dtype is not weight.dtype or not x.is_cpu or not weight.is_cpu:
        return False
    if torch._C._get_tracing_state() is not None or torch.is_autocast_enabled("cpu"):
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if torch._C._functorch.is_legacy_batchedtensor(x):  # autograd.grad(..., is_grads_batched=True)
        return False
    return forward_ad._current_level < 0 and not isinstance(load_library(x.dtype is torch.float64), str)
