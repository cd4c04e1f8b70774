"""The matmul of a step, by cuBLAS or by a kernel whose partial sums the row kernel adds, and the buffers of a scan.

A step's matmul is small (128 rows), and most of its time is spent on loading the weight and summing the parts. Loading
is fastest if the inner axis is split until every multiprocessor has one tile; the row kernel then adds the parts while
it loads them.
"""

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrum.ops.kernels import triton_launch
from torchrum.ops.kernels.linear import BF16, has_tf32, matmul_16bit, split_right, tf32_allowed
from torchrum.ops.kernels.rows import INTERPRET
from torchrum.ops.kernels.triton_launch import (
    TABLE_SLOTS,
    Launch,
    fill_table,
    is_dry_run,
    padded,
    prefer_shared,
    prepare,
)

# Tuning, read when a StepMatmul is built. SPLIT_K enables the portable kernel, WEIGHT_FIRST the kernel for Hopper.
SPLIT_K = {"forward": False, "backward": True}  # for 16-bit dtypes; the inner axis of the backward is longer
WEIGHT_FIRST = {"forward": True, "backward": True}  # if it can run
BLOCK = {"forward": 0, "backward": 0}  # columns per tile; 0 chooses
WARPS = {"forward": 8, "backward": 8}  # for the Hopper kernel; the portable one uses 8 for 128 columns, else 4
STAGES = 5  # blocks of the left factor in flight
ROWS = 128  # rows per tile: larger batches use cuBLAS, since they fill the device
MAX_PARTS = 12
PART_WEIGHT = 4  # weight of a part's bytes: the row kernel waits for them (measured at 704 and 1024 units)
ROW_SHARED = 16 * 1024  # bytes of shared memory left for the row kernel
INNER = 64  # the hidden axis is padded to a multiple of this
GLUON_VERSIONS = ("3.6",)  # Triton versions that the Hopper kernel supports: Gluon changes between versions


