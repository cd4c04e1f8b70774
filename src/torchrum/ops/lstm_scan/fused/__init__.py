"""The fused GPU backend of the LSTM scan. Triton is imported on first use: it is absent on machines without a GPU."""

from typing import Any

import torch
from torch import Tensor

from torchrum.ops.kernels.machine import row_kernel_obstacle, tracing_obstacle
from torchrum.ops.kernels.masks import stream_seeds
from torchrum.ops.kernels.weights import reference_gradients
from torchrum.ops.lstm_scan.options import LstmOptions
from torchrum.ops.lstm_scan.reference import STREAMS, lstm_scan_reference
from torchrum.ops.lstm_scan.types import LstmInputs


def obstacle(xp: Tensor) -> str | None:
    """Why the fused scan cannot run on such an input, or None."""
    return tracing_obstacle(xp) or row_kernel_obstacle(xp, xp.shape[-1] // 4)


class _LstmScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: LstmOptions, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        from torchrum.ops.lstm_scan.fused.scan import lstm_forward

        inputs = LstmInputs(*tensors)  # type: ignore[arg-type]
        seeds = None if inputs.seed is None else stream_seeds(inputs.seed, STREAMS)
        out, h_n, c_n, saved = lstm_forward(inputs, seeds, options)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, seeds, *saved)
        return out, h_n, c_n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from torchrum.ops.lstm_scan.fused.scan import Grads, Saved, lstm_backward

        tensors: tuple[Any, ...] = ctx.saved_tensors  # once: checkpointing unpacks them only once
        inputs, (seeds, *kept) = LstmInputs(*tensors[:8]), tensors[8:]
        if torch.is_grad_enabled():  # create_graph=True: the reference is differentiable twice

            def scan(*x: Any) -> tuple[Tensor, ...]:
                return lstm_scan_reference(LstmInputs._make((*x, inputs.lengths, inputs.seed)), ctx.options)

            found = reference_gradients(scan, inputs[:6], grads, ctx.needs_input_grad[1:7])
        else:
            found = lstm_backward(Grads(*grads), inputs, seeds, Saved(*kept), ctx.options)
        return None, *found, None, None


@torch.compiler.disable  # graphs and kernels of its own: a compiler has nothing to add
def lstm_scan_fused(inputs: LstmInputs, options: LstmOptions) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments and results of ``lstm_scan_reference``."""
    return _LstmScan.apply(options, *inputs)
