"""Masks of zoneout and dropout from a counter: the same seed, step and unit give the same mask everywhere.

The forward, the backward and replays of every backend agree. One seed serves many independent streams.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
CELL_STREAMS = 3  # streams of masks per cell: zoneout of h, zoneout of c, dropout after the cell


def hash32(x: Tensor) -> Tensor:
    """Mix 32 bits held in int64; multiplication wraps modulo 2^64, which keeps the low 32 bits right."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def draw_seed(device: torch.device) -> Tensor:
    """Draw the seed of a scan, an int64 scalar, on the device, without a synchronisation."""
    return torch.randint(2**31 - 1, (), device=device)


def stream_seeds(seed: Tensor, count: int) -> Tensor:
    """``(count,)`` int64 seeds below 2^31, one for each stream of masks, from the scan's ``seed`` (a scalar)."""
    streams = torch.arange(1, count + 1, device=seed.device) * 0x9E3779B9
    return hash32((hash32(seed & _MASK) + streams) & _MASK) >> 1


def keep_threshold(chance: float) -> int:
    """The hash is below this with chance ``1 - chance``; at most 2^32 - 1, since kernels hold it in 32 bits."""
    return min(int((1 - chance) * 2**32), _MASK)


def keep_mask(seed: Tensor, t: int, B: int, H: int, chance: float) -> Tensor:
    """``(B, H)`` bool, false with ``chance``, for step ``t`` of the stream that ``seed`` (a scalar) belongs to."""
    key = hash32(seed ^ ((t * 0x9E3779B9) & _MASK))
    units = torch.arange(B * H, device=seed.device).view(B, H)
    return hash32(key ^ units) < keep_threshold(chance)


def zoneout_flags(chance: float, training: bool) -> tuple[float | str | None, int]:
    """ZONEOUT and KEEP_BELOW of the row kernels: masks in training, else the expectation; None without zoneout."""
    if chance == 0:
        return None, 0
    return ("train", keep_threshold(chance)) if training else (float(chance), 0)
