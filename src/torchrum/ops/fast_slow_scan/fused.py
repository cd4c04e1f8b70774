"""The Fast-Slow scan on the GPU: a chain of its cells, with the slow RUM's row kernels and stages.

Unlike in a RUM layer, the slow RUM's input is not known in advance, so one matmul covers the input and the state. This
module is imported on first use, since it needs Triton.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrum.ops.fast_slow_scan.gated_stage import GatedBackward, GatedForward
from torchrum.ops.fast_slow_scan.reference import FastSlowInputs, FastSlowOptions, State, fast_slow_scan_reference
from torchrum.ops.gated_scan import GatedOptions
from torchrum.ops.kernels.cell_rows import apply_zoneout, dependent_start, load_gate, load_state_grad, store_state
from torchrum.ops.kernels.chain import (
    BackwardStage,
    ForwardStage,
    Given,
    LstmBackward,
    LstmForward,
    Plan,
    Saved,
    chain_scan,
)
from torchrum.ops.kernels.gated_step import head_flags
from torchrum.ops.kernels.linear import CellWeights
from torchrum.ops.kernels.rows import own_row, prefetch
from torchrum.ops.kernels.rum_step import load_norms, new_value_mask, rum_cell, with_norm
from torchrum.ops.kernels.rum_step_backward import (
    STATS,
    norm_grads,
    precompute_sums,
    recompute_step,
    step_backward,
    store_stats,
)
from torchrum.ops.kernels.triton_launch import Launch, prepare, tensor_at
from torchrum.ops.lstm_scan import LstmOptions
from torchrum.ops.rum_scan import RumOptions


@triton.jit(do_not_specialize=["t", "B"])
def slow_rum_forward_kernel(
    table, slots, raw, stats, plain, dropped, states,
    parts, bias, state, plain_operand, dropped_operand, plain_mask, ln_weight, ln_bias, seeds, t, B,
    PARTS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr,
    LN: tl.constexpr, LN_EPS: tl.constexpr, ACTIVATION: tl.constexpr, ETA: tl.constexpr,
    ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr, DROP: tl.constexpr, DROP_BELOW: tl.constexpr,
    PLAIN_WIDTH: tl.constexpr, DROPPED_WIDTH: tl.constexpr, STREAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run one forward step for row b.

    Save tau, u and eps before layer norm in ``raw`` and, if ``plain`` is masked, h before the step in ``states``.
    """
    dtype = plain_operand.dtype.element_ty
    dependent_start(PDL)
    if table is not None:
        t = tl.load(table) + t
        raw = tensor_at(slots, 1, dtype)
        stats = tensor_at(slots, 2, tl.float32)
        plain = tensor_at(slots, 3, dtype)
        dropped = tensor_at(slots, 4, dtype)
        if plain_mask is not None:
            states = tensor_at(slots, 5, dtype)
    b, row, j, mask = own_row(t, B, H, BLOCK)
    index = b * H + j
    BLOCKS: tl.constexpr = 3 if GATE else 2
    raw += row * (BLOCKS * H)
    h = tl.load(state + index, mask=mask, other=0.0)
    if plain_mask is not None:
        tl.store(states + row * H + j, h.to(dtype), mask=mask)
    norms = load_norms(ln_weight, ln_bias, j, mask, H, GATE, LN)
    tau_raw = load_gate(parts, None, bias, raw, 0, b, B, j, mask, H, HP, BLOCKS, PARTS)
    u_raw = tau_raw
    if GATE:
        u_raw = load_gate(parts, None, bias, raw, 1, b, B, j, mask, H, HP, BLOCKS, PARTS)
    eps = load_gate(parts, None, bias, raw, BLOCKS - 1, b, B, j, mask, H, HP, BLOCKS, PARTS)
    cell = rum_cell(tau_raw, u_raw, eps, h, norms, j, mask, H, GATE, LN, LN_EPS, ACTIVATION)
    store_stats(stats + row * STATS, cell, GATE, LN, ETA)
    new = with_norm(cell[0], ETA)
    new = apply_zoneout(new, h, seeds, STREAM, t, index, ZONEOUT, KEEP_BELOW)
    tl.store(state + index, new, mask=mask)
    store_state(
        new, plain_operand, dropped_operand, plain, dropped, plain_mask, seeds, t, b, row, index, j, mask,
        PLAIN_WIDTH, DROPPED_WIDTH, DROP, DROP_BELOW, STREAM + 2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["t", "B"])
