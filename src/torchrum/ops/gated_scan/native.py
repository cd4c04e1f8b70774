"""The gated scan in C, on the CPU: ``rum_scan/native/gated.h``, compiled with the scan of the paper's form."""

import ctypes
import functools
import math

import torch
from torch import Tensor

from torchrum.ops.gated_scan.types import GatedGradients, GatedInputs, GatedOptions
from torchrum.ops.kernels.linear import working_dtype
from torchrum.ops.kernels.masks import keep_threshold
from torchrum.ops.rum_scan import native

MOST_ROWS = 16
"""Rows of the batch that share a read of the weight."""


class GatedScan(ctypes.Structure):
    """``GatedScan`` of gated.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("backward", "T", "B", "H", "head_size", "rotated", "block", "threads")),
        *((name, ctypes.c_int64) for name in ("masked", "keep_below", "seed")),
        ("zoneout", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("xp", "h0", "weight", "bias", "lengths", "out", "gates", "grad_out")),
        *((name, ctypes.c_void_p) for name in ("grad_xp", "grad_tau", "grad_h0", "grad_weight", "grad_bias")),
    ]


def obstacle(inputs: GatedInputs, options: GatedOptions) -> str | None:
    """Why the native scan cannot run on such an input, or None; compiles it if need be."""
    xp = inputs.xp
    if xp.device.type != "cpu":
        return f"the input is on {xp.device.type}"
    if xp.dtype not in native.DTYPES:
        return f"the dtype is {xp.dtype}, and it takes float32, float64, bfloat16 and float16"
    return native.build_obstacle(xp.dtype == torch.float64)


@functools.lru_cache(1024)
def _find_layout(
    T: int, B: int, H: int, backward: bool, options: GatedOptions
) -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """The scan for one thread without addresses and seed, and the shapes of the tensors that C reads."""
    scan = GatedScan(
        int(backward), T, B, H, options.head_size, options.rotated_units, max(1, min(MOST_ROWS, B)), 1,
        int(options.draws), keep_threshold(options.zoneout), 0, options.zoneout,
    )  # fmt: skip
    shapes = {
        **{"xp": (T, B, 3 * H), "h0": (B, H), "weight": (3 * H, H), "bias": (3 * H,), "lengths": (B,)},
        **({"out": (T, B, H), "gates": (T, B, 3 * H), "grad_out": (T, B, H)} if backward else {}),
    }
    return bytes(scan), shapes


def _run(inputs: GatedInputs, options: GatedOptions, read: dict[str, Tensor], filled: dict[str, Tensor]) -> None:
    """Run the scan forward, or backward if there is a ``grad_out``, on tensors by C's names.

    ``filled`` tensors are new and contiguous; the others are copied where necessary.
    """
    xp, h0, weight, bias, lengths, seed = inputs
    (T, B, _), H, dtype = xp.shape, h0.shape[1], working_dtype(xp.dtype)
    template, shapes = _find_layout(T, B, H, "grad_out" in read, options)
    scan = GatedScan.from_buffer_copy(template)
    if T * B * H * H * 3 >= native.SMALL:
        scan.threads = threads = max(1, min(torch.get_num_threads(), B))
        scan.block = max(1, min(MOST_ROWS, -(-B // threads)))
    if options.draws:
        assert seed is not None
        scan.seed = int(seed)
    copies = []  # that live until the call has ended
    for name, part in dict(xp=xp, h0=h0, weight=weight, bias=bias, lengths=lengths, **read).items():
        if part is None:
            continue
        shape, wanted = shapes[name], torch.int64 if name == "lengths" else dtype
        needs = (math.prod(shape) + part.storage_offset()) * wanted.itemsize
        # a tensor may have been replaced or freed since the forward, and C trusts its address
        if not (
            part.shape == shape
            and part.dtype is wanted
            and part.is_contiguous()
            and part.is_cpu
            and part.untyped_storage().nbytes() >= needs
        ):
            part = native.readable(name, part, shape, wanted)
            copies.append(part)
        address = part.data_ptr()
        if address == 0 and part.numel() > 0:
            raise ValueError(f"RUM's scan: {name} has no memory for its {part.numel()} values; its storage was freed.")
        setattr(scan, name, address)
    for name, result in filled.items():
        if result.dtype is not dtype:  # a saved tensor came back in another dtype, and C would write past the result
            raise TypeError(f"RUM's scan: saved tensors are {result.dtype}, but they must be {dtype}, as they were.")
        setattr(scan, name, result.data_ptr())
    library = native.load_library(dtype is torch.float64)
    assert isinstance(library, ctypes.CDLL)
    if library.torchrum_gated_scan(ctypes.byref(scan)) != 0:
        raise MemoryError(f"the native scan found no memory for its workspace of {scan.threads} threads at H={H}.")


def forward(inputs: GatedInputs, options: GatedOptions, save: bool = True) -> tuple[Tensor, Tensor]:
    """Run the scan; without ``save`` no memory but the states grows with T."""
    out, gates = inputs.empty_results(save)
    states = out if out.dtype is gates.dtype else out.to(gates.dtype)
    _run(inputs, options, {}, {"out": states, "gates": gates} if save else {"out": states})
    return states if states is out else states.to(out.dtype), gates


def backward(
    grad_out: Tensor, inputs: GatedInputs, out: Tensor, gates: Tensor, options: GatedOptions
) -> GatedGradients:
    """Gradients of the inputs from that of the states."""
    given = zip(("grad_xp", "grad_h0", "grad_weight", "grad_bias"), inputs[:4], strict=True)
    parts: dict[str, Tensor] = {name: part for name, part in given if part is not None}
    grads = {name: gates.new_empty(part.shape) for name, part in parts.items()}
    read = {"out": out, "gates": gates, "grad_out": grad_out}
    _run(inputs, options, read, {**grads, "grad_tau": gates.new_empty(out.shape)})
    return GatedGradients(*(grads[name].to(part.dtype) for name, part in parts.items()))
