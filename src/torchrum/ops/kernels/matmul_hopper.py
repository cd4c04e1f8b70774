"""The split-K matmul for Hopper: each tile loads its whole share of the weight before it waits for the state.

The state depends on the previous kernel, the weight does not. Under dependent launch this kernel starts while the row
kernel is still running, so the weight, half of the traffic, is loaded when the state arrives. It is written in Gluon,
which gives explicit control of shared memory, bulk copies and tensor-core instructions.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_predecessor():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["M"])
def weight_first_kernel(
    left, right, parts, M,
    N: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, BN: gl.constexpr,
    INNER_LAST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute ``parts[s] = left[:, ks] @ right[ks]`` for the s-th share of the inner axis, CHUNKS blocks of BK long.

    ``left`` and ``right`` are descriptors; right's block is (BN, BK) if the inner axis is its last, else (BK, BN).
    Elements outside of them are zero, so the last share may be short. ``STAGES`` blocks of left are in flight. There is
    space for ``SLOTS`` blocks: more than ``STAGES`` if a multiprocessor must not hold a second tile.
    """
    BM: gl.constexpr = left.block_shape[0]
    BK: gl.constexpr = left.block_shape[1]
    dtype: gl.constexpr = left.dtype
    share = gl.program_id(1)
    col = gl.program_id(0) * BN
    inner = share * (CHUNKS * BK)
    a = gl.allocate_shared_memory(dtype, [SLOTS, BM, BK], left.layout)
    b = gl.allocate_shared_memory(dtype, [CHUNKS] + right.block_shape, right.layout)  # noqa: RUF005
    a_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    b_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(b_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(a_ready.index(stage), count=1)
    fence_async_shared()

    mbarrier.expect(b_ready, CHUNKS * right.block_type.nbytes)
    for chunk in gl.static_range(CHUNKS):
        if INNER_LAST:
            tma.async_copy_global_to_shared(right, [col, inner + chunk * BK], b_ready, b.index(chunk))
        else:
            tma.async_copy_global_to_shared(right, [inner + chunk * BK, col], b_ready, b.index(chunk))
    for stage in gl.static_range(STAGES):
        mbarrier.expect(a_ready.index(stage), left.block_type.nbytes)
    if PDL:
        wait_for_predecessor()
        launch_dependents()  # after the wait: the next kernel may read what earlier kernels wrote
    for stage in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(left, [0, inner + stage * BK], a_ready.index(stage), a.index(stage))

    accumulator: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BN, 16]
    )
    total = gl.zeros([BM, BN], gl.float32, accumulator)
    mbarrier.wait(b_ready, 0)
    for chunk in gl.static_range(CHUNKS):
        mbarrier.wait(a_ready.index(chunk % STAGES), (chunk // STAGES) & 1)
        weight = b.index(chunk)
        if INNER_LAST:
            weight = weight.permute((1, 0))
        total = warpgroup_mma(a.index(chunk % STAGES), weight, total, is_async=True)
        if chunk > 0 and chunk - 1 + STAGES < CHUNKS:  # refill the previous block's place, once all warps have read it
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
            gl.thread_barrier()
            free = (chunk - 1) % STAGES
            mbarrier.expect(a_ready.index(free), left.block_type.nbytes)
            offset = inner + (chunk - 1 + STAGES) * BK
            tma.async_copy_global_to_shared(left, [0, offset], a_ready.index(free), a.index(free))
    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))

    VECTOR: gl.constexpr = 16 * 8 // parts.dtype.element_ty.primitive_bitwidth
    ACROSS: gl.constexpr = BN // VECTOR if BN // VECTOR < 32 else 32
    wide: gl.constexpr = gl.BlockedLayout(
        size_per_thread=[1, VECTOR], threads_per_warp=[32 // ACROSS, ACROSS], warps_per_cta=[gl.num_warps(), 1],
        order=[1, 0],
    )  # fmt: skip
    total = gl.convert_layout(total.to(parts.dtype.element_ty), wide)
    rows = gl.arange(0, BM, gl.SliceLayout(1, wide))
    cols = col + gl.arange(0, BN, gl.SliceLayout(0, wide))
    gl.store(parts + (share * M + rows[:, None]) * N + cols[None, :], total, mask=rows[:, None] < M)


def descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Return a descriptor of ``x``, at its current address, for bulk copies of blocks (rows, cols)."""
    element = {2: gl.float16, 4: gl.float32}[x.element_size()]  # the layout depends only on the size
    return TensorDescriptor.from_tensor(x, [rows, cols], gl.NVMMASharedLayout.get_default_for([rows, cols], element))