def slow_rum_backward_kernel(
    table, slots, raw, stats, before, draw, saved_dnew,
    parts_plain, parts_dropped, plain_mask, dstate, operand, ln_weight, ln_bias, seeds, t, B,
    PLAIN_PARTS: tl.constexpr, DROPPED_PARTS: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr,
    LN: tl.constexpr, ACTIVATION: tl.constexpr, ETA: tl.constexpr,
    ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr, DROP: tl.constexpr, DROP_BELOW: tl.constexpr,
    PLAIN_WIDTH: tl.constexpr, DROPPED_WIDTH: tl.constexpr, BEFORE_WIDTH: tl.constexpr,
    STREAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run one backward step for row b; ``before`` holds the states before each step, in rows BEFORE_WIDTH apart."""
    dtype = operand.dtype.element_ty
    dependent_start(PDL)
    if table is not None:
        t = tl.load(table) - t
        raw = tensor_at(slots, 1, dtype)
        stats = tensor_at(slots, 2, tl.float32)
        before = tensor_at(slots, 3, dtype)
        draw = tensor_at(slots, 4, dtype)
        if LN != "none":
            saved_dnew = tensor_at(slots, 5, dtype)
    b, row, j, mask = own_row(t, B, H, BLOCK)
    index = b * H + j
    BLOCKS: tl.constexpr = 3 if GATE else 2
    raw += row * (BLOCKS * H)
    draw += row * (BLOCKS * H)
    operand += b * (BLOCKS * HP)
    if LN != "none":
        saved_dnew += row * H
    tau_raw = tl.load(raw + j, mask=mask, other=0.0).to(tl.float32)
    u_raw = tau_raw
    if GATE:
        u_raw = tl.load(raw + H + j, mask=mask, other=0.0).to(tl.float32)
    eps = tl.load(raw + (BLOCKS - 1) * H + j, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(before + row * BEFORE_WIDTH + j, mask=mask, other=0.0).to(tl.float32)
    dh = load_state_grad(
        dstate, parts_plain, parts_dropped, None, plain_mask, seeds, t, b, B, row, index, j, mask, H,
        PLAIN_PARTS, DROPPED_PARTS, PLAIN_WIDTH, DROPPED_WIDTH, DROP, DROP_BELOW, STREAM + 2,
    )  # fmt: skip
    if t > 0:  # the data that the next backward step begins with
        BYTES: tl.constexpr = H * dtype.primitive_bitwidth // 8
        prefetch(raw - B.to(tl.int64) * (BLOCKS * H), BLOCKS * BYTES)
        prefetch(before + (row - B) * BEFORE_WIDTH, BYTES)
        prefetch(stats + (row - B) * STATS, 4 * STATS)

    seed = None
    if ZONEOUT == "train":
        seed = seeds + STREAM
    stats += row * STATS
    norms = load_norms(ln_weight, ln_bias, j, mask, H, GATE, LN)
    keep = new_value_mask(None, seed, t, b, j, H, ZONEOUT, KEEP_BELOW)
    recomputed = recompute_step(tau_raw, u_raw, eps, h, stats, norms, j, mask, GATE, LN, ACTIVATION, ETA)
    precomputed = precompute_sums(recomputed, GATE, LN, ETA)
    dtau, dgate, deps, dprev = step_backward(
        dh, recomputed, precomputed, keep, h, stats, saved_dnew, j, mask, H, GATE, LN, ETA, ZONEOUT
    )
    tl.store(operand + j, dtau.to(dtype), mask=mask)
    if GATE:
        tl.store(operand + HP + j, dgate.to(dtype), mask=mask)
        tl.store(draw + H + j, dgate.to(dtype), mask=mask)
    tl.store(operand + (BLOCKS - 1) * HP + j, deps.to(dtype), mask=mask)
    tl.store(dstate + index, dprev, mask=mask)
    tl.store(draw + j, dtau.to(dtype), mask=mask)
    tl.store(draw + (BLOCKS - 1) * H + j, deps.to(dtype), mask=mask)


class RumForward(ForwardStage):
    """A RUM's forward step; its running h is float32."""

    @staticmethod
    def allocate_saved(xp: Tensor, plan: Plan, inputs: Tensor) -> Saved:
        T, B = xp.shape[:2]
        stats = xp.new_empty((T, B, STATS.value), dtype=torch.float32)
        states = xp.new_empty((T, B, plan.hidden)) if plan.masked else None
        return Saved(inputs, xp.new_empty((T, B, plan.blocks * plan.hidden)), None, stats, states)

    @staticmethod
    def over_time(xp: Tensor | None, saved: Saved, plain: Tensor, dropped: Tensor | None) -> Given:
        return saved.gates, saved.stats, plain, dropped, saved.states

    def row(self, table: Tensor | None, slots: Tensor | None, t: int, T: int) -> Launch:
        return prepare(
            slow_rum_forward_kernel, (self.B,),
            table, slots, *self.tensors(table),
            self.matmul.out, self.bias, *self.state, self.plain_operand, self.dropped_operand, self.plain_mask,
            self.ln_weight, self.ln_bias, self.seeds, t, self.B, PARTS=self.matmul.parts, **self.flags,
        )  # fmt: skip


class RumBackward(BackwardStage):
    """A RUM's backward step; the gradient of h is carried in float32."""

    @staticmethod
    def over_time(saved: Saved, before: Tensor, grad_out: Tensor | None, dgates: Tensor, plan: Plan) -> Given:
        saved_dnew = dgates.new_empty((*dgates.shape[:2], plan.hidden)) if plan.norms else None
        return saved.gates, saved.stats, before, dgates, saved_dnew

    def row(self, table: Tensor | None, slots: Tensor | None, t: int, T: int) -> Launch:
        unused = ("LN_EPS", "FROM_OUT")  # the moments are saved, and the caller reads no slow state
        flags = {name: value for name, value in self.flags.items() if name not in unused}
        flags["BEFORE_WIDTH"] = self.plan.before_width
        return prepare(
            slow_rum_backward_kernel, (self.B,),
            table, slots, *self.tensors(table), self.parts_plain, self.parts_dropped, self.plain_mask, *self.state,
            self.operand, self.ln_weight, self.ln_bias, self.seeds, t, self.B, **flags,
        )  # fmt: skip

    def norm_grads(self) -> Tensor | None:
        if self.ln_weight is None or self.ln_bias is None:
            return None
        raw, stats, before, _, saved_dnew = self.given
        assert raw is not None and stats is not None and before is not None and saved_dnew is not None
        eps = raw[..., (self.plan.blocks - 1) * self.plan.hidden :]
        return norm_grads(raw, eps, before, None, stats, saved_dnew, self.ln_weight, self.ln_bias, self.flags)


STAGES: dict[type, tuple[type[ForwardStage], type[BackwardStage]]] = {
    LstmOptions: (LstmForward, LstmBackward),
    RumOptions: (RumForward, RumBackward),
    GatedOptions: (GatedForward, GatedBackward),
}


@functools.lru_cache(256)
def fast_slow_plans(H: int, S: int, options: FastSlowOptions, masked: tuple[bool, ...] = ()) -> tuple[Plan, ...]:
    """Return the chain F1, S, F2, F3, ... with ``H`` units in the fast cells and ``S`` in the slow one.

    F2 reads F1's state and S reads it after dropout; S reads its own state and F2 reads it after dropout. The state of
    F2 and of each later cell goes to the next cell; the last cell's goes to F1 and, after dropout, to the caller.
    ``masked`` has a flag per cell that is true if it reads its state through a mask; if it is empty, no cell does.
    """
    inputs = [(H,), (H, S), (S, H), *[(H,)] * (len(options.fast) - 2)]
    plans = []
    for number, cell in enumerate(options.cells):
        is_slow, is_lstm = number == 1, isinstance(cell, LstmOptions)
        flags = cell.kernel_flags()
        if isinstance(cell, GatedOptions):
            flags |= head_flags(S, cell.head_size, cell.rotated_units)
        plan = Plan(
            stages=STAGES[type(cell)],
            number=number,
            hidden=S if is_slow else H,
            inputs=inputs[number],
            blocks=cell.blocks,
            norms=cell.norms,
            state=((2, 3) if is_lstm else (2,)) if is_slow else (0, 1),
            plain=(2, 1) if number == 0 else (1, 1) if is_slow else ((number + 1) % len(options.cells), 0),
            dropped=(1, 0) if number == 0 else (2, 0) if is_slow else None,
            dropout=options.drops[number],
            masked=bool(masked) and masked[number],
            flags=tuple(flags.items()),
        )
        plans.append(plan)
    return tuple(plans)


@torch.compiler.disable  # it has its own graphs and kernels, which a compiler cannot improve
def fast_slow_scan_fused(inputs: FastSlowInputs, options: FastSlowOptions) -> tuple[Tensor, State, State]:
    """Run the scan with the arguments and results of ``fast_slow_scan_reference``."""
    xp, fast, slow, weights, seed, masks = inputs

    def reference(xp: Tensor, states: Sequence[Tensor], weights: Sequence[CellWeights]) -> tuple[Tensor, ...]:
        given = FastSlowInputs(xp, tuple(states[:2]), tuple(states[2:]), weights, seed, masks)
        out, fast, slow = fast_slow_scan_reference(given, options)
        return out, *fast, *slow

    masked = tuple(mask is not None for mask in masks)
    plans = fast_slow_plans(fast[0].shape[1], slow[0].shape[1], options, masked)
    out, last = chain_scan(plans, xp, (*fast, *slow), weights, seed, None, masks, options.training, reference)
    return out, tuple(last[:2]), tuple(last[2:])
