"""A whole Fast-Slow sequence: each step is one matmul and one row kernel for each of its cells."""

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrum.ops.fast_slow_scan.fused.rum import RumBackward, RumForward
from torchrum.ops.fast_slow_scan.options import STREAMS_PER_CELL, FastSlowOptions
from torchrum.ops.fast_slow_scan.types import FastSlowInputs, State
from torchrum.ops.kernels.chain import (
    Chain,
    Given,
    LstmBackward,
    LstmForward,
    Plan,
    Shared,
    empty_shared,
    saved_tensors,
)
from torchrum.ops.kernels.rum_step_backward import STATS
from torchrum.ops.kernels.step_graphs import Pass, aligned, plain_mode, run_pass, scan_key
from torchrum.ops.kernels.weights import CellWeights, weight_gradient
from torchrum.ops.lstm_scan import LstmOptions


class Saved(NamedTuple):
    """What the backward needs of the forward, one entry per cell."""

    inputs: tuple[Tensor, ...]
    """What each cell's matmul multiplied, ``(T or T + 1, B, width)``."""
    gates: tuple[Tensor, ...]
    cells: tuple[Tensor | None, ...]
    stats: tuple[Tensor | None, ...]


class Sizes(NamedTuple):
    """Hidden sizes of the fast cells and of the slow one."""

    fast: int
    slow: int

    @classmethod
    def of(cls, inputs: FastSlowInputs) -> "Sizes":
        return cls(inputs.fast[0].shape[1], inputs.slow[0].shape[1])


def make_plans(options: FastSlowOptions, sizes: Sizes) -> list[Plan]:
    """One for each cell of a step: F1, S, F2, F3, ..."""
    H, S = sizes
    inputs = [(H,), (H, S), (S, H), *[(H,)] * (len(options.fast) - 2)]
    plans = []
    for number, (read, cell) in enumerate(zip(inputs, options.cells, strict=True)):
        blocks, norms = (4, 5) if isinstance(cell, LstmOptions) else (cell.num_inputs, cell.num_inputs)
        plan = Plan(
            hidden=S if number == 1 else H,
            inputs=read,
            blocks=blocks,
            projected=number == 0,
            stream=STREAMS_PER_CELL * number,
            dropout=options.drops[number],
            norms=norms if cell.layer_norm else 0,
            flags=tuple(cell.kernel_flags().items()),
        )
        plans.append(plan)
    return plans


def connect(stages: Sequence[Any]) -> None:
    """Tell each cell who reads its state: itself or another, plain, and another or the caller, through dropout."""
    first, slow, second, *others = stages
    first.connect((second, 1), (slow, 0), False)
    slow.connect((slow, 1), (second, 0), False)
    chain = [second, *others, first]
    for cell, following in pairwise(chain):
        cell.connect((following, 0), None, following is first)


class ForwardScan(Chain):
    """The chain F1, S, F2, ... going forward."""

    def __init__(
        self, like: Tensor, B: int, options: FastSlowOptions, sizes: Sizes, shared: Shared, graphed: bool
    ) -> None:
        self.fast, self.slow = make_states(like, B, options, sizes)
        stages: list[Any] = []
        for plan, cell, state in zip_cells(options, sizes, self.fast, self.slow):
            make = LstmForward if isinstance(cell, LstmOptions) else RumForward
            stages.append(make(like, B, plan, shared, *state))
        connect(stages)
        super().__init__(like, stages, shared, graphed)

    def start(self, fast: State, slow: State, inputs: Sequence[Tensor]) -> None:
        for mine, given in zip((*self.fast, *self.slow), (*fast, *slow), strict=True):
            mine.copy_(given)
        for number, state in ((0, fast[0]), (1, slow[0])):
            stage, begin = self.stages[number], self.stages[number].plan.offset(number)
            columns = slice(begin, begin + state.shape[1])
            stage.low[:, columns].copy_(state)
            inputs[number][0, :, columns].copy_(state)

    def cells(self) -> tuple[Tensor, ...]:
        """The last c of every LSTM, in float32."""
        return tuple(part.clone() for part in (*self.fast[1:], *self.slow[1:]))


