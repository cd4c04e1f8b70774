"""Whether a call may pass torch's dispatcher by: it saves as much time as a small scan takes, and is seen by nobody."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

PLAIN = (Tensor, Parameter)


def is_unwatched(*tensors: Tensor) -> bool:
    """Whether the tensors are plain, and no compiler, tracer, transform or mode looks at what is done with them."""
    if torch.compiler.is_compiling() or not all(type(x) in PLAIN for x in tensors):
        return False
    if torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() > 0 or forward_ad._current_level >= 0:
        return False
    # autograd.grad(..., is_grads_batched=True)
    return not any(torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors)
