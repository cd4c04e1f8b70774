"""The backward of a native scan, whether it was given projected inputs or the input itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrum.ops.rum_scan.native.call import call_scan
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.types import Results


def pull_back(
    grads: Sequence[Tensor | None],
    given: dict[str, Tensor | None],
    R0: Tensor | None,
    results: Results,
    gradients: Mapping[str, Tensor | None],
    options: RumOptions,
    seed: Tensor | None,
) -> tuple[Any, ...]:
    """Fill ``gradients`` from those of the results.

    Args:
        grads: gradients of all states ``(T, B, H)``, of the last one ``(B, H)`` once more, and of the last R.
        given: inputs of the scan by C's names; the other tensors are added to them.
        R0: ``(B, H, H)``, only where its gradient is asked for.
        results: what the scan returned, the states in the dtype that it runs in.
        gradients: tensors to fill, by C's names.
        options, seed: as those of the scan.

    Returns:
        Gradients of h0, R0 or None, and layer norm's weight and bias or None.
    """
    states, R_n, (saved, kept) = results
    assert saved is not None
    (T, B, H), dtype, (grad_out, grad_last, grad_R) = states.shape, states.dtype, grads
    grad_h0 = saved.new_empty(B, H)
    grad_z = None if R0 is None else saved.new_empty(T, B, H)
    outer = None if grad_R is None or R_n is None else torch.bmm(grad_R.to(dtype), R_n.mT)
    grad_K = None if outer is None else outer - outer.mT
    given.update(gradients, out=states, saved=saved, R_n=R_n, kept=kept)
    given.update(grad_out=grad_out, grad_last=grad_last, grad_K=grad_K, grad_h0=grad_h0, grad_z=grad_z)
    sums = call_scan(given, seed, options)
    grad_R0 = None
    if R0 is not None:
        z = saved[..., options.num_gates * H :][..., :H]
        added = torch.einsum("tbi,tbj->bij", grad_z, z)
        grad_R0 = torch.bmm(added if outer is None else added + outer, R0.to(dtype))
    norms = (None, None) if sums is None else (part.flatten() for part in sums)
    return grad_h0, grad_R0, *norms
