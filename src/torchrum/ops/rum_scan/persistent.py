"""lam = 0 on Hopper, the whole sequence in one launch: weights stay in registers, blocks exchange states directly.

A group of blocks shares a tile of batch rows and splits the hidden units. The kernels are in ``cuda/persistent``, where
``common.cuh`` explains how the blocks communicate.
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

from torchrum.ops.kernels.cuda import EMPTY, Fill, Kernel, kept_mail, load_kernel, nvrtc_obstacle
from torchrum.ops.kernels.linear import recurrent_weight_gradient, tf32_allowed
from torchrum.ops.kernels.masks import keep_threshold
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.types import NO_COPIES, Copies, Gradients, Residuals, Results, ScanInputs

UNITS = 32  # hidden units a block owns
THREADS = 512
MAX_HIDDEN = {torch.bfloat16: 1024, torch.float16: 1024, torch.float32: 512}
"""A block's share of wider weights, and the operands that it gathers, do not fit its registers and shared memory."""
MIN_HIDDEN = 32
ACTIVATION_CODES = {"relu": 0, "tanh": 1, "sigmoid": 2, "softsign": 3}
ARCHITECTURE = "sm_90a"  # the only target that has the warpgroup instructions
FLAGS = ("--use_fast_math",)
STATS = 8  # row scalars that the forward leaves for the backward

RESIDENT = {"forward": 12, "backward": 11}
"""Steps of the matmul whose weights a thread keeps in registers; more than this and the compiler spills. A step is
32 bytes of the inner axis: 16 numbers of a 16-bit dtype or 8 of float32."""
WIDE_RESIDENT = {"forward": (14, 14, 10, 10), "backward": (12, 12, 9, 9)}
"""The same for float32, by the height of the batch tile in eights."""
ROW_BLOCKS: tuple[int, ...] = (1, 2, 3, 4)
"""Heights of a batch tile to choose from, in eights."""
WGMMA_ROW_BLOCKS = 4
"""Height from which the forward multiplies by Hopper's warpgroup instruction; mma.sync is as fast on lower tiles."""


