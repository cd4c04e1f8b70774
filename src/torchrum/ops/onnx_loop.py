"""ONNX building blocks for the scans of both forms: the loop over time and the two reflections of a rotation.

In a small step a runtime spends more time on the nodes than on their arithmetic, so a step has few nodes: one node
normalises a vector, and a matmul with a constant matrix computes the sums of all heads, broadcast to their units. There
is no ``If``: onnxruntime is no faster with one, and OpenVINO 2026.4 computes wrong numbers around it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrum.ops.rotation import opposite_of, tiny_of

__all__ = ["active_steps", "bisector", "bisector_operands", "is_one_step", "reflect", "run_steps", "twos", "unit"]

Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]]
"""A function of the state, the inputs of this step and the constants that returns the new state."""

LONG = 1e15
"""A length to which the length of a unit vector is negligible."""
WIDE = 32
"""From this number of units on, a head's sum is computed once and broadcast."""


def run_steps(step: Step, state: list[Tensor], given: list[Tensor], fixed: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Run ``step`` over the first dimension of all ``given`` -> the last state, and the first part of every state.

    If the first tensor of ``given`` is ``(B, H)`` instead of ``(T, B, H)``, this is one step without a loop.
    """
    from torch._higher_order_ops.scan import scan_op  # a prototype in torch, without a public path yet

    if given[0].dim() == 2:
        last = step(state, given, fixed)
        return last, last[0]

    def body(*parts: Tensor) -> list[Tensor]:
        # the operator passes the carry, the slices of this step, then the constants
        start, end = len(state), len(state) + len(given)
        new = step(list(parts[:start]), list(parts[start:end]), list(parts[end:]))
        return [*new, new[0].clone()]  # carry, then output; they must not alias

    # the operator treats views of one tensor as aliases, so clone them
    *last, states = scan_op(body, state, [part.clone() for part in given], tuple(part.clone() for part in fixed))
    return last, states


def is_one_step(xp: Tensor) -> bool:
    """Return whether ``xp`` ``(T, B, ...)`` is known to have a single step; then no row is shorter."""
    return xp.dim() == 3 and isinstance(xp.shape[0], int) and xp.shape[0] == 1


def active_steps(xp: Tensor, lengths: Tensor | None) -> list[Tensor]:
    """Return ``(T, B, 1)``, 1 where a step of ``xp`` ``(T, B, ...)`` is within its row's length, else 0.

    The tensor is in a list, which is empty without ``lengths``.
    """
    if lengths is None:
        return []
    return [(torch.arange(xp.shape[0], device=xp.device).unsqueeze(1) < lengths).unsqueeze(-1).to(xp.dtype)]


def unit(x: Tensor) -> Tensor:
    """Return x/|x| over the last dimension, zero for zero, as one node."""
    return torch.onnx.ops.symbolic(
        "LpNormalization", (x,), {"axis": -1, "p": 2}, dtype=x.dtype, shape=x.shape, version=18
    )


def bisector_operands(eps: Tensor) -> list[Tensor]:
    """Return the vectors for ``bisector``, each of the shape of ``eps``: e, e again, and the bisector of a half turn.

    e is the direction of ``eps``. Where ``eps`` has no direction, the second e is so long that it determines the
    bisector, and nothing rotates.
    """
    tiny = tiny_of(eps.dtype)
    axes = torch.eye(eps.shape[-1], dtype=eps.dtype, device=eps.device)
    eps = eps + 1e-6 * tiny * axes[0]  # runtimes disagree on the direction of zero
    e = unit(eps)
    short = (torch.linalg.vector_norm(eps, dim=-1) <= tiny).to(eps.dtype)
    axis = F.embedding(e.abs().argmin(-1), axes / opposite_of(eps.dtype))
    across = axis - (axis * e).sum(-1, keepdim=True) * e  # as ``orthogonal_to`` in rotation.py, but longer
    return [e, e * (1 + LONG * short).unsqueeze(-1), across]


def bisector(operands: list[Tensor], tau: Tensor) -> Tensor:
    """Return the unit vector m of R = H_m H_e, the rotation from eps to ``tau``.

    ``operands`` is the result of ``bisector_operands``. The rules of ``rotation.py`` for zero and opposite vectors
    apply, with two exceptions. Squares are not scaled, so they must not overflow, and a tau that is shorter than
    ``tiny_of`` but not zero still rotates.
    """
    _, e, across = operands
    s = e + unit(tau)
    opposite = torch.linalg.vector_norm(s, dim=-1) <= opposite_of(s.dtype)
    return unit(s + opposite.to(s.dtype).unsqueeze(-1) * across)


def twos(size: int, like: Tensor) -> Tensor:
    """Return the matrix with which ``reflect`` computes twice the sum of ``size`` entries."""
    return like.new_full((size, 1 if size >= WIDE else size), 2.0)


def reflect(x: Tensor, h: Tensor, twos: Tensor) -> Tensor:
    """Return H_x h = h - 2 (x.h) x."""
    return h - (x * h) @ twos * x
