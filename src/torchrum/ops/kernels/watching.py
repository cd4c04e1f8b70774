"""Whether a call may pass torch's dispatcher by: it saves as much time as a small scan takes, and is seen by nobody."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

_is_batched = torch._C._functorch.is_legacy_batchedtensor
_tracing_state, _transforms_active = torch._C._get_tracing_state, torch._C._are_functorch_transforms_active


def is_unwatched(tensors: Iterable[Tensor]) -> bool:
    """Whether the tensors are plain memory, and no compiler, tracer, transform or mode sees what is done with them."""
    if torch.compiler.is_compiling():
        return False
    for x in tensors:  # a loop: it stands on the way of every small call, where a generator is felt
        kind = type(x)
        if kind is Parameter:
            continue
        # autograd.grad(..., is_grads_batched=True) batches, z.conj().imag negates without writing: never a parameter
        if kind is not Tensor or _is_batched(x) or x.is_neg():
            return False
    if _tracing_state() is not None or _transforms_active():
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and forward_ad._current_level < 0
