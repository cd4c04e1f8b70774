"""Zoneout's and dropout's masks from a counter: one seed serves many independent streams, in every backend alike."""

import torch
from torch import Tensor

from ..rum_scan.zoneout import hash32

_MASK = 0xFFFFFFFF


def stream_seeds(seed: Tensor, count: int) -> Tensor:
    """``(count,)`` int64 seeds below 2^31, one for each stream of masks, from the scan's ``seed`` (a scalar)."""
    streams = torch.arange(1, count + 1, device=seed.device) * 0x9E3779B9
    return hash32((hash32(seed & _MASK) + streams) & _MASK) >> 1


def keep_threshold(chance: float) -> int:
    """The hash is below this with chance ``1 - chance``."""
    return min(int((1 - chance) * 2**32), _MASK)


def keep_mask(seed: Tensor, t: int, B: int, H: int, chance: float) -> Tensor:
    """``(B, H)`` bool, false with ``chance``, for step ``t`` of the stream that ``seed`` (a scalar) belongs to."""
    key = hash32(seed ^ ((t * 0x9E3779B9) & _MASK))
    units = torch.arange(B * H, device=seed.device).view(B, H)
    return hash32(key ^ units) < keep_threshold(chance)
