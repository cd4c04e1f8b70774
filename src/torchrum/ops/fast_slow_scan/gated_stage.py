"""The slow gated RUM of a Fast-Slow scan: its row kernels and stages.

The rotation stays inside heads, so each program holds whole heads of a row, as in the gated scan. The matmul over the
input and the state has four blocks: r, u, tau, which reads only the state, and eps, which reads only the input. This
module is imported on first use, since it needs Triton.
"""

import triton
import triton.language as tl
from torch import Tensor

from torchrum.ops.kernels.cell_rows import (
    apply_zoneout,
    dependent_start,
    load_gate,
    load_state_grad,
    store_state,
    zoneout_backward,
)
from torchrum.ops.kernels.chain import BackwardStage, ForwardStage, Given, Plan, Saved, Stage
from torchrum.ops.kernels.gated_step import find_plane, gated_step_backward, inner_of, own_units
from torchrum.ops.kernels.rows import sigmoid, tanh
from torchrum.ops.kernels.triton_launch import Launch, prepare, tensor_at


@triton.jit(do_not_specialize=["t", "B"])
def slow_gated_forward_kernel(
    table, slots, raw, plain, dropped, states,
    parts, bias, state, plain_operand, dropped_operand, plain_mask, seeds, t, B,
    PARTS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, HEAD: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr,
    DROP: tl.constexpr, DROP_BELOW: tl.constexpr, PLAIN_WIDTH: tl.constexpr, DROPPED_WIDTH: tl.constexpr,
    STREAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run one forward step for the heads of one program in row b; the matmul's blocks are saved in ``raw``."""
    dtype = plain_operand.dtype.element_ty
    dependent_start(PDL)
    if table is not None:
        t = tl.load(table) + t
        raw = tensor_at(slots, 1, dtype)
        plain = tensor_at(slots, 2, dtype)
        dropped = tensor_at(slots, 3, dtype)
        if plain_mask is not None:
            states = tensor_at(slots, 4, dtype)
    b = tl.program_id(0)
    row = t.to(tl.int64) * B + b
    j, mask = own_units(H, HEAD, SIZE, HEADS)
    index = b * H + j
    raw += row * (4 * H)
    h = tl.load(state + index, mask=mask, other=0.0)
    if plain_mask is not None:
        tl.store(states + row * H + j, h.to(dtype), mask=mask)
    r = sigmoid(load_gate(parts, None, bias, raw, 0, b, B, j, mask, H, HP, 4, PARTS))
    u = sigmoid(load_gate(parts, None, bias, raw, 1, b, B, j, mask, H, HP, 4, PARTS))
    tau = load_gate(parts, None, bias, raw, 2, b, B, j, mask, H, HP, 4, PARTS)
    eps = load_gate(parts, None, bias, raw, 3, b, B, j, mask, H, HP, 4, PARTS)
    e, _, m, _, _, _ = find_plane(eps, tau, j, mask, K, HEAD)
    candidate = tanh(eps + r * inner_of(tau, h, e, m, j, K))
    new = apply_zoneout(u * h + (1.0 - u) * candidate, h, seeds, STREAM, t, index, ZONEOUT, KEEP_BELOW)
    tl.store(state + index, new, mask=mask)
    store_state(
        new, plain_operand, dropped_operand, plain, dropped, plain_mask, seeds, t, b, row, index, j, mask,
        PLAIN_WIDTH, DROPPED_WIDTH, DROP, DROP_BELOW, STREAM + 2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["t", "B"])
def slow_gated_backward_kernel(
    table, slots, raw, before, draw,
    parts_plain, parts_dropped, plain_mask, dstate, operand, seeds, t, B,
    PLAIN_PARTS: tl.constexpr, DROPPED_PARTS: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, HEAD: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr,
    ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr, DROP: tl.constexpr, DROP_BELOW: tl.constexpr,
    PLAIN_WIDTH: tl.constexpr, DROPPED_WIDTH: tl.constexpr, BEFORE_WIDTH: tl.constexpr,
    STREAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run one backward step; ``before`` holds the states before each step, in rows BEFORE_WIDTH apart."""
    dtype = operand.dtype.element_ty
    dependent_start(PDL)
    if table is not None:
        t = tl.load(table) - t
        raw = tensor_at(slots, 1, dtype)
        before = tensor_at(slots, 2, dtype)
        draw = tensor_at(slots, 3, dtype)
    b = tl.program_id(0)
    row = t.to(tl.int64) * B + b
    j, mask = own_units(H, HEAD, SIZE, HEADS)
    index = b * H + j
    raw += row * (4 * H) + j
    r = sigmoid(tl.load(raw, mask=mask, other=0.0).to(tl.float32))
    u = sigmoid(tl.load(raw + H, mask=mask, other=0.0).to(tl.float32))
    tau = tl.load(raw + 2 * H, mask=mask, other=0.0).to(tl.float32)
    eps = tl.load(raw + 3 * H, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(before + row * BEFORE_WIDTH + j, mask=mask, other=0.0).to(tl.float32)
    total = load_state_grad(
        dstate, parts_plain, parts_dropped, None, plain_mask, seeds, t, b, B, row, index, j, mask, H,
        PLAIN_PARTS, DROPPED_PARTS, PLAIN_WIDTH, DROPPED_WIDTH, DROP, DROP_BELOW, STREAM + 2,
    )  # fmt: skip
    grad, kept = zoneout_backward(total, seeds, STREAM, t, index, ZONEOUT, KEEP_BELOW)
    dr, du, dtau, deps, dh = gated_step_backward(grad, r, u, tau, eps, h, j, mask, K, HEAD)
    tl.store(dstate + index, kept + dh, mask=mask)
    draw += row * (4 * H) + j
    operand += b * (4 * HP) + j
    tl.store(draw, dr.to(dtype), mask=mask)
    tl.store(draw + H, du.to(dtype), mask=mask)
    tl.store(draw + 2 * H, dtau.to(dtype), mask=mask)
    tl.store(draw + 3 * H, deps.to(dtype), mask=mask)
    tl.store(operand, dr.to(dtype), mask=mask)
    tl.store(operand + HP, du.to(dtype), mask=mask)
    tl.store(operand + 2 * HP, dtau.to(dtype), mask=mask)
    tl.store(operand + 3 * HP, deps.to(dtype), mask=mask)


def grid_of(stage: Stage) -> tuple[int, int]:
    """Return the grid of a stage: rows, and blocks of heads."""
    flags = stage.flags
    return stage.B, triton.cdiv(flags["H"], flags["HEAD"] * flags["HEADS"])


class GatedForward(ForwardStage):
    """A gated RUM's forward step; its running h is float32."""

    @staticmethod
    def allocate_saved(xp: Tensor, plan: Plan, inputs: Tensor) -> Saved:
        T, B = xp.shape[:2]
        states = xp.new_empty((T, B, plan.hidden)) if plan.masked else None
        return Saved(inputs, xp.new_empty((T, B, plan.blocks * plan.hidden)), None, None, states)

    @staticmethod
    def over_time(xp: Tensor | None, saved: Saved, plain: Tensor, dropped: Tensor | None) -> Given:
        return saved.gates, plain, dropped, saved.states

    def row(self, table: Tensor | None, slots: Tensor | None, t: int, T: int) -> Launch:
        flags = {name: value for name, value in self.flags.items() if name != "BLOCK"}
        return prepare(
            slow_gated_forward_kernel, grid_of(self),
            table, slots, *self.tensors(table), self.matmul.out, self.bias, *self.state, self.plain_operand,
            self.dropped_operand, self.plain_mask, self.seeds, t, self.B, PARTS=self.matmul.parts, **flags,
        )  # fmt: skip


class GatedBackward(BackwardStage):
    """A gated RUM's backward step; the gradient of h is carried in float32."""

    @staticmethod
    def over_time(saved: Saved, before: Tensor, grad_out: Tensor | None, dgates: Tensor, plan: Plan) -> Given:
        return saved.gates, before, dgates

    def row(self, table: Tensor | None, slots: Tensor | None, t: int, T: int) -> Launch:
        flags = {name: value for name, value in self.flags.items() if name not in ("BLOCK", "FROM_OUT")}
        return prepare(
            slow_gated_backward_kernel, grid_of(self),
            table, slots, *self.tensors(table), self.parts_plain, self.parts_dropped, self.plain_mask, *self.state,
            self.operand, self.seeds, t, self.B, BEFORE_WIDTH=self.plan.before_width, **flags,
        )  # fmt: skip

    def norm_grads(self) -> None:
        return None
