"""One cell of a fused scan: a matmul and a row kernel, with the buffers both keep at fixed addresses.

A scan is a chain of cells (one for an LSTM, three or more for a Fast-Slow RNN). Each cell multiplies one buffer, its
inputs and its state side by side, so that a step is as many matmuls as cells. The row kernels write new states
straight into the buffers of the cells that read them; going back they read gradients from those cells' matmuls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from torchrum.ops.kernels.cell_rows import STATS, lstm_backward_kernel, lstm_forward_kernel, lstm_norm_grad_kernel
from torchrum.ops.kernels.masks import keep_threshold
from torchrum.ops.kernels.matmul import StepMatmul
from torchrum.ops.kernels.step_graphs import TABLE_SLOTS, fill_table
from torchrum.ops.kernels.triton_launch import Launch, launch, padded, pdl_runs, prepare, row_flags
from torchrum.ops.kernels.weights import CellWeights

Given = Sequence[Tensor | None]


@dataclass(frozen=True)
class Plan:
    """What a cell's kernels are compiled for; all of it is hashable, for the graphs' key."""

    hidden: int
    inputs: tuple[int, ...]
    """Sizes of what is multiplied, in the order of the weights' columns."""
    blocks: int
    """Row blocks of the weight."""
    projected: bool
    """Whether the scan's input comes in already multiplied; else there is a bias."""
    stream: int
    """First of the three streams of masks that belong to the cell: h, c, dropout behind it."""
    dropout: float
    """Behind the cell, while training."""
    norms: int
    """Blocks of layer norm's gains; 0 without it."""
    flags: tuple[tuple[str, Any], ...]
    """What its options compile its kernels for: pairs, since a dictionary is not hashable."""

    @property
    def width(self) -> int:
        """Columns of the matmul's left operand."""
        return sum(map(padded, self.inputs))

    def offset(self, number: int) -> int:
        """Where an input begins in it."""
        return sum(map(padded, self.inputs[:number]))


def cell_flags(like: Tensor, plan: Plan, direction: str) -> dict[str, Any]:
    """Compile-time arguments that the row kernels of every cell take."""
    # four gates in registers: a long row needs more threads
    most_warps = 16 if plan.hidden > 2048 else 8
    return {
        **row_flags(plan.hidden, direction, pdl_runs(like), most_warps),
        "DROP": None if plan.dropout == 0 else 0.0 if plan.dropout == 1 else 1 / (1 - plan.dropout),
        "DROP_BELOW": keep_threshold(plan.dropout) if plan.dropout > 0 else 0,
        "STREAM": plan.stream,
        **dict(plan.flags),
    }


@dataclass
class Shared:
    """Buffers that all cells of a scan see."""

    seeds: Tensor | None
    lengths: Tensor | None


class Stage:
    """A cell's weight, matmul and parameters, in one direction."""

    direction: str

    def __init__(self, like: Tensor, B: int, plan: Plan, shared: Shared) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        self.plan, self.B, self.shared = plan, B, shared
        rows = plan.blocks * padded(plan.hidden)
        self.flags = cell_flags(like, plan, self.direction)
        self.weight = zeros(rows, plan.width, dtype=like.dtype)  # padding stays zero, here and in low
        forward = self.direction == "forward"
        self.low = zeros(B, plan.width if forward else rows, dtype=like.dtype)
        self.matmul = StepMatmul(
            self.low, self.weight.t() if forward else self.weight, self.flags["PDL"], self.direction
        )
        self.bias = None if plan.projected else zeros(plan.blocks * plan.hidden)
        self.ln_weight = zeros(plan.norms * plan.hidden) if plan.norms else None
        self.ln_bias = zeros(plan.norms * plan.hidden) if plan.norms else None
        self.given: Given = ()

    def load(self, weights: CellWeights) -> None:
        H = self.plan.hidden
        blocks = self.weight.unflatten(0, (self.plan.blocks, -1))
        columns = [weight for weight in (weights.weight_ih, weights.weight_hh) if weight is not None]
        for number, (weight, size) in enumerate(zip(columns, self.plan.inputs, strict=True)):
            begin = self.plan.offset(number)
            rows = weight.shape[0] // H  # RUM's eps has no recurrent rows
            blocks[:rows, :H, begin : begin + size].copy_(weight.reshape(rows, H, size))
        for mine, given in (
            (self.bias, weights.bias),
            (self.ln_weight, weights.ln_weight),
            (self.ln_bias, weights.ln_bias),
        ):
            if mine is not None:  # the buffers outlive the model: no bias must not be the last model's bias
                mine.zero_() if given is None else mine.copy_(given)

    def row(self, table: Tensor | None, slots: Tensor | None, t: int, T: int) -> Launch:
        """The row kernel's launch, on the tensors in the slots or on those given."""
        raise NotImplementedError

    def tensors(self, table: Tensor | None) -> Given:
        return self.given if table is None else [None] * len(self.given)


