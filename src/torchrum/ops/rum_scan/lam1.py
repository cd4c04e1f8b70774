"""lam = 1 on the GPU: a whole sequence in one launch, one block per batch row, with the memory R in registers.

The kernels are in ``cuda/lam1``: ``forward.cu``, ``gates.cu``, ``backward.cu`` and ``replay.cu``, all based on
``common.cu``. The README there explains them.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchrum.ops.kernels.cuda import Kernel, load_kernel, nvrtc_obstacle
from torchrum.ops.kernels.linear import recurrent_weight_gradient
from torchrum.ops.kernels.machine import constant_when_traced
from torchrum.ops.kernels.masks import keep_threshold
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.types import NO_COPIES, Copies, Gradients, Residuals, Results, ScanInputs

MAX_HIDDEN = 128
"""Largest hidden size N: three N x N matrices of float32 must fit in one multiprocessor's registers."""
CHECKPOINT_EVERY = 512
"""Steps over which the backward reconstructs R in reverse before it loads a checkpoint."""
GATE_BLOCKS = 512
"""Blocks that share the rows of the recomputed gates: several per multiprocessor."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {"relu": 1, "tanh": 2, "sigmoid": 3, "softsign": 4}


class Layout(NamedTuple):
    """The layout of a kernel for one size and one set of options; mirrors the constants of ``common.cu``."""

    macros: tuple[tuple[str, int], ...]
    threads: int
    shared_floats: int


def rows_per_thread(hidden: int) -> int:
    """Return the rows per thread: few rows keep more warps busy, many rows load each vector less often."""
    return 2 if hidden <= 64 else 4


def obstacle(inputs: ScanInputs, options: RumOptions) -> str | None:
    """Return the reason why the lam = 1 kernels cannot run this scan, or None."""
    xp, hidden = inputs.xp, inputs.h0.shape[-1]
    if xp.device.type != "cuda":
        return f"the input is on {xp.device.type}"
    if options.lam != 1:
        return f"lam is {options.lam}, and the kernels are written for lam 1"
    if xp.dtype not in DTYPES:
        return f"the dtype is {xp.dtype}, and the kernels take float32, bfloat16 and float16"
    if options.activation not in ACTIVATIONS:
        return f"activation is {options.activation!r}, and the kernels know only " + ", ".join(ACTIVATIONS)
    if not 1 <= hidden <= MAX_HIDDEN:
        return f"the lam=1 kernel holds hidden sizes up to {MAX_HIDDEN} on chip, and this one is {hidden}"
    if (reason := nvrtc_obstacle()) is not None:
        return reason
    needed = (
        4 * _make_layout("backward", hidden, xp.dtype, options, rows_per_thread(hidden), CHECKPOINT_EVERY).shared_floats
    )
    available = shared_bytes(xp.device)
    if available is not None and needed > available:
        return f"the lam=1 kernel needs {needed} bytes of shared memory, and the device grants {available}"
    return None


@constant_when_traced
def shared_bytes(device: torch.device) -> int | None:
    """Return the shared memory that the device grants a block, or None if torch does not report it."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)


