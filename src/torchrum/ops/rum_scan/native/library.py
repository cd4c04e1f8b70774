"""Calls of the compiled scan: its structure of arguments, threads and blocks."""

import ctypes

import torch
from torch import Tensor

from ..options import RumOptions
from .build import load_library

ACTIVATIONS = ("relu", "tanh", "sigmoid", "softsign")
INTEGERS = (
    *("backward", "T", "B", "H", "gates", "block", "threads", "activation", "layer_norm", "norm_after_sigmoid"),
    *("zoneout_kind", "seed", "keep_below"),
)
NUMBERS = ("eta", "ln_eps", "zoneout")
TENSORS = (
    *("xp", "h0", "R0", "weight", "ln_weight", "ln_bias", "lengths", "out", "saved", "R_n", "kept"),
    *("grad_out", "grad_K", "grad_xp", "grad_h0", "grad_z", "ln_sums"),
)

SMALL = 1_000_000
"""Multiplications below which a second thread costs more than it saves."""


class Scan(ctypes.Structure):
    """``Scan`` of step.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in INTEGERS),
        *((name, ctypes.c_double) for name in NUMBERS),
        *((name, ctypes.c_void_p) for name in TENSORS),
    ]


def count_threads(multiplications: int, rows: int) -> int:
    """Threads for so many multiplications on independent rows."""
    return 1 if multiplications < SMALL else max(1, min(torch.get_num_threads(), rows))


def plan(T: int, B: int, H: int, options: RumOptions) -> tuple[int, int]:
    """Rows of the batch that walk through time together, and threads."""
    threads = count_threads(T * B * H * H * (8 if options.lam == 1 else 2), B)
    most = (
        4 if options.lam == 1 else 16
    )  # rows that share a read of the weight; with lam = 1 each has an R in the cache
    return max(1, min(most, -(-B // threads))), threads


def call_scan(tensors: dict[str, Tensor | None], seed: Tensor | None, options: RumOptions) -> Tensor | None:
    """Run the scan on contiguous ``tensors``, forward, or backward if ``grad_out`` is among them.

    Returns:
        In a backward with layer norm, the gradients of its weight and bias, ``(2, gates + 1, H)``.
    """
    out = tensors["out"]
    assert out is not None
    (T, B, H), dtype, gates = out.shape, out.dtype, options.num_gates
    block, threads = plan(T, B, H, options)
    backward, sums = "grad_out" in tensors, None
    if options.layer_norm and backward:
        sums = torch.zeros(-(-B // block), 2, gates + 1, H, dtype=dtype)
    masked = options.zoneout > 0 and options.training
    assert isinstance(options.activation, str)
    scan = Scan(
        backward,
        T,
        B,
        H,
        gates,
        block,
        threads,
        ACTIVATIONS.index(options.activation),
        options.layer_norm,
        options.ln_order == "authors",
        0 if options.zoneout == 0 else 2 if masked else 1,
        int(seed) if masked and seed is not None else 0,
        int((1 - options.zoneout) * 2**32),
        options.eta or 0.0,
        options.ln_eps,
        options.zoneout,
    )
    for name, part in {**tensors, "ln_sums": sums}.items():
        if part is not None:
            assert part.is_contiguous() and part.dtype == (torch.int64 if name == "lengths" else dtype), name
            setattr(scan, name, part.data_ptr())
    library = load_library(dtype == torch.float64)
    assert isinstance(library, ctypes.CDLL)
    if library.torchrum_scan(ctypes.byref(scan)) != 0:
        raise MemoryError(f"the native scan found no memory for its workspace of {threads} threads at H={H}.")
    return None if sums is None else sums.sum(0)
