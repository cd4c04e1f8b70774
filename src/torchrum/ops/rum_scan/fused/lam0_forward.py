"""Forward of the lam = 0 scan: each step is one matrix product and one kernel that does the rest, a program a row."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._split import HALF, split_left, split_right
from ..options import RumOptions
from .common import (
    ACCURATE_COS,
    activate,
    moments,
    moments2,
    prefetch,
    rotation_scalars,
    settled,
    sigmoid,
    sum2,
    sum3,
    sum4,
    sum5,
    sum6,
    sum7,
    zoneout_keep_new,
)
from .compiling import launch
from .graphs import TABLE_SLOTS, aligned, can_graph, fill_table, plain_mode, prefer_shared, rounded, run_graphed
from .product import Product, add_parts, fetch_parts, splits

# Tuning, read when a scan's buffers are made (clear_graphs() makes them anew).
LANES_PER_WARP = {"forward": 256, "backward": 256}  # of a row
MOST_WARPS = 8
ROW_REGISTERS = 40 * 1024  # of a multiprocessor's 64 * 1024, with PDL: a product's tile must fit beside a row
PDL = True  # launch each kernel while the one before it drains; half types only, where the products take part
CARVEOUT = True  # with PDL: divide cache and shared memory in row kernels as in products
TRANSPOSED = {"forward": False, "backward": False}  # hold the padded weight column by column


@triton.jit
def load_ln(ln_weight, ln_bias, block: tl.constexpr, j, mask, H: tl.constexpr):
    weight = tl.load(ln_weight + block * H + j, mask=mask, other=0.0)
    return weight, tl.load(ln_bias + block * H + j, mask=mask, other=0.0)


@triton.jit
def load_norms(ln_weight, ln_bias, j, mask, H: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr):
    """Layer norm's gain and shift for tau, for the gate and for the candidate."""
    norms = None
    if LN != "none":
        weight_t, bias_t = load_ln(ln_weight, ln_bias, 0, j, mask, H)
        weight_u, bias_u = weight_t, bias_t
        if GATE:
            weight_u, bias_u = load_ln(ln_weight, ln_bias, 1, j, mask, H)
        weight_c, bias_c = load_ln(ln_weight, ln_bias, 2 if GATE else 1, j, mask, H)
        norms = (weight_t, bias_t, weight_u, bias_u, weight_c, bias_c)
    return norms


@triton.jit
def kept_new(lengths, seed, t, b, j, H: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr):
    """Where zoneout's masks and the length let the new state in; None if everywhere."""
    keep = None
    if ZONEOUT == "train":
        keep = zoneout_keep_new(tl.load(seed), t, b * H + j, KEEP_BELOW)
        if lengths is not None:
            keep = keep & (t < tl.load(lengths + b))
        keep = settled(keep)
    elif lengths is not None:
        keep = t < tl.load(lengths + b)
    return keep


@triton.jit
def sums_of_inputs(e, h, LN: tl.constexpr):
    """The sums of ``rum_cell`` that need neither tau nor the gate: e.e, e.h and, for layer norm, h.h, those of e, h."""
    if LN == "none":
        ee, eh = sum2(e * e, e * h)
        return ee, eh, ee, ee, ee
    else:
        return sum5(e * e, e * h, h * h, e, h)


