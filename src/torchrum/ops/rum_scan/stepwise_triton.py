"""Kernels and launches of the lam = 0 scan by steps.

Forward, each step is one matmul and one row kernel that does the rest, one program per batch row. It keeps the raw
gates. Backward, a parallel pass first computes the forward's sums again from them for all T at once; then each step is
one row kernel, which rebuilds its step pointwise and waits only for the sums of the incoming gradient, and one matmul.
"""

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrum.ops.kernels import triton_launch
from torchrum.ops.kernels.linear import BF16, recurrent_weight_gradient, split_left, split_right
from torchrum.ops.kernels.matmul import StepMatmul, add_parts, fetch_parts, load_parts, rounded, scan_key
from torchrum.ops.kernels.rows import own_row, prefetch
from torchrum.ops.kernels.rum_step import kept_new, load_norms, rum_cell, sums_of_inputs, with_norm
from torchrum.ops.kernels.rum_step_backward import (
    STATS,
    load_step,
    norm_grads,
    redo_step,
    store_stats,
    sums_ahead,
    undo_step,
)
from torchrum.ops.kernels.triton_launch import (
    TABLE_SLOTS,
    Launch,
    Pass,
    aligned,
    fill_table,
    launch,
    padded,
    plain_mode,
    prefer_shared,
    prepare,
    rehearsing,
    row_flags,
    row_registers,
    run_pass,
    takes_pdl,
    tensor_at,
)
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.stepwise import empty_results
from torchrum.ops.rum_scan.types import Gradients, Results, ScanInputs


@triton.jit(do_not_specialize=["t", "T", "B"])
def stepwise_forward_kernel(
    table, xp, out, gates, parts, state, low, ln_weight, ln_bias, lengths, seed, t, T, B,
    PARTS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr,
    LN: tl.constexpr, LN_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr, ETA: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr, PDL: tl.constexpr,
    BF16X3: tl.constexpr,
):  # fmt: skip
    """One step for row b. A table holds the step that ``t`` counts from, and xp, out, gates and T.

    BF16X3 leaves the new state in ``low`` as ``precision.split_left`` divides a float32 operand.
    """
    dtype = tl.float32 if BF16X3 else low.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if table is not None:
        t = tl.load(table) + t
        T = tl.load(table + 7)
        xp = tensor_at(table, 1, dtype)
        out = tensor_at(table, 2, dtype)
        gates = tensor_at(table, 3, dtype)
    b, row, j, mask = own_row(t, B, H, BLOCK)
    G: tl.constexpr = 2 if GATE else 1
    xp += row * ((G + 1) * H)
    gates += row * (G * H)
    eps = tl.load(xp + G * H + j, mask=mask, other=0.0).to(tl.float32)
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
    if PDL:  # the matmul begins after the row kernel before it has ended, so only its own output is waited for
        inputs = sums_of_inputs(eps, h, LN)
        tl.extra.cuda.gdc_wait()
    parts += b * (G * HP)
    tau_parts = fetch_parts(parts, j, mask, B * (G * HP), PARTS)
    if GATE:  # its loads before the first store, which they might not pass
        u_parts = fetch_parts(parts + HP, j, mask, B * (G * HP), PARTS)
        u_raw += add_parts(u_parts, PARTS)
        tl.store(gates + H + j, u_raw.to(dtype), mask=mask)
    tau_raw += add_parts(tau_parts, PARTS)
    tl.store(gates + j, tau_raw.to(dtype), mask=mask)

    cell = rum_cell(tau_raw, u_raw, eps, h, norms, j, mask, H, GATE, LN, LN_EPS, ACTIVATION, inputs)
    new = with_norm(cell[0], ETA)
    if ZONEOUT is not None and ZONEOUT != "train":
        new = (1.0 - ZONEOUT) * new + ZONEOUT * h
    if keep is not None:
        new = tl.where(keep, new, h)
    tl.store(state + b * H + j, new, mask=mask)
    if BF16X3:
        low += b * (3 * HP) + j
        head = new.to(low.dtype.element_ty)
        tl.store(low, head, mask=mask)
        tl.store(low + HP, (new - head.to(tl.float32)).to(low.dtype.element_ty), mask=mask)
        tl.store(low + 2 * HP, head, mask=mask)
    else:
        tl.store(low + b * HP + j, new.to(dtype), mask=mask)
    tl.store(out + row * H + j, new.to(dtype), mask=mask)


def launch_flags(like: Tensor, H: int, options: RumOptions, direction: str, pdl: bool | None = None) -> dict[str, Any]:
    """Compile-time arguments of the row kernels: everything but T, B and the step."""
    pdl = takes_pdl(like) if pdl is None else pdl
    flags = row_flags(H, direction, pdl) | options.kernel_flags()
    if pdl:
        flags["maxnreg"] = row_registers(flags["num_warps"])
    return flags


