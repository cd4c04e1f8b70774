"""The whole lam = 0 scan in one launch: weights stay in registers, blocks exchange states directly.

A group of blocks shares a tile of batch rows and splits the hidden units. persistent.cuh says how they talk.
"""

import ctypes
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..._precision import tf32_allowed
from ..options import RumOptions
from . import nvrtc
from .weight_gradient import weight_gradient

UNITS = 32  # hidden units a block owns
THREADS = 512
MAX_HIDDEN = {torch.bfloat16: 1024, torch.float16: 1024, torch.float32: 512}
"""A block's share of wider weights, and the operands that it gathers, do not fit its registers and shared memory."""
MIN_HIDDEN = 32
ACTIVATION_CODES = {"relu": 0, "tanh": 1, "sigmoid": 2, "softsign": 3}
EMPTY = -1  # all bits set: a word that nobody has written yet
STATS = 8  # row scalars that the forward leaves for the backward

RESIDENT = {"forward": 12, "backward": 11}
"""Steps of the product whose weights a thread keeps in registers; more than this and the compiler spills. A step is
32 bytes of the inner axis: 16 half numbers or 8 of float32."""
WIDE_RESIDENT = {"forward": (14, 14, 10, 10), "backward": (12, 12, 9, 9)}
"""The same for float32, by the height of the batch tile in eights."""
ROW_BLOCKS: tuple[int, ...] = (1, 2, 3, 4)
"""Heights of a batch tile to choose from, in eights."""
WGMMA_ROW_BLOCKS = 4
"""Height from which the forward multiplies by Hopper's warpgroup instruction; mma.sync is as fast on lower tiles."""


