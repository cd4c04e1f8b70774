"""Zeros that kernels read, kept for good: to fill a state with them costs the host as much as a launch."""

import torch
from torch import Tensor

FEWEST, MOST = 2**12, 2**20
_kept: dict[torch.device, list[Tensor]] = {}


def kept_zeros(device: torch.device, count: int) -> Tensor | None:
    """At least ``count`` zeros in float32, which nobody may write to and which every stream may read.

    None for more than ``MOST``, and for the first ones that a CUDA graph would record: their memory goes with it.
    """
    kept = _kept.setdefault(device, [])
    if kept and kept[-1].numel() >= count:
        return kept[-1]
    cuda = device.type == "cuda"
    if count > MOST or (cuda and torch.cuda.is_current_stream_capturing()):
        return None
    zeros = torch.zeros(max(count, FEWEST), device=device, dtype=torch.float32)
    if cuda:
        torch.cuda.current_stream(device).synchronize()
    kept.append(zeros)  # behind the smaller ones, which launches that have not run yet may read
    return zeros
