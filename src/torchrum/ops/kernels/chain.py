"""Fused scans over a chain of cells: one LSTM, or the three or more cells of a Fast-Slow RNN.

A step runs the cells one after the other, each as one matmul and one row kernel. The left operand of a cell's matmul is
one buffer that holds its inputs and its state side by side. The row kernels write new states directly into the buffers
of the cells that read them; in the backward they read gradients from the outputs of these cells' matmuls.

From top to bottom: the plan of a cell, a cell in each direction (``Stage``), the LSTM's two stages, the chain of stages
in each direction, its forward and backward pass, and ``chain_scan``, which is differentiable by autograd.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from torchrum.ops.kernels.cell_rows import (
    ROTATED_STATS,
    STATS,
    lstm_backward_kernel,
    lstm_forward_kernel,
    lstm_norm_grad_kernel,
)
from torchrum.ops.kernels.linear import CellWeights, reference_gradients, weight_gradient
from torchrum.ops.kernels.masks import CELL_STREAMS, keep_threshold, stream_seeds
from torchrum.ops.kernels.matmul import StepMatmul, scan_key
from torchrum.ops.kernels.triton_launch import (
    TABLE_SLOTS,
    Launch,
    Pass,
    aligned,
    fill_table,
    launch,
    padded,
    pdl_runs,
    plain_mode,
    prepare,
    row_flags,
    run_pass,
)

Given = Sequence[Tensor | None]


@dataclass(frozen=True)
class Plan:
    """One cell of a chain and the compile-time settings of its kernels; hashable, as a part of the graphs' key."""

    stages: tuple[type["ForwardStage"], type["BackwardStage"]]
    number: int
    """Position in the chain."""
    hidden: int
    inputs: tuple[int, ...]
    """Sizes of the parts of the matmul's left operand, in the order of the weights' columns."""
    blocks: int
    """Row blocks of the weight."""
    norms: int
    """Blocks of layer norm's gains; 0 without layer norm."""
    state: tuple[int, ...]
    """Indices of its state in the chain's state tensors: h, and c for an LSTM. Cells may share a state."""
    plain: tuple[int, int]
    """The cell that reads the new h without dropout, and the number of that cell's input."""
    dropped: tuple[int, int] | None
    """The same for the new h after dropout. The last cell instead writes it to the chain's output."""
    dropout: float
    """Chance of dropout after the cell, in training."""
    masked: bool
    """Whether its matmul reads the state through a mask, the same for all steps."""
    flags: tuple[tuple[str, Any], ...]
    """Compile-time arguments from the cell's options: pairs, since a dictionary is not hashable."""

    @property
    def width(self) -> int:
        """Columns of the matmul's left operand."""
        return sum(map(padded, self.inputs))

    @property
    def carries(self) -> bool:
        """Whether the next step reads the new h: its reader is not later in the chain."""
        return self.plain[0] <= self.number

    @property
    def rotational(self) -> bool:
        """Whether the cell is a rotational LSTM."""
        return bool(dict(self.flags).get("ROTATED"))

    @property
    def before_width(self) -> int:
        """Row stride of ``before`` in ``BackwardStage.over_time``."""
        return self.hidden if self.masked else self.width

    def offset(self, number: int) -> int:
        """Return the first column of an input."""
        return sum(map(padded, self.inputs[:number]))

    def columns(self, number: int) -> slice:
        """Return the columns of an input, without padding."""
        return slice(self.offset(number), self.offset(number) + self.inputs[number])


class ChainInputs(NamedTuple):
    """The tensors of one call."""

    xp: Tensor
    """``(T, B, 4H)``: the projected input of the first cell, with its bias."""
    states: Sequence[Tensor]
    """The parts of all states before the first step, ``(B, H)`` each."""
    weights: Sequence[CellWeights]
    """One entry per cell."""
    seeds: Tensor | None = None
    """``(CELL_STREAMS * cells,)`` int64, for the masks of zoneout and dropout."""
    lengths: Tensor | None = None
    """``(B,)`` int64; a row past its length keeps its state."""
    masks: Sequence[Tensor | None] = ()
    """``(B, H)`` per cell, or None: a factor of the state that the cell's matmul reads. Empty if no cell has one."""

    def seen(self, part: int, reader: int) -> Tensor:
        """Return a part of the first states as the matmul of cell ``reader`` reads it."""
        mask = self.masks[reader] if self.masks else None
        return self.states[part] if mask is None else self.states[part] * mask