class ForwardStage(Stage):
    """Its state is handed to ``plain`` and, through dropout, to ``dropped``: cells, with the number of their input."""

    direction = "forward"

    def connect(
        self, plain: tuple["ForwardStage", int], dropped: tuple["ForwardStage", int] | None, to_out: bool
    ) -> None:
        reader, number = plain
        self.low_plain = reader.low[:, reader.plan.offset(number) :]
        self.low_dropped = None
        self.flags.update(PLAIN_WIDTH=reader.plan.width, DROPPED_WIDTH=self.plan.hidden if to_out else None)
        if dropped is not None:
            reader, number = dropped
            self.low_dropped = reader.low[:, reader.plan.offset(number) :]
            self.flags["DROPPED_WIDTH"] = reader.plan.width


class BackwardStage(Stage):
    """Its state's gradient is the sum of a carry and of what the matmuls of its readers yield."""

    direction = "backward"

    def connect(
        self, plain: tuple["BackwardStage", int], dropped: tuple["BackwardStage", int] | None, from_out: bool
    ) -> None:
        reader, number = plain
        self.parts_plain = reader.matmul.out[:, :, reader.plan.offset(number) :]
        self.parts_dropped = None
        self.flags.update(
            PLAIN_PARTS=reader.matmul.parts,
            PLAIN_WIDTH=reader.plan.width,
            DROPPED_PARTS=1,
            DROPPED_WIDTH=self.plan.hidden if from_out else None,
            FROM_OUT=from_out,
        )
        if dropped is not None:
            reader, number = dropped
            self.parts_dropped = reader.matmul.out[:, :, reader.plan.offset(number) :]
            self.flags.update(DROPPED_PARTS=reader.matmul.parts, DROPPED_WIDTH=reader.plan.width)


class Chain:
    """The cells of a scan in the order they run, and the table that tells their graphs the step and the addresses."""

    def __init__(self, like: Tensor, stages: Sequence[Any], shared: Shared, graphed: bool) -> None:
        self.stages, self.shared = list(stages), shared
        self.stride = 1 if self.stages[0].direction == "forward" else -1
        self.T = 0
        slots = TABLE_SLOTS * (1 + len(self.stages))  # the step, then the addresses for each cell
        self.table = torch.zeros(slots, dtype=torch.int64, device=like.device) if graphed else None

    def slots(self, number: int) -> Tensor | None:
        return None if self.table is None else self.table[TABLE_SLOTS * (number + 1) : TABLE_SLOTS * (number + 2)]

    def begin(
        self,
        T: int,
        weights: Sequence[CellWeights],
        given: Sequence[Given],
        seeds: Tensor | None,
        lengths: Tensor | None,
    ) -> None:
        self.T = T
        for mine, theirs in ((self.shared.seeds, seeds), (self.shared.lengths, lengths)):
            if mine is not None:
                assert theirs is not None
                mine.copy_(theirs)
        for number, (stage, parameters, tensors) in enumerate(zip(self.stages, weights, given, strict=True)):
            stage.load(parameters)
            stage.given = tensors
            slots = self.slots(number)
            if slots is not None:
                fill_table(slots, 0, T, *tensors)
        if self.table is not None:
            self.table[:1].fill_(0 if self.stride == 1 else T - 1)

    def launches(self, t: int, direct: bool = False) -> Iterator[Launch]:
        table = None if direct else self.table
        for number, stage in enumerate(self.stages):
            row = stage.row(table, None if direct else self.slots(number), t, self.T)
            yield from (stage.matmul.prepare(), row)[:: self.stride]

    def warm_up(self) -> None:
        for direct in (False, True):  # a capture around the scan bakes the addresses in instead
            for enqueue in self.launches(0, direct):
                enqueue()

    def forget(self) -> None:
        for stage in self.stages:
            stage.given = ()