@dataclass(frozen=True)
class Plan:
    """How one problem lies on the device; everything but B, T and N is compiled in."""

    defines: tuple[tuple[str, int], ...]
    padded: int
    row_blocks: int
    wide: bool
    group: int
    tiles: int
    groups: int

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

    def macros(self, name: str) -> tuple[tuple[str, int], ...]:
        """What a direction is compiled with: its defines, but a forward in float32 keeps all digits.

        A relu unit whose sign TF32 turns over spoils the gradients far more than the rounding does elsewhere.
        """
        if name == "backward" or not self.wide:
            return self.defines
        return tuple({**dict(self.defines), "SPLIT": 1}.items())

    def shared_bytes(self, name: str, gates: int) -> int:
        """Dynamic shared memory: the gathered operand, partial products, row sums, weights left over."""
        inner, scratch, splits = (self.padded, 512, 4) if name == "forward" else (gates * self.padded, 320, 8)
        inner_bytes = inner * (4 if self.wide else 2)
        extra = max(inner_bytes // (32 * splits) - most_resident(name, self), 0) * THREADS * 16
        return inner_bytes * self.rows + 8192 * self.row_blocks + 4 * scratch * 4 + extra


def make_plan(B: int, N: int, dtype: torch.dtype, options: RumOptions, with_lengths: bool, blocks: int) -> Plan:
    """The smallest batch tile with which the batch takes the fewest passes over ``blocks`` resident blocks.

    float32 is multiplied as torch is set to: in TF32, or split into three such products that keep its digits; see
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
        "SPLIT": int(wide and not tf32_allowed()),
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


@cache
def _source(name: str, resident: int) -> str:
    folder = Path(__file__).parent
    macros = f"#define {name.upper()} 1\n#define MOST_RESIDENT {resident}\n"
    files = ("persistent.cuh", "persistent_step.cuh", f"persistent_{name}.cu")
    return macros + "\n".join((folder / file).read_text() for file in files)


def compile_ahead(plans: Sequence[Plan]) -> None:
    """Compile both kernels of every plan, several at a time; tests and benchmarks with many plans start so."""
    jobs = {
        (kernel_source(name, plan), f"rum_persistent_{name}", plan.macros(name)) for plan in plans for name in RESIDENT
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: _compile(*job), jobs))


class Gpu:
    """Compiles with the NVRTC that torch ships and launches so that all blocks are resident, or none."""

    def blocks(self, device: torch.device) -> int:
        return resident_blocks(device)

    def launch(self, name: str, plan: Plan, args: bytes, shared: int, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        driver, grid = nvrtc._driver(), plan.group * plan.groups
        with torch.cuda.device(index):
            nvrtc._enter_context(driver, index)
            function = _function(kernel_source(name, plan), f"rum_persistent_{name}", plan.macros(name), shared, index)
            buffer = ctypes.create_string_buffer(args, len(args))
            params = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
            stream = ctypes.c_void_p(torch.cuda.current_stream(index).cuda_stream)
            size = (grid, 1, 1, THREADS, 1, 1)
            result = driver.cuLaunchCooperativeKernel(function, *size, shared, stream, params)
        nvrtc._check_driver(result, f"launching rum_persistent_{name} on {grid} blocks with {shared} bytes each")


def resident_blocks(device: torch.device) -> int:
    """Blocks that are on the device at once: one a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


machine = Gpu()
"""What runs the kernels; the CPU tests put an emulator here."""


def persistent_obstacle(xp: Tensor, options: RumOptions) -> str | None:
    """Why the persistent kernels cannot run this scan, in words, or None."""
    N = xp.shape[-1] // options.num_inputs
    if options.keeps_rotation:
        return "the persistent kernels know lam=0 only"
    if options.layer_norm:
        return "the persistent kernels have no layer norm"
    if options.activation not in ACTIVATION_CODES or options.target_activation is not None:
        return f"the persistent kernels know the activations {', '.join(ACTIVATION_CODES)} alone"
    if xp.dtype not in MAX_HIDDEN:
        return f"the persistent kernels compute in float32, bfloat16 and float16, not in {xp.dtype}"
    if not MIN_HIDDEN <= N <= MAX_HIDDEN[xp.dtype]:
        return f"the persistent kernels take {MIN_HIDDEN} to {MAX_HIDDEN[xp.dtype]} hidden units of {xp.dtype}, not {N}"
    if xp.numel() == 0:
        return "the input is empty"
    if xp[0].numel() >= 2**31:
        return "one step of the input has 2^31 elements or more"
    if xp.device.type != "cuda":
        return f"the input is on {xp.device.type}"
    if (reason := nvrtc.nvrtc_obstacle()) is not None:
        return reason
    if torch.cuda.get_device_capability(xp.device)[0] != 9:
        return "the persistent kernels are made for compute capability 9"
    if machine.blocks(xp.device) * UNITS < N + 127:
        return "the device has too few multiprocessors for one group of blocks"
    return None


def persistent_forward(
    xp: Tensor,
    h0: Tensor,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    options: RumOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """``xp`` ``(T, B, G*H)``, ``h0`` ``(B, H)`` -> out ``(T, B, H)``, raw gates and row scalars ``(T, B, 8)``."""
    assert ln_weight is None
    assert ln_bias is None
    xp = _aligned(xp)
    T, B, N = xp.shape[0], xp.shape[1], h0.shape[-1]
    plan = make_plan(B, N, xp.dtype, options, lengths is not None, machine.blocks(xp.device))
    out, gates = xp.new_empty(T, B, N), xp.new_empty(T, B, options.num_gates * N)
    stats = torch.empty(T, B, STATS, dtype=torch.float32, device=xp.device)
    state_words, board_words = plan.tiles * plan.padded * plan.rows, plan.tiles * plan.board_words
    words = [T * state_words * xp.element_size() // 4, T * board_words, (T + 1) * board_words]
    if plan.wide:
        words.append(T * board_words)
    mail = torch.full((sum(words),), EMPTY, dtype=torch.int32, device=xp.device).split(words)
    weight = _aligned(weight_hh.to(xp.dtype))
    tensors = (xp, weight, h0.float().contiguous(), _int64(lengths), seed, out, gates, stats, *mail)
    _run("forward", plan, tensors, (T, B, N), options)
    return out, gates, stats


def persistent_backward(
    grad_out: Tensor,
    xp: Tensor,
    h0: Tensor,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    gates: Tensor,
    stats: Tensor,
    options: RumOptions,
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    """Gradients of ``xp``, ``h0`` and ``weight_hh`` (layer norm has none here) from what the forward returned."""
    assert ln_weight is None
    assert ln_bias is None
    xp, out, gates = _aligned(xp), _aligned(out), _aligned(gates)
    T, B, N, G = xp.shape[0], xp.shape[1], h0.shape[-1], options.num_gates
    plan = make_plan(B, N, xp.dtype, options, lengths is not None, machine.blocks(xp.device))
    dxp, dh0 = torch.empty_like(xp), torch.empty(B, N, dtype=torch.float32, device=xp.device)
    grad_bytes = plan.tiles * G * plan.padded * plan.rows * xp.element_size()
    words = (T * grad_bytes // 4, T * plan.tiles * plan.board_words)
    mail = torch.full((sum(words),), EMPTY, dtype=torch.int32, device=xp.device)
    grads, early = mail.split(words)
    weight, grad_out = _aligned(weight_hh.to(xp.dtype)), _aligned(grad_out.to(xp.dtype))
    inputs = (grad_out, xp, weight, out, gates)
    row_inputs = (h0.float().contiguous(), stats.contiguous(), _int64(lengths), seed)
    _run("backward", plan, (*inputs, *row_inputs, dxp, dh0, grads, early), (T, B, N), options)
    return dxp, dh0.to(h0.dtype), weight_gradient(dxp, h0, out, G).to(weight_hh.dtype), None, None


def _aligned(x: Tensor) -> Tensor:
    """``x`` contiguous, and where the kernels can read pairs of its numbers."""
    x = x.contiguous()
    return x if x.data_ptr() % (2 * x.element_size()) == 0 else x.clone()


def _int64(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.int64).contiguous()


def _run(
    name: str, plan: Plan, tensors: Sequence[Tensor | None], sizes: tuple[int, int, int], options: RumOptions
) -> None:
    """Launch with the kernels' one argument: pointers, six integers and two doubles, eight bytes each."""
    device = next(x.device for x in tensors if x is not None)
    pointers = [0 if x is None else x.data_ptr() for x in tensors]
    numbers = (*sizes, plan.tiles, plan.groups, int((1 - options.zoneout) * 2**32))
    args = struct.pack(f"={len(pointers)}Q6q2d", *pointers, *numbers, options.eta or 0.0, options.zoneout)
    machine.launch(name, plan, args, plan.shared_bytes(name, options.num_gates), device)


@cache
def _function(
    source: str, entry: str, defines: tuple[tuple[str, int], ...], shared: int, device: int
) -> ctypes.c_void_p:
    """The compiled kernel on ``device``, which is current, allowed ``shared`` bytes of dynamic shared memory."""
    driver, module, function = nvrtc._driver(), ctypes.c_void_p(), ctypes.c_void_p()
    cubin = _compile(source, entry, defines)
    nvrtc._check_driver(driver.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {entry}")
    found = driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode())
    nvrtc._check_driver(found, f"finding {entry}")
    granted = driver.cuFuncSetAttribute(function, nvrtc._MAX_DYNAMIC_SHARED, shared)
    nvrtc._check_driver(granted, f"asking for {shared} bytes of shared memory")
    return function


@cache
def _compile(source: str, entry: str, defines: tuple[tuple[str, int], ...]) -> bytes:
    """Machine code for sm_90a, the only target that has the warpgroup instructions."""
    library = nvrtc._nvrtc()
    if library is None:
        raise RuntimeError(f"cannot compile {entry}: {nvrtc.nvrtc_obstacle()}.")
    program, none = ctypes.c_void_p(), ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{entry}.cu".encode(), 0, none, none)
    options = [
        b"--gpu-architecture=sm_90a",
        b"--std=c++17",
        b"--use_fast_math",
        *(f"-D{key}={value}".encode() for key, value in defines),
    ]
    try:
        if library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            log = nvrtc._read_out(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise RuntimeError(f"NVRTC could not compile {entry} with {options}: {log.decode(errors='replace')}")
        return nvrtc._read_out(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
