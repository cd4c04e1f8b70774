"""Weights that anyone can write down, so that a cell can be checked against numbers computed elsewhere."""

import torch
from torch import Tensor


def sines(first: float, *shape: int, scale: float = 0.5) -> Tensor:
    """``scale * sin(first + k)``, k = 0, 1, 2, ... in row-major order; float64."""
    count = torch.Size(shape).numel()
    return (scale * torch.sin(first + torch.arange(count, dtype=torch.float64))).view(shape)


X = sines(1, 3, 2, scale=1.0).unsqueeze(1)
"""Three steps of one row, ``(T, 1, 2)``."""

DIGITS = {"rtol": 0, "atol": 1e-7}
"""The numbers are given with eight decimals at most, cut where they end in zeros."""


def fill(parameter: Tensor, values: Tensor) -> None:
    """Put ``values`` into ``parameter``; a matrix is given as (in, out) and stored as (out, in)."""
    with torch.no_grad():
        parameter.copy_(values.T if values.dim() == 2 else values)