@triton.jit(do_not_specialize=["M"])
def split_k_kernel(
    left, right, parts, M,
    N: tl.constexpr, K: tl.constexpr, RIGHT_K: tl.constexpr, RIGHT_N: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute ``parts[s] = left[:, ks] @ right[ks]`` for the s-th share of the inner axis, CHUNKS blocks of BK long."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # after the wait: the next kernel may read what earlier kernels wrote
    share = tl.program_id(1)
    rows = tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    inner = share * (CHUNKS * BK) + tl.arange(0, BK)
    row_mask = rows[:, None] < M
    left += rows[:, None] * K + inner[None, :]
    right += inner[:, None] * RIGHT_K + cols[None, :] * RIGHT_N
    total = tl.zeros([BM, BN], tl.float32)
    for chunk in range(CHUNKS):
        if K % (CHUNKS * BK) == 0:
            a = tl.load(left, mask=row_mask, other=0.0)
            b = tl.load(right)
        else:  # the last share may be short
            inside = inner + chunk * BK < K
            a = tl.load(left, mask=row_mask & inside[None, :], other=0.0)
            b = tl.load(right, mask=inside[:, None], other=0.0)
        if INTERPRET:  # the interpreter's dot treats bfloat16 as integers
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
        left += BK
        right += BK * RIGHT_K
    parts += (share * M + rows[:, None]) * N + cols[None, :]
    tl.store(parts, total.to(parts.dtype.element_ty), mask=row_mask)


@triton.jit
def fetch_parts(parts, offset, mask, stride, PARTS: tl.constexpr):
    """Load the partial sums of a matmul's row, ``stride`` apart, for ``add_parts``; all loads come before a use."""
    fetched = (tl.load(parts + offset, mask=mask, other=0.0),)
    for part in tl.static_range(1, PARTS):
        more = tl.load(parts + part * stride + offset, mask=mask, other=0.0)
        fetched = fetched + (more,)  # type: ignore[assignment]  # noqa: RUF005
    return fetched


@triton.jit
def add_parts(fetched, PARTS: tl.constexpr):
    total = fetched[0].to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += fetched[part].to(tl.float32)
    return total


@triton.jit
def load_parts(parts, offset, mask, stride, PARTS: tl.constexpr):
    """Load a matmul's row from its partial sums, ``stride`` apart."""
    return add_parts(fetch_parts(parts, offset, mask, stride, PARTS), PARTS)


@dataclass(frozen=True)
class Tiling:
    """The division of a matmul: ``tiles`` of ``block`` columns times ``parts`` of ``chunks`` inner blocks."""

    block: int
    tiles: int
    chunks: int
    parts: int

    def traffic(self, B: int, processors: int, size: int) -> int:
        """Return the weighted bytes that the division adds to a step.

        These are a tile's loads of the left factor and its stores, counted for every multiprocessor even if it has no
        tile, and the row kernel's loads of the parts.
        """
        tile = self.chunks * INNER * ROWS * 2 + ROWS * self.block * size
        return processors * tile + PART_WEIGHT * self.parts * B * self.tiles * self.block * size

    def stages(self, shared: int) -> int:
        """Return how many blocks of the left factor fit in shared memory beside the tile's share of the weight."""
        return min(self.chunks, STAGES, (shared - self.chunks * self.block * INNER * 2) // (ROWS * INNER * 2))


def tiling(B: int, K: int, N: int, processors: int, size: int, block: int = 0) -> Tiling:
    """Return the tiling with the least traffic and at most one tile per multiprocessor, if the columns permit.

    ``size`` is the size of a partial sum in bytes.
    """
    found = []
    for width in (block,) if block else (128, 64, 32):
        if N % width and width > 32:
            continue
        blocks, tiles = K // INNER, triton.cdiv(N, width)
        shares = max(1, min(MAX_PARTS, blocks, processors // tiles))
        chunks = triton.cdiv(blocks, shares)
        found.append(Tiling(width, tiles, chunks, triton.cdiv(blocks, chunks)))  # no part is empty
    return (
        min(found, key=lambda division: division.traffic(B, processors, size))
        if found
        else tiling(B, K, N, processors, size)
    )


class StepMatmul:
    """The matmul ``left (B, K) @ right (K, N)`` at fixed addresses.

    ``out`` is ``(parts, B, N)``, in the dtype ``out_dtype`` if given, else in the dtype of ``left``.
    """

    def __init__(
        self, left: Tensor, right: Tensor, pdl: bool, direction: str, out_dtype: torch.dtype | None = None
    ) -> None:
        self.left, self.right, self.pdl = left, right, pdl
        (B, K), N = self.sizes = left.shape, right.shape[1]
        self.parts, out_dtype = 1, out_dtype or left.dtype  # parts are rounded as cuBLAS rounds their sum
        self.split_k = self.weight_first = False
        if splits(direction, B, left.dtype):
            self.tiling = tiling(B, K, N, multiprocessors(left), out_dtype.itemsize, BLOCK[direction])
            self.warps = WARPS[direction]
            self.weight_first = self._prepare_weight_first(direction)
            self.split_k = self.weight_first or SPLIT_K[direction]
            if self.split_k:
                self.parts = self.tiling.parts
        self.out = torch.empty((self.parts, B, N), dtype=out_dtype, device=left.device)
        multiply = torch.mm if out_dtype == left.dtype else matmul_16bit
        self.by_cublas = None if self.split_k else functools.partial(multiply, left, right, out=self.out[0])

    def _prepare_weight_first(self, direction: str) -> bool:
        if not WEIGHT_FIRST[direction] or not has_weight_first(self.left):
            return False
        shared = triton.runtime.driver.active.utils.get_device_properties(self.left.device.index)["max_shared_mem"]
        self.stages = self.slots = self.tiling.stages(shared - ROW_SHARED)
        if self.stages < min(2, self.tiling.chunks):
            return False
        # with more than half of the shared memory per tile, no second tile starts, not even while one ends
        more_than_half = shared // 2 + 4096 - self.tiling.chunks * self.tiling.block * INNER * 2
        self.slots = max(self.slots, triton.cdiv(more_than_half, ROWS * INNER * 2))
        from torchrum.ops.kernels.matmul_hopper import descriptor

        inner_last = self.right.stride(0) == 1
        weight = self.right.t() if inner_last else self.right
        shape = (self.tiling.block, INNER) if inner_last else (INNER, self.tiling.block)
        self.descriptors = descriptor(self.left, ROWS, INNER), descriptor(weight, *shape)
        self.inner_last = inner_last
        return True

    def prepare(self) -> Launch:
        """Prepare the launch, which multiplies the values that ``left`` and ``right`` have when it runs."""
        if self.by_cublas is not None:
            return self.by_cublas
        ((B, K), N), division = self.sizes, self.tiling
        dependent = {"launch_pdl": True} if self.pdl else {}
        if self.weight_first:
            from torchrum.ops.kernels.matmul_hopper import weight_first_kernel

            return prepare(
                weight_first_kernel, (division.tiles, division.parts), *self.descriptors, self.out, B, N=N,
                CHUNKS=division.chunks, STAGES=self.stages, SLOTS=self.slots, BN=division.block,
                INNER_LAST=self.inner_last, PDL=self.pdl, num_warps=self.warps, **dependent,
            )  # fmt: skip
        return prepare(
            split_k_kernel, (division.tiles, division.parts), self.left, self.right, self.out, B, N, K,
            *self.right.stride(), division.chunks, BM=ROWS, BN=division.block, BK=INNER, PDL=self.pdl,
            num_warps=8 if division.block == 128 else 4, num_stages=4, **dependent,
        )  # fmt: skip


def splits(direction: str, B: int, dtype: torch.dtype) -> bool:
    """Return whether the matmul may be left in parts; float32 uses cuBLAS, to follow torch's precision settings."""
    wanted = SPLIT_K[direction] or WEIGHT_FIRST[direction]
    return wanted and B <= ROWS and dtype in (torch.float16, torch.bfloat16)


@functools.cache
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def has_weight_first(x: Tensor) -> bool:
    """Return whether the kernel for Hopper can run on the device of ``x``."""
    version = ".".join(triton.__version__.split(".")[:2])
    return x.is_cuda and not INTERPRET.value and version in GLUON_VERSIONS and _hopper(x.device)


def multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 132


def uses_tf32(x: Tensor) -> bool:
    """Return whether matmuls of ``x`` use TF32, which a capture fixes; Triton's interpreter follows the setting too."""
    return x.dtype == torch.float32 and tf32_allowed() and (not x.is_cuda or has_tf32(x.device))


def scan_key(kind: str, direction: str, x: Tensor, *more: Any) -> Hashable:
    """Return the key of all that a scan's graphs depend on: input ``x`` ``(T, B, ...)``, tuning, and ``more``."""
    B = x.shape[1]
    return kind, direction, x.device, x.dtype, B, uses_tf32(x), triton_launch.PDL, splits(direction, B, x.dtype), *more


class ScanSteps:
    """One direction of a scan, as one matmul and one row kernel per step, with buffers at fixed addresses.

    Args:
        inputs: the tensors of a call, ``ScanInputs`` or ``GatedInputs``.
        num_gates: row blocks of the weight.
        draws: whether there is a seed.
        graphed: whether graphs will capture the steps, which then read addresses from a table.
        bf16x3: whether to hold each float32 operand as three bfloat16 operands.
    """

    direction: str
    stride: int
    """+1 forward: the row kernel reads the matmul's result. -1 backward: the row kernel runs first."""
    flags: dict[str, Any]
    matmul: StepMatmul

    def __init__(self, inputs: Any, num_gates: int, draws: bool, graphed: bool, bf16x3: bool = False) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=inputs.xp.device)

        (self.B, self.H), self.G = inputs.h0.shape, num_gates
        self.bf16x3, self.pieces = bf16x3, 3 if bf16x3 else 1
        self.HP = padded(self.H)
        self.table = empty(TABLE_SLOTS, dtype=torch.int64) if graphed else None
        self.weight = empty(self.G * self.HP, self.pieces * self.HP, dtype=BF16 if bf16x3 else inputs.xp.dtype)
        self.weight.zero_()  # padding stays zero
        self.h0 = empty(self.B, self.H)
        self.lengths = None if inputs.lengths is None else empty(self.B, dtype=torch.int64)
        self.seed = empty(1, dtype=torch.int64) if draws else None
        self.T = 0
        self.given: tuple[Tensor | None, ...] = ()

    def load(self, inputs: Any, *given: Tensor | None) -> None:
        """Load a call's data; ``given`` holds the row kernel's tensors over all steps."""
        G, H, pieces = self.G, self.H, self.pieces
        weight = split_right(inputs.weight_hh) if self.bf16x3 else inputs.weight_hh
        self.weight.view(G, -1, pieces, self.HP)[:, :H, :, :H].copy_(weight.view(G, H, pieces, H))
        self.h0.copy_(inputs.h0)
        for buffer, source in ((self.lengths, inputs.lengths), (self.seed, inputs.seed)):
            if buffer is not None:
                buffer.copy_(source)
        self.T, self.given = len(inputs.xp), given
        if self.table is not None:
            fill_table(self.table, 0 if self.stride == 1 else self.T - 1, self.T, *given)

    def tensors(self, table: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the row kernel's first arguments: the table, or None and the tensors."""
        return (table, *(self.given if table is None else [None] * len(self.given)))

    def row(self, table: Tensor | None, t: int) -> Launch:
        """Prepare the row kernel's launch, on the table's tensors or, without a table, on the given ones."""
        raise NotImplementedError

    def launches(self, t: int) -> tuple[Launch, ...]:
        return (self.matmul.prepare(), self.row(self.table, t))[:: self.stride]

    def warm_up(self) -> None:
        _, row = [enqueue() for enqueue in self.launches(0)][:: self.stride]
        direct = self.row(None, 0)()  # inside another capture, the kernel takes the addresses as arguments
        if self.flags.get("PDL") and not is_dry_run():
            prefer_shared(row)
            prefer_shared(direct)

    def release_tensors(self) -> None:
        self.given = ()
