"""Inputs, results, residuals and gradients of a RUM scan; ``T B H`` are steps, batch, hidden units."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from torchrum.ops.rum_scan.options import RumOptions


class StepWeights(NamedTuple):
    """Parameters of one step."""

    weight_hh: Tensor
    """``(2H, H)``, rows tau, u; ``(H, H)`` without update gate."""
    ln_weight: Tensor | None = None
    ln_bias: Tensor | None = None
    """Both ``(3H,)``, blocks tau, u, candidate (``(2H,)`` without update gate), with layer norm."""


class ScanInputs(NamedTuple):
    """The tensors of one scan."""

    xp: Tensor
    """``(T, B, 3H)``, the projected input in blocks tau, u, eps; ``(T, B, 2H)``, tau and eps, without update gate."""
    h0: Tensor
    """``(B, H)``; a tensor without data in a ``from_zero`` scan."""
    R0: Tensor | None
    """``(B, H, H)``, the identity if None; only with lam other than 0."""
    weight_hh: Tensor
    ln_weight: Tensor | None = None
    ln_bias: Tensor | None = None
    """As in ``StepWeights``."""
    lengths: Tensor | None = None
    """``(B,)`` int64; a row past its length keeps its state."""
    seed: Tensor | None = None
    """int64 scalar from which zoneout's masks are derived."""

    @property
    def from_zero(self) -> bool:
        """Whether h0 is known to be zero: then it adds nothing to a weight's gradient, and its own is not needed."""
        return False

    @property
    def weights(self) -> StepWeights:
        return StepWeights(self.weight_hh, self.ln_weight, self.ln_bias)

    @classmethod
    def shaped_like(cls, xp: Tensor, options: RumOptions) -> "ScanInputs":
        """Return inputs whose shapes match ``xp``, without memory of their own, to choose a design."""
        H = xp.shape[-1] // options.num_inputs
        one = xp.new_empty(1)
        return cls(xp, one.expand(*xp.shape[1:-1], H), None, one.expand(options.num_gates * H, H))


class ScanFromZero(ScanInputs):
    """The tensors of a scan without an initial state."""

    __slots__ = ()

    @property
    def from_zero(self) -> bool:
        return True


@functools.lru_cache(256)
def _shape_only(B: int, H: int, dtype: torch.dtype) -> Tensor:
    """Return a meta tensor in place of an initial state of zeros, which needs neither memory nor a launch."""
    return torch.empty(B, H, dtype=dtype, device="meta")


class LayerInputs(NamedTuple):
    """The tensors of one recurrence, of either form, before the input projection."""

    x: Tensor
    """``(T, B, I)``"""
    weight_ih: Tensor
    """``(3H, I)``, rows tau, u, eps; ``(2H, I)`` without update gate."""
    bias: Tensor | None
    """``(3H,)``, or ``(2H,)`` without the part of eps; H less without update gate."""
    h0: Tensor | None
    """``(B, H)``, zeros if None."""
    R0: Tensor | None
    weight_hh: Tensor
    ln_weight: Tensor | None = None
    ln_bias: Tensor | None = None
    lengths: Tensor | None = None
    seed: Tensor | None = None
    """As in ``ScanInputs``."""
    bias_hh: Tensor | None = None
    """``(3H,)``, only in the gated form: blocks r, u, n, as the rows of its ``weight_ih`` and ``weight_hh``."""

    def projected(self, xp: Tensor, from_zero: bool = False) -> ScanInputs:
        """Return the inputs of the scan; without an h0, a tensor on the meta device gives its shape."""
        if self.h0 is None:
            return ScanFromZero(xp, _shape_only(xp.shape[1], self.weight_hh.shape[1], xp.dtype), *self[4:10])
        return (ScanFromZero if from_zero else ScanInputs)(xp, self.h0, *self[4:10])

    def with_zeros(self) -> "LayerInputs":
        """Return the inputs with an h0 of zeros if there is none."""
        x, weight_ih, bias, h0, R0, weight_hh, *others = self
        if h0 is not None:
            return self
        h0 = x.new_zeros(x.shape[1], weight_hh.shape[1])
        return LayerInputs(x, weight_ih, bias, h0, R0, weight_hh, *others)  # _replace takes twice as long


class Residuals(NamedTuple):
    """Tensors that the forward saves for the backward in addition to its results; each design defines their content."""

    gates: Tensor | None = None
    """``(T, B, ...)``, the raw gates of all steps, tau first."""
    kept: Tensor | None = None
    """Other data: scalars per row and step, or the data from which the R of earlier steps are reconstructed."""


class Results(NamedTuple):
    """The results of a scan."""

    out: Tensor
    """``(T, B, H)``, the states after each step."""
    R: Tensor | None
    """``(B, H, H)``, the last one; None with lam 0."""
    residuals: Residuals = Residuals()


class Copies(NamedTuple):
    """Buffers for copies of the results for the user, who may overwrite them; nothing else reads these buffers."""

    last: Tensor | None = None
    """``(..., B, H)``, for the last state."""
    out: Tensor | None = None
    """``(T, B, H)``"""
    R: Tensor | None = None
    """``(..., B, H, H)``"""

    def fill(self, results: Results) -> None:
        """Copy the results into the buffers that are given; some designs write result and copy at once instead."""
        for copy, part in ((self.last, results.out[-1:]), (self.out, results.out), (self.R, results.R)):
            if copy is not None and part is not None:
                copy.view(part.shape).copy_(part)


NO_COPIES = Copies()


class Gradients(NamedTuple):
    """Gradients of a scan's inputs, each in the dtype of its tensor; None for inputs that were not given."""

    xp: Tensor | None
    """None if the scan projected x and this gradient is not needed."""
    h0: Tensor | None
    R0: Tensor | None
    weight_hh: Tensor
    ln_weight: Tensor | None = None
    ln_bias: Tensor | None = None
    bias: Tensor | None = None
    """``(3H,)``, the gradient of xp summed over steps and rows, if requested and available from the design. The
    operators return neither this gradient nor those below."""
    x: Tensor | None = None
    weight_ih: Tensor | None = None
    """Both from a scan that projected its input."""
    bias_hh: Tensor | None = None
    """``(3H,)``, only in the gated form."""


NUM_GRADIENTS = len(ScanInputs._fields) - 2
"""Number of gradients that the operators return: of all inputs but lengths and seed."""