class Saved(NamedTuple):
    """Tensors that one cell's forward saves for its backward."""

    inputs: Tensor
    """``(T, B, width)``: the left operands of its matmul; T + 1 of them if it reads a carried state."""
    gates: Tensor
    """``(T, B, blocks * hidden)``: before layer norm."""
    cells: Tensor | None
    """``(T, B, hidden)`` float32: c before each step, for an LSTM."""
    stats: Tensor | None
    """Scalars per row and step, float32."""
    states: Tensor | None = None
    """``(T, B, hidden)``: h before each step, if the backward needs it and ``inputs`` has it masked."""


class Stage:
    """The weight, matmul and parameters of a cell in one direction, in buffers at fixed addresses."""

    direction: str

    def __init__(
        self, like: Tensor, B: int, plan: Plan, state: Sequence[Tensor], seeds: Tensor | None, lengths: Tensor | None
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        self.plan, self.B, self.state, self.seeds, self.lengths = plan, B, state, seeds, lengths
        rows = plan.blocks * padded(plan.hidden)
        max_warps = 16 if plan.hidden > 2048 else 8  # four gates in registers: a long row needs more threads
        drop = plan.dropout
        self.flags = {
            **row_flags(plan.hidden, pdl_runs(like), max_warps),
            "DROP": None if drop == 0 else 0.0 if drop == 1 else 1 / (1 - drop),
            "DROP_BELOW": keep_threshold(drop) if drop > 0 else 0,
            "STREAM": CELL_STREAMS * plan.number,
            **dict(plan.flags),
        }
        self.weight = zeros(rows, plan.width, dtype=like.dtype)  # padding stays zero, here and in operand
        forward = self.direction == "forward"
        self.operand = zeros(B, plan.width if forward else rows, dtype=like.dtype)
        self.matmul = StepMatmul(
            self.operand, self.weight.t() if forward else self.weight, self.flags["PDL"], self.direction
        )
        # the input of the first cell is already projected, with its bias
        self.bias = zeros(plan.blocks * plan.hidden) if plan.number > 0 else None
        self.ln_weight = zeros(plan.norms * plan.hidden) if plan.norms else None
        self.ln_bias = zeros(plan.norms * plan.hidden) if plan.norms else None
        self.mask = zeros(B, plan.hidden) if plan.masked else None
        self.plain_mask: Tensor | None = None  # the mask of the cell that reads the new h
        self.given: Given = ()

    def load(self, weights: CellWeights) -> None:
        """Copy a cell's parameters into the buffers."""
        H = self.plan.hidden
        blocks = self.weight.unflatten(0, (self.plan.blocks, -1))
        matrices = [weight for weight in (weights.weight_ih, weights.weight_hh) if weight is not None]
        for number, weight in enumerate(matrices):
            rows = weight.shape[0] // H  # RUM's eps has no recurrent rows
            blocks[:rows, :H, self.plan.columns(number)].copy_(weight.reshape(rows, H, self.plan.inputs[number]))
        for buffer, given in (
            (self.bias, weights.bias),
            (self.ln_weight, weights.ln_weight),
            (self.ln_bias, weights.ln_bias),
        ):
            if buffer is not None:  # the buffers outlive the model: without a bias, clear the previous model's
                buffer.zero_() if given is None else buffer.copy_(given)

    def row(self, table: Tensor | None, slots: Tensor | None, t: int, T: int) -> Launch:
        """Prepare the row kernel, on the tensors whose addresses are in ``slots`` or, without a table, on ``given``."""
        raise NotImplementedError

    def tensors(self, table: Tensor | None) -> Given:
        return self.given if table is None else [None] * len(self.given)


class ForwardStage(Stage):
    """A cell's forward step."""

    direction = "forward"

    @staticmethod
    def allocate_saved(xp: Tensor, plan: Plan, inputs: Tensor) -> Saved:
        """Allocate the tensors that the forward saves in addition to ``inputs``."""
        raise NotImplementedError

    @staticmethod
    def over_time(xp: Tensor | None, saved: Saved, plain: Tensor, dropped: Tensor | None) -> Given:
        """Return the row kernel's tensors over all steps; ``xp`` is None except for the first cell."""
        raise NotImplementedError

    def connect(self, stages: Sequence["ForwardStage"]) -> None:
        """Find the buffers of the cells that read the new state."""
        plan, (reader, number) = self.plan, self.plan.plain
        self.plain_operand = stages[reader].operand[:, stages[reader].plan.offset(number) :]
        self.plain_mask = stages[reader].mask
        self.dropped_operand = None
        to_out = plan.number == len(stages) - 1
        self.flags.update(PLAIN_WIDTH=stages[reader].plan.width, DROPPED_WIDTH=plan.hidden if to_out else None)
        if plan.dropped is not None:
            reader, number = plan.dropped
            self.dropped_operand = stages[reader].operand[:, stages[reader].plan.offset(number) :]
            self.flags["DROPPED_WIDTH"] = stages[reader].plan.width


class BackwardStage(Stage):
    """A cell's backward step. The gradient of its state is a carry plus the outputs of its readers' matmuls."""

    direction = "backward"

    @staticmethod
    def over_time(saved: Saved, before: Tensor, grad_out: Tensor | None, dgates: Tensor, plan: Plan) -> Given:
        """Return the row kernel's tensors over all steps.

        ``before`` holds the states before each step; ``grad_out`` is None except for the last cell.
        """
        raise NotImplementedError

    def norm_grads(self) -> Tensor | None:
        """Compute the gradients of layer norm's gains and shifts, ``(2, norms * H)`` float32, after the last step."""
        raise NotImplementedError

    def connect(self, stages: Sequence["BackwardStage"]) -> None:
        """Find the matmuls of the cells that read the new state."""
        plan, (reader, number) = self.plan, self.plan.plain
        self.parts_plain = stages[reader].matmul.out[:, :, stages[reader].plan.offset(number) :]
        self.plain_mask = stages[reader].mask
        self.parts_dropped = None
        from_out = plan.number == len(stages) - 1
        self.flags.update(
            PLAIN_PARTS=stages[reader].matmul.parts,
            PLAIN_WIDTH=stages[reader].plan.width,
            DROPPED_PARTS=1,
            DROPPED_WIDTH=plan.hidden if from_out else None,
            FROM_OUT=from_out,
        )
        if plan.dropped is not None:
            reader, number = plan.dropped
            self.parts_dropped = stages[reader].matmul.out[:, :, stages[reader].plan.offset(number) :]
            self.flags.update(DROPPED_PARTS=stages[reader].matmul.parts, DROPPED_WIDTH=stages[reader].plan.width)


class LstmForward(ForwardStage):
    """An LSTM's forward step; its running h and c are float32."""

    @staticmethod
    def allocate_saved(xp: Tensor, plan: Plan, inputs: Tensor) -> Saved:
        (T, B), H = xp.shape[:2], plan.hidden
        stats = states = None
        if plan.norms or plan.rotational:
            kept = ROTATED_STATS if plan.rotational else STATS
            stats = xp.new_empty((T, B, kept.value), dtype=torch.float32)
        if plan.rotational and plan.masked:
            states = xp.new_empty((T, B, H))
        gates, cells = xp.new_empty((T, B, plan.blocks * H)), xp.new_empty((T, B, H), dtype=torch.float32)
        return Saved(inputs, gates, cells, stats, states)

    @staticmethod
    def over_time(xp: Tensor | None, saved: Saved, plain: Tensor, dropped: Tensor | None) -> Given:
        return xp, saved.gates, saved.cells, saved.stats, plain, dropped, saved.states

    def row(self, table: Tensor | None, slots: Tensor | None, t: int, T: int) -> Launch:
        return prepare(
            lstm_forward_kernel, (self.B,),
            table, slots, *self.tensors(table),
            self.matmul.out, self.bias, *self.state, self.plain_operand, self.dropped_operand, self.plain_mask,
            self.ln_weight, self.ln_bias, self.lengths, self.seeds, t, T, self.B,
            PARTS=self.matmul.parts, READS_XP=self.plan.number == 0,
            KEEPS_H=self.plan.rotational and self.plan.masked, **self.flags,
        )  # fmt: skip


class LstmBackward(BackwardStage):
    """An LSTM's backward step; the gradients of h and c are carried in float32."""

    @staticmethod
    def over_time(saved: Saved, before: Tensor, grad_out: Tensor | None, dgates: Tensor, plan: Plan) -> Given:
        dnormed = dgates.new_empty((*dgates.shape[:2], plan.norms * plan.hidden)) if plan.norms else None
        return saved.gates, saved.cells, saved.stats, grad_out, dgates, dnormed, before if plan.rotational else None

    def row(self, table: Tensor | None, slots: Tensor | None, t: int, T: int) -> Launch:
        flags = {name: value for name, value in self.flags.items() if name != "LN_EPS"}  # the moments are saved
        return prepare(
            lstm_backward_kernel, (self.B,),
            table, slots, *self.tensors(table), self.parts_plain, self.parts_dropped, self.plain_mask, *self.state,
            self.operand, self.ln_weight, self.ln_bias, self.lengths, self.seeds, t, self.B,
            BEFORE_WIDTH=self.plan.before_width if self.plan.rotational else 0, **flags,
        )  # fmt: skip

    def norm_grads(self) -> Tensor | None:
        if self.ln_weight is None:
            return None
        gates, cells, stats, _, _, dnormed, before = self.given
        assert gates is not None
        H, rows = self.plan.hidden, gates.shape[0] * self.B
        programs, block = min(rows, 256), min(256, self.flags["BLOCK"])
        sums = torch.empty((programs, 2, self.plan.norms * H), device=gates.device)
        launch(
            lstm_norm_grad_kernel, (programs, triton.cdiv(H, block)),
            gates, cells, stats, dnormed, before, sums, self.ln_weight, self.ln_bias, rows, H=H, BLOCK=block,
            FORGET=self.flags["FORGET"], ROTATED=self.plan.rotational,
            BEFORE_WIDTH=self.plan.before_width if self.plan.rotational else 0, num_warps=4,
        )  # fmt: skip
        return sums.sum(0)


class Chain:
    """The stages of a scan in one direction, and the table that gives their graphs the step and the addresses.

    ``states`` are the running states in float32, or their gradients.
    """

    stride: int

    def __init__(self, plans: Sequence[Plan], inputs: ChainInputs, graphed: bool) -> None:
        def integers(given: Tensor | None) -> Tensor | None:
            return None if given is None else torch.zeros(given.shape, dtype=torch.int64, device=given.device)

        like, B = inputs.xp, inputs.xp.shape[1]
        self.states = [torch.empty(state.shape, device=like.device) for state in inputs.states]
        self.seeds, self.lengths = integers(inputs.seeds), integers(inputs.lengths)
        self.cells: list[Any] = []
        for plan in plans:
            make = plan.stages[0 if self.stride == 1 else 1]
            state = [self.states[part] for part in plan.state]
            self.cells.append(make(like, B, plan, state, self.seeds, self.lengths))
        for cell in self.cells:
            cell.connect(self.cells)
        self.stages = self.cells[:: self.stride]  # in the order of the launches
        self.T = 0
        slots = TABLE_SLOTS * (1 + len(plans))  # the step, then the addresses for each stage
        self.table = torch.zeros(slots, dtype=torch.int64, device=like.device) if graphed else None

    def slots(self, number: int) -> Tensor | None:
        return None if self.table is None else self.table[TABLE_SLOTS * (number + 1) : TABLE_SLOTS * (number + 2)]

    def load(self, inputs: ChainInputs, given: Sequence[Given]) -> None:
        """Load a call's parameters and, for each cell, the addresses of its tensors over all steps."""
        self.T = len(inputs.xp)
        for buffer, source in ((self.seeds, inputs.seeds), (self.lengths, inputs.lengths)):
            if buffer is not None and source is not None:
                buffer.copy_(source)
        for cell, mask in zip(self.cells, inputs.masks, strict=False):  # the masks may be empty
            if cell.mask is not None and mask is not None:
                cell.mask.copy_(mask)
        for cell, weights, tensors in zip(self.cells, inputs.weights, given, strict=True):
            cell.load(weights)
            cell.given = tensors
        if self.table is not None:
            for number, stage in enumerate(self.stages, 1):
                fill_table(self.table[TABLE_SLOTS * number :], 0, self.T, *stage.given)
            self.table[:1].fill_(0 if self.stride == 1 else self.T - 1)

    def launches(self, t: int, direct: bool = False) -> Iterator[Launch]:
        table = None if direct else self.table
        for number, stage in enumerate(self.stages):
            row = stage.row(table, None if direct else self.slots(number), t, self.T)
            yield from (stage.matmul.prepare(), row)[:: self.stride]

    def warm_up(self) -> None:
        for direct in (False, True):  # inside another capture, kernels take the addresses as arguments
            for enqueue in self.launches(0, direct):
                enqueue()

    def release_tensors(self) -> None:
        for stage in self.stages:
            stage.given = ()

    def carried(self) -> Iterator[tuple[int, slice, int, Sequence[int]]]:
        """Yield per state the cell that reads its h in the next step, the columns there and the indices of h and c."""
        for cell in self.cells:
            if cell.plan.carries:
                (reader, number), (h, *others) = cell.plan.plain, cell.plan.state
                yield reader, self.cells[reader].plan.columns(number), h, others


class ForwardChain(Chain):
    """The chain in the order of a step."""

    stride = 1

    def begin(self, inputs: ChainInputs, saved: Sequence[Saved], out: Tensor) -> None:
        """Load a call's data; the steps fill ``saved`` and ``out``."""
        for buffer, start in zip(self.states, inputs.states, strict=True):
            buffer.copy_(start)
        for reader, columns, h, _ in self.carried():
            seen = inputs.seen(h, reader)
            self.cells[reader].operand[:, columns].copy_(seen)
            saved[reader].inputs[0, :, columns].copy_(seen)
        given: list[Given] = []
        for cell in self.cells:
            plan, (reader, number) = cell.plan, cell.plan.plain
            plain = saved[reader].inputs[int(plan.carries) :, :, self.cells[reader].plan.offset(number) :]
            dropped = out if plan.number == len(self.cells) - 1 else None
            if plan.dropped is not None:
                reader, number = plan.dropped
                dropped = saved[reader].inputs[..., self.cells[reader].plan.offset(number) :]
            given.append(cell.over_time(inputs.xp if plan.number == 0 else None, saved[plan.number], plain, dropped))
        self.load(inputs, given)

    def finish(self, inputs: ChainInputs) -> list[Tensor]:
        """Return the last states in the dtypes of the first ones. Each h is rounded as in its reader's input."""
        last = list(inputs.states)
        for _, _, h, others in self.carried():
            last[h] = self.states[h].to(inputs.xp.dtype).to(last[h].dtype, copy=True)
            for part in others:
                last[part] = self.states[part].to(last[part].dtype, copy=True)
        return last


class BackwardChain(Chain):
    """The chain in the opposite order."""

    stride = -1

    def begin(
        self, inputs: ChainInputs, saved: Sequence[Saved], grads: Sequence[Tensor | None], dgates: Sequence[Tensor]
    ) -> None:
        """Load a call's data: ``grads`` of the output and of the last states. The steps fill ``dgates``."""
        for carry, grad in zip(self.states, grads[1:], strict=True):
            carry.zero_() if grad is None else carry.copy_(grad)
        for reader, _, _, _ in self.carried():
            self.cells[reader].matmul.out.zero_()  # no step follows the last one
        given: list[Given] = []
        for cell, kept, dgate in zip(self.cells, saved, dgates, strict=True):
            before = kept.states
            if before is None:
                before = kept.inputs[..., cell.plan.offset(len(cell.plan.inputs) - 1) :]
            grad_out = grads[0] if cell is self.cells[-1] else None
            given.append(cell.over_time(kept, before, grad_out, dgate, cell.plan))
        self.load(inputs, given)

    def finish(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the gradients of the first states and of each cell's layer norm, in float32."""
        states = list(self.states)
        for reader, columns, h, others in self.carried():
            reader_grad, mask = self.cells[reader].matmul.out[:, :, columns].float().sum(0), self.cells[reader].mask
            states[h] = self.states[h] + (reader_grad if mask is None else reader_grad * mask)
            for part in others:
                states[part] = self.states[part].clone()
        return states, [cell.norm_grads() for cell in self.cells]


def chain_forward(
    plans: tuple[Plan, ...], inputs: ChainInputs, training: bool = False
) -> tuple[Tensor, list[Tensor], list[Saved]]:
    """Run a chain over a sequence.

    With ``training``, the backward's kernels are compiled together with the forward's.

    Returns:
        The last cell's h of all steps, after dropout, ``(T, B, H)``; the last states; each cell's saved tensors.
    """
    T, B = inputs.xp.shape[:2]
    with plain_mode(inputs.xp):
        out, saved = inputs.xp.new_empty((T, B, plans[-1].hidden)), []
        for plan in plans:
            carried = any(other.carries and other.plain[0] == plan.number for other in plans)
            multiplied = inputs.xp.new_empty((T + carried, B, plan.width))  # padding is never read
            saved.append(plan.stages[0].allocate_saved(inputs.xp, plan, multiplied))
        if inputs.xp.numel() == 0:
            return out, [state.clone() for state in inputs.states], saved
        inputs = inputs._replace(xp=aligned(inputs.xp))

        def next_pass() -> None:
            chain_backward(plans, inputs, saved, [None] * (1 + len(inputs.states)))

        scan_pass = Pass(
            key=lambda: _key("forward", plans, inputs),
            build=lambda graphed: ForwardChain(plans, inputs, graphed),
            begin=lambda chain: chain.begin(inputs, saved, out),
            finish=lambda chain: chain.finish(inputs),
            next_pass=next_pass if training else None,
        )
        return out, run_pass(scan_pass, inputs.xp, T), saved


def chain_backward(
    plans: tuple[Plan, ...], inputs: ChainInputs, saved: Sequence[Saved], grads: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor], list[CellWeights]]:
    """Compute the gradients of ``xp``, of the first states and of the weights, each in the dtype of its tensor.

    ``grads`` are the gradients of the output and of the last states; None counts as zero.
    """
    (xp, states, weights, *_), (grad_out, *grad_states) = inputs, grads
    with plain_mode(xp):
        dgates = [torch.empty_like(cell.gates) for cell in saved]
        if xp.numel() == 0:
            carried = [torch.zeros_like(x) if g is None else g for x, g in zip(states, grad_states, strict=True)]
            zeros = [[None if part is None else torch.zeros_like(part) for part in cell] for cell in weights]
            return dgates[0], carried, [CellWeights(*cell) for cell in zeros]  # type: ignore[arg-type]
        if grad_out is None:
            grad_out = xp.new_zeros((*xp.shape[:2], plans[-1].hidden))
        all_grads = [aligned(grad_out.to(xp.dtype)), *grad_states]
        scan_pass = Pass(
            key=lambda: _key("backward", plans, inputs),
            build=lambda graphed: BackwardChain(plans, inputs, graphed),
            begin=lambda chain: chain.begin(inputs, saved, all_grads, dgates),
            finish=BackwardChain.finish,
        )
        dstates, norms = run_pass(scan_pass, xp, len(xp))
        dweights = [
            cell_grads(cell, plan, dgate, kept.inputs[: len(xp)], norm)
            for cell, plan, dgate, kept, norm in zip(weights, plans, dgates, saved, norms, strict=True)
        ]
        return dgates[0], [grad.to(x.dtype) for grad, x in zip(dstates, states, strict=True)], dweights


def _key(direction: str, plans: tuple[Plan, ...], inputs: ChainInputs) -> Hashable:
    return scan_key("chain", direction, inputs.xp, plans, inputs.seeds is not None, inputs.lengths is not None)


def cell_grads(weights: CellWeights, plan: Plan, dgates: Tensor, inputs: Tensor, norms: Tensor | None) -> CellWeights:
    """Compute the gradients of one cell's parameters, by matmuls over all steps."""
    whole = weight_gradient(dgates, inputs)  # (blocks * H, width)
    weight_ih = None if weights.weight_ih is None else whole[:, plan.columns(0)].to(weights.weight_ih.dtype)
    recurrent = whole[: weights.weight_hh.shape[0], plan.columns(len(plan.inputs) - 1)]
    bias = ln_weight = ln_bias = None
    if weights.bias is not None:
        bias = dgates.sum((0, 1), dtype=torch.float32).to(weights.bias.dtype)
    if norms is not None and weights.ln_weight is not None and weights.ln_bias is not None:
        ln_weight, ln_bias = norms[0].to(weights.ln_weight.dtype), norms[1].to(weights.ln_bias.dtype)
    return CellWeights(weight_ih, recurrent.to(weights.weight_hh.dtype), bias, ln_weight, ln_bias)


Reference = Callable[[Tensor, Sequence[Tensor], Sequence[CellWeights]], tuple[Tensor, ...]]


class _ChainScan(torch.autograd.Function):
    """Autograd function of a chain: ``tensors`` are xp, the parts of the states and those of each cell's weights."""

    @staticmethod
    def forward(
        ctx: Any, plans: tuple[Plan, ...], training: bool, reference: Reference, seeds: Tensor | None,
        lengths: Tensor | None, masks: Sequence[Tensor | None], *tensors: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        inputs = ChainInputs(*_unflatten(plans, tensors), seeds, lengths, masks)
        out, last, saved = chain_forward(plans, inputs, training)
        ctx.plans, ctx.reference, ctx.counts = plans, reference, (len(tensors), len(masks))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, seeds, lengths, *masks, *(part for cell in saved for part in cell))
        return out, *last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plans, everything = ctx.plans, ctx.saved_tensors  # read once: checkpointing unpacks them only once
        count, masked = ctx.counts
        tensors, (seeds, lengths, *flat) = everything[:count], everything[count:]
        if torch.is_grad_enabled():  # create_graph=True: the reference is differentiable twice

            def scan(*given: Any) -> tuple[Tensor, ...]:
                return ctx.reference(*_unflatten(plans, given))

            return *[None] * 6, *reference_gradients(scan, tensors, grads, ctx.needs_input_grad[6:])
        saved = [Saved(*parts) for parts in _chunks(flat[masked:], len(Saved._fields))]
        inputs = ChainInputs(*_unflatten(plans, tensors), seeds, lengths, flat[:masked])
        dxp, dstates, dweights = chain_backward(plans, inputs, saved, grads)
        return *[None] * 6, dxp, *dstates, *(part for cell in dweights for part in cell)


def _unflatten(plans: Sequence[Plan], tensors: Sequence[Any]) -> tuple[Tensor, Sequence[Tensor], list[CellWeights]]:
    size = len(CellWeights._fields)
    first = len(tensors) - size * len(plans)
    return tensors[0], tensors[1:first], [CellWeights(*parts) for parts in _chunks(tensors[first:], size)]


def _chunks(flat: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [flat[i : i + size] for i in range(0, len(flat), size)]


def chain_scan(
    plans: tuple[Plan, ...],
    xp: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[CellWeights],
    seed: Tensor | None,
    lengths: Tensor | None,
    masks: Sequence[Tensor | None],
    training: bool,
    reference: Reference,
) -> tuple[Tensor, list[Tensor]]:
    """Run ``chain_forward``, differentiable by autograd, and return the output of all steps and the last states.

    ``seed`` is an int64 scalar from which the seeds of all masks are derived. ``reference(xp, states, weights)``
    computes the same in plain PyTorch, for second derivatives.
    """
    seeds = None if seed is None else stream_seeds(seed, CELL_STREAMS * len(plans))
    flat = (part for cell in weights for part in cell)
    out, *last = _ChainScan.apply(plans, training, reference, seeds, lengths, masks, xp, *states, *flat)
    return out, last
