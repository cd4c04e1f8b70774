"""CUDA's driver by ctypes: its context, and memory that it fills on torch's current stream.

A fill is one call of the driver, a third of what torch takes for it, and is recorded in a CUDA graph too.
"""

import ctypes
import functools
import os
from collections.abc import Sequence

import torch

Fill = tuple[int, int, int]
"""Memory to fill with one 32-bit word: its address, the word, and how many."""


@functools.cache
def load_driver() -> ctypes.CDLL:
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    address, stream = ctypes.c_uint64, ctypes.c_void_p  # an address is no pointer to the driver, but an integer
    library.cuMemsetD32Async.argtypes = (address, ctypes.c_uint32, ctypes.c_size_t, stream)
    return library


def current_stream(driver: ctypes.CDLL, device: int) -> int | None:
    """Torch's current stream of ``device`` as the driver takes it, with torch's context current.

    Autograd runs the backward in a thread that may have no context yet. None where another device is current: its
    context would be the wrong one.
    """
    # what torch.cuda.current_device and current_stream ask for, without what they ask and build on every call
    if torch._C._cuda_getDevice() != device:
        return None
    context = ctypes.c_void_p()
    check = driver.cuCtxGetCurrent(ctypes.byref(context))
    if check != 0 or not context.value:
        _enter_context(driver, device, context, check)
    return torch._C._cuda_getCurrentRawStream(device)


def _enter_context(driver: ctypes.CDLL, device: int, context: ctypes.c_void_p, check: int) -> None:
    check_driver(check, "asking for the current context")
    handle = ctypes.c_int()
    check_driver(driver.cuDeviceGet(ctypes.byref(handle), device), f"finding device {device}")
    check_driver(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "retaining the context")
    check_driver(driver.cuCtxSetCurrent(context), "entering the context")


def fill_memory(driver: ctypes.CDLL, fills: Sequence[Fill], stream: int) -> None:
    """Fill memory of the device whose context is current."""
    for address, word, words in fills:
        if words > 0:
            done = driver.cuMemsetD32Async(address, word, words, stream)
            if done != 0:
                check_driver(done, f"filling {words} words of memory")


def check_driver(result: int, doing: str) -> None:
    """Raise if the driver has failed at ``doing``."""
    if result != 0:
        text = ctypes.c_char_p()
        load_driver().cuGetErrorString(result, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"CUDA failed at {doing}: {reason} ({result}).")
