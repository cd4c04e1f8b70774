"""The native CPU backend: the scan in C, compiled on first use, on the tensors' own memory; README.md explains it.

``forward`` and ``backward`` take the inputs of a scan, which are already projected, or the inputs of a layer, which C
projects step by step.
"""

import ctypes
import functools
import math
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from torchrum.ops.kernels.linear import padded_bias
from torchrum.ops.kernels.machine import constant_when_traced
from torchrum.ops.kernels.masks import keep_threshold
from torchrum.ops.rum_scan.native.build import load_library
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.types import NO_COPIES, Copies, Gradients, LayerInputs, Residuals, Results, ScanInputs

__all__ = [
    "DTYPES",
    "SMALL",
    "backward",
    "build_obstacle",
    "empty_results",
    "forward",
    "load_library",
    "obstacle",
    "projects",
    "readable",
]

DTYPES = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""The dtypes of the input, each with the dtype that C computes in."""
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
NARROWER = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.int64: (torch.int32, torch.int16, torch.int8, torch.uint8),
}
"""The dtypes that a scan converts, by the dtype that it runs in."""

SMALL = 1_000_000
"""Number of multiplications below which a second thread is slower."""


def obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """Return the reason why the native scan cannot run on such an input, or None; compile it if needed."""
    xp = inputs.xp
    if xp.device.type != "cpu":
        return f"the input is on {xp.device.type}"
    if xp.dtype not in DTYPES:
        return f"the dtype is {xp.dtype}, and it takes float32, float64, bfloat16 and float16"
    return build_obstacle(xp.dtype == torch.float64)


@constant_when_traced
def build_obstacle(double: bool) -> str | None:
    """Return the reason why there is no compiled scan, or None."""
    found = load_library(double)
    return found if isinstance(found, str) else None


def projects(x: Tensor, backend: str) -> bool:
    """Return whether a plain call with this ``backend`` runs here and projects ``x``, of the parameters' dtype."""
    if backend not in ("auto", "native") or not x.is_cpu or x.dtype not in (torch.float32, torch.float64):
        return False
    return not isinstance(load_library(x.dtype is torch.float64), str)


def empty_results(inputs: ScanInputs | LayerInputs, options: RumOptions) -> Results:
    """Allocate the results of ``forward``.

    ``gates`` holds the raw gates, R h with lam = 1, and eps if the scan projects. With lam = 1, ``kept`` holds each
    step's update of R.
    """
    x, H, memory = inputs[0], inputs.weight_hh.shape[1], options.lam == 1
    T, B, _ = x.shape
    blocks = (options.num_inputs if isinstance(inputs, LayerInputs) else options.num_gates) + memory
    out, saved = x.new_empty(T, B, H), x.new_empty(T, B, blocks * H, dtype=DTYPES[x.dtype])
    if not memory:
        return Results(out, None, Residuals(saved))
    return Results(out, saved.new_empty(B, H, H), Residuals(saved, saved.new_empty(T, B, 2, H)))


def forward(
    inputs: ScanInputs | LayerInputs, options: RumOptions, save: bool = True, copies: Copies = NO_COPIES
) -> Results:
    """Run the scan and fill ``copies``; without ``save`` only the memory of the results grows with T."""
    x = inputs[0]
    dtype = DTYPES[x.dtype]
    if save:
        results = empty_results(inputs, options)
    else:
        (T, B, _), H = x.shape, inputs.weight_hh.shape[1]
        results = Results(x.new_empty(T, B, H), x.new_empty(B, H, H, dtype=dtype) if options.lam == 1 else None)
    out, R_n, (saved, kept) = results
    states = out if out.dtype is dtype else out.to(dtype)
    tensors = _named(inputs)
    tensors["out"], tensors["saved"], tensors["R_n"], tensors["kept"] = states, saved, R_n, kept
    if states is out:
        tensors["last"], tensors["out_copy"], tensors["R_copy"] = copies
    call_scan(tensors, inputs.seed, options)
    if states is not out:
        results = results._replace(out=states.to(out.dtype))
        copies.fill(results)
    return results


def _cast(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)  # even a conversion that does nothing slows a small step


def drop_saved_eps(results: Results) -> Results:
    """Return the results of a scan that projects with the residuals of a scan of projected inputs."""
    saved, kept = results.residuals
    assert saved is not None
    return results._replace(residuals=Residuals(saved[..., : -results.out.shape[-1]], kept))


