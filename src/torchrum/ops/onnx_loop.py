"""What the scans of both forms share in ONNX: the loop over time, and the two vectors that a rotation reflects in.

For a small step a runtime spends more time on its nodes than on their arithmetic. So a step has few of them: one
normalises a vector, and a matmul with a constant matrix forms the sums of all heads in each of their units. There is no
``If``: onnxruntime is no faster with one, and OpenVINO 2026.4 computes wrong numbers around it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrum.ops.rotation import opposite_of, tiny_of

__all__ = ["bisector", "going_on", "is_one_step", "reflect", "run_steps", "turning_from", "twos", "unit"]

Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]]
"""From the state, the inputs of this step and the constants to the new state."""

LONG = 1e15
"""A length beside which that of a unit vector vanishes."""
WIDE = 32
"""From this many units on, a head's sum is formed once and broadcast."""


def run_steps(step: Step, state: list[Tensor], given: list[Tensor], fixed: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Run ``step`` over the first dimension of all ``given`` -> the last state, and the first part of every state.

    A ``given`` that starts with ``(B, H)`` instead of ``(T, B, H)`` is one step, which needs no loop.
    """
    from torch._higher_order_ops.scan import scan_op  # a prototype of torch: there is no public path to it yet

    if given[0].dim() == 2:
        last = step(state, given, fixed)
        return last, last[0]

    def body(*parts: Tensor) -> list[Tensor]:
        """Carry, slices of this step, then constants: the order in which the operator passes them."""
        start, end = len(state), len(state) + len(given)
        new = step(list(parts[:start]), list(parts[start:end]), list(parts[end:]))
        return [*new, new[0].clone()]  # carry, then output: they may not alias

    # views of one tensor count as aliases of each other
    *last, states = scan_op(body, state, [part.clone() for part in given], tuple(part.clone() for part in fixed))
    return last, states


def is_one_step(xp: Tensor) -> bool:
    """Whether ``xp`` ``(T, B, ...)`` is known to have one step: then no row is shorter."""
    return xp.dim() == 3 and isinstance(xp.shape[0], int) and xp.shape[0] == 1


def going_on(xp: Tensor, lengths: Tensor | None) -> list[Tensor]:
    """1 where a step of ``xp`` ``(T, B, ...)`` is within its row's length, else 0, ``(T, B, 1)``; nothing without."""
    if lengths is None:
        return []
    return [(torch.arange(xp.shape[0], device=xp.device).unsqueeze(1) < lengths).unsqueeze(-1).to(xp.dtype)]


def unit(x: Tensor) -> Tensor:
    """x/|x| over the last dimension, and zero for zero, as one node."""
    return torch.onnx.ops.symbolic(
        "LpNormalization", (x,), {"axis": -1, "p": 2}, dtype=x.dtype, shape=x.shape, version=18
    )


def turning_from(eps: Tensor) -> list[Tensor]:
    """What ``bisector`` needs of ``eps``, all of its shape: the direction e, e again, and what bisects a half turn.

    The second e is so long where ``eps`` has no direction that it is the bisector itself, and then nothing turns.
    """
    tiny = tiny_of(eps.dtype)
    axes = torch.eye(eps.shape[-1], dtype=eps.dtype, device=eps.device)
    eps = eps + 1e-6 * tiny * axes[0]  # zero has no direction that a runtime agrees on
    e = unit(eps)
    short = (torch.linalg.vector_norm(eps, dim=-1) <= tiny).to(eps.dtype)
    axis = F.embedding(e.abs().argmin(-1), axes / opposite_of(eps.dtype))
    across = axis - (axis * e).sum(-1, keepdim=True) * e  # as ``orthogonal_to`` in rotation.py, but long
    return [e, e * (1 + LONG * short).unsqueeze(-1), across]


def bisector(turn: list[Tensor], tau: Tensor) -> Tensor:
    """The unit vector m of R = H_m H_e, the rotation to ``tau`` from what ``turning_from`` read.

    The rules of ``rotation.py`` for zero and opposite vectors hold, with two exceptions. Squares are taken as they are,
    so they must not overflow, and a tau that is shorter than ``tiny_of`` turns if it is not zero.
    """
    _, e, across = turn
    s = e + unit(tau)
    opposite = torch.linalg.vector_norm(s, dim=-1) <= opposite_of(s.dtype)
    return unit(s + opposite.to(s.dtype).unsqueeze(-1) * across)


def twos(size: int, like: Tensor) -> Tensor:
    """The matrix with which ``reflect`` forms twice the sum of ``size`` entries."""
    return like.new_full((size, 1 if size >= WIDE else size), 2.0)


def reflect(x: Tensor, h: Tensor, twos: Tensor) -> Tensor:
    """H_x h = h - 2 (x.h) x."""
    return h - (x * h) @ twos * x
