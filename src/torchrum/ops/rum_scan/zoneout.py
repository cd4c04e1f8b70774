"""Zoneout masks from a counter: the same seed, step and unit give the same answer on every backend and in replay."""

import torch
from torch import Tensor

from .options import RumOptions

_MASK = 0xFFFFFFFF


def hash32(x: Tensor) -> Tensor:
    """Mix 32 bits held in int64; multiplication wraps modulo 2^64, which keeps the low 32 bits right."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def keep_new(seed: Tensor | None, t: int, B: int, H: int, options: RumOptions) -> Tensor:
    """``(B, H)`` bool, true with chance ``1 - zoneout``, for step ``t`` of the scan that drew ``seed``."""
    assert seed is not None
    key = hash32(seed ^ ((t * 0x9E3779B9) & _MASK))
    units = torch.arange(B * H, device=seed.device).view(B, H)
    return hash32(key ^ units) < int((1 - options.zoneout) * 2**32)
