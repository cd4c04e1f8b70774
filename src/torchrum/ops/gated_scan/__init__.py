"""A whole sequence of the gated form of RUM: from projected inputs and an initial state to all states."""

from torch import Tensor

from torchrum.ops._dispatch import REFERENCE, Backend, Choice, choose_backend
from torchrum.ops.gated_scan.reference import GatedOptions, gated_scan_reference, gated_step_reference
from torchrum.ops.kernels.masks import draw_seed

__all__ = ["GatedOptions", "gated_scan", "gated_scan_choice", "gated_scan_reference", "gated_step_reference"]


def gated_scan_choice(xp: Tensor, options: GatedOptions, *, backend: Backend = "auto") -> Choice:
    """The backend that ``gated_scan`` takes for ``xp`` ``(T, B, 3H)``, and why no faster one."""
    design, reason = choose_backend(backend, (REFERENCE,), lambda design: None)
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
    backend: Backend = "auto",
) -> Tensor:
    """Run the gated form of RUM over a sequence of projected inputs.

    Args:
        xp: ``(T, B, 3H)``, the projected input ``x W_ih^T + b_ih`` in blocks r, u, n.
        h0: ``(B, H)``
        weight_hh: ``(3H, H)``, rows r, u, n.
        bias_hh: ``(3H,)``, zero if None.
        lengths: ``(B,)`` int64; a row past its length keeps its state.
        options: the hyper-parameters.
        seed: int64 scalar that zoneout's masks come from; drawn if it is None and needed.
        backend: ``"auto"`` takes the fastest that can run; ``"fused"``, ``"native"``, ``"torch"`` or ``"reference"``
            insists.

    Returns:
        All states, ``(T, B, H)``.
    """
    if options.draws and seed is None:
        seed = draw_seed(xp.device)
    # under autocast the projected input has the lower precision
    weight_hh = weight_hh.to(xp.dtype)
    bias_hh = None if bias_hh is None else bias_hh.to(xp.dtype)
    gated_scan_choice(xp, options, backend=backend)
    return gated_scan_reference(xp, h0, weight_hh, bias_hh, lengths, seed, options)
