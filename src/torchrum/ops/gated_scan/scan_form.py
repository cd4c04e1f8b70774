"""The gated scan as torch's ``scan`` operator around its step, for ONNX and for programs without torchrum."""

from dataclasses import replace

import torch
from torch import Tensor

from torchrum.ops.gated_scan.reference import gated_step_reference
from torchrum.ops.gated_scan.torch_backend import Heads
from torchrum.ops.gated_scan.types import GatedOptions
from torchrum.ops.kernels.linear import working_dtype
from torchrum.ops.onnx_loop import active_steps, bisector, bisector_operands, is_one_step, reflect, run_steps, twos


def gated_scan_form(
    xp: Tensor,
    h0: Tensor,
    weight_hh: Tensor,
    bias_hh: Tensor | None,
    lengths: Tensor | None,
    options: GatedOptions,
) -> Tensor:
    """Compute all states ``(T, B, H)``, in evaluation, with dynamic T and B.

    All operands are detached, as in ``rum_scan_form``: the ONNX exporter fails on operands that require gradients.
    """
    from torch._higher_order_ops.scan import scan_op  # a prototype in torch, without a public path yet

    xp, weight_hh = xp.detach(), weight_hh.detach().to(xp.dtype)
    bias = xp.new_zeros(len(weight_hh)) if bias_hh is None else bias_hh.detach().to(xp.dtype)
    start = h0.detach().to(working_dtype(xp.dtype)).contiguous()
    if torch.onnx.is_in_onnx_export():
        parts, weight_hh = folded(xp, weight_hh, bias)
        if is_one_step(xp):
            return onnx_form([part[0] for part in parts], start, weight_hh, bias, None, options).unsqueeze(0)
        return onnx_form(parts, start, weight_hh, bias, lengths, options)
    options = replace(options, training=False)
    fixed = [weight_hh, bias, *([] if lengths is None else [lengths])]

    def step(h: Tensor, now: Tensor, t: Tensor, weight_hh: Tensor, bias_hh: Tensor, *others: Tensor) -> list[Tensor]:
        new = gated_step_reference(now, h, weight_hh, bias_hh, None, options)
        if lengths is not None:
            new = torch.where((t < others[0]).unsqueeze(-1), new, h)
        return [new, new.clone()]  # carry, then output; they must not alias

    # a symbolic batch size must be among the operands, or Inductor cannot allocate the stacked states
    sizes = [size for size in xp.shape[1:2] if isinstance(size, torch.SymInt)]
    _, states = scan_op(step, [start], [xp, torch.arange(xp.shape[0], device=xp.device)], (*fixed, *sizes))
    return states.to(xp.dtype)


def folded(x: Tensor, weight_hh: Tensor, bias_hh: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the operands of ``onnx_form``: three parts of ``x``, which is ``xp`` or ``bias_ih``, and ``weight_hh``.

    The gates' part of ``bias_hh`` is added to ``x``. The sign of the second gate is flipped, which makes it v = 1 - u:
    ``h + v (c - h)`` keeps h exactly where v is 0.
    """
    (x_r, x_u, x_n), (b_r, b_u, _) = x.chunk(3, -1), bias_hh.chunk(3)
    return [x_r + b_r, -b_u - x_u, x_n], weight_hh * gate_signs(bias_hh)


def gate_signs(bias_hh: Tensor) -> Tensor:
    """Return the signs 1, -1 and 1 for the rows r, u, n, ``(3H, 1)``."""
    ones = torch.ones_like(bias_hh.chunk(3)[0])
    return torch.cat([ones, -ones, ones]).unsqueeze(1)


def onnx_form(
    x: list[Tensor], h0: Tensor, weight_hh: Tensor, bias_hh: Tensor, lengths: Tensor | None, options: GatedOptions
) -> Tensor:
    """Compute the states, or one step ``(B, H)``, from ``folded`` operands with few nodes per step (``onnx_loop.py``).

    The gates are sigmoids of a ``Gemm`` that adds their part of ``x``, a pair that runtimes fuse.
    """
    H, K, dtype = h0.shape[1], options.rotated_units, h0.dtype
    heads = Heads.of(options)
    rotating_heads = [head for head in heads if head.size > 1]  # in one dimension the only rotation is the identity
    x_dtype, eps, bias_n = x[0].dtype, x[2].to(dtype), bias_hh[2 * H :]
    given = [*x[:2], eps, *active_steps(eps, lengths)]
    for head in rotating_heads:
        given += bisector_operands(head.view(eps))
    ends = ((0, H), (H, 2 * H), (2 * H, 2 * H + K), (2 * H + K, 3 * H))
    to_r, to_v, to_tau, to_rest = (weight_hh[start:end].t() for start, end in ends)
    fixed = [to_r, to_v, to_tau, bias_n[:K], to_rest, bias_n[K:]]
    fixed += [twos(head.size, h0) for head in rotating_heads]

    def step(state: list[Tensor], given: list[Tensor], fixed: list[Tensor]) -> list[Tensor]:
        (h,), (x_r, x_v, eps, *others) = state, given
        to_r, to_v, to_tau, bias_tau, to_rest, bias_rest, *sums = fixed
        read = h.to(x_dtype)
        r = torch.addmm(x_r, read, to_r).sigmoid().to(dtype)
        v = torch.addmm(x_v, read, to_v).sigmoid().to(dtype)
        if lengths is not None:
            v = v * others.pop(0)
        if options.zoneout > 0:
            v = v * (1 - options.zoneout)
        inner = []
        tau = torch.addmm(bias_tau, read, to_tau).to(dtype) if K > 0 else h
        for head in heads:
            target, z = head.view(tau), head.view(h)
            if head.size > 1:
                operands, matrix = [others.pop(0) for _ in range(3)], sums.pop(0)
                z = reflect(bisector(operands, target), reflect(operands[0], z, matrix), matrix)
            inner.append((target + z).flatten(-2))
        if K < H:
            inner.append(torch.addmm(bias_rest, read, to_rest).to(dtype))
        candidate = torch.tanh(eps + r * torch.cat(inner, -1))
        return [h + v * (candidate - h)]

    return run_steps(step, [h0], given, fixed)[1].to(x_dtype)