def backward(
    grad_out: Tensor | None,
    grad_R: Tensor | None,
    inputs: ScanInputs | LayerInputs,
    results: Results,
    options: RumOptions,
    need_R0: bool,
    grad_last: Tensor | None = None,
    need_x: bool = True,
) -> Gradients:
    """Compute the gradients of the inputs from those of all states, of the last R and, in addition, of the last state.

    A scan that projects also computes the gradients of x, if ``need_x``, of ``weight_ih`` and of the bias, padded to
    the rows of the weight.
    """
    x, weight_hh, R0, h0 = inputs[0], inputs.weight_hh, inputs.R0 if need_R0 else None, inputs.h0
    out, R_n, (saved, kept) = results
    assert saved is not None
    (T, B, H), dtype = out.shape, DTYPES[x.dtype]
    grad_xp, grad_weight = x.new_empty(T, B, options.num_inputs * H, dtype=dtype), saved.new_empty(*weight_hh.shape)
    grad_h0, grad_z = None if h0 is None else saved.new_empty(B, H), None if R0 is None else saved.new_empty(T, B, H)
    outer = None if grad_R is None or R_n is None else torch.bmm(grad_R.to(dtype), R_n.mT)
    tensors = _named(inputs)
    tensors.update(
        out=as_contiguous(out, dtype), saved=saved, R_n=R_n, kept=kept, grad_out=grad_out, grad_last=grad_last
    )
    tensors.update(grad_xp=grad_xp, grad_weight=grad_weight, grad_h0=grad_h0, grad_z=grad_z)
    tensors["grad_K"] = None if outer is None else outer - outer.mT
    grad_x = grad_weight_ih = grad_bias = None
    if isinstance(inputs, LayerInputs):
        grad_x, grad_weight_ih = x.new_empty(*x.shape) if need_x else None, x.new_empty(*inputs.weight_ih.shape)
        grad_bias = None if inputs.bias is None else x.new_empty(grad_xp.shape[2])
        tensors.update(grad_x=grad_x, grad_weight_ih=grad_weight_ih, grad_bias=grad_bias)
    sums = call_scan(tensors, inputs.seed, options)
    grad_R0 = None
    if R0 is not None:
        z = saved[..., options.num_gates * H :][..., :H]
        added = torch.einsum("tbi,tbj->bij", grad_z, z)
        grad_R0 = torch.bmm(added if outer is None else added + outer, R0.to(dtype))
    grad_ln_weight, grad_ln_bias = (None, None) if sums is None else (part.flatten() for part in sums)
    grad_xp, grad_weight = _cast(x.dtype, grad_xp), _cast(weight_hh.dtype, grad_weight)
    grad_h0 = None if h0 is None or grad_h0 is None else _cast(h0.dtype, grad_h0)
    norms = grad_ln_weight, grad_ln_bias
    return Gradients(grad_xp, grad_h0, grad_R0, grad_weight, *norms, grad_bias, grad_x, grad_weight_ih)


def _named(inputs: ScanInputs | LayerInputs) -> dict[str, Tensor | None]:
    """Return the inputs except the seed by their names in C; h0 may be None for zeros."""
    read: dict[str, Tensor | None]
    if isinstance(inputs, ScanInputs):
        read = {"xp": inputs.xp}
    else:
        x, weight_ih, bias, *_ = inputs
        if bias is not None and bias.shape[0] != weight_ih.shape[0]:
            bias = padded_bias(weight_ih, bias)
        read = {"x": x, "weight_ih": weight_ih, "bias": bias}
    read["h0"], read["R0"], read["weight"], read["lengths"] = inputs.h0, inputs.R0, inputs.weight_hh, inputs.lengths
    read["ln_weight"], read["ln_bias"] = inputs.ln_weight, inputs.ln_bias
    return read


class Scan(ctypes.Structure):
    """``Scan`` of step.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (*SIZES, *SETTINGS, "seed")),
        *((name, ctypes.c_double) for name in NUMBERS),
        *((name, ctypes.c_void_p) for name in (*INPUTS, *RESULTS, *GRADIENTS)),
    ]


class Layout(NamedTuple):
    """The settings of C for scans of one size, and the tensors that C reads."""

    template: bytes
    """``Scan`` for one thread, without addresses, seed and R0."""
    shapes: dict[str, tuple[tuple[int, ...], int]]
    """Shape and bytes of each tensor that C reads, by its name in C."""
    multiplications: int
    max_rows: int
    """Most rows that share a read of the weight; fewer with lam = 1, where each row has its own R."""


@functools.lru_cache(1024)
def find_layout(T: int, B: int, H: int, features: int, size: int, backward: bool, options: RumOptions) -> Layout:
    """Return the layout of a scan over ``T`` steps of numbers of ``size`` bytes; ``features`` is 0 if xp is given."""
    assert isinstance(options.activation, str)
    kind = 0 if options.zoneout == 0 else 2 if options.training else 1
    after, keep_below = options.ln_order == "authors", keep_threshold(options.zoneout)
    whole = (ACTIVATIONS.index(options.activation), int(options.layer_norm), int(after), kind, keep_below)
    gates, inputs, memory = options.num_gates * H, options.num_inputs * H, options.lam == 1
    shapes: dict[str, tuple[int, ...]] = {
        **{"xp": (T, B, inputs), "x": (T, B, features), "weight_ih": (inputs, features), "bias": (inputs,)},
        **{"h0": (B, H), "R0": (B, H, H), "weight": (gates, H), "ln_weight": (inputs,), "ln_bias": (inputs,)},
        "lengths": (B,),
    }
    if backward:
        shapes.update({"out": (T, B, H), "R_n": (B, H, H), "kept": (T, B, 2, H)})
        shapes["saved"] = (T, B, gates + H * memory + H * (features > 0))
        shapes.update({"grad_out": (T, B, H), "grad_last": (B, H), "grad_K": (B, H, H)})
    max_rows = 8 if memory else 16
    sizes = (int(backward), T, B, H, options.num_gates, features, 0, max(1, min(max_rows, B)), 1)
    scan = Scan(*sizes, *whole, 0, options.eta or 0.0, options.ln_eps, options.zoneout)
    needs = {name: (shape, size * math.prod(shape)) for name, shape in shapes.items()}
    return Layout(bytes(scan), needs, T * B * H * H * (8 if memory else 2), max_rows)


def as_contiguous(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor that C only reads to ``dtype`` and contiguous memory."""
    part = _cast(dtype, part)
    return part if part.is_contiguous() else part.contiguous()


