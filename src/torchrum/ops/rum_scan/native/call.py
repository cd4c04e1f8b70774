"""Calls of the compiled scan: its structure of arguments, threads and blocks."""

import ctypes
import functools

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


@functools.lru_cache(64)
def settings(options: RumOptions) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The values of ``SETTINGS`` and ``NUMBERS``."""
    assert isinstance(options.activation, str)
    kind = 0 if options.zoneout == 0 else 2 if options.training else 1
    after, keep_below = options.ln_order == "authors", keep_threshold(options.zoneout)
    whole = (ACTIVATIONS.index(options.activation), int(options.layer_norm), int(after), kind, keep_below)
    return whole, (options.eta or 0.0, options.ln_eps, options.zoneout)


def as_read(part: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor that C only reads, as it reads it."""
    return part if part.dtype is dtype and part.is_contiguous() else part.to(dtype).contiguous()


def memory_as_read(R0: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """R_0 as C reads it, and the numbers from one row's to the next: 0 where all rows share one, as at the start."""
    B, H, _ = R0.shape
    if B == 0 or R0.stride(0) > 0:
        return as_read(R0, dtype), H * H
    return as_read(R0[0], dtype), 0


def call_scan(tensors: dict[str, Tensor | None], seed: Tensor | None, options: RumOptions) -> Tensor | None:
    """Run the scan on ``tensors`` by C's names, forward, or backward if ``grad_out`` is among them.

    Those that it fills must be contiguous and of one dtype; copies are made of others where need be.

    Returns:
        In a backward with layer norm, the gradients of its weight and bias, ``(2, gates + 1, H)``.
    """
    out, x, R0 = tensors["out"], tensors.get("x"), tensors.pop("R0", None)
    assert out is not None
    (T, B, H), dtype, gates = out.shape, out.dtype, options.num_gates
    (block, threads), (whole, numbers) = plan(T, B, H, options), settings(options)
    backward, sums, R0_stride = "grad_out" in tensors, None, 0
    if options.layer_norm and backward:
        sums = tensors["ln_sums"] = out.new_zeros(-(-B // block), 2, gates + 1, H)
    if R0 is not None:
        R0, R0_stride = memory_as_read(R0, dtype)
    seed_value = int(seed) if seed is not None and options.training and options.zoneout > 0 else 0
    features = 0 if x is None else x.shape[-1]
    scan = Scan(backward, T, B, H, gates, features, R0_stride, block, threads, *whole, seed_value, *numbers)
    scan.R0 = None if R0 is None else R0.data_ptr()
    copies = []  # that live until the call has ended
    for name, part in tensors.items():
        if part is None:
            continue
        if part.dtype is not dtype or not part.is_contiguous():
            assert name in READ[backward], name
            part = as_read(part, torch.int64 if name == "lengths" else dtype)
            copies.append(part)
        setattr(scan, name, part.data_ptr())
    library = load_library(dtype is torch.float64)
    assert isinstance(library, ctypes.CDLL)
    if library.torchrum_scan(ctypes.byref(scan)) != 0:
        raise MemoryError(f"the native scan found no memory for its workspace of {threads} threads at H={H}.")
    return None if sums is None else sums.sum(0)
