"""Variational dropout: one mask for all steps of a sequence (Gal & Ghahramani, 2016)."""

import torch.nn.functional as F
from torch import Tensor


def sequence_mask(like: Tensor, size: int, chance: float) -> Tensor:
    """Draw one dropout mask per row of the batch, the same at every step.

    A cell appends the mask of its state to the projected input: a step then finds it there, and ``scan``, compiled
    steps and CUDA graphs need no second way to pass it.

    Args:
        like: ``(..., B, I)``; its leading dimensions, device and dtype are the mask's.
        size: N, numbers per row.
        chance: that a number is zeroed; the others are divided by ``1 - chance``.

    Returns:
        ``(..., B, N)``, expanded over the leading dimensions.
    """
    mask = F.dropout(like.new_ones(like.shape[-2], size), chance)
    return mask.expand(*like.shape[:-1], size)
