"""Single steps of stacked layers on the CPU, without gradients: the call of C is prepared once for each layer.

With one row of 128 units, a step in C takes five microseconds. Checking the weights and options in every step, and
creating tensors for every layer, would take longer than this.
"""

import ctypes
import math
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchrum.ops.gated_scan import native as gated_native
from torchrum.ops.kernels.machine import autocasts, is_unobserved
from torchrum.ops.rum_scan import native
from torchrum.ops.rum_scan.designs import operator_obstacle
from torchrum.ops.rum_scan.options import RumOptions

MAX_ROWS = gated_native.DIRECT_ROWS
"""Most rows of the batch for which C reads the weights without packing; for more rows, other calls are as fast."""
GATED = {"weight_ih": "weight_ih", "bias_ih": "bias_ih", "weight_hh": "weight", "bias_hh": "bias"}
PAPER = {
    **{"weight_ih": "weight_ih", "bias_ih": "bias", "weight_hh": "weight"},
    **{"ln_weight": "ln_weight", "ln_bias": "ln_bias"},
}
"""Names of the parameters in C."""
Scan = native.Scan | gated_native.GatedScan


class NativeSteps:
    """The prepared steps of stacked layers on ``rows`` rows; ``layers`` holds each layer's parameters by name.

    It keeps the addresses of the parameters: while these are ``current()``, changes in place take effect. Several
    threads may call it at once. :func:`prepare_steps` creates it.
    """

    def __init__(
        self, layers: Sequence[Mapping[str, Tensor | None]], scans: Sequence[Scan], rows: int, gated: bool
    ) -> None:
        self.parts = [part for weights in layers for part in weights.values()]
        given = [part for part in self.parts if part is not None]
        # keep the storages, so that their memory is not reused and an address identifies a parameter
        storages = [part.untyped_storage() for part in given]
        self.parameters = [(p, p.data_ptr(), p.shape, s, s.nbytes()) for p, s in zip(given, storages, strict=True)]
        self.rows, self.scans, self.dtype = rows, scans, given[0].dtype
        library = native.load_library(self.dtype is torch.float64)
        assert isinstance(library, ctypes.CDLL)
        self.run = library.torchrum_gated_scan if gated else library.torchrum_scan
        self.copy = type(scans[0]).from_buffer_copy
        H = self.hidden_size = scans[0].H
        self.features, self.numbers = scans[0].features, len(layers) * rows * H  # features of x, numbers of h
        self.row = rows * H * self.dtype.itemsize  # bytes of a layer's h
        self.unused_output = given[0].new_empty(rows, H)  # outputs of the lower layers, which are equal to their states
        for scan in scans:
            scan.out = self.unused_output.data_ptr()

    def current(self, parts: Sequence[Tensor | None] | None = None) -> bool:
        """Return whether the parameters (``parts``, if given) are the prepared ones, at the same addresses."""
        if parts is not None and not all(map(operator.is_, parts, self.parts)):
            return False
        for part, address, shape, storage, size in self.parameters:
            if (
                part.data_ptr() != address
                or storage.nbytes() != size
                or part.shape != shape
                or not part.is_contiguous()
            ):
                return False
        return True

    def accepts(self, x: Tensor, h: Tensor, R: Tensor | None) -> bool:
        """Return whether a step from ``x`` and this state is possible: plain memory of the expected sizes and dtype."""
        return (
            is_unobserved((x, h))
            and not autocasts(x)
            and _reads(x, self.dtype, self.rows * self.features)
            and _reads(h, self.dtype, self.numbers)
            and (R is None or _reads(R, self.dtype, self.numbers * self.hidden_size))
        )

    def __call__(self, x: Tensor, h: Tensor, R: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run one step on inputs for which ``accepts`` is True.

        Args:
            x: ``(..., I)``, B rows in total.
            h: ``(L, B, H)``, or ``(B, H)`` for a single layer.
            R: ``(L, B, H, H)`` with lam 1, else None.

        Returns:
            The output ``(..., H)``, and the new h and R; all are new tensors that share no memory.
        """
        output, new_h = x.new_empty(*x.shape[:-1], self.hidden_size), torch.empty_like(h)
        new_R = None if R is None else torch.empty_like(R)
        at, old, new, row, last = x.data_ptr(), h.data_ptr(), new_h.data_ptr(), self.row, len(self.scans) - 1
        for layer, prepared in enumerate(self.scans):
            scan = self.copy(prepared)
            scan.x, scan.h0, scan.last = at, old, new
            if layer == last:
                scan.out = output.data_ptr()
            if R is not None and new_R is not None:
                offset = layer * row * self.hidden_size
                scan.R0, scan.R_n = R.data_ptr() + offset, new_R.data_ptr() + offset
            if self.run(ctypes.byref(scan)) != 0:
                raise MemoryError(f"the native scan found no memory for a step at H={self.hidden_size}.")
            at, old, new = new, old + row, new + row
        return output, new_h, new_R


def prepare_steps(
    layers: Sequence[Mapping[str, Tensor | None]], rows: int, options: RumOptions, backend: str
) -> NativeSteps | None:
    """Prepare the steps of stacked layers in evaluation, or return None if C cannot run them one by one."""
    parts = [part for weights in layers for part in weights.values() if part is not None]
    first = layers[0]["weight_ih"]
    if first is None or not 0 < rows <= MAX_ROWS or not native.projects(first, backend) or not is_unobserved(parts):
        return None
    if options.gated is None and operator_obstacle(options, any(weights["lam"] is not None for weights in layers)):
        return None
    scans = [_prepare(weights, rows, options, first.dtype) for weights in layers]
    found = [scan for scan in scans if scan is not None]
    return NativeSteps(layers, found, rows, options.gated is not None) if len(found) == len(scans) else None


def _prepare(weights: Mapping[str, Tensor | None], B: int, options: RumOptions, dtype: torch.dtype) -> Scan | None:
    """Return the scan of one step of a layer, without the tensors of a call; None if C cannot read a parameter."""
    weight_ih, weight_hh = weights["weight_ih"], weights["weight_hh"]
    if weight_ih is None or weight_hh is None or weight_ih.dim() != 2 or weight_hh.dim() != 2:
        return None
    I, H = weight_ih.shape[1], weight_hh.shape[1]
    scan: Scan
    if options.gated is not None:
        template, shapes = gated_native.find_layout(1, B, H, I, dtype.itemsize, False, options.gated[False])
        scan, names = gated_native.GatedScan.from_buffer_copy(template), GATED
    else:
        template, shapes, _, _ = native.find_layout(1, B, H, I, dtype.itemsize, False, options)
        scan, names = native.Scan.from_buffer_copy(template), PAPER
        scan.R0_stride = H * H
    for name, field in names.items():
        part = weights[name]
        if part is None:
            continue
        shape, _ = shapes[field]  # a bias without the part of eps does not match: C reads the whole bias
        if part.shape != shape or not _reads(part, dtype, math.prod(shape)):
            return None
        setattr(scan, field, part.data_ptr())
    if 3 * B * H * H >= native.SMALL:
        scan.threads = max(1, min(torch.get_num_threads(), B))
        scan.block = -(-B // scan.threads)
    return scan


def _reads(part: Tensor, dtype: torch.dtype, numbers: int) -> bool:
    """Return whether C can read ``numbers`` numbers from a tensor without a copy."""
    return (
        part.dtype is dtype
        and part.numel() == numbers
        and part.is_contiguous()
        and part.is_cpu
        and part.untyped_storage().nbytes() >= (part.storage_offset() + numbers) * dtype.itemsize
        and part.data_ptr() != 0
    )
