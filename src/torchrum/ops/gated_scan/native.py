"""The gated scan in C, on the CPU: ``rum_scan/native/gated.h``, compiled with the scan of the paper's form."""

import ctypes
import functools
import math

import torch
from torch import Tensor

from torchrum.ops.gated_scan.types import GatedGradients, GatedInputs, GatedOptions
from torchrum.ops.kernels.masks import keep_threshold
from torchrum.ops.rum_scan import Copies, Gradients, LayerInputs, Residuals, Results, native

DIRECT_ROWS = 32
"""Rows times steps up to which C may read a weight without packing it, as in matmul.h."""
MAX_ROWS = 16
"""Most rows of the batch that share a read of the weight."""


class GatedScan(ctypes.Structure):
    """``GatedScan`` of gated.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("backward", "T", "B", "H", "features", "head_size")),
        *((name, ctypes.c_int64) for name in ("rotated", "block", "threads")),
        *((name, ctypes.c_int64) for name in ("masked", "keep_below", "seed")),
        ("zoneout", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("xp", "x", "weight_ih", "bias_ih", "h0", "weight")),
        *((name, ctypes.c_void_p) for name in ("bias", "lengths")),
        *((name, ctypes.c_void_p) for name in ("out", "out_copy", "last", "gates", "grad_out", "grad_last", "grad_xp")),
        *((name, ctypes.c_void_p) for name in ("grad_tau", "grad_h0", "grad_weight", "grad_bias")),
        *((name, ctypes.c_void_p) for name in ("grad_x", "grad_weight_ih", "grad_bias_ih")),
    ]


def obstacle(inputs: GatedInputs, options: GatedOptions) -> str | None:
    """Return the reason why the native scan cannot run on such an input, or None; compile it if needed."""
    xp = inputs.xp
    if xp.device.type != "cpu":
        return f"the input is on {xp.device.type}"
    if xp.dtype not in native.DTYPES:
        return f"the dtype is {xp.dtype}, and it takes float32, float64, bfloat16 and float16"
    return native.build_obstacle(xp.dtype == torch.float64)


@functools.lru_cache(1024)
def find_layout(
    T: int, B: int, H: int, features: int, size: int, backward: bool, options: GatedOptions
) -> tuple[bytes, dict[str, tuple[tuple[int, ...], int]]]:
    """Return the scan for one thread without addresses and seed, and shape and bytes of each tensor that C reads."""
    scan = GatedScan(
        int(backward), T, B, H, features, options.head_size, options.rotated_units, max(1, min(MAX_ROWS, B)), 1,
        int(options.draws), keep_threshold(options.zoneout), 0, options.zoneout,
    )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        **{"xp": (T, B, 3 * H), "x": (T, B, features), "weight_ih": (3 * H, features), "bias_ih": (3 * H,)},
        **{"h0": (B, H), "weight": (3 * H, H), "bias": (3 * H,), "lengths": (B,)},
    }
    if backward:
        gates = (T, B, (4 if features else 3) * H)
        shapes.update({"out": (T, B, H), "gates": gates, "grad_out": (T, B, H), "grad_last": (B, H)})
    sizes = {name: 8 if name == "lengths" else size for name in shapes}
    return bytes(scan), {name: (shape, math.prod(shape) * sizes[name]) for name, shape in shapes.items()}


def _run(
    sizes: tuple[int, int, int, int],
    seed: Tensor | None,
    options: GatedOptions,
    read: dict[str, Tensor | None],
    filled: dict[str, Tensor | None],
) -> None:
    """Run the scan forward or, if ``filled`` has ``grad_weight``, backward, on tensors by their names in C.

    ``sizes`` are T, B, H and the features of an input to project, or 0. Tensors in ``filled`` must be contiguous and of
    one dtype; those in ``read`` are copied if needed.
    """
    T, B, H, features = sizes
    backward = "grad_weight" in filled
    result = filled["grad_weight" if backward else "out"]
    assert result is not None
    dtype = result.dtype
    if dtype is not torch.float32 and dtype is not torch.float64:  # the dtype of a saved tensor was changed
        raise TypeError(
            f"RUM's scan: saved tensors are {dtype}, but they must be torch.float32 or float64, as they were."
        )
    template, shapes = find_layout(T, B, H, features, dtype.itemsize, backward, options)
    scan = GatedScan.from_buffer_copy(template)
    if T * B * H * H * 3 >= native.SMALL:
        scan.threads = threads = max(1, min(torch.get_num_threads(), B))
        scan.block = max(1, min(MAX_ROWS, -(-B // threads)))
    if scan.masked:
        assert seed is not None
        scan.seed = int(seed)
    copies = []  # references that must live until the call has ended
    for name, part in read.items():
        if part is None:
            continue
        (shape, needs), wanted = shapes[name], torch.int64 if name == "lengths" else dtype
        # a tensor may have been replaced or freed since the forward, and C cannot check its address
        if not (
            part.shape == shape
            and part.dtype is wanted
            and part.is_contiguous()
            and part.is_cpu
            and part.untyped_storage().nbytes() >= needs + part.storage_offset() * wanted.itemsize
        ):
            part = native.readable(name, part, shape, wanted)
            copies.append(part)
        address = part.data_ptr()
        if address == 0 and part.numel() > 0:
            raise ValueError(f"RUM's scan: {name} has no memory for its {part.numel()} values; its storage was freed.")
        setattr(scan, name, address)
    for name, part in filled.items():
        if part is None:
            continue
        if part.dtype is not dtype:  # the dtype of a saved tensor was changed, and C would write past the result
            raise TypeError(f"RUM's scan: saved tensors are {part.dtype}, but they must be {dtype}, as they were.")
        setattr(scan, name, part.data_ptr())
    library = native.load_library(dtype is torch.float64)
    assert isinstance(library, ctypes.CDLL)
    if library.torchrum_gated_scan(ctypes.byref(scan)) != 0:
        raise MemoryError(f"the native scan found no memory for its workspace of {scan.threads} threads at H={H}.")


def forward(inputs: GatedInputs, options: GatedOptions, save: bool = True) -> tuple[Tensor, Tensor]:
    """Run the scan; without ``save`` only the memory of the states grows with T."""
    out, gates = inputs.empty_results(save)
    states = out if out.dtype is gates.dtype else out.to(gates.dtype)
    xp, h0, weight, bias, lengths, seed = inputs
    read = {"xp": xp, "h0": h0, "weight": weight, "bias": bias, "lengths": lengths}
    _run((*out.shape, 0), seed, options, read, {"out": states, "gates": gates if save else None})
    return states if states is out else states.to(out.dtype), gates


def backward(
    grad_out: Tensor, inputs: GatedInputs, out: Tensor, gates: Tensor, options: GatedOptions
) -> GatedGradients:
    """Compute the gradients of the inputs from the gradient of the states."""
    xp, h0, weight, _, lengths, seed = inputs
    given = zip(("grad_xp", "grad_h0", "grad_weight", "grad_bias"), inputs[:4], strict=True)
    parts: dict[str, Tensor] = {name: part for name, part in given if part is not None}
    grads: dict[str, Tensor | None] = {name: gates.new_empty(*part.shape) for name, part in parts.items()}
    read = {"xp": xp, "h0": h0, "weight": weight, "lengths": lengths, "out": out, "gates": gates, "grad_out": grad_out}
    _run((*out.shape, 0), seed, options, read, {**grads, "grad_tau": gates.new_empty(*out.shape)})
    return GatedGradients(*(grads[name].to(part.dtype) for name, part in parts.items()))  # type: ignore[union-attr]


def forward_layer(inputs: LayerInputs, options: GatedOptions, save: bool, copies: Copies) -> Results:
    """Run a plain call in float32 or float64, projecting its input, and fill ``copies``."""
    x, weight_ih, bias_ih, h0, _, weight_hh, _, _, lengths, seed, bias_hh = inputs
    (T, B, I), H = x.shape, weight_hh.shape[1]
    read = {"x": x, "weight_ih": weight_ih, "bias_ih": bias_ih}
    read["h0"], read["weight"], read["bias"], read["lengths"] = h0, weight_hh, bias_hh, lengths
    out, gates = x.new_empty(T, B, H), x.new_empty(T, B, 4 * H) if save else None
    _run((T, B, H, I), seed, options, read, {"out": out, "gates": gates, "last": copies.last, "out_copy": copies.out})
    return Results(out, None, Residuals(gates))


def backward_layer(
    grad_out: Tensor | None,
    grad_last: Tensor | None,
    inputs: LayerInputs,
    results: Results,
    options: GatedOptions,
    need_x: bool,
    need_h0: bool,
) -> Gradients:
    """Compute the gradients of a plain call's tensors."""
    x, weight_ih, bias_ih, h0, _, weight_hh, _, _, lengths, seed, bias_hh = inputs
    out, _, (gates, _) = results
    T, B, H = out.shape
    read = {"x": x, "weight_ih": weight_ih, "h0": h0, "weight": weight_hh, "lengths": lengths}
    read["out"], read["gates"], read["grad_out"], read["grad_last"] = out, gates, grad_out, grad_last
    grad_weight, grad_weight_ih = out.new_empty(*weight_hh.shape), out.new_empty(*weight_ih.shape)
    grad_bias = None if bias_hh is None else out.new_empty(3 * H)
    grad_bias_ih = None if bias_ih is None else out.new_empty(3 * H)
    grad_x, grad_h0 = out.new_empty(*x.shape) if need_x else None, out.new_empty(B, H) if need_h0 else None
    filled = {"grad_weight": grad_weight, "grad_weight_ih": grad_weight_ih, "grad_bias": grad_bias}
    filled["grad_bias_ih"], filled["grad_x"], filled["grad_h0"] = grad_bias_ih, grad_x, grad_h0
    _run((T, B, H, x.shape[-1]), seed, options, read, filled)
    return Gradients(
        None, grad_h0, None, grad_weight, None, None, grad_bias_ih, grad_x, grad_weight_ih, bias_hh=grad_bias
    )
