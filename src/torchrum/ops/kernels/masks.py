"""Masks of zoneout and dropout from a counter: the same seed, step and unit give the same mask everywhere.

The forward, the backward and replays of every backend use the same masks. One seed gives many independent streams.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
CELL_STREAMS = 3  # streams of masks per cell: zoneout of h, zoneout of c, dropout after the cell


def hash32(x: Tensor) -> Tensor:
    """Hash 32 bits held in int64; multiplication wraps modulo 2^64, which keeps the low 32 bits correct."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def draw_seed(device: torch.device) -> Tensor:
    """Draw the seed of a scan, an int64 scalar, on ``device`` without a synchronisation."""
    return torch.randint(2**31 - 1, (), device=device)


def stream_seeds(seed: Tensor, count: int) -> Tensor:
    """Derive ``(count,)`` int64 seeds below 2^31, one per stream of masks, from the scan's ``seed`` (a scalar)."""
    streams = torch.arange(1, count + 1, device=seed.device) * 0x9E3779B9
    return hash32((hash32(seed & _MASK) + streams) & _MASK) >> 1


def keep_threshold(chance: float) -> int:
    """Return the threshold that a hash is below with chance ``1 - chance``.

    It is at most 2^32 - 1, since kernels hold it in 32 bits.
    """
    return min(int((1 - chance) * 2**32), _MASK)


def keep_mask(seed: Tensor, t: int, B: int, H: int, chance: float) -> Tensor:
    """Return a ``(B, H)`` bool mask, false with ``chance``, for step ``t`` of the stream of ``seed`` (a scalar)."""
    key = hash32(seed ^ ((t * 0x9E3779B9) & _MASK))
    units = torch.arange(B * H, device=seed.device).view(B, H)
    return hash32(key ^ units) < keep_threshold(chance)


def zoneout_flags(chance: float, training: bool) -> tuple[float | str | None, int]:
    """Return ZONEOUT and KEEP_BELOW of the row kernels: masks in training, else the expectation; None if no zoneout."""
    if chance == 0:
        return None, 0
    return ("train", keep_threshold(chance)) if training else (float(chance), 0)
