"""Checks whether kernels can run on this machine and for a given call, and autocast. No Triton here.

Some virtual machines announce AMX without granting it: bfloat16 matmuls then fail in torch itself. oneDNN, which torch
uses for bfloat16 matmuls on a CPU, relies on the announcement and crashes on the first AMX instruction, or reports that
it "could not create a primitive". oneDNN's own limit on instruction sets avoids this (``limit_isa``).
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

KERNEL_ACTIVATIONS = ("relu", "tanh", "sigmoid", "softsign")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HIDDEN = 8192  # a whole row is held in one program's registers


Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_traced(function: Function) -> Function:
    """Mark a function that inspects the machine, which a compiler cannot trace, as constant for the compiler.

    As :func:`torch.compiler.assume_constant_result`, without its import of the compiler, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced
def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels: slowly, on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@constant_when_traced
def triton_obstacle() -> str | None:
    """Return the reason why Triton cannot compile here, or None.

    Triton needs a C compiler, since it builds a small launcher in C for each kernel.
    """
    return _triton_obstacle()


@functools.cache
def _triton_obstacle() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "gcc", "clang", "cc"))):
        return "Triton finds no C compiler (install gcc or clang, or set CC)"
    return None


@constant_when_traced
def device_obstacle(device: torch.device) -> str | None:
    """Return the reason why Triton's kernels cannot run on a CUDA device, or None."""
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 7 else f"the GPU has compute capability {major}.{minor}, and Triton needs 7.0"


def row_kernel_obstacle(x: Tensor, hidden: int) -> str | None:
    """Return the reason why kernels with one program per batch row cannot run on a tensor like ``x``, or None."""
    if x.dtype not in KERNEL_DTYPES:
        return f"the dtype is {x.dtype}, and the kernels take float32, bfloat16 and float16"
    if hidden > LARGEST_HIDDEN:
        return f"the hidden size is {hidden}, and a row of at most {LARGEST_HIDDEN} fits in one program"
    if interpreted():
        return None if importlib.util.find_spec("triton") else "Triton is not installed"
    if x.device.type != "cuda":
        return f"the input is on {x.device.type}"
    return triton_obstacle() or device_obstacle(x.device)


def tracing_obstacle(x: Tensor) -> str | None:
    """Return the reason why a scan that is not a torch operator, so cannot be traced, cannot run on ``x``, or None."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(x, FakeTensor) or torch.compiler.is_exporting():
        return "the tensors have no data, and the kernels cannot be traced"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active, and the kernels take plain tensors"
    return None


_is_batched = torch._C._functorch.is_legacy_batchedtensor
_tracing_state, _transforms_active = torch._C._get_tracing_state, torch._C._are_functorch_transforms_active


def is_unobserved(tensors: Iterable[Tensor]) -> bool:
    """Return whether the tensors are plain memory and no compiler, tracer, transform or mode observes the call."""
    if torch.compiler.is_compiling():
        return False
    for x in tensors:  # a loop: this runs on every small call, and a generator would be slower
        kind = type(x)
        if kind is Parameter:
            continue
        # is_grads_batched=True gives batched tensors, and z.conj().imag lazily negated ones; a parameter is neither
        if kind is not Tensor or _is_batched(x) or x.is_neg():
            return False
    if _tracing_state() is not None or _transforms_active():
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and forward_ad._current_level < 0


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast rounds the operands of a matmul to on a device type; None if it is off."""
    # torch raises for a device type without autocast, such as meta; CPU and CUDA need no check
    if device_type not in ("cpu", "cuda") and not torch.amp.is_autocast_available(device_type):
        return None
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocasts(x: Tensor) -> bool:
    """Return whether autocast rounds the operands of a matmul of ``x``."""
    # the cheap test first: reading a device's name takes as long as a view. It does not cover MPS
    if not torch._C._is_any_autocast_enabled() and (x.is_cuda or x.is_cpu):
        return False
    return autocast_dtype(x.device.type) is not None


_NULL_CONTEXT = nullcontext()


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context manager that turns autocast off on the device of ``x``."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else _NULL_CONTEXT


ISA_VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
AMX_SYMPTOM = "could not create a primitive"
AMX_ADVICE = (
    "this CPU announces AMX but does not grant it, so bfloat16 matmuls fail in torch itself; "
    f"set {ISA_VARIABLE}={WITHOUT_AMX} in the environment and start again"
)
AMX_TRIAL = """
import torch
for size in (8, 64, 256):
    x = torch.ones(size, size, dtype=torch.bfloat16)
    torch.nn.functional.linear(x, x, x[0]) + x @ x + torch.addmm(x, x, x.t())
"""


def announces_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor announces AMX; False if this is unknown."""
    try:
        return "amx_tile" in cpuinfo.read_text()
    except OSError:
        return False


def bf16_works() -> bool:
    """Try bfloat16 matmuls in a child process, since a failure may crash the process."""
    return subprocess.run([sys.executable, "-c", AMX_TRIAL], capture_output=True, timeout=300).returncode == 0


def limit_isa(
    environment: MutableMapping[str, str] = os.environ,
    announced: Callable[[], bool] = announces_amx,
    works: Callable[[], bool] = bf16_works,
) -> str | None:
    """Keep oneDNN from using AMX if the CPU announces it and a trial shows that it does not work.

    Call this before the first bfloat16 matmul. A limit set by the user is left unchanged.

    Returns:
        A message that names the reason and the limit, or None if no limit was set.
    """
    if ISA_VARIABLE in environment or not announced() or works():
        return None
    environment[ISA_VARIABLE] = WITHOUT_AMX
    return f"bfloat16 matmuls fail on this CPU, which announces AMX but does not grant it: {ISA_VARIABLE}={WITHOUT_AMX}"


def linear_with_amx_advice(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Call :func:`torch.nn.functional.linear`, and add advice to the error of a CPU that does not grant AMX."""
    try:
        return F.linear(x, weight, bias)
    except RuntimeError as error:
        if AMX_SYMPTOM not in str(error):
            raise
        raise RuntimeError(f"{error}: {AMX_ADVICE}.") from error
