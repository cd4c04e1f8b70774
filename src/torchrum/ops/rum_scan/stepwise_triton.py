"""Triton kernels of the lam = 0 scan, one launch per step, and their launches.

In the forward each step is one matmul and one row kernel for the rest, with one program per batch row; the raw gates
are saved. In the backward a parallel pass first recomputes the forward's sums from the gates, for all T at once. Then
each step is one row kernel, which recomputes its step pointwise and waits only for the sums of the incoming gradient,
and one matmul.
"""

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrum.ops.kernels.linear import recurrent_weight_gradient, split_left
from torchrum.ops.kernels.matmul import ScanSteps, StepMatmul, add_parts, fetch_parts, load_parts, scan_key, uses_tf32
from torchrum.ops.kernels.rows import own_row, prefetch
from torchrum.ops.kernels.rum_step import load_norms, new_value_mask, rum_cell, sums_of_inputs, with_norm
from torchrum.ops.kernels.rum_step_backward import (
    STATS,
    load_step,
    norm_grads,
    precompute_sums,
    recompute_step,
    step_backward,
    store_stats,
)
from torchrum.ops.kernels.triton_launch import (
    Launch,
    Pass,
    aligned,
    launch,
    plain_mode,
    prepare,
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
    table, xp, out, gates, parts, state, operand, ln_weight, ln_bias, lengths, seed, t, T, B,
    PARTS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr,
    LN: tl.constexpr, LN_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr, ETA: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr, PDL: tl.constexpr,
    BF16X3: tl.constexpr,
):  # fmt: skip
    """Run one forward step for row b.

    If there is a table, it holds the step that ``t`` counts from, the addresses of xp, out and gates, and T. With
    BF16X3 the new state is stored in ``operand`` as by ``linear.split_left``.
    """
    dtype = tl.float32 if BF16X3 else operand.dtype.element_ty
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
    keep = new_value_mask(lengths, seed, t, b, j, H, ZONEOUT, KEEP_BELOW)
    if t + 1 < T:
        ROW: tl.constexpr = (G + 1) * H
        prefetch(xp + B.to(tl.int64) * ROW, ROW * dtype.primitive_bitwidth // 8)
    inputs = None
    if PDL:  # the matmul begins after the previous row kernel has ended, so only the matmul must be waited for
        inputs = sums_of_inputs(eps, h, LN)
        tl.extra.cuda.gdc_wait()
    parts += b * (G * HP)
    tau_parts = fetch_parts(parts, j, mask, B * (G * HP), PARTS)
    if GATE:  # load before the first store, since loads may not be moved before a store
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
        operand += b * (3 * HP) + j
        head = new.to(operand.dtype.element_ty)
        tl.store(operand, head, mask=mask)
        tl.store(operand + HP, (new - head.to(tl.float32)).to(operand.dtype.element_ty), mask=mask)
        tl.store(operand + 2 * HP, head, mask=mask)
    else:
        tl.store(operand + b * HP + j, new.to(dtype), mask=mask)
    tl.store(out + row * H + j, new.to(dtype), mask=mask)


class Steps(ScanSteps):
    """The parts common to both directions: layer norm's parameters, and the options as flags of the row kernels."""

    def __init__(self, inputs: ScanInputs, options: RumOptions, graphed: bool, bf16x3: bool = False) -> None:
        super().__init__(inputs, options.num_gates, options.draws, graphed, bf16x3)

        def norm() -> Tensor | None:
            return torch.empty(options.num_inputs * self.H, device=self.h0.device) if options.layer_norm else None

        self.ln_weight, self.ln_bias = norm(), norm()

    def set_flags(self, options: RumOptions, pdl: bool) -> None:
        """Set the compile-time arguments of the row kernel: everything but T, B and the step."""
        self.flags = row_flags(self.H, pdl) | options.kernel_flags()
        if pdl:
            self.flags["maxnreg"] = row_registers(self.flags["num_warps"])

    def load(self, inputs: ScanInputs, *given: Tensor | None) -> None:
        super().load(inputs, *given)
        for buffer, source in ((self.ln_weight, inputs.ln_weight), (self.ln_bias, inputs.ln_bias)):
            if buffer is not None and source is not None:
                buffer.copy_(source)


class ForwardSteps(Steps):
    """One matmul and one row kernel per step; ``h0`` is the running state in float32, ``operand`` the matmul's."""

    direction = "forward"
    stride = 1

    def __init__(self, inputs: ScanInputs, options: RumOptions, graphed: bool) -> None:
        super().__init__(inputs, options, graphed, uses_tf32(inputs.xp))
        self.operand = self.weight.new_zeros(self.B, self.pieces * self.HP)  # padding stays zero
        out_dtype = inputs.xp.dtype if self.bf16x3 else None
        self.matmul = StepMatmul(self.operand, self.weight.t(), takes_pdl(self.operand), self.direction, out_dtype)
        if self.bf16x3 and not self.matmul.weight_first:
            self.matmul.pdl = False  # 2 % slower with cuBLAS
        self.set_flags(options, self.matmul.pdl)
        self.flags["BF16X3"] = self.bf16x3

    def begin(self, inputs: ScanInputs, out: Tensor, gates: Tensor) -> None:
        self.load(inputs, inputs.xp, out, gates)
        first = split_left(self.h0) if self.bf16x3 else self.h0
        self.operand.view(self.B, self.pieces, -1)[..., : self.H].copy_(first.view(self.B, self.pieces, self.H))

    def row(self, table: Tensor | None, t: int) -> Launch:
        return prepare(
            stepwise_forward_kernel, (self.B,),
            *self.tensors(table), self.matmul.out, self.h0, self.operand, self.ln_weight, self.ln_bias,
            self.lengths, self.seed, t, self.T, self.B, PARTS=self.matmul.parts, **self.flags,
        )  # fmt: skip


def _key(direction: str, inputs: ScanInputs, options: RumOptions) -> Hashable:
    flags = options.kernel_flags().values()
    return scan_key("rum", direction, inputs.xp, inputs.h0.shape[1], inputs.lengths is not None, *flags)


def forward(inputs: ScanInputs, options: RumOptions) -> Results:
    """Run the forward pass, see ``stepwise.forward``."""
    out, _, (gates, _) = results = empty_results(inputs, options)
    assert gates is not None
    if out.numel() == 0:
        return results
    with plain_mode(inputs.xp):
        inputs = inputs._replace(xp=aligned(inputs.xp), weight_hh=inputs.weight_hh.contiguous())

        def next_pass() -> None:
            backward(out, inputs, results, options)

        scan_pass: Pass[ForwardSteps, None] = Pass(
            key=lambda: _key("forward", inputs, options),
            build=lambda graphed: ForwardSteps(inputs, options, graphed),
            begin=lambda steps: steps.begin(inputs, out, gates),
            finish=lambda steps: None,
            next_pass=next_pass if options.training else None,
        )
        run_pass(scan_pass, inputs.xp, len(out))
    return results


@triton.jit(do_not_specialize=["B"])
def stepwise_stats_kernel(
    xp, out, gates, h0, stats, ln_weight, ln_bias, B,
    H: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, LN: tl.constexpr, LN_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr, ETA: tl.constexpr,
):  # fmt: skip
    """Compute the scalars of one row of one step; all T * B programs run in parallel."""
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
    table, xp, out, gates, stats, grad_out, dxp, saved_dnew, parts, dstate, operand, h0, ln_weight, ln_bias,
    lengths, seed, t, T, B,
    PARTS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr,
    LN: tl.constexpr, LN_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr, ETA: tl.constexpr, ZONEOUT: tl.constexpr, KEEP_BELOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run one backward step for row b. ``t`` is the step or, if there is a table, counts back from the table's step."""
    dtype = operand.dtype.element_ty
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
            saved_dnew = tensor_at(table, 8, dtype)
    b, row, j, mask = own_row(t, B, H, BLOCK)
    G: tl.constexpr = 2 if GATE else 1
    dxp += row * ((G + 1) * H)
    operand += b * (G * HP)
    if LN != "none":
        saved_dnew += row * H
    tau_raw, u_raw, eps, h = load_step(xp, out, gates, h0, row, t, b, B, j, mask, H, GATE)
    dh = tl.load(grad_out + row * H + j, mask=mask, other=0.0).to(tl.float32)
    if t > 0:  # the data that the next backward step begins with
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
    keep = new_value_mask(lengths, seed, t, b, j, H, ZONEOUT, KEEP_BELOW)
    recomputed = recompute_step(tau_raw, u_raw, eps, h, stats, norms, j, mask, GATE, LN, ACTIVATION, ETA)
    precomputed = precompute_sums(recomputed, GATE, LN, ETA)
    if PDL:  # everything above was written before the matmul began, see BackwardSteps.begin
        tl.extra.cuda.gdc_wait()
    later = mask & (t + 1 < T)  # no step follows the last one
    dh += tl.load(dstate + b * H + j, mask=later, other=0.0)
    dh += load_parts(parts, b * HP + j, later, B * HP, PARTS)
    dtau, dgate, deps, dprev = step_backward(
        dh, recomputed, precomputed, keep, h, stats, saved_dnew, j, mask, H, GATE, LN, ETA, ZONEOUT
    )
    tl.store(operand + j, dtau.to(dtype), mask=mask)
    if GATE:
        tl.store(operand + HP + j, dgate.to(dtype), mask=mask)
        tl.store(dxp + H + j, dgate.to(dtype), mask=mask)
    tl.store(dstate + b * H + j, dprev, mask=mask)
    tl.store(dxp + j, dtau.to(dtype), mask=mask)
    tl.store(dxp + G * H + j, deps.to(dtype), mask=mask)


class BackwardSteps(Steps):
    """One row kernel and one matmul per step; h's gradient is the sum of ``dstate`` and the matmul's output."""

    direction = "backward"
    stride = -1

    def __init__(self, inputs: ScanInputs, options: RumOptions, graphed: bool) -> None:
        super().__init__(inputs, options, graphed)
        self.operand = self.weight.new_zeros(self.B, self.G * self.HP)  # padding stays zero
        self.dstate = torch.empty_like(self.h0)
        self.set_flags(options, takes_pdl(self.operand))
        self.matmul = StepMatmul(self.operand, self.weight, self.flags["PDL"], self.direction)

    def begin(
        self, inputs: ScanInputs, out: Tensor, gates: Tensor, stats: Tensor, grad_out: Tensor, dxp: Tensor
    ) -> None:
        saved_dnew = None if self.ln_weight is None else torch.empty_like(out)
        self.load(inputs, inputs.xp, out, gates, stats, grad_out, dxp, saved_dnew)
        self.sums(inputs.xp, out, gates, stats)
        # under dependent launch the first row kernel reads the weight and the scalars above before the previous kernel
        # has ended, so this kernel must write neither
        self.dstate.zero_()

    def sums(self, xp: Tensor, out: Tensor, gates: Tensor, stats: Tensor) -> None:
        """Enqueue the parallel pass over all steps."""
        names = ("H", "BLOCK", "GATE", "LN", "LN_EPS", "ACTIVATION", "ETA")
        launch(
            stepwise_stats_kernel, (self.T * self.B,),
            xp, out, gates, self.h0, stats, self.ln_weight, self.ln_bias, self.B,
            **{name: self.flags[name] for name in names}, num_warps=min(self.flags["num_warps"], 8),
        )  # fmt: skip

    def row(self, table: Tensor | None, t: int) -> Launch:
        return prepare(
            stepwise_backward_kernel, (self.B,),
            *self.tensors(table), self.matmul.out, self.dstate, self.operand, self.h0,
            self.ln_weight, self.ln_bias, self.lengths, self.seed, t, self.T, self.B,
            PARTS=self.matmul.parts, **self.flags,
        )  # fmt: skip

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the first state and of layer norm's (weight, bias), both in float32."""
        dh0 = self.dstate + self.matmul.out[:, :, : self.H].float().sum(0)
        if self.ln_weight is None or self.ln_bias is None:
            return dh0, None
        xp, out, gates, stats, _, _, saved_dnew = self.given
        assert xp is not None and out is not None and gates is not None and stats is not None and saved_dnew is not None
        eps, norm = xp[..., self.G * self.H :], (self.ln_weight, self.ln_bias)
        return dh0, norm_grads(gates, eps, out, self.h0, stats, saved_dnew, *norm, self.flags)


def backward(grad_out: Tensor, inputs: ScanInputs, results: Results, options: RumOptions) -> Gradients:
    """Run the backward pass, see ``stepwise.backward``."""
    out, _, (gates, _) = results
    assert gates is not None
    with plain_mode(inputs.xp):
        xp, weight_hh, h0 = aligned(inputs.xp), inputs.weight_hh.contiguous(), inputs.h0
        inputs = inputs._replace(xp=xp, weight_hh=weight_hh)
        dxp = torch.empty_like(xp)
        if xp.numel() == 0:
            dh0, dweight, *dln = (None if x is None else torch.zeros_like(x) for x in (h0, *inputs.weights))
            return Gradients(dxp, dh0, None, dweight, *dln)  # type: ignore[arg-type]
        stats = xp.new_empty((*out.shape[:2], STATS.value), dtype=torch.float32)
        given = (aligned(out), aligned(gates), stats, aligned(grad_out.to(xp.dtype)), dxp)
        scan_pass: Pass[BackwardSteps, tuple[Tensor, Tensor | None]] = Pass(
            key=lambda: _key("backward", inputs, options),
            build=lambda graphed: BackwardSteps(inputs, options, graphed),
            begin=lambda steps: steps.begin(inputs, *given),
            finish=BackwardSteps.finish,
        )
        dh0, ln_grads = run_pass(scan_pass, xp, len(out))
        dweight = recurrent_weight_gradient(dxp, weight_hh.shape[0], None if inputs.from_zero else h0, given[0])
        grads = Gradients(dxp, dh0.to(h0.dtype), None, dweight.to(weight_hh.dtype))
        if ln_grads is None or inputs.ln_weight is None or inputs.ln_bias is None:
            return grads
        return grads._replace(
            ln_weight=ln_grads[0].to(inputs.ln_weight.dtype), ln_bias=ln_grads[1].to(inputs.ln_bias.dtype)
        )