@triton.jit
def rum_cell(
    tau_raw, u_raw, e, h, norms, j, mask,
    H: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr, LN_EPS: tl.constexpr, ACTIVATION: tl.constexpr,
    inputs=None,
):  # fmt: skip
    """The state before eta and zoneout, and every scalar that the backward needs to redo it without a sum.

    ``inputs`` is what ``sums_of_inputs`` returns, where that is known already.
    """
    mean_t, rstd_t, mean_u, rstd_u, mean_c, rstd_c = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    tau = tau_raw
    u = u_raw
    if LN == "none":
        if inputs is None:
            ee, eh, tt, et, th = sum5(e * e, e * h, tau * tau, e * tau, tau * h)
        else:
            ee, eh, _, _, _ = inputs
            tt, et, th = sum3(tau * tau, e * tau, tau * h)
        if GATE:
            u = sigmoid(u)
    else:
        weight_t, bias_t, weight_u, bias_u, weight_c, bias_c = norms
        if inputs is not None:
            ee, eh, hh, total_e, total_h = inputs
        if GATE:
            if LN == "authors":
                u = tl.where(mask, sigmoid(u), 0.0)
            if inputs is None:
                total, squares, total_u, squares_u, ee, eh = sum6(tau, tau * tau, u, u * u, e * e, e * h)
            else:
                total, squares, total_u, squares_u = sum4(tau, tau * tau, u, u * u)
            mean_t, rstd_t, mean_u, rstd_u = moments2(
                tau, u, mask, total, squares, total_u, squares_u, LN_EPS, H
            )  # fmt: skip
            u = (u - mean_u) * rstd_u * weight_u + bias_u
            if LN == "before":
                u = sigmoid(u)
        else:
            if inputs is None:
                total, squares, ee, eh = sum4(tau, tau * tau, e * e, e * h)
            else:
                total, squares = sum2(tau, tau * tau)
            mean_t, rstd_t = moments(tau, mask, total, squares, LN_EPS, H)
        tau = (tau - mean_t) * rstd_t * weight_t + bias_t
        if inputs is None:
            tt, et, th, total_t, hh, total_e, total_h = sum7(tau * tau, e * tau, tau * h, tau, h * h, e, h)
        else:
            tt, et, th, total_t = sum4(tau * tau, e * tau, tau * h, tau)

    inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f = rotation_scalars(e, tau, h, j, mask, ee, eh, tt, et, th, H)
    new = e + h + (al * inv_e) * e + (be * inv_t) * tau + tl.where(j == i, ga, 0.0)
    if LN != "none":
        # Moments of e + z without another sum: z is as long as h, and e.z = |e| (2 p c - q).
        ez = tl.where(inv_e == 0.0, eh, ee * inv_e * (2.0 * p * c - q))
        mean_c = (total_e + total_h + (al * inv_e) * total_e + (be * inv_t) * total_t) / H
        var_c = tl.maximum((ee + hh + 2.0 * ez) / H - mean_c * mean_c, 0.0)
        if (c < ACCURATE_COS) | (ee + hh > (8.0 * H) * (var_c + LN_EPS)):  # these terms cancel: sum after all
            mean_c = tl.sum(new, 0) / H
            centred = tl.where(mask, new - mean_c, 0.0)
            var_c = tl.sum(centred * centred, 0) / H
        rstd_c = 1.0 / tl.sqrt(var_c + LN_EPS)
        new = (new - mean_c) * rstd_c * weight_c + bias_c
    new = activate(new, ACTIVATION)
    if GATE:
        new = u * h + (1.0 - u) * new
    new = tl.where(mask, new, 0.0)
    return (
        new, inv_e, inv_t, c, k, p, q, al, be, ga, i, u_i, inv_f, mean_t, rstd_t, mean_u, rstd_u, mean_c, rstd_c
    )  # fmt: skip


