"""Second derivatives of a scan whose kernels are differentiated once: by way of its reference."""

from typing import Any

import torch
from torch import Tensor


def reference_gradients(
    scan: Any, inputs: tuple[Any, ...], grads: tuple[Tensor | None, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of ``scan(*inputs)`` with a graph of their own; None for inputs that need none."""
    pairs = [(out, grad) for out, grad in zip(scan(*inputs), grads, strict=True) if grad is not None]
    chosen = [number for number, wants in enumerate(wanted) if wants]
    found = torch.autograd.grad(
        [out for out, _ in pairs], [inputs[n] for n in chosen], [grad for _, grad in pairs],
        create_graph=True, allow_unused=True,
    )  # fmt: skip
    by_number = dict(zip(chosen, found, strict=True))
    return tuple(by_number.get(number) for number in range(len(inputs)))
