"""How row kernels are launched: one program per batch row, next to the matmul of the step."""

from typing import Any

import torch
import triton
from torch import Tensor

# Tuning, read when a scan's buffers are made (clear_graphs() makes them anew).
LANES_PER_WARP = {"forward": 256, "backward": 256}  # of a row
MOST_WARPS = 8
ROW_REGISTERS = 40 * 1024  # of a multiprocessor's 64 * 1024, with PDL: a matmul's tile must fit beside a row
PDL = True  # programmatic dependent launch: start each kernel while the one before it drains
CARVEOUT = True  # with PDL: divide cache and shared memory in row kernels as in matmuls


def padded(H: int) -> int:
    """The hidden axis inside the matmuls: cuBLAS is several times slower on unaligned rows."""
    return -(-H // 64) * 64


def pdl_runs(x: Tensor) -> bool:
    """Whether dependent launch is on and the device of ``x`` has it."""
    return PDL and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def takes_pdl(operand: Tensor) -> bool:
    """Whether a matmul of ``operand`` and the row kernels around it are launched while the one before drains.

    16-bit dtypes only: float32 goes to cuBLAS, which takes no part in it.
    """
    return operand.dtype != torch.float32 and pdl_runs(operand)


def row_flags(H: int, direction: str, pdl: bool, most_warps: int | None = None) -> dict[str, Any]:
    """Compile-time arguments that every row kernel takes."""
    block = max(32, triton.next_power_of_2(H))
    warps = min(most_warps or MOST_WARPS, max(1, block // LANES_PER_WARP[direction]))
    flags = {"H": H, "HP": padded(H), "BLOCK": block, "PDL": pdl, "num_warps": warps}
    if pdl:
        flags["launch_pdl"] = True
    return flags


def row_registers(num_warps: int) -> int:
    """Registers of a thread that leave room for a matmul's tile beside the row."""
    return min(255, ROW_REGISTERS // (32 * num_warps))
