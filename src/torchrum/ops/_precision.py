"""Where a GPU's float32 products must not be rounded to TF32's ten bits."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def rounds_products(x: Tensor) -> bool:
    """Whether a product of ``x`` would be TF32; a compiled program keeps its precision, and is not asked."""
    if torch.compiler.is_compiling() or not x.is_cuda or x.dtype != torch.float32:
        return False
    return not torch.is_autocast_enabled("cuda") and tf32_allowed() and has_tf32(x.device)


@functools.cache
def has_tf32(device: torch.device) -> bool:
    """Whether a GPU has such products at all."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def tf32_allowed() -> bool:
    """Whether torch takes TF32 for float32 products on a GPU, by either of its two interfaces."""
    asked = torch.backends.cuda.matmul.fp32_precision
    return (getattr(torch.backends, "fp32_precision", "none") if asked == "none" else asked) == "tf32"


@contextmanager
def exact_products() -> Iterator[None]:
    """IEEE float32 products on the GPU inside, by the interface that the precision was set with."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by the newer interface, which the older one refuses to read
        newer = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.fp32_precision = newer
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
