"""The precision of matmuls: what autocast makes of them, and where a GPU's must not be rounded to TF32's ten bits."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """16-bit dtypes carry the state and do everything but the matmul in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast rounds the operands of a matmul to on a kind of device; None where it is off."""
    # a meta device has no autocast, and torch raises where it is asked for it; the usual ones need not be asked about
    if device_type not in ("cpu", "cuda") and not torch.amp.is_autocast_available(device_type):
        return None
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocasts(x: Tensor) -> bool:
    """Whether autocast rounds the operands of a matmul of ``x``."""
    # "any" is asked on every call: the name of a device costs as much as a view. It leaves MPS out
    if not torch._C._is_any_autocast_enabled() and (x.is_cuda or x.is_cpu):
        return False
    return autocast_dtype(x.device.type) is not None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Matmuls in the dtype of their operands."""
    if autocast_dtype(device_type) is None:
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def rounds_matmuls(x: Tensor) -> bool:
    """Whether a matmul of ``x`` would be TF32."""
    if not x.is_cuda or x.dtype is not torch.float32:
        return False
    return tf32_allowed() and not autocasts(x) and has_tf32(x.device)


@functools.cache
def has_tf32(device: torch.device) -> bool:
    """Whether a GPU has TF32 matmuls at all."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def tf32_allowed() -> bool:
    """Whether torch takes TF32 for float32 matmuls on a GPU, by either of its two interfaces."""
    read = torch._C._get_fp32_precision_getter  # what torch.backends calls, ten times faster: it is asked on every call
    asked = read("cuda", "matmul")
    return (read("generic", "all") if asked == "none" else asked) == "tf32"


class ExactMatmuls:
    """FP32 matmuls (TF32 off) on the GPU inside ``with``, by the interface that the precision was set with.

    No generator: that would take longer than to set the precision does.
    """

    def __enter__(self) -> None:
        self.older: str | None = None
        try:
            self.older = torch.get_float32_matmul_precision()
        except RuntimeError:  # set by the newer interface, which the older one refuses to read
            self.newer = torch.backends.cuda.matmul.fp32_precision
            torch.backends.cuda.matmul.fp32_precision = "ieee"
            return
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *error: object) -> None:
        if self.older is None:
            torch.backends.cuda.matmul.fp32_precision = self.newer
        else:
            torch.set_float32_matmul_precision(self.older)