def readable(name: str, part: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return ``part`` in the form that C reads, copied if needed; raise for a wrong shape or dtype or freed memory."""
    found = part.shape
    if found != shape and (found[-len(shape) :] != shape or part.numel() != math.prod(shape)):
        raise ValueError(
            f"RUM's scan: {name} has shape {tuple(found)}, but it must be {shape}. Do not replace it between a forward "
            "and its backward."
        )
    if part.dtype is not dtype and part.dtype not in NARROWER.get(dtype, ()) and name != "R0":  # R may have any dtype
        raise TypeError(f"RUM's scan: {name} is {part.dtype}, but it must be {dtype}, as the other tensors are.")
    if not part.is_cpu or part.layout is not torch.strided:
        raise ValueError(f"RUM's scan: {name} is {part.layout} on {part.device}, but it must be dense and on the CPU.")
    strides = part.stride()
    end = part.storage_offset() + sum(map(operator.mul, found, strides)) - sum(strides) + 1  # end of the last number
    if found.numel() > 0 and (part.data_ptr() == 0 or part.untyped_storage().nbytes() < end * part.itemsize):
        raise ValueError(f"RUM's scan: {name} has no memory for its {found.numel()} values; its storage was freed.")
    return as_contiguous(part, dtype)


def call_scan(tensors: dict[str, Tensor | None], seed: Tensor | None, options: RumOptions) -> Tensor | None:
    """Run the scan on ``tensors``, by their names in C, forward or, if ``grad_out`` is among them, backward.

    Tensors that it fills must be contiguous and of one dtype; the others are copied if needed.

    Returns:
        In a backward with layer norm, the gradients of its weight and bias, ``(2, gates + 1, H)``.
    """
    out, x, R0 = tensors["out"], tensors.get("x"), tensors.pop("R0", None)
    assert out is not None
    (T, B, H), dtype, backward, sums = out.shape, out.dtype, "grad_out" in tensors, None
    size, features = dtype.itemsize, 0 if x is None else x.shape[-1]
    template, shapes, multiplications, max_rows = find_layout(T, B, H, features, size, backward, options)
    scan = Scan.from_buffer_copy(template)
    if multiplications >= SMALL:
        scan.threads = threads = max(1, min(torch.get_num_threads(), B))
        scan.block = max(1, min(max_rows, -(-B // threads)))
    if backward and options.layer_norm:
        sums = tensors["ln_sums"] = out.new_zeros(-(-B // scan.block), 2, options.num_gates + 1, H)
    if R0 is not None:
        if B > 0 and R0.dim() == 3 and R0.stride(0) == 0:  # one matrix for all rows, as in the initial state
            R0 = readable("R0", R0[0], (H, H), dtype)
        else:
            R0, scan.R0_stride = readable("R0", R0, (B, H, H), dtype), H * H
        scan.R0 = R0.data_ptr()
    if seed is not None and options.training and options.zoneout > 0:
        scan.seed = int(seed)
    copies = []  # references that must live until the call has ended
    for name, part in tensors.items():
        if part is None:
            continue
        # a tensor may have been replaced or freed since the forward, and C cannot check its address
        read = shapes.get(name)
        if read is not None:
            shape, needs = read
            if not (
                part.shape == shape
                and part.dtype is dtype
                and part.is_contiguous()
                and part.is_cpu
                and part.untyped_storage().nbytes() >= needs + part.storage_offset() * size
            ):
                part = readable(name, part, shape, torch.int64 if name == "lengths" else dtype)
                copies.append(part)
        else:
            assert part.dtype is dtype, name
        address = part.data_ptr()
        if address == 0 and part.numel() > 0:
            raise ValueError(f"RUM's scan: {name} has no memory for its {part.numel()} values; its storage was freed.")
        setattr(scan, name, address)
    library = load_library(dtype is torch.float64)
    assert isinstance(library, ctypes.CDLL)
    if library.torchrum_scan(ctypes.byref(scan)) != 0:
        raise MemoryError(f"the native scan found no memory for its workspace of {scan.threads} threads at H={H}.")
    return None if sums is None else sums.sum(0)
