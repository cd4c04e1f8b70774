"""An LSTM's place in a chain of cells: its row kernels, launched, and what they keep."""

import torch
import triton
from torch import Tensor

from torchrum.ops.kernels.chain import BackwardStage, ForwardStage, Plan, Shared
from torchrum.ops.kernels.compiling import Launch, launch, prepare
from torchrum.ops.kernels.lstm_rows import STATS, lstm_backward_kernel, lstm_forward_kernel, lstm_norm_grad_kernel


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
