"""A whole LSTM sequence, forward and backward, on the row kernels and CUDA graphs."""

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from torchrum.ops.kernels.chain import Chain, LstmBackward, LstmForward, Plan, Shared, empty_shared, saved_tensors
from torchrum.ops.kernels.step_graphs import Pass, aligned, plain_mode, run_pass, scan_key
from torchrum.ops.kernels.triton_launch import padded
from torchrum.ops.kernels.weights import CellWeights, weight_gradient
from torchrum.ops.lstm_scan.options import LstmOptions
from torchrum.ops.lstm_scan.types import LstmInputs


class Saved(NamedTuple):
    """What the backward needs of the forward."""

    states: Tensor
    """``(T + 1, B, padded H)``: h before each step, and the last one."""
    gates: Tensor
    cells: Tensor
    stats: Tensor | None


class Grads(NamedTuple):
    """Gradients of a scan's results; None where nothing asked for one."""

    out: Tensor | None = None
    h: Tensor | None = None
    c: Tensor | None = None


def make_plan(H: int, options: LstmOptions) -> Plan:
    flags = tuple(options.kernel_flags().items())
    norms = 5 if options.layer_norm else 0
    return Plan(hidden=H, inputs=(H,), blocks=4, projected=True, stream=0, dropout=0.0, norms=norms, flags=flags)


class ForwardScan(Chain):
    """The chain of one LSTM, whose state it reads itself."""

    def __init__(self, like: Tensor, B: int, H: int, options: LstmOptions, shared: Shared, graphed: bool) -> None:
        self.h, self.c = (torch.empty((B, H), dtype=torch.float32, device=like.device) for _ in range(2))
        stage = LstmForward(like, B, make_plan(H, options), shared, self.h, self.c)
        stage.connect((stage, 0), None, to_out=True)
        super().__init__(like, [stage], shared, graphed)

    def start(self, h0: Tensor, c0: Tensor, states: Tensor) -> None:
        self.h.copy_(h0)
        self.c.copy_(c0)
        H = h0.shape[1]
        self.stages[0].low[:, :H].copy_(h0)
        states[0, :, :H].copy_(h0)


class BackwardScan(Chain):
    def __init__(self, like: Tensor, B: int, H: int, options: LstmOptions, shared: Shared, graphed: bool) -> None:
        self.dh, self.dc = (torch.empty((B, H), dtype=torch.float32, device=like.device) for _ in range(2))
        stage = LstmBackward(like, B, make_plan(H, options), shared, self.dh, self.dc)
        stage.connect((stage, 0), None, from_out=True)
        super().__init__(like, [stage], shared, graphed)

    def start(self, grad_h: Tensor | None, grad_c: Tensor | None) -> None:
        self.stages[0].matmul.out.zero_()
        for carry, grad in ((self.dh, grad_h), (self.dc, grad_c)):
            carry.zero_() if grad is None else carry.copy_(grad)

    def finish(self) -> tuple[Tensor, Tensor, Tensor | None]:
        (stage,) = self.stages
        return (
            self.dh + stage.matmul.out[:, :, : stage.plan.hidden].float().sum(0),
            self.dc.clone(),
            stage.norm_grads(),
        )


def lstm_forward(
    inputs: LstmInputs, seeds: Tensor | None, options: LstmOptions
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """Projected input ``(T, B, 4H)`` -> h of all steps, last h, last c, and what the backward needs.

    ``seeds`` are those of the streams of masks, from ``inputs.seed``.
    """
    xp, h0, c0, weight_hh, ln_weight, ln_bias, lengths, _ = inputs
    (T, B, _), H = xp.shape, weight_hh.shape[1]
    with plain_mode(xp):
        gates, cells, stats = saved_tensors(xp, make_plan(H, options))
        states, out = xp.new_empty((T + 1, B, padded(H))), xp.new_empty((T, B, H))  # padding is never read
        saved = Saved(states, gates, cells, stats)
        if xp.numel() == 0:
            return out, h0.clone(), c0.clone(), saved
        xp = aligned(xp)
        weights = [CellWeights(None, weight_hh, None, ln_weight, ln_bias)]
        given = [(xp, gates, cells, stats, states[1:], out)]

        def key() -> Hashable:
            return scan_key("lstm", "forward", xp, H, options, lengths is not None)

        def build(graphed: bool) -> ForwardScan:
            return ForwardScan(xp, B, H, options, empty_shared(xp, seeds, lengths), graphed)

        def begin(scan: ForwardScan) -> None:
            scan.begin(T, weights, given, seeds, lengths)
            scan.start(h0, c0, states)

        def last_cell(scan: ForwardScan) -> Tensor:
            return scan.c.to(c0.dtype, copy=True)

        def following() -> None:
            lstm_backward(Grads(), inputs, seeds, saved, options)

        then = following if options.training else None
        c_n = run_pass(Pass(key, build, begin, last_cell, then), xp, T)
        return out, states[-1, :, :H].to(h0.dtype), c_n, saved


def lstm_backward(
    grads: Grads, inputs: LstmInputs, seeds: Tensor | None, saved: Saved, options: LstmOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``xp, h0, c0, weight_hh, ln_weight, ln_bias``, each in the dtype of its tensor."""
    _, h0, c0, weight_hh, ln_weight, ln_bias, lengths, _ = inputs
    gates, H = saved.gates, weight_hh.shape[1]
    T, B = gates.shape[:2]
    with plain_mode(gates):
        dgates = torch.empty_like(gates)
        if gates.numel() == 0:
            carried = [torch.zeros_like(x) if grad is None else grad for x, grad in ((h0, grads.h), (c0, grads.c))]
            zeros = [None if x is None else torch.zeros_like(x) for x in (weight_hh, ln_weight, ln_bias)]
            return dgates, *carried, *zeros  # type: ignore[return-value]
        grad_out = gates.new_zeros((T, B, H)) if grads.out is None else aligned(grads.out.to(gates.dtype))
        dnormed = gates.new_empty((T, B, 5 * H)) if options.layer_norm else None
        weights = [CellWeights(None, weight_hh, None, ln_weight, ln_bias)]
        given = [(gates, saved.cells, saved.stats, grad_out, dgates, dnormed)]

        def key() -> Hashable:
            return scan_key("lstm", "backward", gates, H, options, lengths is not None)

        def build(graphed: bool) -> BackwardScan:
            return BackwardScan(gates, B, H, options, empty_shared(gates, seeds, lengths), graphed)

        def begin(scan: BackwardScan) -> None:
            scan.begin(T, weights, given, seeds, lengths)
            scan.start(grads.h, grads.c)

        dh0, dc0, norms = run_pass(Pass(key, build, begin, BackwardScan.finish), gates, T)
        dweight = weight_gradient(dgates, saved.states[:-1])[:, :H].to(weight_hh.dtype)
        if norms is None or ln_weight is None or ln_bias is None:
            return dgates, dh0.to(h0.dtype), dc0.to(c0.dtype), dweight, None, None
        dln = norms[0].to(ln_weight.dtype), norms[1].to(ln_bias.dtype)
        return dgates, dh0.to(h0.dtype), dc0.to(c0.dtype), dweight, *dln
