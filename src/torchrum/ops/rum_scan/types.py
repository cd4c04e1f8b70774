"""What a RUM scan is given, what it returns and what its backward keeps; ``T B H`` are steps, batch, hidden units."""

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
    """``(B, H)``; ``from_zero`` scans may have no numbers here."""
    R0: Tensor | None
    """``(B, H, H)``, the identity if None; only with lam other than 0."""
    weight_hh: Tensor
    ln_weight: Tensor | None = None
    ln_bias: Tensor | None = None
    """As in ``StepWeights``."""
    lengths: Tensor | None = None
    """``(B,)`` int64; a row past its length keeps its state."""
    seed: Tensor | None = None
    """int64 scalar that zoneout's masks come from."""

    @property
    def from_zero(self) -> bool:
        """Whether h0 is known to be zero: it adds nothing to the gradient of a weight, and nobody asks for its own."""
        return False

    @property
    def weights(self) -> StepWeights:
        return StepWeights(self.weight_hh, self.ln_weight, self.ln_bias)

    @classmethod
    def shaped_like(cls, xp: Tensor, options: RumOptions) -> "ScanInputs":
        """Inputs that go with ``xp``, one number expanded to their shapes: to ask what would run."""
        H = xp.shape[-1] // options.num_inputs
        one = xp.new_empty(1)
        return cls(xp, one.expand(*xp.shape[1:-1], H), None, one.expand(options.num_gates * H, H))


class ScanFromZero(ScanInputs):
    """The tensors of a scan that was given no initial state."""

    __slots__ = ()

    @property
    def from_zero(self) -> bool:
        return True


@functools.lru_cache(256)
def _shape_alone(B: int, H: int, dtype: torch.dtype) -> Tensor:
    """Zeros that nobody reads: without memory they need no launch, on no stream."""
    return torch.empty(B, H, dtype=dtype, device="meta")


class LayerInputs(NamedTuple):
    """The tensors of one recurrence, of either form, before its input is projected."""

    x: Tensor
    """``(T, B, I)``"""
    weight_ih: Tensor
    """``(3H, I)``, rows tau, u, eps; ``(2H, I)`` without update gate."""
    bias: Tensor | None
    """``(3H,)``, or shorter by the H of eps."""
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
    """``(3H,)``, of the gated form alone: blocks r, u, n, as the rows of its ``weight_ih`` and ``weight_hh``."""

    def projected(self, xp: Tensor, from_zero: bool = False) -> ScanInputs:
        """What the scan takes; without an h0 a tensor on the meta device tells its shape."""
        if self.h0 is None:
            return ScanFromZero(xp, _shape_alone(xp.shape[1], self.weight_hh.shape[1], xp.dtype), *self[4:10])
        return (ScanFromZero if from_zero else ScanInputs)(xp, self.h0, *self[4:10])

    def with_zeros(self) -> "LayerInputs":
        """With an h0 in any case."""
        x, weight_ih, bias, h0, R0, weight_hh, *others = self
        if h0 is not None:
            return self
        h0 = x.new_zeros(x.shape[1], weight_hh.shape[1])
        return LayerInputs(x, weight_ih, bias, h0, R0, weight_hh, *others)  # _replace takes twice as long


class Residuals(NamedTuple):
    """What the backward needs of the forward beside its results; each design says what it puts here."""

    gates: Tensor | None = None
    """``(T, B, ...)``, the raw gates of all steps, tau first."""
    kept: Tensor | None = None
    """Whatever else: scalars of each row and step, or what tells the R of earlier steps."""


class Results(NamedTuple):
    """What a scan returns."""

    out: Tensor
    """``(T, B, H)``, the states after each step."""
    R: Tensor | None
    """``(B, H, H)``, the last one; None with lam 0."""
    residuals: Residuals = Residuals()


class Copies(NamedTuple):
    """Memory for results that go to a user, who may write to it: it is nobody else's."""

    last: Tensor | None = None
    """``(..., B, H)``, for the last of all states."""
    out: Tensor | None = None
    """``(T, B, H)``"""
    R: Tensor | None = None
    """``(..., B, H, H)``"""

    def fill(self, results: Results) -> None:
        """Copy the results where there is memory for them; some designs write both at once instead."""
        for copy, part in ((self.last, results.out[-1:]), (self.out, results.out), (self.R, results.R)):
            if copy is not None and part is not None:
                copy.view(part.shape).copy_(part)


NO_COPIES = Copies()


class Gradients(NamedTuple):
    """Gradients of a scan's inputs, each in the dtype of its tensor; None for those that were not given."""

    xp: Tensor | None
    """None where the scan projected x and nobody asks for it."""
    h0: Tensor | None
    R0: Tensor | None
    weight_hh: Tensor
    ln_weight: Tensor | None = None
    ln_bias: Tensor | None = None
    bias: Tensor | None = None
    """``(3H,)``, the sum of xp's over steps and rows, where it was asked for and the design has it; no operator returns
    it, nor the two below."""
    x: Tensor | None = None
    weight_ih: Tensor | None = None
    """From a scan that projected its input."""
    bias_hh: Tensor | None = None
    """Of the gated form."""


NUM_GRADIENTS = len(ScanInputs._fields) - 2
"""The gradients that the operators return: of all inputs but lengths and seed."""
