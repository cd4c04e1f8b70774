"""Single steps of stacked layers on the CPU, without gradients: the call of C is prepared once for each layer.

At one row of 128 units a step takes C five microseconds. Looking at the weights and at the options again, and a tensor
of each kind for each layer, would take longer than that.
"""

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchrum.ops.gated_scan import native as gated_native
from torchrum.ops.kernels.machine import autocasts, is_unwatched
from torchrum.ops.rum_scan import native
from torchrum.ops.rum_scan.designs import operator_obstacle
from torchrum.ops.rum_scan.options import RumOptions

MOST_ROWS = gated_native.PROJECTED_ROWS
"""Rows of the batch up to which C reads the weights as they are; for more, other calls are as fast."""
GATED = {"weight_ih": "weight_ih", "bias_ih": "bias_ih", "weight_hh": "weight", "bias_hh": "bias"}
PAPER = {
    **{"weight_ih": "weight_ih", "bias_ih": "bias", "weight_hh": "weight"},
    **{"ln_weight": "ln_weight", "ln_bias": "ln_bias"},
}
"""C's names of the parameters."""


class NativeSteps:
    """The steps of ``layers``, each the parameters of one layer by name, on ``rows`` rows.

    It keeps the addresses of the parameters: as long as they are ``current()``, changes in place are seen. One thread
    at a time may call it. :func:`prepare_steps` says where it can be had.
    """

    def __init__(self, layers: Sequence[Mapping[str, Tensor | None]], rows: int, options: RumOptions) -> None:
        first = layers[0]["weight_ih"]
        assert first is not None
        self.rows, self.options, self.dtype, self.features = rows, options, first.dtype, first.shape[1]
        self.parts = [part for weights in layers for part in weights.values() if part is not None]
        self.addresses = [part.data_ptr() for part in self.parts]
        library = native.load_library(self.dtype is torch.float64)
        assert isinstance(library, ctypes.CDLL)
        self.run = library.torchrum_scan if options.gated is None else library.torchrum_gated_scan
        self.scans = [self._prepare(weights) for weights in layers]
        self.calls = [ctypes.byref(scan) for scan in self.scans]
        H = self.hidden_size = self.scans[0].H
        self.shapes = (len(layers), rows, H), (len(layers), rows, H, H)
        self.row = rows * H * self.dtype.itemsize  # bytes of a layer's h
        self.unread = first.new_empty(rows, H)  # outputs of the lower layers, which are their states
        for scan in self.scans:
            scan.out = self.unread.data_ptr()

    def _prepare(self, weights: Mapping[str, Tensor | None]) -> native.Scan | gated_native.GatedScan:
        weight_ih, weight_hh, B = weights["weight_ih"], weights["weight_hh"], self.rows
        assert weight_ih is not None and weight_hh is not None
        I, H, size = weight_ih.shape[1], weight_hh.shape[1], self.dtype.itemsize
        scan: native.Scan | gated_native.GatedScan
        if self.options.gated is not None:
            template, _ = gated_native.find_layout(1, B, H, I, size, False, self.options.gated[False])
            scan, names = gated_native.GatedScan.from_buffer_copy(template), GATED
        else:
            layout = native.find_layout(1, B, H, I, size, False, self.options)
            scan, names = native.Scan.from_buffer_copy(layout.template), PAPER
            scan.R0_stride = H * H
        for name, field in names.items():
            part = weights[name]
            setattr(scan, field, None if part is None else part.data_ptr())
        if 3 * B * H * H >= native.SMALL:
            scan.threads = max(1, min(torch.get_num_threads(), B))
            scan.block = -(-B // scan.threads)
        return scan

    def current(self) -> bool:
        """Whether the parameters are where they were."""
        return [part.data_ptr() for part in self.parts] == self.addresses

    def take(self, x: Tensor, h: Tensor, R: Tensor | None) -> bool:
        """Whether it can step from ``x`` and this state: plain memory of the sizes and the dtype that C expects."""
        return (
            is_unwatched((x,))
            and x.dtype is self.dtype
            and x.is_cpu
            and x.numel() == self.rows * self.features
            and x.is_contiguous()
            and not autocasts(x)
            and h.dtype is self.dtype
            and h.shape == self.shapes[0]
            and h.is_contiguous()
            and (R is None or (R.dtype is self.dtype and R.shape == self.shapes[1] and R.is_contiguous()))
        )

    def __call__(self, x: Tensor, h: Tensor, R: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Take one step from what ``take`` allows.

        Args:
            x: ``(..., I)``, B rows in all.
            h: ``(L, B, H)``.
            R: ``(L, B, H, H)`` with lam 1, else None.

        Returns:
            The output ``(..., H)``, and the new h and R; new tensors, each in memory of its own.
        """
        output, new_h = x.new_empty(*x.shape[:-1], self.hidden_size), torch.empty_like(h)
        new_R = None if R is None else torch.empty_like(R)
        at, old, new, row = x.data_ptr(), h.data_ptr(), new_h.data_ptr(), self.row
        self.scans[-1].out = output.data_ptr()
        for place, scan in enumerate(self.scans):
            scan.x, scan.h0, scan.last = at, old, new
            if R is not None and new_R is not None:
                offset = place * row * self.hidden_size
                scan.R0, scan.R_n = R.data_ptr() + offset, new_R.data_ptr() + offset
            if self.run(self.calls[place]) != 0:
                raise MemoryError(f"the native scan found no memory for a step at H={self.hidden_size}.")
            at, old, new = new, old + row, new + row
        return output, new_h, new_R


def prepare_steps(
    layers: Sequence[Mapping[str, Tensor | None]], rows: int, options: RumOptions, backend: str
) -> NativeSteps | None:
    """Prepare the steps of stacked layers in evaluation, or return None where C cannot take them one by one."""
    parts = [part for weights in layers for part in weights.values() if part is not None]
    first = layers[0]["weight_ih"]
    if first is None or rows > MOST_ROWS or not native.projects(first, backend) or not is_unwatched(parts):
        return None
    if options.gated is None and operator_obstacle(options, any(weights["lam"] is not None for weights in layers)):
        return None
    for weights in layers:
        bias, weight = weights["bias_ih"], weights["weight_ih"]
        if weight is None or (bias is not None and bias.shape[0] != weight.shape[0]):
            return None  # eps has no bias, and C reads all of it
    if any(part.dtype is not first.dtype or not part.is_contiguous() or part.data_ptr() == 0 for part in parts):
        return None
    return NativeSteps(layers, rows, options)
