"""Calls of the compiled scan: its structure of arguments, threads and blocks."""

import ctypes
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchrum.ops.kernels.masks import keep_threshold
from torchrum.ops.rum_scan.native.build import load_library
from torchrum.ops.rum_scan.options import RumOptions

ACTIVATIONS = ("relu", "tanh", "sigmoid", "softsign")
SIZES = ("backward", "T", "B", "H", "gates", "features", "R0_stride", "block", "threads")
SETTINGS = ("activation", "layer_norm", "norm_after_sigmoid", "zoneout_kind", "keep_below")
NUMBERS = ("eta", "ln_eps", "zoneout")
INPUTS = ("xp", "x", "weight_ih", "bias", "h0", "R0", "weight", "ln_weight", "ln_bias", "lengths")
RESULTS = ("out", "out_copy", "last", "saved", "R_n", "R_copy", "kept")
GRADIENTS = (
    *("grad_out", "grad_last", "grad_K", "grad_xp", "grad_h0", "grad_weight"),
    *("grad_x", "grad_weight_ih", "grad_bias", "grad_z", "ln_sums"),
)
READ = (frozenset(INPUTS), frozenset((*INPUTS, *RESULTS, "grad_out", "grad_last", "grad_K")))
"""What a forward and a backward do not write to."""

NARROWER = {torch.float32: (torch.bfloat16, torch.float16), torch.int64: (torch.int32, torch.int16, torch.int8)}
"""The dtypes that a scan converts to the one it runs in."""

SMALL = 1_000_000
"""Multiplications below which a second thread costs more than it saves."""


class Scan(ctypes.Structure):
    """``Scan`` of step.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (*SIZES, *SETTINGS, "seed")),
        *((name, ctypes.c_double) for name in NUMBERS),
        *((name, ctypes.c_void_p) for name in (*INPUTS, *RESULTS, *GRADIENTS)),
    ]


def count_threads(multiplications: int, rows: int) -> int:
    """Threads for so many multiplications on independent rows."""
    return 1 if multiplications < SMALL else max(1, min(torch.get_num_threads(), rows))


def plan(T: int, B: int, H: int, options: RumOptions) -> tuple[int, int]:
    """Rows of the batch that walk through time together, and threads."""
    threads = count_threads(T * B * H * H * (8 if options.lam == 1 else 2), B)
    most = 8 if options.lam == 1 else 16  # rows that share a read of the weight; with lam = 1 each one has its R
    return max(1, min(most, -(-B // threads))), threads


class Layout(NamedTuple):
    """What C is told of a scan, and what it relies on."""

    settings: tuple[int, ...]
    numbers: tuple[float, ...]
    """The values of ``SETTINGS`` and ``NUMBERS``."""
    shapes: dict[str, tuple[int, ...]]
    """The shapes of the tensors that C is given, by its names."""


@functools.lru_cache(1024)
def find_layout(T: int, B: int, H: int, features: int, options: RumOptions) -> Layout:
    """The layout of a scan over ``T`` steps; ``features`` is 0 where the input is projected already."""
    assert isinstance(options.activation, str)
    kind = 0 if options.zoneout == 0 else 2 if options.training else 1
    after, keep_below = options.ln_order == "authors", keep_threshold(options.zoneout)
    whole = (ACTIVATIONS.index(options.activation), int(options.layer_norm), int(after), kind, keep_below)
    gates, inputs = options.num_gates * H, options.num_inputs * H
    shapes = {
        **{"xp": (T, B, inputs), "x": (T, B, features), "weight_ih": (inputs, features), "bias": (inputs,)},
        **{"h0": (B, H), "R0": (B, H, H), "weight": (gates, H), "ln_weight": (inputs,), "ln_bias": (inputs,)},
        **{"lengths": (B,), "out": (T, B, H), "R_n": (B, H, H), "kept": (T, B, 2, H)},
        **{"saved": (T, B, gates + H * (options.lam == 1) + H * (features > 0))},
        **{"grad_out": (T, B, H), "grad_last": (B, H), "grad_K": (B, H, H)},
    }
    return Layout(whole, (options.eta or 0.0, options.ln_eps, options.zoneout), shapes)


def as_read(part: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor that C only reads, as it reads it."""
    return part if part.dtype is dtype and part.is_contiguous() else part.to(dtype).contiguous()


