"""CPUs that announce AMX without granting it, as some virtual machines do: bfloat16 matmuls fail there in torch itself.

oneDNN, which torch multiplies bfloat16 matrices with on a CPU, trusts the announcement and dies on the first AMX
instruction, or reports that it "could not create a primitive". Its own limit on instruction sets avoids that.
"""

import os
import subprocess
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
SYMPTOM = "could not create a primitive"
ADVICE = (
    "this CPU announces AMX but does not grant it, so bfloat16 matmuls fail in torch itself; "
    f"set {VARIABLE}={WITHOUT_AMX} in the environment and start again"
)
TRIAL = """
import torch
for size in (8, 64, 256):
    x = torch.ones(size, size, dtype=torch.bfloat16)
    torch.nn.functional.linear(x, x, x[0]) + x @ x + torch.addmm(x, x, x.t())
"""


def announces_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor says that it has AMX; False where that cannot be told."""
    try:
        return "amx_tile" in cpuinfo.read_text()
    except OSError:
        return False


def bf16_works() -> bool:
    """Try bfloat16 matmuls in a child process: where they fail, they may take the process with them."""
    return subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, timeout=300).returncode == 0


def limit_isa(
    environment: MutableMapping[str, str] = os.environ,
    announced: Callable[[], bool] = announces_amx,
    works: Callable[[], bool] = bf16_works,
) -> str | None:
    """Keep oneDNN from AMX where the CPU announces it and a trial shows that it does not work.

    Call it before the first bfloat16 matmul. A limit that the user has set is left alone.

    Returns:
        What was done, in words, or None if nothing had to be.
    """
    if VARIABLE in environment or not announced() or works():
        return None
    environment[VARIABLE] = WITHOUT_AMX
    return f"bfloat16 matmuls fail on this CPU, which announces AMX but does not grant it: {VARIABLE}={WITHOUT_AMX}"


def explained_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`torch.nn.functional.linear`, whose error says what to do if it is this one."""
    try:
        return F.linear(x, weight, bias)
    except RuntimeError as error:
        if SYMPTOM not in str(error):
            raise
        raise RuntimeError(f"{error}: {ADVICE}.") from error
