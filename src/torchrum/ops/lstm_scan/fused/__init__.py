"""The fused GPU backend of the LSTM scan. Triton is imported on first use: it is absent on machines without a GPU."""

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...rum_scan.fused import KERNEL_DTYPES, LARGEST_HIDDEN, device_obstacle, interpreted, triton_obstacle
from ..masks import stream_seeds
from ..options import LstmOptions
from ..reference import STREAMS, lstm_scan_reference


def machine_obstacle(x: Tensor) -> str | None:
    """Why no kernel can run on a tensor like ``x``, in words, or None."""
    if x.dtype not in KERNEL_DTYPES:
        return f"the dtype is {x.dtype}, and the kernels take float32, bfloat16 and float16"
    if isinstance(x, FakeTensor) or torch.compiler.is_exporting():
        return "the tensors have no data, and the kernels cannot be traced"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is at work, and the kernels take plain tensors"
    if interpreted():
        return None if importlib.util.find_spec("triton") else "Triton is not installed"
    if x.device.type != "cuda":
        return f"the input is on {x.device.type}"
    return triton_obstacle() or device_obstacle(x.device)


def size_obstacle(hidden: int) -> str | None:
    if hidden > LARGEST_HIDDEN:
        return f"the hidden size is {hidden}, and a row of at most {LARGEST_HIDDEN} fits in one program"
    return None


def obstacle(xp: Tensor) -> str | None:
    """Why the fused scan cannot run on such an input, or None."""
    return machine_obstacle(xp) or size_obstacle(xp.shape[-1] // 4)


class _LstmScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: LstmOptions, lengths: Tensor | None, seed: Tensor | None, *inputs: Tensor | None):
        from .scan import lstm_forward

        xp, h0, c0, weight_hh, ln_weight, ln_bias = inputs
        seeds = None if seed is None else stream_seeds(seed, STREAMS)
        arguments = (xp, h0, c0, weight_hh, ln_weight, ln_bias, lengths, seeds, options)
        out, h_n, c_n, saved = lstm_forward(*arguments)  # type: ignore[arg-type]
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, lengths, seed, seeds, *saved)
        return out, h_n, c_n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from .scan import Saved, lstm_backward

        tensors: tuple[Any, ...] = ctx.saved_tensors  # once: checkpointing unpacks them only once
        inputs, (lengths, seed, seeds, states, gates, cells, stats) = tensors[:6], tensors[6:]
        if torch.is_grad_enabled():  # create_graph=True: the reference is differentiable twice

            def scan(*x: Any) -> tuple[Tensor, ...]:
                return lstm_scan_reference(*x, lengths, seed, ctx.options)  # type: ignore[call-arg]

            return None, None, None, *reference_gradients(scan, inputs, grads, ctx.needs_input_grad[3:])
        saved = Saved(states, gates, cells, stats)
        found = lstm_backward(*grads, *inputs[1:], lengths, seeds, saved, ctx.options)  # type: ignore[call-arg, arg-type]
        return None, None, None, *found


def reference_gradients(
    scan: Any, inputs: tuple[Any, ...], grads: tuple[Tensor | None, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of ``scan(*inputs)`` with a graph of their own; None for inputs that need none."""
    pairs = [(out, grad) for out, grad in zip(scan(*inputs), grads, strict=True) if grad is not None]
    chosen = [number for number, wants in enumerate(wanted) if wants]
    found = torch.autograd.grad(
        [out for out, _ in pairs], [inputs[n] for n in chosen], [grad for _, grad in pairs],
        create_graph=True, allow_unused=True,
    )  # fmt: skip
    by_number = dict(zip(chosen, found, strict=True))
    return tuple(by_number.get(number) for number in range(len(inputs)))


@torch.compiler.disable  # graphs and kernels of its own: a compiler has nothing to add
def lstm_scan_fused(
    xp: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    options: LstmOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments and results of ``lstm_scan_reference``."""
    return _LstmScan.apply(options, lengths, seed, xp, h0, c0, weight_hh, ln_weight, ln_bias)
