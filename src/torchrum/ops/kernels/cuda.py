"""CUDA from Python: runtime compilation of C++ by NVRTC, kernel launches through the driver, graph capture.

NVRTC is the library that torch ships, and all work is enqueued on torch's current stream.
"""

import ctypes
import functools
import gc
import glob
import importlib.util
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchrum.ops.kernels.machine import constant_when_traced

Fill = tuple[int, int, int]
"""Memory to fill with a 32-bit word: the address, the word and the number of words."""


@functools.cache
def load_driver() -> ctypes.CDLL:
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    address, stream = ctypes.c_uint64, ctypes.c_void_p  # the driver takes device addresses as integers, not as pointers
    library.cuMemsetD32Async.argtypes = (address, ctypes.c_uint32, ctypes.c_size_t, stream)
    return library


def current_stream(driver: ctypes.CDLL, device: int) -> int | None:
    """Make torch's context current and return the handle of torch's current stream of ``device``.

    Autograd runs the backward in a thread that may have no context yet. If another device is current, return None,
    since its context would be the wrong one.
    """
    # torch.cuda.current_device and current_stream, without their overhead on every call
    if torch._C._cuda_getDevice() != device:
        return None
    context = ctypes.c_void_p()
    check = driver.cuCtxGetCurrent(ctypes.byref(context))
    if check != 0 or not context.value:
        check_driver(check, "asking for the current context")
        handle = ctypes.c_int()
        check_driver(driver.cuDeviceGet(ctypes.byref(handle), device), f"finding device {device}")
        check_driver(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "retaining the context")
        check_driver(driver.cuCtxSetCurrent(context), "entering the context")
    return torch._C._cuda_getCurrentRawStream(device)


def fill_memory(driver: ctypes.CDLL, fills: Sequence[Fill], stream: int) -> None:
    """Fill memory on the device whose context is current."""
    for address, word, words in fills:
        if words > 0:
            done = driver.cuMemsetD32Async(address, word, words, stream)
            if done != 0:
                check_driver(done, f"filling {words} words of memory")


def check_driver(result: int, doing: str) -> None:
    """Raise if ``result`` is an error; ``doing`` describes the failed call in the message."""
    if result != 0:
        text = ctypes.c_char_p()
        load_driver().cuGetErrorString(result, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"CUDA failed at {doing}: {reason} ({result}).")


Argument = Tensor | int | float | bytes | None
"""A kernel argument: a pointer (null for None and for an empty tensor), a 32-bit integer, a float or a structure."""

Macros = tuple[tuple[str, int], ...]

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel:
    """A compiled kernel on one device."""

    def __init__(self, function: ctypes.c_void_p, device: int) -> None:
        self._function = function
        self._device = device
        self._shared_bytes = 48 * 1024  # CUDA's default limit
        self._form: Form | None = None  # the arguments have the same types at every launch

    def launch(
        self,
        blocks: int,
        threads: int,
        shared_bytes: int,
        args: Sequence[Argument],
        *,
        cooperative: bool = False,
        fills: Sequence[Fill] = (),
    ) -> None:
        """Enqueue ``fills`` and the kernel on the current stream of its device, also inside a CUDA graph's capture.

        A structure must be the only argument in ``args``. ``cooperative`` makes the launch cooperative: all blocks are
        resident at once, or the launch fails.
        """
        driver = load_driver()
        stream = current_stream(driver, self._device)
        if stream is None:
            with torch.cuda.device(self._device):
                self.launch(blocks, threads, shared_bytes, args, cooperative=cooperative, fills=fills)
            return
        if shared_bytes > self._shared_bytes:
            check = driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes)
            check_driver(check, f"asking for {shared_bytes} bytes of shared memory")
            self._shared_bytes = shared_bytes
        if fills:
            fill_memory(driver, fills, stream)
        packed: Packed | None = None
        addresses: Any
        if isinstance(args[0], bytes):
            addresses = ctypes.byref(ctypes.c_char_p(args[0]))  # an array with the structure's address
        else:
            self._form = self._form or find_form(args)
            packed = pack(args, self._form)
            addresses = packed.addresses
        size, stream_pointer = (blocks, 1, 1, threads, 1, 1, shared_bytes), ctypes.c_void_p(stream)
        if cooperative:
            check = driver.cuLaunchCooperativeKernel(self._function, *size, stream_pointer, addresses)
        else:
            check = driver.cuLaunchKernel(self._function, *size, stream_pointer, addresses, None)
        if check != 0:
            check_driver(check, f"launching {blocks} blocks of {threads} threads with {shared_bytes} bytes each")
        if packed is not None:
            packed.give_back()  # the launch has copied the values


class Packed:
    """Kernel arguments as C values, eight bytes each, and the array of their addresses that a launch takes.

    Instances are reused. Until ``give_back``, no other launch writes to one, from any thread.
    """

    def __init__(self, count: int) -> None:
        self.values = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self.values)
        self.addresses = (ctypes.c_void_p * count)(*(first + 8 * i for i in range(count)))
        self._count = count

    def give_back(self) -> None:
        _spare.setdefault(self._count, []).append(self)


_spare: dict[int, list[Packed]] = {}


Form = tuple[int, struct.Struct]
"""The number of pointers, which come first, and the layout of all arguments."""