def readable(name: str, part: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """``part`` as C reads it, a copy if need be; an error if it has another shape or dtype, or no memory."""
    found = part.shape
    if found != shape and (found[-len(shape) :] != shape or part.numel() != math.prod(shape)):
        raise ValueError(
            f"RUM's scan: {name} has shape {tuple(found)}, but it must be {shape}. Do not replace it between a forward "
            "and its backward."
        )
    if part.dtype is not dtype and part.dtype not in NARROWER.get(dtype, ()) and name != "R0":  # R may have its own
        raise TypeError(f"RUM's scan: {name} is {part.dtype}, but it must be {dtype}, as the other tensors are.")
    if not part.is_cpu or part.layout is not torch.strided:
        raise ValueError(f"RUM's scan: {name} is {part.layout} on {part.device}, but it must be dense and on the CPU.")
    last = sum((size - 1) * step for size, step in zip(found, part.stride(), strict=True))
    end = (part.storage_offset() + last + 1) * part.itemsize
    if found.numel() > 0 and (part.data_ptr() == 0 or part.untyped_storage().nbytes() < end):
        raise ValueError(f"RUM's scan: {name} has no memory for its {found.numel()} values; its storage was freed.")
    return as_read(part, dtype)


def call_scan(tensors: dict[str, Tensor | None], seed: Tensor | None, options: RumOptions) -> Tensor | None:
    """Run the scan on ``tensors`` by C's names, forward, or backward if ``grad_out`` is among them.

    Those that it fills must be contiguous and of one dtype; copies are made of others where need be.

    Returns:
        In a backward with layer norm, the gradients of its weight and bias, ``(2, gates + 1, H)``.
    """
    out, x, R0 = tensors["out"], tensors.get("x"), tensors.pop("R0", None)
    assert out is not None
    (T, B, H), dtype, gates = out.shape, out.dtype, options.num_gates
    features = 0 if x is None else x.shape[-1]
    (block, threads), (whole, numbers, shapes) = plan(T, B, H, options), find_layout(T, B, H, features, options)
    backward, sums, R0_stride = "grad_out" in tensors, None, 0
    if options.layer_norm and backward:
        sums = tensors["ln_sums"] = out.new_zeros(-(-B // block), 2, gates + 1, H)
    if R0 is not None:
        if B > 0 and R0.dim() == 3 and R0.stride(0) == 0:  # one for all rows, as at the start
            R0 = readable("R0", R0[0], (H, H), dtype)
        else:
            R0, R0_stride = readable("R0", R0, (B, H, H), dtype), H * H
    seed_value = int(seed) if seed is not None and options.training and options.zoneout > 0 else 0
    size = dtype.itemsize
    scan = Scan(backward, T, B, H, gates, features, R0_stride, block, threads, *whole, seed_value, *numbers)
    scan.R0 = None if R0 is None else R0.data_ptr()
    copies, read = [], READ[backward]  # copies live until the call has ended
    for name, part in tensors.items():
        if part is None:
            continue
        # Only this stands between a tensor and C: it may have been replaced or freed since the forward.
        if name in read and not (
            part.shape == shapes[name]
            and part.dtype is dtype
            and part.is_contiguous()
            and part.is_cpu
            and part.untyped_storage().nbytes() >= part.nbytes + part.storage_offset() * size
        ):
            part = readable(name, part, shapes[name], torch.int64 if name == "lengths" else dtype)
            copies.append(part)
        address = part.data_ptr()
        if address == 0 and part.numel() > 0:
            raise ValueError(f"RUM's scan: {name} has no memory for its {part.numel()} values; its storage was freed.")
        setattr(scan, name, address)
    library = load_library(dtype is torch.float64)
    assert isinstance(library, ctypes.CDLL)
    if library.torchrum_scan(ctypes.byref(scan)) != 0:
        raise MemoryError(f"the native scan found no memory for its workspace of {threads} threads at H={H}.")
    return None if sums is None else sums.sum(0)
