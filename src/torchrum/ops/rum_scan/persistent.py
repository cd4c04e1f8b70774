"""lam = 0 on Hopper: a whole sequence in one launch, with weights in registers and direct exchange between blocks.

A group of blocks shares a tile of batch rows and divides the hidden units among its blocks. The kernels are in
``cuda/persistent``, where ``common.cuh`` explains the communication between blocks.
"""

import functools
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrum.ops.kernels.cuda import EMPTY_WORD, Fill, Kernel, load_kernel, nvrtc_obstacle, shared_mailboxes
from torchrum.ops.kernels.linear import recurrent_weight_gradient, tf32_allowed
from torchrum.ops.kernels.masks import keep_threshold
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.types import NO_COPIES, Copies, Gradients, Residuals, Results, ScanInputs

UNITS = 32  # hidden units per block
THREADS = 512
MAX_HIDDEN = {torch.bfloat16: 1024, torch.float16: 1024, torch.float32: 512}
"""Largest hidden size: a block's share of the weights must fit in its registers, its operands in shared memory."""
MIN_HIDDEN = 32
ACTIVATION_CODES = {"relu": 0, "tanh": 1, "sigmoid": 2, "softsign": 3}
ARCHITECTURE = "sm_90a"  # the only target with warpgroup instructions
FLAGS = ("--use_fast_math",)
STATS = 8  # scalars per row and step that the forward saves for the backward

RESIDENT = {"forward": 12, "backward": 11}
"""Most matmul steps whose weights a thread can keep in registers without spills. A step is 32 bytes of the inner axis:
16 numbers of a 16-bit dtype or 8 of float32."""
WIDE_RESIDENT = {"forward": (14, 14, 10, 10), "backward": (12, 12, 9, 9)}
"""The same for float32, by the height of the batch tile in units of 8 rows."""
ROW_BLOCKS: tuple[int, ...] = (1, 2, 3, 4)
"""Possible heights of a batch tile, in units of 8 rows."""
WGMMA_ROW_BLOCKS = 4
"""Height from which the forward uses Hopper's warpgroup instruction; mma.sync is as fast on lower tiles."""


