"""Weights for the tests of cells: random ones, and such as anyone can write down, to compare with other programs."""

import torch
from torch import Tensor, nn


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


def shuffled(cell: nn.Module) -> nn.Module:
    """Random values everywhere, so that no parameter hides behind its 0 or 1."""
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return cell