@triton.jit(do_not_specialize=["t", "T", "B"])
def lam0_forward_kernel(
    table, xp, out, gates, product, state, low, ln_weight, ln_bias, lengths, seed, t, T, B,
    PARTS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr,
    LN: tl.constexpr, LN_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr, ETA: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr, PDL: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """One step for row b. A table holds the step that ``t`` counts from, and xp, out, gates and T.

    SPLIT leaves the new state in ``low`` as ``_split.py`` divides a factor in float32.
    """
    dtype = tl.float32 if SPLIT else low.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if table is not None:
        t = tl.load(table) + t
        T = tl.load(table + 7)
        xp = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(dtype)), 16)
        out = tl.multiple_of(tl.load(table + 2).to(tl.pointer_type(dtype)), 16)
        gates = tl.multiple_of(tl.load(table + 3).to(tl.pointer_type(dtype)), 16)
    b = tl.program_id(0)
    row = t.to(tl.int64) * B + b
    G: tl.constexpr = 2 if GATE else 1
    j = tl.arange(0, BLOCK)
    mask = j < H
    xp += row * ((G + 1) * H)
    gates += row * (G * H)
    e = tl.load(xp + G * H + j, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(state + b * H + j, mask=mask, other=0.0, cache_modifier=".cg")
    tau_raw = tl.load(xp + j, mask=mask, other=0.0).to(tl.float32)
    u_raw = tau_raw
    if GATE:
        u_raw = tl.load(xp + H + j, mask=mask, other=0.0).to(tl.float32)
    norms = load_norms(ln_weight, ln_bias, j, mask, H, GATE, LN)
    keep = kept_new(lengths, seed, t, b, j, H, ZONEOUT, KEEP_BELOW)
    if t + 1 < T:
        ROW: tl.constexpr = (G + 1) * H
        prefetch(xp + B.to(tl.int64) * ROW, ROW * dtype.primitive_bitwidth // 8)
    inputs = None
    if PDL:  # the product begins after the row kernel before it has ended, so only its own output is waited for
        inputs = sums_of_inputs(e, h, LN)
        tl.extra.cuda.gdc_wait()
    product += b * (G * HP)
    tau_parts = fetch_parts(product, j, mask, B * (G * HP), PARTS)
    if GATE:  # its loads before the first store, which they might not pass
        u_parts = fetch_parts(product + HP, j, mask, B * (G * HP), PARTS)
        u_raw += add_parts(u_parts, PARTS)
        tl.store(gates + H + j, u_raw.to(dtype), mask=mask)
    tau_raw += add_parts(tau_parts, PARTS)
    tl.store(gates + j, tau_raw.to(dtype), mask=mask)

    cell = rum_cell(tau_raw, u_raw, e, h, norms, j, mask, H, GATE, LN, LN_EPS, ACTIVATION, inputs)
    new = cell[0]
    if ETA is not None:
        norm = tl.sqrt(tl.sum(new * new, 0))
        new = new * tl.where(norm <= 1e-12, 0.0, ETA / norm)
    if ZONEOUT is not None and ZONEOUT != "train":
        new = (1.0 - ZONEOUT) * new + ZONEOUT * h
    if keep is not None:
        new = tl.where(keep, new, h)
    tl.store(state + b * H + j, new, mask=mask)
    if SPLIT:
        low += b * (3 * HP) + j
        head = new.to(low.dtype.element_ty)
        tl.store(low, head, mask=mask)
        tl.store(low + HP, (new - head.to(tl.float32)).to(low.dtype.element_ty), mask=mask)
        tl.store(low + 2 * HP, head, mask=mask)
    else:
        tl.store(low + b * HP + j, new.to(dtype), mask=mask)
    tl.store(out + row * H + j, new.to(dtype), mask=mask)


def padded(H: int) -> int:
    """The hidden axis inside the matrix products: cuBLAS is several times slower on unaligned rows."""
    return -(-H // 64) * 64


def takes_pdl(factor: Tensor) -> bool:
    """Whether a product with ``factor`` and the row kernels around it are launched while the one before drains."""
    half = PDL and factor.dtype != torch.float32
    return half and factor.is_cuda and torch.cuda.get_device_capability(factor.device) >= (9, 0)


def launch_options(
    like: Tensor, H: int, options: RumOptions, direction: str, pdl: bool | None = None
) -> dict[str, Any]:
    """Compile-time arguments of the row kernels: everything but T, B and the step."""
    block = max(32, triton.next_power_of_2(H))
    pdl = takes_pdl(like) if pdl is None else pdl
    zoneout: float | str | None = None
    if options.zoneout > 0:
        zoneout = "train" if options.training else float(options.zoneout)
    flags = {
        "H": H,
        "HP": padded(H),
        "BLOCK": block,
        "GATE": options.update_gate,
        "LN": options.ln_order if options.layer_norm else "none",
        "LN_EPS": float(options.ln_eps) if options.layer_norm else 0.0,
        "ACTIVATION": options.activation,
        "ETA": None if options.eta is None else float(options.eta),
        "ZONEOUT": zoneout,
        "KEEP_BELOW": min(int((1 - options.zoneout) * 2**32), 2**32 - 1) if zoneout == "train" else 0,
        "PDL": pdl,
        "num_warps": min(MOST_WARPS, max(1, block // LANES_PER_WARP[direction])),
    }
    if pdl:
        flags["launch_pdl"] = True
        flags["maxnreg"] = min(255, ROW_REGISTERS // (32 * flags["num_warps"]))
    return flags


class Buffers:
    """The parts of a scan that both directions keep at fixed addresses."""

    direction: str
    flags: dict[str, Any]

    def __init__(
        self, like: Tensor, B: int, H: int, options: RumOptions, has_lengths: bool, graphed: bool, split: bool = False
    ) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=like.device)

        self.B, self.H, self.G = B, H, options.num_gates
        self.split, self.pieces = split, 3 if split else 1
        HP, dtype = padded(H), HALF if split else like.dtype
        self.table = empty(TABLE_SLOTS, dtype=torch.int64) if graphed else None
        if TRANSPOSED[self.direction]:
            self.weight = empty(self.pieces * HP, self.G * HP, dtype=dtype).t()
        else:
            self.weight = empty(self.G * HP, self.pieces * HP, dtype=dtype)
        if HP != H:
            self.weight.zero_()  # padding stays zero
        self.ln_weight = empty((self.G + 1) * H) if options.layer_norm else None
        self.ln_bias = empty((self.G + 1) * H) if options.layer_norm else None
        self.lengths = empty(B, dtype=torch.int64) if has_lengths else None
        self.seed = empty(1, dtype=torch.int64) if options.zoneout > 0 and options.training else None
        self.h0 = empty(B, H)
        self.given: tuple[Tensor, ...] = ()

    def row(self, table: Tensor | None, t: int) -> None:
        """Enqueue the row kernel, on the table's tensors or on those given."""
        raise NotImplementedError

    def launched(self, kernel: Any) -> None:
        if CARVEOUT and self.flags["PDL"]:
            prefer_shared(kernel)

    def step(self, t: int) -> None:
        raise NotImplementedError

    def warm_up(self) -> None:
        self.step(0)
        self.row(None, 0)  # a capture around the scan bakes the addresses in instead

    def forget(self) -> None:
        self.given = ()

    def load(
        self,
        h0: Tensor,
        weight_hh: Tensor,
        ln_weight: Tensor | None,
        ln_bias: Tensor | None,
        lengths: Tensor | None,
        seed: Tensor | None,
    ) -> None:
        G, H, pieces = self.G, self.H, self.pieces
        if self.split:
            weight_hh = split_right(weight_hh)
        self.weight.view(G, -1, pieces, padded(H))[:, :H, :, :H].copy_(weight_hh.view(G, H, pieces, H))
        self.h0.copy_(h0)
        for mine, given in (
            (self.ln_weight, ln_weight),
            (self.ln_bias, ln_bias),
            (self.lengths, lengths),
            (self.seed, seed if seed is None else seed.view(1)),
        ):
            if mine is not None:
                assert given is not None
                mine.copy_(given)


class ForwardSteps(Buffers):
    """One product and one row kernel a step. ``h0`` is the running state in float32, ``low`` what the product sees."""

    direction = "forward"
    stride = 1

    def __init__(self, like: Tensor, B: int, H: int, options: RumOptions, has_lengths: bool, graphed: bool) -> None:
        super().__init__(like, B, H, options, has_lengths, graphed, rounded(like))
        HP = padded(H)
        self.low = self.weight.new_zeros(B, self.pieces * HP)  # padding stays zero
        summed = like.dtype if self.split else None
        self.product = Product(self.low, self.weight.t(), takes_pdl(self.low), self.direction, summed)
        if self.split and not self.product.weight_first:
            self.product.pdl = False  # 2 % slower with cuBLAS
        self.flags = launch_options(like, H, options, "forward", self.product.pdl) | {"SPLIT": self.split}

    def begin(self, xp: Tensor, out: Tensor, gates: Tensor, *loaded: Any) -> None:
        self.load(*loaded)
        first = split_left(self.h0) if self.split else self.h0
        self.low.view(self.B, self.pieces, -1)[..., : self.H].copy_(first.view(self.B, self.pieces, self.H))
        self.given = (xp, out, gates)
        if self.table is not None:
            fill_table(self.table, 0, len(xp), *self.given)

    def row(self, table: Tensor | None, t: int) -> None:
        given = self.given if table is None else [None] * len(self.given)
        kernel = launch(
            lam0_forward_kernel, (self.B,),
            table, *given, self.product.out, self.h0, self.low, self.ln_weight, self.ln_bias, self.lengths, self.seed,
            t, len(self.given[0]), self.B, PARTS=self.product.parts, **self.flags,
        )  # fmt: skip
        self.launched(kernel)

    def step(self, t: int) -> None:
        self.product()
        self.row(self.table, t)


def scan_key(direction: str, x: Tensor, B: int, H: int, options: RumOptions, has_lengths: bool) -> tuple[Any, ...]:
    """All that a scan's graphs bake in."""
    flags = tuple(sorted(launch_options(x, H, options, direction).items(), key=lambda item: item[0]))
    product = (splits(direction, B, x.dtype), TRANSPOSED[direction], rounded(x))
    return direction, x.device, x.dtype, B, has_lengths, flags, product


def lam0_forward(
    xp: Tensor,
    h0: Tensor,
    weight_hh: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    options: RumOptions,
) -> tuple[Tensor, Tensor]:
    """Projected input ``(T, B, G*H)`` -> states ``(T, B, H)`` and raw gates ``(T, B, (G-1)*H)`` for the backward."""
    T, B, H = xp.shape[0], xp.shape[1], weight_hh.shape[1]
    out, gates = xp.new_empty((T, B, H)), xp.new_empty((T, B, weight_hh.shape[0]))
    if xp.numel() == 0:
        return out, gates
    with plain_mode(xp):
        xp = aligned(xp)
        given = (xp, out, gates, h0, weight_hh.contiguous(), ln_weight, ln_bias, lengths, seed)

        def build(graphed: bool = True) -> ForwardSteps:
            return ForwardSteps(xp, B, H, options, lengths is not None, graphed)

        if can_graph(xp, T):
            key = scan_key("forward", xp, B, H, options, lengths is not None)

            def following() -> None:
                from .lam0_backward import lam0_backward

                others = (h0, weight_hh, ln_weight, ln_bias, lengths, seed)
                lam0_backward(out, xp, *others, out, gates, options)

            then = following if options.training else None
            run_graphed(key, build, lambda steps: steps.begin(*given), T, lambda steps: None, then)
        else:
            steps = build(graphed=False)
            steps.begin(*given)
            for t in range(T):
                steps.step(t)
    return out, gates
