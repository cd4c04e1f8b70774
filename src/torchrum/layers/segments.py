"""Rows that start anew in the middle of a sequence: cut at their resets, and run as rows of their own.

A segment knows nothing of the one before it, so segments of one length class run side by side in one call of the scan,
in every backend, with the gradients of a call. A class holds lengths from 2^k to 2^(k+1) - 1: at most half of what
runs is padding, and there are at most log2(T) + 1 calls.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchrum.cells.base import State

Scan = Callable[[Tensor, State, Tensor | None], tuple[Tensor, State]]

MOST_NUMBERS = 2**24
"""Numbers in the states of the segments that run in one call, about: with lam other than 0 each has a matrix."""


class Segments(NamedTuple):
    """Stretches of rows between resets, by row and then by time; every part is ``(S,)``."""

    row: Tensor
    start: Tensor
    length: Tensor
    anew: Tensor
    """True where it starts from the initial state, False where from the state that was given."""
    first: Tensor
    last: Tensor
    """True for the first and for the last one of a row."""

    def take(self, which: Tensor) -> "Segments":
        return Segments(*(part[which] for part in self))


def find_segments(reset: Tensor, lengths: Tensor | None) -> Segments:
    """Cut rows before the steps where ``reset`` ``(T, B)`` holds; on the CPU, where sizes can be read."""
    reset, T = reset.cpu(), reset.shape[0]  # torch's default device may be another
    ends = torch.full((reset.shape[1],), T, device="cpu") if lengths is None else lengths.cpu().long()
    begins = reset.clone()
    begins[0] = True
    begins &= torch.arange(T, device="cpu").unsqueeze(1) < ends
    row, start = begins.T.nonzero().unbind(1)
    changes = row[1:] != row[:-1]
    edge = torch.ones(min(len(row), 1), dtype=torch.bool, device="cpu")
    last, first = torch.cat([changes, edge]), torch.cat([edge, changes])
    end = torch.where(last, ends[row], start.roll(-1))
    return Segments(row, start, end - start, reset[start, row], first, last)


def classes(segments: Segments, most: int) -> Iterator[Segments]:
    """Segments of alike lengths, at most ``most`` at a time."""
    exponent = torch.frexp(segments.length.double()).exponent
    for value in exponent.unique().tolist():
        for which in (exponent == value).nonzero().squeeze(1).split(most):
            yield segments.take(which)


def scan_segments(
    scan: Scan, initial: Callable[[int], State], x: Tensor, state: State, segments: Segments, backwards: bool
) -> tuple[Tensor, State]:
    """Run a recurrence over all segments of ``x`` ``(T, B, I)``.

    Args:
        scan: from ``x``, state and lengths to outputs and the last state.
        initial: the state before the first step, for a number of rows.
        x: ``(T, B, I)``.
        state: each part ``(B, ...)``: where a row starts that is not reset there.
        segments: where to cut.
        backwards: read each segment from its end.

    Returns:
        Outputs ``(T, B, H)``, zero past the end of a row, and the state after the last segment of each row.
    """
    T, B = x.shape[:2]
    rows_at_once = max(B, MOST_NUMBERS // max(sum(part[0].numel() for part in state if B > 0), 1))
    outputs, places, ends, rows = [], [], [], []
    for cut in classes(segments, rows_at_once):
        row, start, length, anew, first, last = (part.to(x.device, non_blocking=True) for part in cut)
        offset = torch.arange(int(cut.length.max()), device=x.device).unsqueeze(1)  # (L, 1)
        inside = offset < length  # (L, S)
        time = start + torch.where(inside, length - 1 - offset if backwards else offset, 0)
        begun = last if backwards else first  # the segment that the given state leads into
        given = begun if backwards else begun & ~anew
        start_state = tuple(
            torch.where(given.view(-1, *[1] * (part.dim() - 1)), part[row], fresh)
            for part, fresh in zip(state, initial(len(row)), strict=True)
        )
        out, end = scan(x[time, row], start_state, length)
        outputs.append(out[inside])
        places.append((time * B + row)[inside])
        final = first if backwards else last
        ends.append(tuple(part[final] for part in end))
        rows.append(row[final])
    flat = torch.cat(outputs)
    out = flat.new_zeros(T * B, flat.shape[-1]).index_copy(0, torch.cat(places), flat).view(T, B, -1)
    order = torch.cat(rows).argsort()
    return out, tuple(torch.cat(column)[order] for column in zip(*ends, strict=True))
