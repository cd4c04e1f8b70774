"""A scan step by step whose weight gradients are one matmul each, after the last step.

Autograd makes one per step and adds them up. With few rows in a batch each of them moves more numbers than the step
itself: a gradient as large as the weight is written, and read again with the sum so far.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.utils import parametrize

from torchrum.cells.base import Cell, State, run_steps
from torchrum.ops.kernels.machine import autocast_dtype
from torchrum.ops.kernels.weights import weight_gradient

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``F.linear``, or what stands in for it."""
ALIGNED = 16  # bytes: where a row begins elsewhere, cuBLAS is several times slower


class GatherableCell(Cell):
    """A cell whose step may use another function for ``F.linear``."""

    @abstractmethod
    def step_weights(self) -> Sequence[tuple[Tensor, Tensor | None]]:
        """What ``step_with`` passes to ``linear``: matrix and bias of each call, in order."""

    @abstractmethod
    def step_with(self, x: Tensor, state: State, linear: Linear) -> tuple[Tensor, State]:
        """``step`` with ``linear`` for ``F.linear``."""

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self.step_with(x, state, F.linear)


class GatheredScan:
    """``Cell.scan`` of such a cell, its step compiled.

    In front of the steps each weight is laid out for the matmuls. A step adds zeros, its *tap*, to what a matmul gives,
    and hands out what the matmul read: the tap's gradient is that of the result, so both are there for all steps when
    the weight's gradient is due. Where no gradient is wanted, ``cell`` scans as it is.
    """

    def __init__(self, cell: GatherableCell) -> None:
        self._cell = cell
        self._step = torch.compile(tapped_step)

    def __call__(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        with parametrize.cached():
            return self._scan(x, state, lengths)

    def _scan(self, x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
        cell = self._cell
        pairs = cell.step_weights()
        if not torch.is_grad_enabled() or not any(weight.requires_grad for weight, _ in pairs):
            return type(cell).scan(cell, x, state, lengths)
        dtype = autocast_dtype(x.device.type)
        packed = [pack(weight.detach(), dtype or weight.dtype) for weight, _ in pairs]
        reads: list[list[Tensor]] = [[] for _ in pairs]
        taps = [
            make_taps(weight, bias, read, x.shape[:2], matrix.dtype)
            for (weight, bias), read, matrix in zip(pairs, reads, packed, strict=True)
        ]

        def step(given: tuple[Tensor, Sequence[Tensor]], state: State) -> tuple[Tensor, State]:
            output, new, read = self._step(cell, *given, state, packed)
            for kept, tensor in zip(reads, read, strict=True):
                kept.append(tensor)
            return output, new

        by_step = zip(*(tap.unbind(0) for tap in taps), strict=True)
        return run_steps(step, zip(cell.project(x).unbind(0), by_step, strict=True), state, lengths)


class TappedLinear:
    """Stands in for ``F.linear`` in one step: its calls come in the order of ``step_weights``."""

    def __init__(self, packed: Sequence[Tensor], taps: Sequence[Tensor]) -> None:
        self._packed, self._taps = packed, taps
        self.reads: list[Tensor] = []

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        call = len(self.reads)
        matrix, tap = self._packed[call], self._taps[call]
        x = F.pad(x.to(matrix.dtype), (0, matrix.shape[1] - x.shape[1]))
        self.reads.append(x.detach())
        return F.linear(x, matrix)[:, : weight.shape[0]] + tap


def tapped_step(
    cell: GatherableCell, x: Tensor, taps: Sequence[Tensor], state: State, packed: Sequence[Tensor]
) -> tuple[Tensor, State, list[Tensor]]:
    """A step of ``cell``, and what each of its matmuls read."""
    linear = TappedLinear(packed, taps)
    output, new = cell.step_with(x, state, linear)
    return output, new, linear.reads


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight`` in the dtype of the matmuls, with zeros behind its rows and columns up to aligned ones."""
    rows, columns = (-size % (ALIGNED // dtype.itemsize) for size in weight.shape)
    return F.pad(weight.to(dtype), (0, columns, 0, rows))


def make_taps(
    weight: Tensor, bias: Tensor | None, reads: list[Tensor], sizes: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """What to add to a matmul by ``weight`` in every step, ``(T, B, rows)``: zeros, or the bias."""
    taps: Tensor = _Taps.apply(weight, reads, sizes, dtype)
    return taps if bias is None else taps + bias.to(dtype)


class _Taps(torch.autograd.Function):
    """Zeros whose gradient, with what was read by then, makes the weight's."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, weight: Tensor, reads: list[Tensor], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        ctx.reads, ctx.columns, ctx.dtype = reads, weight.shape[1], weight.dtype  # type: ignore[attr-defined]
        return torch.zeros((), dtype=dtype, device=weight.device).expand(*sizes, weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = weight_gradient(grad.contiguous(), torch.stack(ctx.reads))  # type: ignore[attr-defined]
        return gradient[:, : ctx.columns].to(ctx.dtype), None, None, None  # type: ignore[attr-defined]
