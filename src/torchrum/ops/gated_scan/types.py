"""Options, inputs and gradients of a gated scan; ``T B H`` are steps, batch, units."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrum.ops._checks import check_flags, check_positive_int
from torchrum.ops.kernels.linear import working_dtype
from torchrum.ops.kernels.masks import keep_mask, zoneout_flags


@dataclass(frozen=True, kw_only=True)
class GatedOptions:
    """Options of a gated scan."""

    head_size: int = 8
    """Units per head; the last head is shorter if ``rotated_units`` is not a multiple."""
    rotated_units: int = 0
    """Number of units, the first ones, that take the rotated state; the other units are a GRU's."""
    zoneout: float = 0.0
    """Probability that a unit keeps its old value, below 1."""
    training: bool = False
    """Whether zoneout draws masks; otherwise it takes their expectation."""

    def __post_init__(self) -> None:
        check_positive_int("gated_scan", head_size=self.head_size)
        if self.rotated_units != 0:
            check_positive_int("gated_scan", rotated_units=self.rotated_units)
        if not 0 <= self.zoneout < 1:
            raise ValueError(f"gated_scan: zoneout={self.zoneout!r} is not allowed; it must be at least 0 and below 1.")
        check_flags("gated_scan", training=self.training)

    @property
    def draws(self) -> bool:
        """Whether a scan needs a seed."""
        return self.training and self.zoneout > 0

    def kernel_flags(self) -> dict[str, Any]:
        """Return the compile-time arguments of the kernels, except those of ``head_flags``."""
        zoneout, keep_below = zoneout_flags(self.zoneout, self.training)
        return {"ZONEOUT": zoneout, "KEEP_BELOW": keep_below}

    @property
    def blocks(self) -> int:
        """Row blocks of the matmul over input and state in a Fast-Slow RNN: r, u, tau, eps."""
        return 4

    @property
    def norms(self) -> int:
        """Blocks of layer norm's gains: 0, since the gated form has no layer norm."""
        return 0


class GatedInputs(NamedTuple):
    """The tensors of one scan."""

    xp: Tensor
    """``(T, B, 3H)``, the projected input in blocks r, u, n."""
    h0: Tensor
    """``(B, H)``"""
    weight_hh: Tensor
    """``(3H, H)``, rows r, u, n."""
    bias_hh: Tensor | None = None
    """``(3H,)``"""
    lengths: Tensor | None = None
    """``(B,)`` int64; a row past its length keeps its state."""
    seed: Tensor | None = None
    """int64 scalar from which zoneout's masks are derived."""

    def empty_results(self, save: bool) -> tuple[Tensor, Tensor]:
        """Allocate the states ``(T, B, H)`` and the gates r, u and tau, ``(T, B, 3H)`` in the working dtype.

        Without ``save`` the gates are empty.
        """
        T, B, rows = self.xp.shape
        gates = self.xp.new_empty((T, B, rows) if save else 0, dtype=working_dtype(self.xp.dtype))
        return self.xp.new_empty(T, B, rows // 3), gates


class GatedGradients(NamedTuple):
    """Gradients of the inputs, each in the dtype of its tensor."""

    xp: Tensor
    h0: Tensor
    weight_hh: Tensor
    bias_hh: Tensor | None = None


def keep_shares(inputs: GatedInputs, options: GatedOptions) -> Tensor | None:
    """Return the share of each new value in the state, from zoneout and lengths; None if it is always 1.

    The shape is ``(T, B, H)`` or ``(T, B, 1)``.
    """
    xp, h0, (T, B, _), dtype = inputs.xp, inputs.h0, inputs.xp.shape, working_dtype(inputs.xp.dtype)
    share = None
    if options.draws:
        assert inputs.seed is not None
        masks = [keep_mask(inputs.seed, t, B, h0.shape[1], options.zoneout) for t in range(T)]
        share = torch.stack(masks).to(dtype)
    elif options.zoneout > 0:
        share = torch.full((T, B, 1), 1 - options.zoneout, dtype=dtype, device=xp.device)
    if inputs.lengths is None:
        return share
    active = (torch.arange(T, device=xp.device).unsqueeze(1) < inputs.lengths).unsqueeze(-1).to(dtype)
    return active if share is None else active * share