def empty_shared(like: Tensor, seeds: Tensor | None, lengths: Tensor | None) -> Shared:
    """Buffers for seeds and lengths such as these."""

    def buffer(given: Tensor | None) -> Tensor | None:
        return None if given is None else torch.zeros(given.shape, dtype=torch.int64, device=like.device)

    return Shared(buffer(seeds), buffer(lengths))


class LstmForward(ForwardStage):
    """An LSTM's step; ``h`` and ``c`` are its running state in float32, which fast cells share."""

    def __init__(self, like: Tensor, B: int, plan: Plan, shared: Shared, h: Tensor, c: Tensor) -> None:
        super().__init__(like, B, plan, shared)
        self.h, self.c = h, c
        self.flags["READS_XP"] = plan.projected

    def row(self, table: Tensor | None, slots: Tensor | None, t: int, T: int) -> Launch:
        return prepare(
            lstm_forward_kernel, (self.B,),
            table, slots, *self.tensors(table),
            self.matmul.out, self.bias, self.h, self.c, self.low_plain, self.low_dropped, self.ln_weight, self.ln_bias,
            self.shared.lengths, self.shared.seeds, t, T, self.B, PARTS=self.matmul.parts, **self.flags,
        )  # fmt: skip


class LstmBackward(BackwardStage):
    """An LSTM's step back; ``dh`` and ``dc`` carry gradients from step to step in float32."""

    def __init__(self, like: Tensor, B: int, plan: Plan, shared: Shared, dh: Tensor, dc: Tensor) -> None:
        super().__init__(like, B, plan, shared)
        self.dh, self.dc = dh, dc
        del self.flags["LN_EPS"]  # the moments are kept

    def row(self, table: Tensor | None, slots: Tensor | None, t: int, T: int) -> Launch:
        return prepare(
            lstm_backward_kernel, (self.B,),
            table, slots, *self.tensors(table), self.parts_plain, self.parts_dropped, self.dh, self.dc,
            self.low, self.ln_weight, self.ln_bias, self.shared.lengths, self.shared.seeds, t, self.B, **self.flags,
        )  # fmt: skip

    def norm_grads(self) -> Tensor | None:
        """``(2, 5H)`` in float32: gradients of layer norm's gains and shifts, after the last step."""
        if self.ln_weight is None:
            return None
        gates, cells, stats, _, _, dnormed = self.given
        assert gates is not None
        H, rows = self.plan.hidden, gates.shape[0] * self.B
        programs, block = min(rows, 256), min(256, self.flags["BLOCK"])
        sums = torch.empty((programs, 2, 5 * H), device=gates.device)
        launch(
            lstm_norm_grad_kernel, (programs, triton.cdiv(H, block)),
            gates, cells, stats, dnormed, sums, self.ln_weight, self.ln_bias, rows,
            H=H, BLOCK=block, FORGET=self.flags["FORGET"], num_warps=4,
        )  # fmt: skip
        return sums.sum(0)


def saved_tensors(xp: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Where an LSTM's forward keeps its raw gates, the c it began with and layer norm's moments."""
    (T, B), H = xp.shape[:2], plan.hidden
    stats = xp.new_empty((T, B, STATS.value), dtype=torch.float32) if plan.norms else None
    return xp.new_empty((T, B, 4 * H)), xp.new_empty((T, B, H), dtype=torch.float32), stats
