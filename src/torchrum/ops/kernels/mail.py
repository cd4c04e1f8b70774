"""Memory through which the blocks of a launch talk, kept for good: to fill it costs the host as much as a launch."""

import torch
from torch import Tensor

EMPTY = 0xFFFFFFFF
"""All bits set: a word that nobody has written yet."""
FEWEST = 2**16
"""Words that are kept at first, 256 KB."""
MOST = 2**18
"""Words that a launch may clear, 1 MB: a single block clears those of a tile."""
_kept: dict[int, Tensor] = {}
"""By the number of the device."""


def kept_mail(like: Tensor, words: int) -> Tensor | None:
    """At least ``words`` 32-bit words that are ``EMPTY``, on the device of ``like``, for a launch that leaves them so.

    The launches of the default stream share them: they run one after the other, and no CUDA graph records them. None on
    any other stream, and for more than ``MOST``.
    """
    device = like.get_device()
    if words > MOST or torch._C._cuda_getCurrentRawStream(device) != 0:
        return None
    kept = _kept.get(device)
    if kept is None or kept.numel() < words:
        # the smaller one is given back to its stream, behind the launches that use it
        kept = _kept[device] = like.new_full((max(words, FEWEST),), -1, dtype=torch.int32)
    return kept
