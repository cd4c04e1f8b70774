"""Handwriting-like digits of 8 x 8 pixels, drawn from strokes: no file, no licence, as many as are asked for."""

import itertools
import math

import torch
from torch import Tensor

SIDE = 8


def _arc(x: float, y: float, rx: float, ry: float, start: float, stop: float) -> list[tuple[float, float]]:
    """Eight points on an ellipse, angles in turns; y grows downwards."""
    angles = [2 * math.pi * (start + (stop - start) * k / 7) for k in range(8)]
    return [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles]


STROKES: list[list[list[tuple[float, float]]]] = [
    [_arc(0.5, 0.5, 0.3, 0.4, 0, 1)],
    [[(0.35, 0.25), (0.5, 0.1), (0.5, 0.9)]],
    [[*_arc(0.5, 0.3, 0.28, 0.2, -0.5, 0.08), (0.2, 0.9), (0.8, 0.9)]],
    [_arc(0.45, 0.3, 0.27, 0.2, -0.4, 0.25) + _arc(0.45, 0.7, 0.3, 0.2, -0.25, 0.4)],
    [[(0.55, 0.1), (0.2, 0.6), (0.8, 0.6)], [(0.62, 0.35), (0.62, 0.9)]],
    [[(0.75, 0.1), (0.3, 0.1), (0.28, 0.45), *_arc(0.45, 0.66, 0.3, 0.24, -0.3, 0.4)]],
    [[(0.65, 0.1), (0.35, 0.4), *_arc(0.5, 0.68, 0.24, 0.22, -0.5, 0.5)]],
    [[(0.2, 0.1), (0.8, 0.1), (0.4, 0.9)], [(0.35, 0.5), (0.7, 0.5)]],
    [_arc(0.5, 0.3, 0.22, 0.2, 0, 1), _arc(0.5, 0.7, 0.27, 0.2, 0, 1)],
    [_arc(0.5, 0.32, 0.24, 0.22, 0, 1), [(0.74, 0.32), (0.6, 0.9)]],
]
"""The ten digits as polylines in the unit square."""


def _segments(digit: int) -> Tensor:
    pairs = [pair for line in STROKES[digit] for pair in itertools.pairwise(line)]
    return torch.tensor(pairs)  # (segments, 2 ends, 2 coordinates)


def draw_digits(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw digits that are turned, sheared, shifted, shaken and blurred at random.

    Returns:
        Pixels ``(count, 8, 8)`` in [0, 1] with a little noise, and labels ``(count,)``.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    labels = torch.randint(10, (count,), generator=generator)
    shape = torch.eye(2) + torch.tensor([[0.12, 0.22], [0.16, 0.12]]) * normal(count, 2, 2)
    shift, width = 0.07 * normal(count, 1, 1, 2), 0.09 * (0.25 * normal(count, 1, 1)).exp()
    centres = (torch.arange(SIDE) + 0.5) / SIDE
    grid = torch.stack(torch.meshgrid(centres, centres, indexing="xy"), -1).view(1, -1, 1, 2)  # (1, 64, 1, 2)
    images = torch.empty(count, SIDE * SIDE)
    for digit in range(10):
        rows = (labels == digit).nonzero().squeeze(1)
        ends = _segments(digit).expand(len(rows), -1, -1, -1) + 0.03 * normal(len(rows), 1, 2, 2)
        ends = torch.einsum("nij,nskj->nski", shape[rows], ends - 0.5) + 0.5 + shift[rows]
        start, along = ends[:, None, :, 0], ends[:, None, :, 1] - ends[:, None, :, 0]  # (n, 1, segments, 2)
        part = ((grid - start) * along).sum(-1) / along.square().sum(-1).clamp_min(1e-6)
        nearest = start + part.clamp(0, 1).unsqueeze(-1) * along
        distance = (grid - nearest).norm(dim=-1).amin(-1)  # (n, 64)
        images[rows] = torch.exp(-0.5 * (distance / width[rows, 0]).square())
    images = (images + 0.08 * torch.randn(images.shape, generator=generator)).clamp(0, 1)
    return images.view(count, SIDE, SIDE), labels
