"""Initial values of weights, orthogonal or uniform as in TensorFlow."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

INITS = ("glorot", "orthogonal", "block_orthogonal")


@torch.no_grad()
def orthogonal(rows: int, columns: int, like: Tensor) -> Tensor:
    """Draw a ``(rows, columns)`` matrix with orthonormal rows or columns, whichever are fewer, on ``like``'s device.

    It is drawn in float32, so that a seed gives the same matrix for every dtype; 16-bit dtypes have no QR. For float64
    it is then made orthonormal to that precision.
    """
    start = nn.init.orthogonal_(torch.empty(rows, columns, device=like.device, dtype=torch.float32))
    if like.dtype != torch.float64:
        return start
    Q = start.double()
    for _ in range(2):  # Q (3 - Q^T Q) / 2: each iteration squares the error, which starts at float32's 1e-7
        Q = 1.5 * Q - 0.5 * ((Q @ Q.mT) @ Q if rows < columns else Q @ (Q.mT @ Q))
    return Q


@torch.no_grad()
def orthogonal_(*blocks: Tensor) -> None:
    """Fill ``blocks`` so that, side by side, they are a matrix with orthonormal rows (or columns, if fewer)."""
    widths = [block.shape[1] for block in blocks]
    if sum(widths) == 0:
        return
    whole = orthogonal(blocks[0].shape[0], sum(widths), blocks[0])
    for block, part in zip(blocks, whole.split(widths, 1), strict=True):
        block.copy_(part)


@torch.no_grad()
def block_orthogonal_(weight: Tensor) -> None:
    """Fill ``weight`` with orthogonal square blocks, the largest that tile it."""
    size = math.gcd(*weight.shape)
    if weight.numel() > 0:
        for rows in weight.split(size):
            for block in rows.split(size, 1):
                orthogonal_(block)


@torch.no_grad()
def glorot_(*blocks: Tensor) -> None:
    """Fill ``blocks`` Glorot-uniformly as a single matrix, side by side, as TensorFlow's cells do."""
    fan_in, fan_out = sum(block.shape[1] for block in blocks), blocks[0].shape[0]
    bound = (6 / (fan_in + fan_out)) ** 0.5
    for block in blocks:
        block.uniform_(-bound, bound)


def widen(x: Tensor) -> Tensor:
    """Convert 16-bit dtypes to float32, since angles and phases need more than 8 bits."""
    return x if x.dtype == torch.float64 else x.float()


def new_parameter(
    device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Callable[..., nn.Parameter]:
    """Return a function that allocates a parameter of a given shape; ``reset_parameters`` fills it."""
    return lambda *shape: nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