class Buffers:
    """The buffers at fixed addresses that both directions have."""

    direction: str
    stride: int
    flags: dict[str, Any]
    matmul: StepMatmul

    def __init__(
        self, like: Tensor, B: int, H: int, options: RumOptions, has_lengths: bool, graphed: bool, bf16x3: bool = False
    ) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=like.device)

        self.B, self.H, self.G = B, H, options.num_gates
        self.bf16x3, self.pieces = bf16x3, 3 if bf16x3 else 1
        HP, dtype = padded(H), BF16 if bf16x3 else like.dtype
        self.table = empty(TABLE_SLOTS, dtype=torch.int64) if graphed else None
        self.weight = empty(self.G * HP, self.pieces * HP, dtype=dtype)
        if HP != H:
            self.weight.zero_()  # padding stays zero
        self.ln_weight = empty((self.G + 1) * H) if options.layer_norm else None
        self.ln_bias = empty((self.G + 1) * H) if options.layer_norm else None
        self.lengths = empty(B, dtype=torch.int64) if has_lengths else None
        self.seed = empty(1, dtype=torch.int64) if options.zoneout > 0 and options.training else None
        self.h0 = empty(B, H)
        self.given: tuple[Tensor, ...] = ()

    def row(self, table: Tensor | None, t: int) -> Launch:
        """The row kernel's launch, on the table's tensors or on those given."""
        raise NotImplementedError

    def launches(self, t: int) -> tuple[Launch, ...]:
        return (self.matmul.prepare(), self.row(self.table, t))[:: self.stride]  # backward the row kernel comes first

    def warm_up(self) -> None:
        _, row = [enqueue() for enqueue in self.launches(0)][:: self.stride]
        direct = self.row(None, 0)()  # a capture around the scan records the addresses instead
        if triton_launch.CARVEOUT and self.flags["PDL"] and not rehearsing():
            prefer_shared(row)
            prefer_shared(direct)

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
        if self.bf16x3:
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
    """One matmul and one row kernel per step. ``h0`` is the running state in float32, ``low`` what the matmul reads."""

    direction = "forward"
    stride = 1

    def __init__(self, like: Tensor, B: int, H: int, options: RumOptions, has_lengths: bool, graphed: bool) -> None:
        super().__init__(like, B, H, options, has_lengths, graphed, rounded(like))
        HP = padded(H)
        self.low = self.weight.new_zeros(B, self.pieces * HP)  # padding stays zero
        summed = like.dtype if self.bf16x3 else None
        self.matmul = StepMatmul(self.low, self.weight.t(), takes_pdl(self.low), self.direction, summed)
        if self.bf16x3 and not self.matmul.weight_first:
            self.matmul.pdl = False  # 2 % slower with cuBLAS
        self.flags = launch_flags(like, H, options, "forward", self.matmul.pdl) | {"BF16X3": self.bf16x3}

    def begin(self, xp: Tensor, out: Tensor, gates: Tensor, *loaded: Any) -> None:
        self.load(*loaded)
        first = split_left(self.h0) if self.bf16x3 else self.h0
        self.low.view(self.B, self.pieces, -1)[..., : self.H].copy_(first.view(self.B, self.pieces, self.H))
        self.given = (xp, out, gates)
        if self.table is not None:
            fill_table(self.table, 0, len(xp), *self.given)

    def row(self, table: Tensor | None, t: int) -> Launch:
        given = self.given if table is None else [None] * len(self.given)
        return prepare(
            stepwise_forward_kernel, (self.B,),
            table, *given, self.matmul.out, self.h0, self.low, self.ln_weight, self.ln_bias, self.lengths, self.seed,
            t, len(self.given[0]), self.B, PARTS=self.matmul.parts, **self.flags,
        )  # fmt: skip


def forward(inputs: ScanInputs, options: RumOptions) -> Results:
    """The forward pass, see ``stepwise.forward``."""
    xp, h0, _, weight_hh, ln_weight, ln_bias, lengths, seed = inputs
    out, _, (gates, _) = results = empty_results(inputs, options)
    assert gates is not None
    (T, B, _), H = xp.shape, weight_hh.shape[1]
    if xp.numel() == 0:
        return results
    with plain_mode(xp):
        xp, weight_hh = aligned(xp), weight_hh.contiguous()

        def key() -> Hashable:
            return scan_key("rum", "forward", xp, H, lengths is not None, *options.kernel_flags().values())

        def build(graphed: bool) -> ForwardSteps:
            return ForwardSteps(xp, B, H, options, lengths is not None, graphed)

        def begin(steps: ForwardSteps) -> None:
            steps.begin(xp, out, gates, h0, weight_hh, ln_weight, ln_bias, lengths, seed)

        def following() -> None:
            backward(out, inputs, results, options)

        then = following if options.training else None
        run_pass(Pass(key, build, begin, lambda steps: None, then), xp, T)
    return results


