"""The matmul of a step: cuBLAS, or a kernel whose partial sums are added by the row kernel; a scan's buffers around it.

A step's matmul is small (128 rows) and its time goes into loading the weight and summing the parts. Splitting the
inner axis until every multiprocessor has one tile loads fastest, and the row kernel adds the parts while it loads them.
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
    padded,
    prefer_shared,
    prepare,
    rehearsing,
)

# Tuning, read when a matmul is made. SPLIT_K takes the portable kernel, WEIGHT_FIRST the one for Hopper.
SPLIT_K = {"forward": False, "backward": True}  # for 16-bit dtypes; the inner axis of the backward is longer
WEIGHT_FIRST = {"forward": True, "backward": True}  # where it can run
BLOCK = {"forward": 0, "backward": 0}  # columns of a tile; 0 chooses
WARPS = {"forward": 8, "backward": 8}  # of the kernel for Hopper; the portable one takes 8 for 128 columns
STAGES = 5  # blocks of the left factor in flight
ROWS = 128  # of a tile: larger batches go to cuBLAS, which fills the device with them
MOST_PARTS = 12
PART_WEIGHT = 4  # of a part's bytes against others: the row kernel waits for them (measured at 704 and 1024 units)
ROW_SHARED = 16 * 1024  # bytes left over for the row kernel beside it
INNER = 64  # the hidden axis is padded to this
GLUON_VERSIONS = ("3.6",)  # of Triton; the language of the kernel for Hopper changes from one to the next


@triton.jit(do_not_specialize=["M"])
def split_k_kernel(
    left, right, parts, M,
    N: tl.constexpr, K: tl.constexpr, RIGHT_K: tl.constexpr, RIGHT_N: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``parts[s] = left[:, ks] @ right[ks]`` for the s-th share of the inner axis, CHUNKS blocks of BK long."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # not before: the next kernel may read what was written before this one
    share = tl.program_id(1)
    rows = tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    inner = share * (CHUNKS * BK) + tl.arange(0, BK)
    there = rows[:, None] < M
    left += rows[:, None] * K + inner[None, :]
    right += inner[:, None] * RIGHT_K + cols[None, :] * RIGHT_N
    total = tl.zeros([BM, BN], tl.float32)
    for chunk in range(CHUNKS):
        if K % (CHUNKS * BK) == 0:
            a = tl.load(left, mask=there, other=0.0)
            b = tl.load(right)
        else:  # the last share may be short
            inside = inner + chunk * BK < K
            a = tl.load(left, mask=there & inside[None, :], other=0.0)
            b = tl.load(right, mask=inside[:, None], other=0.0)
        if INTERPRET:  # whose dot takes bfloat16 for integers
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
        left += BK
        right += BK * RIGHT_K
    parts += (share * M + rows[:, None]) * N + cols[None, :]
    tl.store(parts, total.to(parts.dtype.element_ty), mask=there)


@triton.jit
def fetch_parts(parts, offset, mask, stride, PARTS: tl.constexpr):
    """The partial sums of a matmul's row, ``stride`` apart, for ``add_parts``: every load on its way before a use."""
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
    """The matmul's row from its partial sums, ``stride`` apart."""
    return add_parts(fetch_parts(parts, offset, mask, stride, PARTS), PARTS)