def empty_results(inputs: ScanInputs, options: RumOptions) -> Results:
    """Allocate the results of ``forward``; only checkpoints of R are saved, since the gates are recomputed."""
    xp, (T, B), H = inputs.xp, inputs.xp.shape[:2], inputs.h0.shape[-1]
    R = xp.new_empty(B, H, H, dtype=torch.float32)
    return Results(xp.new_empty(T, B, H), R, Residuals(None, R.new_empty((T - 1) // CHECKPOINT_EVERY, B, H, H)))


def forward(
    inputs: ScanInputs,
    options: RumOptions,
    save: bool = True,
    copies: Copies = NO_COPIES,
    bias: Tensor | None = None,
) -> Results:
    """Run the scan and fill ``copies``; without ``save``, or in a short sequence, there are no checkpoints."""
    xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed = inputs
    (T, B, _), H = xp.shape, h0.shape[-1]
    out, R_n = xp.new_empty(T, B, H), xp.new_empty(B, H, H, dtype=torch.float32)
    segments = (max(T, 1) - 1) // CHECKPOINT_EVERY
    checkpoints = xp.new_empty(segments, B, H, H, dtype=torch.float32) if save and segments > 0 else None
    results = Results(out, R_n, Residuals(None, checkpoints))
    if out.numel() == 0:
        R_n.copy_(torch.eye(H, device=xp.device) if R0 is None else R0)
        return results
    tensors = _all_plain(None if inputs.from_zero else h0, R0, weight_hh, ln_weight, ln_bias)
    rows = _plain(lengths, torch.int64), seed, _plain(bias)
    args = (xp.contiguous(), *tensors, *rows, out, R_n, checkpoints, *copies, T, B)
    kernel, threads, shared, numbers = _find_kernel("forward", xp, options)
    kernel.launch(B, threads, shared, (*args, *numbers))  # one block per batch row
    return results


def backward(
    grad_out: Tensor,
    grad_R: Tensor | None,
    inputs: ScanInputs,
    results: Results,
    options: RumOptions,
    need_R0: bool,
    bias: Tensor | None = None,
    need_bias: bool = False,
) -> Gradients:
    """Compute the gradients of the inputs; with ``need_R0``, the gradient of R0 needs a second pass over the sequence.

    The caller computes the gradient of ``bias``, even with ``need_bias``.
    """
    xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, seed = inputs
    out, R_n, (_, checkpoints) = results
    assert R_n is not None
    (T, B, _), H = xp.shape, h0.shape[-1]
    need_R0 = need_R0 and R0 is not None
    grad_R_n = None if grad_R is None or grad_R.numel() == 0 else grad_R
    if out.numel() == 0:
        zero = [None if x is None else torch.zeros_like(x) for x in inputs[:6]]
        zero[1] = None if inputs.from_zero else zero[1]
        zero[2] = (zero[2] if grad_R_n is None else grad_R_n) if need_R0 else None
        return Gradients(*zero)  # type: ignore[arg-type]

    K_n = None
    if grad_R_n is not None:
        A_n = torch.bmm(R_n.mT, grad_R_n.float())
        K_n = (A_n - A_n.mT).contiguous()
    xp, out, lengths, bias = xp.contiguous(), out.contiguous(), _plain(lengths, torch.int64), _plain(bias)
    start, weight, *ln = _all_plain(None if inputs.from_zero else h0, weight_hh, ln_weight, ln_bias)
    grad_xp = torch.empty_like(xp)
    gates = _gates(xp, bias, start, weight, out, grad_xp, options)
    grad_h0 = None if inputs.from_zero else xp.new_empty(B, H, dtype=torch.float32)
    grad_ln = xp.new_empty(B, options.num_inputs, 2, H, dtype=torch.float32) if options.layer_norm else None
    grad_z = rotated_h = None
    if need_R0:  # before the backward, which may overwrite the gates
        # z_t = R_0 P_t h_{t-1} with P_t = Rot_1 ... Rot_t, which does not depend on R_0
        rotated_h, P_n = xp.new_zeros(T, B, H, dtype=torch.float32), torch.empty_like(R_n)
        kernel, threads, shared, _ = _find_kernel("replay", xp, options)
        args = (xp, bias, start, *ln, lengths, out, gates, rotated_h, P_n, T, B, float(options.ln_eps))
        kernel.launch(B, threads, shared, args)
        grad_z = torch.zeros_like(rotated_h)
    tensors = (
        _plain(grad_out, xp.dtype),
        xp,
        start,
        weight,
        *ln,
        lengths,
        seed,
        bias,
        out,
        gates,
        R_n,
        checkpoints,
        K_n,
    )
    kernel, threads, shared, numbers = _find_kernel("backward", xp, options)
    kernel.launch(B, threads, shared, (*tensors, grad_xp, grad_h0, grad_ln, grad_z, T, B, *numbers))

    grad_R0 = None
    if rotated_h is not None and grad_z is not None:
        grad_R0 = torch.bmm(grad_z.permute(1, 2, 0), rotated_h.transpose(0, 1))
        if grad_R_n is not None:
            grad_R0 = torch.baddbmm(grad_R0, grad_R_n.float(), P_n.mT)
    grad_weight = recurrent_weight_gradient(grad_xp, weight_hh.shape[0], None if inputs.from_zero else h0, out)
    grad_weight = grad_weight if grad_weight.dtype is weight_hh.dtype else grad_weight.to(weight_hh.dtype)
    grad_start = grad_h0 if grad_h0 is None or h0.dtype is torch.float32 else grad_h0.to(h0.dtype)
    grads = Gradients(grad_xp, grad_start, grad_R0, grad_weight)
    if ln_weight is None or ln_bias is None or grad_ln is None:
        return grads
    summed = grad_ln.sum(0)  # (norms, 2, H)
    grad_ln_weight = summed[:, 0].reshape(-1).to(ln_weight.dtype)
    return grads._replace(ln_weight=grad_ln_weight, ln_bias=summed[:, 1].reshape(-1).to(ln_bias.dtype))


def _gates(
    xp: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    grad_xp: Tensor,
    options: RumOptions,
) -> Tensor:
    """Recompute the raw gates of all steps in float32: less memory than saving them, and one pass over ``out``.

    They are written into ``grad_xp`` if it is float32, and later overwritten by their gradients.
    """
    T, B, H = out.shape
    gates = grad_xp if xp.dtype == torch.float32 else xp.new_empty(T, B, options.num_gates * H, dtype=torch.float32)
    share = -(-T * B // GATE_BLOCKS)
    kernel, threads, shared, _ = _find_kernel("gates", xp, options)
    kernel.launch(-(-T * B // share), threads, shared, (xp, bias, h0, weight, out, gates, T, B, share))
    return gates


def _all_plain(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else _plain(x) for x in tensors]


def _plain(x: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    if x is None or (x.dtype is dtype and x.is_contiguous()):
        return x
    return x.to(dtype).contiguous()


class Prepared(NamedTuple):
    """A launch without its grid and its tensors."""

    kernel: Kernel
    threads: int
    """Threads per block."""
    shared_bytes: int
    numbers: tuple[float, float, float, int]
    """eta, ln_eps, zoneout, and the threshold that a unit's hash is below if it takes the new value."""


def _find_kernel(kind: str, xp: Tensor, options: RumOptions) -> Prepared:
    """Return the prepared launch for ``xp``."""
    tiling = rows_per_thread, CHECKPOINT_EVERY
    return _prepare(load_kernel, kind, xp.shape[-1], xp.dtype, options, tiling, xp.device.index or 0)


@functools.lru_cache(maxsize=256)
def _prepare(
    load: Callable[..., Kernel],
    kind: str,
    width: int,
    dtype: torch.dtype,
    options: RumOptions,
    tiling: tuple[Callable[[int], int], int],
    device: int,
) -> Prepared:
    """Prepare the launch for an ``xp`` of ``width`` columns, with the kernel that ``load`` returns."""
    H, (rows, every) = width // options.num_inputs, tiling
    layout = _make_layout(kind, H, dtype, options, rows(H), every)
    kernel = load(_source(kind), f"lam1_{kind}", layout.macros, device)
    keep_below = keep_threshold(options.zoneout)
    numbers = float(options.eta or 0.0), float(options.ln_eps), float(options.zoneout), keep_below
    return Prepared(kernel, layout.threads, 4 * layout.shared_floats, numbers)


@functools.cache
def _source(kind: str) -> str:
    folder = Path(__file__).parent / "cuda" / "lam1"
    return "".join((folder / f"{part}.cu").read_text() for part in ("common", kind))


def _make_layout(kind: str, H: int, dtype: torch.dtype, options: RumOptions, rows: int, every: int) -> Layout:
    warps = -(-H // (4 * rows))
    threads = 32 * warps
    padded = 32 * -(-H // 32)
    full = H // 32 + (H % 32 > 24)
    columns = 4 * full + (-(-(H - 32 * full) // 8) if 32 * full < H else 0)
    inputs = options.num_inputs
    norms = 2 * inputs if options.layer_norm else 0
    if kind == "forward":
        shared_floats = padded * (5 + norms + 2 * inputs + 4 * warps)
    elif kind == "backward":
        saved = inputs + 2
        shared_floats = padded * (12 + 2 * norms + 2 * saved + 9 * warps)
        if saved * rows * columns + 100 > min(65536 // threads, 255):  # W_hh does not fit in registers
            shared_floats += options.num_gates * rows * columns * threads
    elif kind == "replay":
        shared_floats = padded * (2 + 2 * inputs + 3 * warps)
    else:
        shared_floats = padded * 2 * warps
    assert isinstance(options.activation, str)
    macros = {
        "N": H,
        "RP": rows,
        "GATES": options.num_gates,
        "DTYPE": DTYPES[dtype],
        "SHARED_FLOATS": shared_floats,
    }
    if kind != "gates":  # each kernel has only the macros that it reads, so that fewer variants are compiled
        macros["LN"] = (1 if options.ln_order == "before" else 2) if options.layer_norm else 0
    if kind in ("forward", "backward"):
        macros["ACT"] = ACTIVATIONS[options.activation]
        macros["ETA"] = int(options.eta is not None)
        macros["ZONE"] = (1 if options.training else 2) if options.zoneout > 0 else 0
        macros["EVERY"] = every
    return Layout(tuple(macros.items()), threads, shared_floats)