class BackwardScan(Chain):
    """The same chain going back, so in the opposite order."""

    def __init__(
        self, like: Tensor, B: int, options: FastSlowOptions, sizes: Sizes, shared: Shared, graphed: bool
    ) -> None:
        self.fast, self.slow = make_states(like, B, options, sizes)
        self.in_order: list[Any] = []
        for plan, cell, state in zip_cells(options, sizes, self.fast, self.slow):
            make = LstmBackward if isinstance(cell, LstmOptions) else RumBackward
            self.in_order.append(make(like, B, plan, shared, *state))
        connect(self.in_order)
        super().__init__(like, self.in_order[::-1], shared, graphed)

    def start(self, grads: Sequence[Tensor | None]) -> None:
        """Begin with the gradients of the last states; nothing comes from steps after the last."""
        for carry, grad in zip((*self.fast, *self.slow), grads, strict=True):
            carry.zero_() if grad is None else carry.copy_(grad)
        for stage in self.in_order[:2]:
            stage.matmul.out.zero_()

    def finish(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Gradients of the first states and of each cell's layer norm, in float32."""
        carries = []
        for number, state in enumerate((self.fast, self.slow)):
            stage, begin = self.in_order[number], self.in_order[number].plan.offset(number)
            arriving = stage.matmul.out[:, :, begin : begin + stage.plan.hidden].float().sum(0)
            carries += [state[0] + arriving, *(part.clone() for part in state[1:])]
        return carries, [stage.norm_grads() for stage in self.in_order]


def make_states(like: Tensor, B: int, options: FastSlowOptions, sizes: Sizes) -> tuple[State, State]:
    """Float32 buffers for the running states, or for their gradients."""

    def empty(H: int, count: int) -> State:
        return tuple(torch.empty((B, H), dtype=torch.float32, device=like.device) for _ in range(count))

    return empty(sizes.fast, 2), empty(sizes.slow, 2 if isinstance(options.slow, LstmOptions) else 1)


def zip_cells(options: FastSlowOptions, sizes: Sizes, fast: State, slow: State) -> list[tuple[Plan, Any, State]]:
    states = [slow if number == 1 else fast for number in range(len(options.cells))]
    return list(zip(make_plans(options, sizes), options.cells, states, strict=True))


def fast_slow_forward(
    inputs: FastSlowInputs, seeds: Tensor | None, options: FastSlowOptions
) -> tuple[Tensor, State, State, Saved]:
    """Outputs, last states, and what the backward needs.

    ``seeds`` are those of the streams of masks, from ``inputs.seed``.
    """
    xp, fast, slow, weights, _ = inputs
    T, B, sizes = xp.shape[0], xp.shape[1], Sizes.of(inputs)
    with plain_mode(xp):
        plans = make_plans(options, sizes)
        out = xp.new_empty((T, B, sizes.fast))
        # the first two hold states from before the first step to after the last; padding is never read
        multiplied = tuple(xp.new_empty((T + (number < 2), B, plan.width)) for number, plan in enumerate(plans))
        saved = keep_tensors(xp, plans, options, multiplied)
        if xp.numel() == 0:
            return out, tuple(x.clone() for x in fast), tuple(x.clone() for x in slow), saved
        xp = aligned(xp)
        given = forward_tensors(xp, out, plans, saved)

        def key() -> Hashable:
            return scan_key("fast_slow", "forward", xp, options, sizes)

        def build(graphed: bool) -> ForwardScan:
            return ForwardScan(xp, B, options, sizes, empty_shared(xp, seeds, None), graphed)

        def begin(scan: ForwardScan) -> None:
            scan.begin(T, weights, given, seeds, None)
            scan.start(fast, slow, multiplied)

        def following() -> None:
            fast_slow_backward([None] * len((out, *fast, *slow)), inputs, seeds, saved, options)

        then = following if options.training else None
        c = run_pass(Pass(key, build, begin, ForwardScan.cells, then), xp, T)
        fast_h = multiplied[0][-1, :, : sizes.fast].to(fast[0].dtype)
        begin_slow = plans[1].offset(1)
        slow_h = multiplied[1][-1, :, begin_slow : begin_slow + sizes.slow].to(slow[0].dtype)
        slow_rest = tuple(part.to(slow[1].dtype) for part in c[1:])
        return out, (fast_h, c[0].to(fast[1].dtype)), (slow_h, *slow_rest), saved


def keep_tensors(xp: Tensor, plans: Sequence[Plan], options: FastSlowOptions, multiplied: tuple[Tensor, ...]) -> Saved:
    T, B = xp.shape[:2]
    kept: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
    for plan, cell in zip(plans, options.cells, strict=True):
        if isinstance(cell, LstmOptions):
            kept.append(saved_tensors(xp, plan))
        else:
            stats = xp.new_empty((T, B, STATS.value), dtype=torch.float32)
            kept.append((xp.new_empty((T, B, plan.blocks * plan.hidden)), None, stats))
    gates, cells, stats_of = zip(*kept, strict=True)
    return Saved(multiplied, gates, cells, stats_of)


def forward_tensors(xp: Tensor, out: Tensor, plans: Sequence[Plan], saved: Saved) -> list[Given]:
    """What each cell's row kernel reads and writes over all steps."""
    first, slow, second, *others = saved.inputs
    plain = [second[..., plans[2].offset(1) :], slow[1:, :, plans[1].offset(1) :], *others, first[1:]]
    dropped = [slow, second, *[None] * len(others), out]
    given: list[Given] = []
    for number, gates in enumerate(saved.gates):
        cells, stats, readers = saved.cells[number], saved.stats[number], (plain[number], dropped[number])
        is_lstm = cells is not None
        given.append(
            (xp if number == 0 else None, gates, cells, stats, *readers) if is_lstm else (gates, stats, *readers)
        )
    return given


def fast_slow_backward(
    grads: Sequence[Tensor | None],
    inputs: FastSlowInputs,
    seeds: Tensor | None,
    saved: Saved,
    options: FastSlowOptions,
) -> tuple[Tensor, list[Tensor], list[CellWeights]]:
    """Gradients of xp, of the first states and of the weights, each in the dtype of its tensor.

    ``grads`` are those of the outputs and of the parts of the last states; None where nothing asked for one.
    """
    grad_out, *grad_states = grads
    like, sizes, weights = saved.gates[0], Sizes.of(inputs), inputs.weights
    T, B = like.shape[:2]
    states = (*inputs.fast, *inputs.slow)
    with plain_mode(like):
        dgates = [torch.empty_like(gates) for gates in saved.gates]
        if like.numel() == 0:
            carried = [torch.zeros_like(x) if g is None else g for x, g in zip(states, grad_states, strict=True)]
            return dgates[0], carried, [CellWeights(*map(zeros_like, cell)) for cell in weights]
        grad_out = like.new_zeros((T, B, sizes.fast)) if grad_out is None else aligned(grad_out.to(like.dtype))
        given = backward_tensors(grad_out, dgates, make_plans(options, sizes), saved, options)

        def key() -> Hashable:
            return scan_key("fast_slow", "backward", like, options, sizes)

        def build(graphed: bool) -> BackwardScan:
            return BackwardScan(like, B, options, sizes, empty_shared(like, seeds, None), graphed)

        def begin(scan: BackwardScan) -> None:
            scan.begin(T, weights[::-1], given[::-1], seeds, None)
            scan.start(grad_states)

        carries, norms = run_pass(Pass(key, build, begin, BackwardScan.finish), like, T)
        dweights = [
            cell_grads(cell, plan, dgate, multiplied[:T], norm)
            for cell, plan, dgate, multiplied, norm in zip(
                weights, make_plans(options, sizes), dgates, saved.inputs, norms, strict=True
            )
        ]
        return dgates[0], [grad.to(x.dtype) for grad, x in zip(carries, states, strict=True)], dweights


def backward_tensors(
    grad_out: Tensor, dgates: Sequence[Tensor], plans: Sequence[Plan], saved: Saved, options: FastSlowOptions
) -> list[Given]:
    given: list[Given] = []
    for number, (plan, cell) in enumerate(zip(plans, options.cells, strict=True)):
        gates, cells, stats = saved.gates[number], saved.cells[number], saved.stats[number]
        if isinstance(cell, LstmOptions):
            from_out = grad_out if number == len(plans) - 1 else None
            dnormed = gates.new_empty((*gates.shape[:2], 5 * plan.hidden)) if cell.layer_norm else None
            given.append((gates, cells, stats, from_out, dgates[number], dnormed))
        else:
            dseen = gates.new_empty((*gates.shape[:2], plan.hidden)) if cell.layer_norm else None
            given.append((gates, stats, saved.inputs[1][..., plan.offset(1) :], dgates[number], dseen))
    return given


def cell_grads(weights: CellWeights, plan: Plan, dgates: Tensor, inputs: Tensor, norms: Tensor | None) -> CellWeights:
    """Gradients of one cell's parameters: matmuls over all steps."""
    whole = weight_gradient(dgates, inputs)  # (blocks*H, width)
    columns = [whole[:, plan.offset(n) : plan.offset(n) + size] for n, size in enumerate(plan.inputs)]
    weight_ih = None if weights.weight_ih is None else columns[0].to(weights.weight_ih.dtype)
    weight_hh = columns[-1][: weights.weight_hh.shape[0]].to(weights.weight_hh.dtype)
    bias = ln_weight = ln_bias = None
    if weights.bias is not None:
        bias = dgates.sum((0, 1), dtype=torch.float32).to(weights.bias.dtype)
    if norms is not None and weights.ln_weight is not None and weights.ln_bias is not None:
        ln_weight, ln_bias = norms[0].to(weights.ln_weight.dtype), norms[1].to(weights.ln_bias.dtype)
    return CellWeights(weight_ih, weight_hh, bias, ln_weight, ln_bias)


def zeros_like(x: Any) -> Any:
    return None if x is None else torch.zeros_like(x)