@dataclass(frozen=True)
class Tiling:
    """How a matmul is cut: ``tiles`` of ``block`` columns times ``parts`` of ``chunks`` inner blocks."""

    block: int
    tiles: int
    chunks: int
    parts: int

    def traffic(self, B: int, processors: int, size: int) -> int:
        """Weighted bytes in a step's way because of the cut: what a tile loads of the left factor and stores, on all
        multiprocessors whether they have one or not, and the parts that the row kernel loads."""
        tile = self.chunks * INNER * ROWS * 2 + ROWS * self.block * size
        return processors * tile + PART_WEIGHT * self.parts * B * self.tiles * self.block * size

    def stages(self, shared: int) -> int:
        """Blocks of the left factor that fit in shared memory beside the tile's whole share of the weight."""
        return min(self.chunks, STAGES, (shared - self.chunks * self.block * INNER * 2) // (ROWS * INNER * 2))


def tiling(B: int, K: int, N: int, processors: int, size: int, block: int = 0) -> Tiling:
    """The cut with the least traffic that gives every multiprocessor one tile; ``size`` of a partial sum in bytes."""
    found = []
    for width in (block,) if block else (128, 64, 32):
        if N % width and width > 32:
            continue
        blocks, tiles = K // INNER, triton.cdiv(N, width)
        shares = max(1, min(MOST_PARTS, blocks, processors // tiles))
        chunks = triton.cdiv(blocks, shares)
        found.append(Tiling(width, tiles, chunks, triton.cdiv(blocks, chunks)))  # every part has something to add
    return min(found, key=lambda cut: cut.traffic(B, processors, size)) if found else tiling(B, K, N, processors, size)


class StepMatmul:
    """``left (B, K) @ right (K, N)`` at fixed addresses; ``out`` is ``(parts, B, N)``, in ``summed`` if it is given."""

    def __init__(
        self, left: Tensor, right: Tensor, pdl: bool, direction: str, summed: torch.dtype | None = None
    ) -> None:
        self.left, self.right, self.pdl = left, right, pdl
        (B, K), N = self.sizes = left.shape, right.shape[1]
        self.parts, summed = 1, summed or left.dtype  # parts are rounded as cuBLAS rounds their sum
        self.split_k = self.weight_first = False
        if splits(direction, B, left.dtype):
            self.tiling = tiling(B, K, N, multiprocessors(left), summed.itemsize, BLOCK[direction])
            self.warps = WARPS[direction]
            self.weight_first = self._prepare_weight_first(direction)
            self.split_k = self.weight_first or SPLIT_K[direction]
            if self.split_k:
                self.parts = self.tiling.parts
        self.out = torch.empty((self.parts, B, N), dtype=summed, device=left.device)
        multiply = torch.mm if summed == left.dtype else matmul_16bit
        self.by_cublas = None if self.split_k else functools.partial(multiply, left, right, out=self.out[0])

    def _prepare_weight_first(self, direction: str) -> bool:
        if not WEIGHT_FIRST[direction] or not has_weight_first(self.left):
            return False
        shared = triton.runtime.driver.active.utils.get_device_properties(self.left.device.index)["max_shared_mem"]
        self.stages = self.places = self.tiling.stages(shared - ROW_SHARED)
        if self.stages < min(2, self.tiling.chunks):
            return False
        # with more than half of the memory a multiprocessor holds no second tile, not even while one ends
        more_than_half = shared // 2 + 4096 - self.tiling.chunks * self.tiling.block * INNER * 2
        self.places = max(self.places, triton.cdiv(more_than_half, ROWS * INNER * 2))
        from torchrum.ops.kernels.matmul_hopper import descriptor

        inner_last = self.right.stride(0) == 1
        weight = self.right.t() if inner_last else self.right
        shape = (self.tiling.block, INNER) if inner_last else (INNER, self.tiling.block)
        self.descriptors = descriptor(self.left, ROWS, INNER), descriptor(weight, *shape)
        self.inner_last = inner_last
        return True

    def prepare(self) -> Launch:
        """Prepare the launch that multiplies the values of ``left`` and ``right`` at that time."""
        if self.by_cublas is not None:
            return self.by_cublas
        ((B, K), N), cut = self.sizes, self.tiling
        dependent = {"launch_pdl": True} if self.pdl else {}
        if self.weight_first:
            from torchrum.ops.kernels.matmul_hopper import weight_first_kernel

            return prepare(
                weight_first_kernel, (cut.tiles, cut.parts), *self.descriptors, self.out, B, N=N, CHUNKS=cut.chunks,
                STAGES=self.stages, PLACES=self.places, BN=cut.block, INNER_LAST=self.inner_last, PDL=self.pdl,
                num_warps=self.warps, **dependent,
            )  # fmt: skip
        return prepare(
            split_k_kernel, (cut.tiles, cut.parts), self.left, self.right, self.out, B, N, K,
            *self.right.stride(), cut.chunks, BM=ROWS, BN=cut.block, BK=INNER, PDL=self.pdl,
            num_warps=8 if cut.block == 128 else 4, num_stages=4, **dependent,
        )  # fmt: skip


def splits(direction: str, B: int, dtype: torch.dtype) -> bool:
    """Whether the matmul may be left in parts; float32 follows torch's precision settings, so it goes to cuBLAS."""
    wanted = SPLIT_K[direction] or WEIGHT_FIRST[direction]
    return wanted and B <= ROWS and dtype in (torch.float16, torch.bfloat16)


@functools.cache
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def has_weight_first(x: Tensor) -> bool:
    """Whether the kernel for Hopper can run on ``x``'s device."""
    version = ".".join(triton.__version__.split(".")[:2])
    return x.is_cuda and not INTERPRET.value and version in GLUON_VERSIONS and _hopper(x.device)


def multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 132


def rounded(x: Tensor) -> bool:
    """Whether matmuls of ``x`` are TF32, which a capture fixes; Triton's interpreter follows the setting."""
    return x.dtype == torch.float32 and tf32_allowed() and (not x.is_cuda or has_tf32(x.device))


def scan_key(kind: str, direction: str, x: Tensor, *more: Any) -> Hashable:
    """Key of everything that a scan's graphs depend on: input ``x`` ``(T, B, ...)``, tuning, and ``more``."""
    B = x.shape[1]
    return kind, direction, x.device, x.dtype, B, rounded(x), triton_launch.PDL, splits(direction, B, x.dtype), *more


class ScanSteps:
    """One direction of a scan by one matmul and one row kernel per step, with buffers at fixed addresses.

    Args:
        inputs: the tensors of a call: its ``ScanInputs`` or ``GatedInputs``.
        num_gates: row blocks of the weight.
        draws: whether there is a seed.
        graphed: whether graphs will capture the steps, which then read addresses from a table.
        bf16x3: hold float32 operands as three of bfloat16.
    """

    direction: str
    stride: int
    """+1 forward, where the row kernel reads the matmul's result; -1 backward, where it comes first."""
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
        """Load a call's data; ``given`` are the row kernel's tensors over all steps."""
        G, H, pieces = self.G, self.H, self.pieces
        weight = split_right(inputs.weight_hh) if self.bf16x3 else inputs.weight_hh
        self.weight.view(G, -1, pieces, self.HP)[:, :H, :, :H].copy_(weight.view(G, H, pieces, H))
        self.h0.copy_(inputs.h0)
        for mine, theirs in ((self.lengths, inputs.lengths), (self.seed, inputs.seed)):
            if mine is not None:
                mine.copy_(theirs)
        self.T, self.given = len(inputs.xp), given
        if self.table is not None:
            fill_table(self.table, 0 if self.stride == 1 else self.T - 1, self.T, *given)

    def tensors(self, table: Tensor | None) -> tuple[Tensor | None, ...]:
        """The row kernel's first arguments: a table, or no table and the tensors themselves."""
        return (table, *(self.given if table is None else [None] * len(self.given)))

    def row(self, table: Tensor | None, t: int) -> Launch:
        """Prepare the row kernel's launch on the table's tensors, or without a table on those given."""
        raise NotImplementedError

    def launches(self, t: int) -> tuple[Launch, ...]:
        return (self.matmul.prepare(), self.row(self.table, t))[:: self.stride]

    def warm_up(self) -> None:
        _, row = [enqueue() for enqueue in self.launches(0)][:: self.stride]
        direct = self.row(None, 0)()  # a capture around the scan records the addresses instead
        if self.flags.get("PDL") and not rehearsing():
            prefer_shared(row)
            prefer_shared(direct)

    def forget(self) -> None:
        self.given = ()
