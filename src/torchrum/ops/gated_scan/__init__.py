"""Scan of RUM's gated form: from the projected inputs of a sequence and an initial state to all states."""

from torch import Tensor

from torchrum.ops._dispatch import Backend, Choice, choose_reference
from torchrum.ops.gated_scan import native
from torchrum.ops.gated_scan.designs import choose_design
from torchrum.ops.gated_scan.op import gated_scan_backward, gated_scan_op
from torchrum.ops.gated_scan.reference import gated_scan_reference, gated_step_reference, gated_update
from torchrum.ops.gated_scan.stepwise import LARGEST_HEAD
from torchrum.ops.gated_scan.types import GatedInputs, GatedOptions
from torchrum.ops.kernels.masks import draw_seed

__all__ = [
    "LARGEST_HEAD",
    "GatedInputs",
    "GatedOptions",
    "gated_scan",
    "gated_scan_backward",
    "gated_scan_choice",
    "gated_scan_reference",
    "gated_step_reference",
    "gated_update",
    "native",
]


MASKED = "state_dropout is at work, and only the reference has it"


def gated_scan_choice(xp: Tensor, options: GatedOptions, *, masked: bool = False, backend: Backend = "auto") -> Choice:
    """Return the backend that ``gated_scan`` takes for ``xp`` ``(T, B, 3H)``, and the reason why no faster one."""
    if masked:
        return choose_reference(backend, MASKED)
    H, one = xp.shape[-1] // 3, xp.new_empty(1)
    inputs = GatedInputs(xp, one.expand(*xp.shape[1:-1], H), one.expand(3 * H, H))
    design, reason = choose_design(inputs, options, backend)
    return Choice(design.backend, reason)


def gated_scan(
    xp: Tensor,
    h0: Tensor,
    weight_hh: Tensor,
    bias_hh: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    options: GatedOptions,
    seed: Tensor | None = None,
    mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Run the gated form of RUM over a sequence of projected inputs.

    Args:
        xp: ``(T, B, 3H)``, the projected input ``x W_ih^T + b_ih`` in blocks r, u, n.
        h0: ``(B, H)``, the initial state.
        weight_hh: ``(3H, H)``, rows r, u, n.
        bias_hh: ``(3H,)``, zero if None.
        lengths: ``(B,)`` int64; a row past its length keeps its state.
        options: the hyper-parameters.
        seed: int64 scalar from which zoneout's masks are derived; drawn if needed and None.
        mask: ``(B, H)``, multiplies the h that the matmul of every step reads (state dropout).
        backend: ``"auto"`` takes the fastest backend that can run; ``"fused"``, ``"native"``, ``"torch"`` or
            ``"reference"`` insists on one.

    Returns:
        All states, ``(T, B, H)``.
    """
    if options.draws and seed is None:
        seed = draw_seed(xp.device)
    # under autocast the projected input has the lower precision
    weight_hh = weight_hh.to(xp.dtype)
    bias_hh = None if bias_hh is None else bias_hh.to(xp.dtype)
    inputs = GatedInputs(xp, h0, weight_hh, bias_hh, lengths, seed)
    if mask is not None:
        choose_reference(backend, MASKED)  # raises if another backend is requested
        return gated_scan_reference(inputs, options, mask)
    return gated_scan_op(inputs, options, backend)
