"""The state that is carried from batch to batch: nested tuples of tensors, whatever the layer's state is made of."""

from typing import Any

import torch
from torch import Tensor


def detached_copy(state: Any) -> Any:
    """The same nested tuple of tensors in memory of their own, cut from their history."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    return type(state)(detached_copy(part) for part in state) if isinstance(state, (tuple, list)) else state


def copy_into(state: Any, new: Any) -> Any:
    """Copy the tensors of ``new`` into those of ``state``, a nested tuple of the same form, and return ``state``."""
    if isinstance(state, Tensor):
        return state.copy_(new)
    for part, fresh in zip(state, new, strict=True) if isinstance(state, (tuple, list)) else ():
        copy_into(part, fresh)
    return state


def same_form(state: Any, other: Any) -> bool:
    """Whether two nested tuples of tensors have the same places and shapes."""
    if isinstance(state, Tensor) or isinstance(other, Tensor):
        return isinstance(state, Tensor) and isinstance(other, Tensor) and state.shape == other.shape
    if not isinstance(state, (tuple, list)) or not isinstance(other, (tuple, list)):
        return state is None and other is None
    return len(state) == len(other) and all(same_form(*parts) for parts in zip(state, other, strict=True))


def to_device(state: Any, device: torch.device) -> Any:
    """The same nested tuple of tensors on another device."""
    if isinstance(state, Tensor):
        return state.to(device)
    return type(state)(to_device(part, device) for part in state) if isinstance(state, (tuple, list)) else state