def pack(args: Sequence[Argument], form: Form | None = None) -> Packed:
    """Pack the tensors and numbers of a launch; ``form`` is derived from ``args`` if it is None."""
    count, layout = form or find_form(args)
    pointers = [0 if x is None else x.data_ptr() for x in args[:count]]  # type: ignore[union-attr]
    packed = _take(len(args))
    try:
        layout.pack_into(packed.values, 0, *pointers, *args[count:])
    except (struct.error, OverflowError):  # convert as C does: integers modulo 2^32, infinity beyond float32's range
        numbers = [ctypes.c_float(x).value if isinstance(x, float) else x & 0xFFFFFFFF for x in args[count:]]  # type: ignore[operator]
        layout.pack_into(packed.values, 0, *pointers, *numbers)
    return packed


def find_form(args: Sequence[Argument]) -> Form:
    tensors = [isinstance(arg, Tensor | None) for arg in args]
    count = sum(tensors)
    assert all(tensors[:count]), "tensors come before numbers"
    forms = ["f4x" if isinstance(arg, float) else "I4x" for arg in args[count:]]
    return count, struct.Struct("=" + "Q" * count + "".join(forms))


def _take(count: int) -> Packed:
    try:
        return _spare[count].pop()
    except (KeyError, IndexError):
        return Packed(count)


@functools.cache
def load_kernel(
    source: str, name: str, macros: Macros, device: int, architecture: str | None = None, flags: tuple[str, ...] = ()
) -> Kernel:
    """Compile ``source`` and return its function ``name`` on ``device``; the result is cached.

    Args:
        macros: names and values of macros to define.
        architecture: architecture to compile for, such as ``"sm_90a"``; the device's if None.
        flags: further options for the compiler.
    """
    if architecture is None:
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    cubin = compile_source(source, name, macros, architecture, flags)
    driver = load_driver()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # torch creates the device's context on first use
        current_stream(driver, device)
        check_driver(driver.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
        check = driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    check_driver(check, f"finding {name}")
    return Kernel(function, device)


@constant_when_traced
def nvrtc_obstacle() -> str | None:
    """Return the reason why kernels cannot be compiled here, or None."""
    return _nvrtc_obstacle()


@functools.cache
def _nvrtc_obstacle() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if _nvrtc() is None:
        return f"libnvrtc for CUDA {torch.version.cuda} was not found beside torch or on the library path"
    return None


@functools.cache
def compile_source(source: str, name: str, macros: Macros, architecture: str, flags: tuple[str, ...] = ()) -> bytes:
    """Compile to machine code for one architecture; the result is cached. Safe to call from several threads."""
    nvrtc = _nvrtc()
    if nvrtc is None:
        raise RuntimeError(f"cannot compile {name}: {nvrtc_obstacle()}.")
    program = ctypes.c_void_p()
    none = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, none, none)
    if created != 0:
        raise RuntimeError(f"NVRTC could not take the source of {name}: error {created}.")
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *flags]
    options += [f"-D{key}={value}" for key, value in macros]
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), encoded) != 0:
            log = _read_out(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise RuntimeError(f"NVRTC could not compile {name} with {options}:\n{log.decode(errors='replace')}")
        return _read_out(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read_out(size_of: Callable[..., int], read: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"nvrtc64_{major}*_0.dll" if os.name == "nt" else f"libnvrtc.so.{major}"
    packages = importlib.util.find_spec("nvidia")
    folders = [
        f"{path}/*/{sub}" for path in (packages and packages.submodule_search_locations) or [] for sub in ("lib", "bin")
    ]
    folders += [os.path.join(os.path.dirname(torch.__file__), "lib")]
    folders += [f"{os.environ[key]}/lib64" for key in ("CUDA_HOME", "CUDA_PATH") if key in os.environ]
    folders += ["/usr/local/cuda/lib64"]
    for candidate in [path for folder in folders for path in sorted(glob.glob(f"{folder}/{name}"))] + [name]:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    return None


EMPTY_WORD = 0xFFFFFFFF
"""All bits set, the value of a word that has not been written."""
MIN_SHARED_WORDS = 2**16
"""Smallest allocation of ``shared_mailboxes``, in words: 256 KB."""
MAX_CLEARED_WORDS = 2**18
"""Largest number of words that a launch may clear, 1 MB: a single block clears all words of a tile."""
_mailboxes: dict[int, Tensor] = {}
"""Words by device index."""


def shared_mailboxes(like: Tensor, words: int) -> Tensor | None:
    """Return at least ``words`` 32-bit words that are ``EMPTY_WORD``, on the device of ``like``.

    The launch must leave them ``EMPTY_WORD``. All launches on the default stream share them, since they run one after
    the other and are never captured in a CUDA graph. Return None on any other stream and for more than
    ``MAX_CLEARED_WORDS`` words.
    """
    device = like.get_device()
    if words > MAX_CLEARED_WORDS or torch._C._cuda_getCurrentRawStream(device) != 0:
        return None
    mailboxes = _mailboxes.get(device)
    if mailboxes is None or mailboxes.numel() < words:
        # the smaller tensor is freed on its stream, after the launches that use it
        mailboxes = _mailboxes[device] = like.new_full((max(words, MIN_SHARED_WORDS),), -1, dtype=torch.int32)
    return mailboxes


@contextmanager
def recording(
    graph: torch.cuda.CUDAGraph,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    *,
    other_threads: bool = False,
) -> Iterator[None]:
    """Enter ``torch.cuda.graph`` with the garbage collector off, since freeing an older graph would end the recording.

    Args:
        graph: the graph that records the enqueued work.
        pool, stream: as in ``torch.cuda.graph``.
        other_threads: whether other threads, such as a data loader's, may use CUDA during the recording.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        mode = "thread_local" if other_threads else "global"
        with torch.cuda.graph(graph, pool, stream, capture_error_mode=mode):
            yield
    finally:
        if collecting:
            gc.enable()