@triton.jit(do_not_specialize=["B"])
def stepwise_stats_kernel(
    xp, out, gates, h0, stats, ln_weight, ln_bias, B,
    H: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr, LN_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr, ETA: tl.constexpr,
):  # fmt: skip
    """The scalars of one row of one step; all T * B of them in parallel."""
    row = tl.program_id(0).to(tl.int64)
    t = row // B
    b = row - t * B
    j = tl.arange(0, BLOCK)
    mask = j < H
    tau_raw, u_raw, eps, h = load_step(xp, out, gates, h0, row, t, b, B, j, mask, H, GATE)
    norms = load_norms(ln_weight, ln_bias, j, mask, H, GATE, LN)
    cell = rum_cell(tau_raw, u_raw, eps, h, norms, j, mask, H, GATE, LN, LN_EPS, ACTIVATION)
    store_stats(stats + row * STATS, cell, GATE, LN, ETA)


@triton.jit(do_not_specialize=["t", "T", "B"])
def stepwise_backward_kernel(
    table, xp, out, gates, stats, grad_out, dxp, dseen, parts, dstate, low, h0, ln_weight, ln_bias, lengths, seed,
    t, T, B,
    PARTS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr,
    LN: tl.constexpr, LN_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr, ETA: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One step back for row b. ``t`` is the step, or counts back from the table's step where there is a table."""
    dtype = low.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if table is not None:
        t = tl.load(table) - t
        T = tl.load(table + 7)
        xp = tensor_at(table, 1, dtype)
        out = tensor_at(table, 2, dtype)
        gates = tensor_at(table, 3, dtype)
        stats = tensor_at(table, 4, tl.float32)
        grad_out = tensor_at(table, 5, dtype)
        dxp = tensor_at(table, 6, dtype)
        if LN != "none":
            dseen = tensor_at(table, 8, dtype)
    b, row, j, mask = own_row(t, B, H, BLOCK)
    G: tl.constexpr = 2 if GATE else 1
    dxp += row * ((G + 1) * H)
    low += b * (G * HP)
    if LN != "none":
        dseen += row * H
    tau_raw, u_raw, eps, h = load_step(xp, out, gates, h0, row, t, b, B, j, mask, H, GATE)
    dh = tl.load(grad_out + row * H + j, mask=mask, other=0.0).to(tl.float32)
    if t > 0:  # what the next step back begins with
        BYTES: tl.constexpr = H * dtype.primitive_bitwidth // 8
        before = row - B
        prefetch(grad_out + before * H, BYTES)
        prefetch(gates + before * (G * H), G * BYTES)
        prefetch(xp + before * ((G + 1) * H) + G * H, BYTES)
        prefetch(stats + before * STATS, 4 * STATS)
        if t > 1:
            prefetch(out + (before - B) * H, BYTES)
    stats += row * STATS
    norms = load_norms(ln_weight, ln_bias, j, mask, H, GATE, LN)
    keep = kept_new(lengths, seed, t, b, j, H, ZONEOUT, KEEP_BELOW)
    again = redo_step(tau_raw, u_raw, eps, h, stats, norms, j, mask, GATE, LN, ACTIVATION, ETA)
    ahead = sums_ahead(again, GATE, LN, ETA)
    if PDL:  # all above was written before the matmul began, see BackwardSteps.begin
        tl.extra.cuda.gdc_wait()
    later = mask & (t + 1 < T)  # no step follows the last one
    dh += tl.load(dstate + b * H + j, mask=later, other=0.0)
    dh += load_parts(parts, b * HP + j, later, B * HP, PARTS)
    dtau, dgate, deps, dprev = undo_step(dh, again, ahead, keep, h, stats, dseen, j, mask, H, GATE, LN, ETA, ZONEOUT)
    tl.store(low + j, dtau.to(dtype), mask=mask)
    if GATE:
        tl.store(low + HP + j, dgate.to(dtype), mask=mask)
        tl.store(dxp + H + j, dgate.to(dtype), mask=mask)
    tl.store(dstate + b * H + j, dprev, mask=mask)
    tl.store(dxp + j, dtau.to(dtype), mask=mask)
    tl.store(dxp + G * H + j, deps.to(dtype), mask=mask)


class BackwardSteps(Buffers):
    """One row kernel and one matmul per step; h's gradient gets ``dstate`` and the matmul's output from later steps."""

    direction = "backward"
    stride = -1

    def __init__(self, like: Tensor, B: int, H: int, options: RumOptions, has_lengths: bool, graphed: bool) -> None:
        super().__init__(like, B, H, options, has_lengths, graphed)
        HP = padded(H)
        self.low = torch.zeros((B, self.G * HP), dtype=like.dtype, device=like.device)  # padding stays zero
        self.dstate = torch.empty((B, H), dtype=torch.float32, device=like.device)
        self.dseen = like.new_empty(0) if options.layer_norm else None  # allocated in each call
        self.flags = launch_flags(like, H, options, "backward")
        self.matmul = StepMatmul(self.low, self.weight, self.flags["PDL"], self.direction)

    def begin(
        self, xp: Tensor, out: Tensor, gates: Tensor, stats: Tensor, grad_out: Tensor, dxp: Tensor, *loaded: Any
    ) -> None:
        self.load(*loaded)
        self.sums(xp, out, gates, stats)
        # Under dependent launch the first row kernel reads ahead of the kernel before it, so that must write nothing
        # which is read ahead: neither the weight nor the scalars above.
        self.dstate.zero_()
        self.given = (xp, out, gates, stats, grad_out, dxp)
        if self.dseen is not None:
            self.dseen = out.new_empty(out.shape)
        if self.table is not None:
            fill_table(self.table, len(out) - 1, len(out), *self.given, self.dseen)

    def sums(self, xp: Tensor, out: Tensor, gates: Tensor, stats: Tensor) -> None:
        """Enqueue the parallel pass over all steps."""
        names = ("H", "BLOCK", "GATE", "LN", "LN_EPS", "ACTIVATION", "ETA")
        launch(
            stepwise_stats_kernel, (out.shape[0] * self.B,),
            xp, out, gates, self.h0, stats, self.ln_weight, self.ln_bias, self.B,
            **{name: self.flags[name] for name in names}, num_warps=min(self.flags["num_warps"], 8),
        )  # fmt: skip

    def row(self, table: Tensor | None, t: int) -> Launch:
        given = (*self.given, self.dseen) if table is None else [None] * (len(self.given) + 1)
        return prepare(
            stepwise_backward_kernel, (self.B,),
            table, *given, self.matmul.out, self.dstate, self.low, self.h0,
            self.ln_weight, self.ln_bias, self.lengths, self.seed, t, len(self.given[0]), self.B,
            PARTS=self.matmul.parts, **self.flags,
        )  # fmt: skip

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Gradient of the first state and of layer norm's (weight, bias), both in float32."""
        dh0 = self.dstate + self.matmul.out[:, :, : self.H].float().sum(0)
        if self.dseen is None or self.ln_weight is None or self.ln_bias is None:
            return dh0, None
        xp, out, gates, stats, _, _ = self.given
        eps, norm = xp[..., self.G * self.H :], (self.ln_weight, self.ln_bias)
        return dh0, norm_grads(gates, eps, out, self.h0, stats, self.dseen, *norm, self.flags)

    def forget(self) -> None:
        super().forget()
        self.dseen = None if self.dseen is None else self.dseen.new_empty(0)


def backward(grad_out: Tensor, inputs: ScanInputs, results: Results, options: RumOptions) -> Gradients:
    """The backward pass, see ``stepwise.backward``."""
    xp, h0, _, weight_hh, ln_weight, ln_bias, lengths, seed = inputs
    out, _, (gates, _) = results
    assert gates is not None
    (T, B, _), H = xp.shape, weight_hh.shape[1]
    with plain_mode(xp):
        dxp = xp.new_empty(xp.shape)
        if xp.numel() == 0:
            dh0, dweight, *dln = (None if x is None else torch.zeros_like(x) for x in (h0, *inputs.weights))
            return Gradients(dxp, dh0, None, dweight, *dln)  # type: ignore[arg-type]
        xp, out, gates, grad_out = aligned(xp), aligned(out), aligned(gates), aligned(grad_out.to(xp.dtype))
        weight_hh, stats = weight_hh.contiguous(), xp.new_empty((T, B, STATS.value), dtype=torch.float32)

        def key() -> Hashable:
            return scan_key("rum", "backward", xp, H, lengths is not None, *options.kernel_flags().values())

        def build(graphed: bool) -> BackwardSteps:
            return BackwardSteps(xp, B, H, options, lengths is not None, graphed)

        def begin(steps: BackwardSteps) -> None:
            loaded = (h0, weight_hh, ln_weight, ln_bias, lengths, seed)
            steps.begin(xp, out, gates, stats, grad_out, dxp, *loaded)

        dh0, ln_grads = run_pass(Pass(key, build, begin, BackwardSteps.finish), xp, T)
        dweight = recurrent_weight_gradient(dxp, weight_hh.shape[0], None if inputs.from_zero else h0, out).to(
            weight_hh.dtype
        )
        grads = Gradients(dxp, dh0.to(h0.dtype), None, dweight)
        if ln_grads is None or ln_weight is None or ln_bias is None:
            return grads
        return grads._replace(ln_weight=ln_grads[0].to(ln_weight.dtype), ln_bias=ln_grads[1].to(ln_bias.dtype))