@dataclass(frozen=True)
class Plan:
    """How one problem is laid out on the device; everything but B, T and N is compiled in."""

    defines: tuple[tuple[str, int], ...]
    """Macros that a kernel is compiled with, before the changes of ``macros``."""
    padded: int
    """Hidden units, rounded up to a number that the warps of a matmul share evenly."""
    row_blocks: int
    """Height of a batch tile, in eights."""
    wide: bool
    """Whether the dtype is float32."""
    group: int
    """Blocks that share a tile."""
    tiles: int
    groups: int
    """Groups of blocks that are on the device at once; each takes its share of the tiles."""

    def __hash__(self) -> int:
        return hash((self.padded, self.row_blocks, self.tiles, self.groups))  # of few numbers: needed on every launch

    @property
    def rows(self) -> int:
        return 8 * self.row_blocks

    @property
    def waves(self) -> int:
        """How often the device goes through the sequence; 1 where the whole batch is resident."""
        return -(-self.tiles // self.groups)

    @property
    def board_words(self) -> int:
        return self.row_blocks * self.group * 32

    @property
    def sums_bias(self) -> bool:
        """Whether the backward has registers to sum the bias's gradient in; as ``SUMS_BIAS`` of backward.cu."""
        inner_bytes = dict(self.defines)["GATES"] * self.padded * (4 if self.wide else 2)
        return inner_bytes // (32 * 8) + 2 <= most_resident("backward", self)

    def macros(self, name: str) -> tuple[tuple[str, int], ...]:
        """The macros of a direction: its defines, but a forward in float32 keeps all digits.

        A ReLU unit whose sign TF32 flips spoils the gradients far more than the rounding does elsewhere.
        """
        if name == "backward" or not self.wide:
            return self.defines
        return tuple({**dict(self.defines), "TF32X3": 1}.items())

    def shared_bytes(self, name: str, gates: int) -> int:
        """Dynamic shared memory: the gathered operand, partial sums, row sums, weights left over."""
        inner, scratch, splits = (self.padded, 512, 4) if name == "forward" else (gates * self.padded, 320, 8)
        inner_bytes = inner * (4 if self.wide else 2)
        extra = max(inner_bytes // (32 * splits) - most_resident(name, self), 0) * THREADS * 16
        return inner_bytes * self.rows + 8192 * self.row_blocks + 4 * scratch * 4 + extra


def find_plan(inputs: ScanInputs, options: RumOptions) -> Plan:
    """``make_plan`` for a scan."""
    (B, N), dtype = inputs.h0.shape, inputs.xp.dtype
    blocks, lengths = machine.blocks(inputs.xp.device), inputs.lengths is not None
    make = make_plan if isinstance(B, int) else make_plan.__wrapped__  # a compiler's symbol cannot be looked up
    return make(B, N, dtype, options, lengths, blocks, tf32_allowed() if dtype == torch.float32 else False)


@functools.lru_cache(256)
def make_plan(
    B: int, N: int, dtype: torch.dtype, options: RumOptions, with_lengths: bool, blocks: int, tf32: bool
) -> Plan:
    """The smallest batch tile with which the batch takes the fewest passes over ``blocks`` resident blocks.

    float32 is multiplied as torch is set to: in TF32, or as three TF32 matmuls that keep its digits; see
    ``Plan.macros`` for the forward.
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


def most_resident(name: str, plan: Plan) -> int:
    return WIDE_RESIDENT[name][plan.row_blocks - 1] if plan.wide else RESIDENT[name]


def kernel_source(name: str, plan: Plan) -> str:
    return _source(name, most_resident(name, plan))


@functools.cache
def _source(name: str, resident: int) -> str:
    folder = Path(__file__).parent / "cuda" / "persistent"
    macros = f"#define {name.upper()} 1\n#define MOST_RESIDENT {resident}\n"
    files = ("common.cuh", "step.cuh", f"{name}.cu")
    return macros + "\n".join((folder / file).read_text() for file in files)


@functools.lru_cache(256)
def _kernel(name: str, plan: Plan, device: int) -> Kernel:
    source, macros = kernel_source(name, plan), plan.macros(name)
    return load_kernel(source, f"rum_persistent_{name}", macros, device, ARCHITECTURE, FLAGS)


class Gpu:
    """Compiles with the NVRTC that torch ships."""

    def blocks(self, device: torch.device) -> int:
        return resident_blocks(device)

    def kernel(self, name: str, plan: Plan, device: torch.device) -> Kernel:
        return _kernel(name, plan, torch.cuda.current_device() if device.index is None else device.index)

    def mail(self, xp: Tensor, words: int) -> Tensor | None:
        return kept_mail(xp, words)


@functools.cache
def resident_blocks(device: torch.device) -> int:
    """Blocks that are on the device at once: one per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


machine = Gpu()
"""The machine that runs the kernels; the CPU tests replace it by an emulator."""


def obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """Why the persistent kernels cannot run this scan, or None."""
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
    if find_plan(inputs, options).waves > 1:  # each would go through the whole sequence, one after the other
        return f"a batch of {B} rows does not fit on the device at once"
    return None


def shape_obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """Why the kernels cannot run such a scan on any device, or None."""
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
    """Allocate the results of ``forward``, with the raw gates and scalars of each row and step."""
    xp, (T, B, _), N = inputs.xp, inputs.xp.shape, inputs.h0.shape[-1]
    gates, stats = xp.new_empty(T, B, inputs.weight_hh.shape[0]), xp.new_empty(T, B, STATS, dtype=torch.float32)
    return Results(xp.new_empty(T, B, N), None, Residuals(gates, stats))


class Layout(NamedTuple):
    """A launch without its tensors."""

    words: int
    """32-bit words of its mailboxes."""
    places: tuple[int, ...]
    """Where among them each begins, in bytes; the last one counts the blocks that read no more."""
    form: struct.Struct
    """Of the pointers, with which the kernels' one argument begins."""
    numbers: bytes
    """The rest of it: six integers, two doubles and in the forward one more integer, eight bytes each."""
    shared_bytes: int
    sums_bias: bool


def lay_out(name: str, plan: Plan, sizes: tuple[int, int, int], options: RumOptions, features: int) -> Layout:
    """The launch of kernel ``name`` for ``sizes`` (T, B, N) and ``features`` of an x that it projects."""
    (T, _, _), gates, board = sizes, options.num_gates, plan.tiles * plan.board_words
    tile_words = plan.tiles * plan.padded * plan.rows * (4 if plan.wide else 2) // 4
    boxes: tuple[int, ...]
    if name == "forward":
        boxes = (T * tile_words, T * board, (T + 1) * board, *((T * board,) if plan.wide else ()))
    else:
        shares = (plan.groups * plan.group * options.num_inputs * UNITS,) if plan.sums_bias else ()
        boxes = (T * gates * tile_words, T * board, *shares)
    ends = (0, *itertools.accumulate((*boxes, plan.tiles)))  # boxes are multiples of 128 bytes
    numbers = (*sizes, plan.tiles, plan.groups, keep_threshold(options.zoneout), options.eta or 0.0, options.zoneout)
    pointers = 14 + len(boxes)
    form, rest = struct.Struct(f"={pointers}Q"), struct.pack("=6q2d", *numbers)
    if name == "forward":
        rest += struct.pack("=q", features)
    places, shared_bytes = tuple(4 * end for end in ends[:-1]), plan.shared_bytes(name, gates)
    return Layout(ends[-1], places, form, rest, shared_bytes, plan.sums_bias)


class Prepared(NamedTuple):
    """A launch without its tensors, and its kernel."""

    layout: Layout
    kernel: Kernel
    blocks: int


def _find(name: str, inputs: ScanInputs, options: RumOptions, features: int = 0) -> Prepared:
    """The launch of kernel ``name``; the forward projects an x of so many ``features``, 0 where xp is there."""
    xp = inputs.xp
    tf32 = name == "backward" and xp.dtype is torch.float32 and tf32_allowed()  # see Plan.macros
    flags = inputs.lengths is not None, tf32
    return _prepare(name, machine, xp.device, xp.shape, features, xp.dtype, options, flags)


@functools.lru_cache(512)
def _prepare(
    name: str,
    on: Any,
    device: torch.device,
    shape: tuple[int, int, int],
    features: int,
    dtype: torch.dtype,
    options: RumOptions,
    flags: tuple[bool, bool],
) -> Prepared:
    """``_find``, cached by everything that decides.

    ``on`` is the machine, ``shape`` that of xp; ``flags`` say whether there are lengths, and whether TF32 is allowed.
    """
    (T, B, width), (with_lengths, tf32) = shape, flags
    N = width // options.num_inputs
    plan = make_plan(B, N, dtype, options, with_lengths, on.blocks(device), tf32)
    layout = lay_out(name, plan, (T, B, N), options, features)
    return Prepared(layout, on.kernel(name, plan, device), plan.group * plan.groups)


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

    ``bias``, ``(3H,)``, is added to ``xp`` as it is read. With an ``x`` ``(T, B, I)``, float32, ``inputs.xp`` is memory
    that is filled with ``x weight_ih^T``.
    """
    xp = inputs.xp
    read = _readable(xp.dtype, xp, bias, inputs.weight_hh, x, weight_ih)
    if save:
        results = empty_results(inputs, options)
    else:
        results = Results(xp.new_empty(*xp.shape[:2], inputs.h0.shape[1]), None)
    layout, kernel, blocks = _find("forward", inputs, options, 0 if x is None else x.shape[2])
    mail, fills = _mail(xp, layout.words)
    tensors = (*read, *_row_inputs(inputs), results.out, *copies[:2], *results.residuals)
    args = _fill_in(layout, mail, tensors, clear=not fills)
    kernel.launch(blocks, THREADS, layout.shared_bytes, [args], together=True, fills=fills)
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
    """Gradients of the inputs; there is neither R nor layer norm here.

    ``bias`` is that of ``forward``. Its gradient comes along where it is needed and the registers suffice.
    """
    (gates, stats), from_zero = results.residuals, inputs.from_zero
    xp, weight, out = inputs.xp, inputs.weight_hh, results.out
    assert stats is not None
    read = _readable(xp.dtype, bias, grad_out, xp, weight, out, gates)
    layout, kernel, blocks = _find("backward", inputs, options)
    (mail, fills), dxp = _mail(xp, layout.words), xp.new_empty(*xp.shape)  # by numbers: half the time of a torch.Size
    dh0 = None if from_zero else xp.new_empty(out.shape[1:], dtype=torch.float32)
    dbias = xp.new_empty(xp.shape[2]) if need_bias and layout.sums_bias else None
    # held until the launch: there may be copies among them
    tensors = (*read, stats.contiguous(), *_row_inputs(inputs), dxp, dh0, dbias)
    args = _fill_in(layout, mail, tensors, clear=not fills)
    kernel.launch(blocks, THREADS, layout.shared_bytes, [args], together=True, fills=fills)
    del mail  # unless it is kept, later work on the stream may reuse it
    dweight = recurrent_weight_gradient(dxp, weight.shape[0], None if from_zero else inputs.h0, out)
    if dweight.dtype is not weight.dtype:
        dweight = dweight.to(weight.dtype)
    return Gradients(dxp, None if dh0 is None else dh0.to(inputs.h0.dtype), None, dweight, bias=dbias)


def _row_inputs(inputs: ScanInputs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """h0, lengths and seed as the kernels read them; no h0 for zeros."""
    lengths = inputs.lengths
    return (
        None if inputs.from_zero else _readable(torch.float32, inputs.h0)[0],
        None if lengths is None else lengths.to(torch.int64).contiguous(),
        inputs.seed,
    )


def _readable(dtype: torch.dtype, *tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors as the kernels read them: in one dtype, contiguous, and where a pair of numbers is one word."""
    pair = 2 * dtype.itemsize
    return [
        x
        if x is None or (x.dtype is dtype and x.is_contiguous() and x.data_ptr() % pair == 0)
        else x.to(dtype, copy=True, memory_format=torch.contiguous_format)
        for x in tensors
    ]


def _mail(xp: Tensor, words: int) -> tuple[Tensor, tuple[Fill, ...]]:
    """Memory for mailboxes, and what is filled before the launch: nothing where the launch before has cleared them."""
    kept = machine.mail(xp, words)
    if kept is not None:
        return kept, ()
    mail = xp.new_empty(words, dtype=torch.int32)
    return mail, ((mail.data_ptr(), EMPTY, words),)


def _fill_in(layout: Layout, mail: Tensor, tensors: Sequence[Tensor | None], clear: bool) -> bytes:
    """The kernels' argument, with null pointers for tensors that are not there.

    With ``clear`` the kernel restores ``mail`` to its state before the launch.
    """
    first = mail.data_ptr()  # views of it would cost as much as conversions
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    addresses += [first + place for place in layout.places]
    if not clear:
        addresses[-1] = 0
    return layout.form.pack(*addresses) + layout.numbers
