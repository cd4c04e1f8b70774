"""The matrix product of a step: cuBLAS, or a kernel that leaves its partial sums to the row kernel that reads them.

A step's product is small (128 rows) and its time is that of loading the weight and of summing the parts. Splitting the
inner axis until every multiprocessor has one tile loads fastest, and the row kernel adds the parts while it loads them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import INTERPRET

SPLIT = {"forward": False, "backward": True}  # partial sums for half types; the inner axis of the backward is longer
ROWS = 128  # of a tile: larger batches go to cuBLAS, which fills the device with them
MOST_PARTS = 12
INNER = 64  # the hidden axis is padded to this


@triton.jit(do_not_specialize=["M"])
def split_product_kernel(
    left, right, parts, M,
    N: tl.constexpr, K: tl.constexpr, RIGHT_K: tl.constexpr, RIGHT_N: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``parts[s] = left[:, ks] @ right[ks]`` for the s-th share of the inner axis, CHUNKS blocks of BK long."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
    tl.store(parts + (share * M + rows[:, None]) * N + cols[None, :], total, mask=there)


@triton.jit
def load_parts(product, offset, mask, stride, PARTS: tl.constexpr):
    """The product's row from its partial sums, ``stride`` apart."""
    total = tl.load(product + offset, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(product + part * stride + offset, mask=mask, other=0.0).to(tl.float32)
    return total


class Product:
    """``left (B, K) @ right (K, N)`` at fixed addresses; ``out`` is ``(parts, B, N)``."""

    def __init__(self, left: Tensor, right: Tensor, pdl: bool, direction: str) -> None:
        self.left, self.right, self.pdl = left, right, pdl
        (B, K), N = left.shape, right.shape[1]
        self.split = splits(direction, B, left.dtype)
        self.block = 64 if N <= 2816 else 128  # wider tiles once there are enough of them
        while N % self.block:
            self.block //= 2
        self.tiles = N // self.block
        blocks = K // INNER
        shares = max(1, min(MOST_PARTS, blocks, multiprocessors(left) // self.tiles)) if self.split else 1
        self.chunks = -(-blocks // shares)
        self.parts = -(-blocks // self.chunks)  # every part has something to add
        dtype = torch.float32 if self.split else left.dtype
        self.out = torch.empty((self.parts if self.split else 1, B, N), dtype=dtype, device=left.device)

    def __call__(self) -> None:
        if not self.split:
            torch.mm(self.left, self.right, out=self.out[0])
            return
        (B, K), N = self.left.shape, self.right.shape[1]
        split_product_kernel[(self.tiles, self.parts)](
            self.left, self.right, self.out, B, N, K, *self.right.stride(), self.chunks,
            BM=ROWS, BN=self.block, BK=INNER, PDL=self.pdl, num_warps=8 if self.block == 128 else 4, num_stages=4,
            **({"launch_pdl": True} if self.pdl else {}),
        )  # fmt: skip


def splits(direction: str, B: int, dtype: torch.dtype) -> bool:
    """Whether the product is left in parts; float32 follows torch's precision settings, so it goes to cuBLAS."""
    return SPLIT[direction] and B <= ROWS and dtype in (torch.float16, torch.bfloat16)


def multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 132