@dataclass(frozen=True)
class Plan:
    """The layout of one problem on the device; everything but B, T and N is compiled in."""

    defines: tuple[tuple[str, int], ...]
    """Macros for the compilation of a kernel, before the changes of ``macros``."""
    padded: int
    """Hidden units, rounded up to a number that divides evenly among the warps of a matmul."""
    row_blocks: int
    """Height of a batch tile, in units of 8 rows."""
    wide: bool
    """Whether the dtype is float32."""
    group: int
    """Blocks that share a tile."""
    tiles: int
    groups: int
    """Groups of blocks that are resident at once; each processes its share of the tiles."""

    def __hash__(self) -> int:
        return hash((self.padded, self.row_blocks, self.tiles, self.groups))  # few fields, since every launch needs it

    @property
    def rows(self) -> int:
        return 8 * self.row_blocks

    @property
    def waves(self) -> int:
        """Number of passes over the sequence; 1 if the whole batch is resident."""
        return -(-self.tiles // self.groups)

    @property
    def board_words(self) -> int:
        return self.row_blocks * self.group * 32

    @property
    def sums_bias(self) -> bool:
        """Whether the backward has enough registers to sum the bias's gradient, as ``SUMS_BIAS`` in backward.cu."""
        inner_bytes = dict(self.defines)["GATES"] * self.padded * (4 if self.wide else 2)
        return inner_bytes // (32 * 8) + 2 <= max_resident("backward", self)

    def macros(self, name: str) -> tuple[tuple[str, int], ...]:
        """Return the macros of a direction: the defines, but a float32 forward always keeps all digits.

        A ReLU unit whose sign is flipped by TF32 harms the gradients far more than rounding does elsewhere.
        """
        if name == "backward" or not self.wide:
            return self.defines
        return tuple({**dict(self.defines), "TF32X3": 1}.items())

    def shared_bytes(self, name: str, gates: int) -> int:
        """Return the dynamic shared memory: the gathered operand, partial sums, row sums, and excess weights."""
        inner, scratch, splits = (self.padded, 512, 4) if name == "forward" else (gates * self.padded, 320, 8)
        inner_bytes = inner * (4 if self.wide else 2)
        extra = max(inner_bytes // (32 * splits) - max_resident(name, self), 0) * THREADS * 16
        return inner_bytes * self.rows + 8192 * self.row_blocks + 4 * scratch * 4 + extra


def find_plan(inputs: ScanInputs, options: RumOptions) -> Plan:
    """Return the plan for a scan on its device."""
    (B, N), dtype = inputs.h0.shape, inputs.xp.dtype
    blocks, lengths = machine.blocks(inputs.xp.device), inputs.lengths is not None
    make = make_plan if isinstance(B, int) else make_plan.__wrapped__  # a compiler's symbols cannot be hashed
    return make(B, N, dtype, options, lengths, blocks, tf32_allowed() if dtype == torch.float32 else False)


@functools.lru_cache(256)
def make_plan(
    B: int, N: int, dtype: torch.dtype, options: RumOptions, with_lengths: bool, blocks: int, tf32: bool
) -> Plan:
    """Return the plan with the fewest passes on ``blocks`` resident blocks and, of these, the smallest batch tile.

    float32 matmuls follow torch's setting: TF32, or three TF32 matmuls that keep all digits; see ``Plan.macros`` for
    the forward.
    """
    wide = dtype == torch.float32
    multiple = (32 if wide else 64) * (1 if options.update_gate else 2)
    padded = -(-N // multiple) * multiple
    group = padded // UNITS
    candidates = []
    for row_blocks in ROW_BLOCKS:
        tiles = -(-B // (8 * row_blocks))
        groups = min(tiles, blocks // group)
        candidates.append((-(-tiles // groups), row_blocks, tiles, groups))
    _, row_blocks, tiles, groups = min(candidates)
    zoneout = 0 if options.zoneout == 0 else 2 if options.training else 1
    defines = {
        "NP": padded,
        "NT": row_blocks,
        "GATES": options.num_gates,
        "ACTIVATION": ACTIVATION_CODES[str(options.activation)],
        "HALF_BF16": int(dtype == torch.bfloat16),
        "WIDE": int(wide),
        "TF32X3": int(wide and not tf32),
        "ETA": int(options.eta is not None),
        "ZONEOUT": zoneout,
        "LENGTHS": int(with_lengths),
        "EVEN": int(N % 2 == 0),
        "WGMMA": int(not wide and row_blocks >= WGMMA_ROW_BLOCKS),
    }
    return Plan(tuple(defines.items()), padded, row_blocks, wide, group, tiles, groups)


def max_resident(name: str, plan: Plan) -> int:
    return WIDE_RESIDENT[name][plan.row_blocks - 1] if plan.wide else RESIDENT[name]


def kernel_source(name: str, plan: Plan) -> str:
    return _source(name, max_resident(name, plan))


@functools.cache
def _source(name: str, resident: int) -> str:
    folder = Path(__file__).parent / "cuda" / "persistent"
    macros = f"#define {name.upper()} 1\n#define MAX_RESIDENT {resident}\n"
    files = ("common.cuh", "step.cuh", f"{name}.cu")
    return macros + "\n".join((folder / file).read_text() for file in files)


@functools.lru_cache(256)
def _kernel(name: str, plan: Plan, device: int) -> Kernel:
    source, macros = kernel_source(name, plan), plan.macros(name)
    return load_kernel(source, f"rum_persistent_{name}", macros, device, ARCHITECTURE, FLAGS)


class Gpu:
    """The GPU, with kernels compiled by the NVRTC that torch ships."""

    def blocks(self, device: torch.device) -> int:
        return resident_blocks(device)

    def kernel(self, name: str, plan: Plan, device: torch.device) -> Kernel:
        return _kernel(name, plan, torch.cuda.current_device() if device.index is None else device.index)

    def mailboxes(self, xp: Tensor, words: int) -> Tensor | None:
        return shared_mailboxes(xp, words)


@functools.cache
def resident_blocks(device: torch.device) -> int:
    """Return the number of blocks that are resident at once: one per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


machine = Gpu()
"""The machine that runs the kernels; the CPU tests replace it by an emulator."""


def obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """Return the reason why the persistent kernels cannot run this scan, or None."""
    xp = inputs.xp
    if xp.device.type != "cuda":
        return f"the input is on {xp.device.type}"
    reason = shape_obstacle(inputs, options) or nvrtc_obstacle()
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(xp.device)[0] != 9:
        return "the persistent kernels are made for compute capability 9"
    B, N = inputs.h0.shape
    if machine.blocks(xp.device) * UNITS < N + 127:
        return "the device has too few multiprocessors for one group of blocks"
    if find_plan(inputs, options).waves > 1:  # each wave is a pass over the whole sequence
        return f"a batch of {B} rows does not fit on the device at once"
    return None


def shape_obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """Return the reason why the kernels cannot run this scan on any device, or None."""
    xp, N = inputs.xp, inputs.h0.shape[-1]
    if options.keeps_rotation:
        return "the persistent kernels know lam=0 only"
    if options.layer_norm:
        return "the persistent kernels have no layer norm"
    if options.activation not in ACTIVATION_CODES or options.target_activation is not None:
        return f"the persistent kernels know the activations {', '.join(ACTIVATION_CODES)} alone"
    if xp.dtype not in MAX_HIDDEN:
        return f"the dtype is {xp.dtype}, and the kernels take float32, bfloat16 and float16"
    if not MIN_HIDDEN <= N <= MAX_HIDDEN[xp.dtype]:
        return f"the persistent kernels take {MIN_HIDDEN} to {MAX_HIDDEN[xp.dtype]} hidden units of {xp.dtype}, not {N}"
    if xp.numel() == 0:
        return "the input is empty"
    if xp.shape[1] * xp.shape[2] >= 2**31:
        return "one step of the input has 2^31 elements or more"
    return None


def empty_results(inputs: ScanInputs, options: RumOptions) -> Results:
    """Allocate the results of ``forward``, with the raw gates and the scalars per row and step."""
    xp, (T, B, _), N = inputs.xp, inputs.xp.shape, inputs.h0.shape[-1]
    gates, stats = xp.new_empty(T, B, inputs.weight_hh.shape[0]), xp.new_empty(T, B, STATS, dtype=torch.float32)
    return Results(xp.new_empty(T, B, N), None, Residuals(gates, stats))


class Layout(NamedTuple):
    """The layout of a launch, without its tensors."""

    words: int
    """Size of the mailboxes, in 32-bit words."""
    mailbox_offsets: tuple[int, ...]
    """Byte offsets of the mailboxes; at the last one are counters of the blocks that have finished reading."""
    form: struct.Struct
    """Format of the pointers at the start of the kernel's single argument."""
    numbers: bytes
    """The rest of the argument: six integers, two doubles and in the forward another integer, eight bytes each."""
    shared_bytes: int
    sums_bias: bool


def lay_out(name: str, plan: Plan, sizes: tuple[int, int, int], options: RumOptions, features: int) -> Layout:
    """Return the layout for kernel ``name``, ``sizes`` (T, B, N) and the number of ``features`` of an x to project."""
    (T, _, _), gates, board = sizes, options.num_gates, plan.tiles * plan.board_words
    tile_words = plan.tiles * plan.padded * plan.rows * (4 if plan.wide else 2) // 4
    mailbox_sizes: tuple[int, ...]
    if name == "forward":
        mailbox_sizes = (T * tile_words, T * board, (T + 1) * board, *((T * board,) if plan.wide else ()))
    else:
        shares = (plan.groups * plan.group * options.num_inputs * UNITS,) if plan.sums_bias else ()
        mailbox_sizes = (T * gates * tile_words, T * board, *shares)
    ends = (0, *itertools.accumulate((*mailbox_sizes, plan.tiles)))  # mailboxes are multiples of 128 bytes
    numbers = (*sizes, plan.tiles, plan.groups, keep_threshold(options.zoneout), options.eta or 0.0, options.zoneout)
    pointers = 14 + len(mailbox_sizes)
    form, rest = struct.Struct(f"={pointers}Q"), struct.pack("=6q2d", *numbers)
    if name == "forward":
        rest += struct.pack("=q", features)
    mailbox_offsets, shared_bytes = tuple(4 * end for end in ends[:-1]), plan.shared_bytes(name, gates)
    return Layout(ends[-1], mailbox_offsets, form, rest, shared_bytes, plan.sums_bias)


class Prepared(NamedTuple):
    """The layout of a launch, its kernel and the number of blocks."""

    layout: Layout
    kernel: Kernel
    blocks: int


def _find(name: str, inputs: ScanInputs, options: RumOptions, features: int = 0) -> Prepared:
    """Return the prepared launch of kernel ``name``; ``features`` is that of an x to project, 0 if xp is given."""
    xp = inputs.xp
    tf32 = name == "backward" and xp.dtype is torch.float32 and tf32_allowed()  # see Plan.macros
    flags = inputs.lengths is not None, tf32
    return _prepare(name, machine, xp.device, xp.shape, features, xp.dtype, options, flags)


@functools.lru_cache(512)
def _prepare(
    name: str,
    gpu: Any,
    device: torch.device,
    shape: tuple[int, int, int],
    features: int,
    dtype: torch.dtype,
    options: RumOptions,
    flags: tuple[bool, bool],
) -> Prepared:
    """Prepare a launch; the result is cached by everything that it depends on.

    ``gpu`` is the machine and ``shape`` the shape of xp. ``flags`` are whether there are lengths and whether TF32 is
    allowed.
    """
    (T, B, width), (with_lengths, tf32) = shape, flags
    N = width // options.num_inputs
    plan = make_plan(B, N, dtype, options, with_lengths, gpu.blocks(device), tf32)
    layout = lay_out(name, plan, (T, B, N), options, features)
    return Prepared(layout, gpu.kernel(name, plan, device), plan.group * plan.groups)


def forward(
    inputs: ScanInputs,
    options: RumOptions,
    save: bool = True,
    copies: Copies = NO_COPIES,
    bias: Tensor | None = None,
    x: Tensor | None = None,
    weight_ih: Tensor | None = None,
) -> Results:
    """Run the scan and fill ``copies``; without ``save`` there are no residuals.

    ``bias``, ``(3H,)``, is added to ``xp`` as it is read. If ``x`` ``(T, B, I)``, float32, is given, ``inputs.xp`` is a
    buffer that is filled with ``x weight_ih^T``.
    """
    xp = inputs.xp
    read = _readable(xp.dtype, xp, bias, inputs.weight_hh, x, weight_ih)
    if save:
        results = empty_results(inputs, options)
    else:
        results = Results(xp.new_empty(*xp.shape[:2], inputs.h0.shape[1]), None)
    layout, kernel, blocks = _find("forward", inputs, options, 0 if x is None else x.shape[2])
    mailboxes, fills = _mailboxes(xp, layout.words)
    tensors = (*read, *_row_inputs(inputs), results.out, *copies[:2], *results.residuals)
    args = _fill_in(layout, mailboxes, tensors, clear=not fills)
    kernel.launch(blocks, THREADS, layout.shared_bytes, [args], cooperative=True, fills=fills)
    return results


def backward(
    grad_out: Tensor,
    grad_R: None,
    inputs: ScanInputs,
    results: Results,
    options: RumOptions,
    need_R0: bool,
    bias: Tensor | None = None,
    need_bias: bool = False,
) -> Gradients:
    """Compute the gradients of the inputs, without R and layer norm, which this design does not have.

    ``bias`` is the argument of ``forward``. Its gradient is returned if it is needed and there are enough registers.
    """
    (gates, stats), from_zero = results.residuals, inputs.from_zero
    xp, weight, out = inputs.xp, inputs.weight_hh, results.out
    assert stats is not None
    read = _readable(xp.dtype, bias, grad_out, xp, weight, out, gates)
    layout, kernel, blocks = _find("backward", inputs, options)
    # new_empty from integers is twice as fast as from a torch.Size
    (mailboxes, fills), dxp = _mailboxes(xp, layout.words), xp.new_empty(*xp.shape)
    dh0 = None if from_zero else xp.new_empty(out.shape[1:], dtype=torch.float32)
    dbias = xp.new_empty(xp.shape[2]) if need_bias and layout.sums_bias else None
    # keep references until the launch, since some may be copies
    tensors = (*read, stats.contiguous(), *_row_inputs(inputs), dxp, dh0, dbias)
    args = _fill_in(layout, mailboxes, tensors, clear=not fills)
    kernel.launch(blocks, THREADS, layout.shared_bytes, [args], cooperative=True, fills=fills)
    del mailboxes  # if it is not shared, later work on the stream may reuse its memory
    dweight = recurrent_weight_gradient(dxp, weight.shape[0], None if from_zero else inputs.h0, out)
    if dweight.dtype is not weight.dtype:
        dweight = dweight.to(weight.dtype)
    return Gradients(dxp, None if dh0 is None else dh0.to(inputs.h0.dtype), None, dweight, bias=dbias)


def _row_inputs(inputs: ScanInputs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return h0, lengths and seed in the form that the kernels read; h0 is None for zeros."""
    lengths = inputs.lengths
    return (
        None if inputs.from_zero else _readable(torch.float32, inputs.h0)[0],
        None if lengths is None else lengths.to(torch.int64).contiguous(),
        inputs.seed,
    )


def _readable(dtype: torch.dtype, *tensors: Tensor | None) -> list[Tensor | None]:
    """Return the tensors in the form that the kernels read: in ``dtype``, contiguous, with pairs of numbers aligned."""
    pair = 2 * dtype.itemsize
    return [
        x
        if x is None or (x.dtype is dtype and x.is_contiguous() and x.data_ptr() % pair == 0)
        else x.to(dtype, copy=True, memory_format=torch.contiguous_format)
        for x in tensors
    ]


def _mailboxes(xp: Tensor, words: int) -> tuple[Tensor, tuple[Fill, ...]]:
    """Return memory for mailboxes and the fills before the launch: none if the previous launch has cleared it."""
    shared = machine.mailboxes(xp, words)
    if shared is not None:
        return shared, ()
    mailboxes = xp.new_empty(words, dtype=torch.int32)
    return mailboxes, ((mailboxes.data_ptr(), EMPTY_WORD, words),)


def _fill_in(layout: Layout, mailboxes: Tensor, tensors: Sequence[Tensor | None], clear: bool) -> bytes:
    """Return the kernel's argument, with null pointers for tensors that are None.

    With ``clear`` the kernel restores ``mailboxes`` to its state before the launch.
    """
    first = mailboxes.data_ptr()  # views of it would take as long as conversions
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    addresses += [first + offset for offset in layout.mailbox_offsets]
    if not clear:
        addresses[-1] = 0
    return layout.form.pack(*addresses) + layout.numbers
