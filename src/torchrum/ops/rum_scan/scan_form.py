"""The scan of the paper's form as torch's ``scan`` operator, for ONNX and for programs without torchrum."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchrum.ops.kernels.linear import working_dtype
from torchrum.ops.onnx_loop import (
    active_steps,
    bisector,
    bisector_operands,
    is_one_step,
    reflect,
    run_steps,
    twos,
    unit,
)
from torchrum.ops.rum_scan.options import RumOptions
from torchrum.ops.rum_scan.reference import activate, block_norm, rum_step_reference
from torchrum.ops.rum_scan.types import ScanInputs, StepWeights


def rum_scan_form(inputs: ScanInputs, options: RumOptions) -> tuple[Tensor, Tensor | None]:
    """Compute all states ``(T, B, H)`` and the last R, in evaluation, for lam 0 and 1, with dynamic T and B.

    ONNX has the same operator, ``Scan``; a sequence with a single step is exported without it. All operands are
    detached: the ONNX exporter fails on an operator whose operands require gradients.
    """
    from torch._higher_order_ops.scan import scan_op  # a prototype in torch, without a public path yet

    if options.lam not in (0, 1):
        raise ValueError(
            f"RUM: lam is {options.lam}; ONNX holds 0 and 1 only, other powers of R have no operator there."
        )
    options = options.with_training(False)
    xp, h0, R0, weight_hh, ln_weight, ln_bias, lengths, _ = inputs
    dtype, (B, H) = working_dtype(xp.dtype), h0.shape
    start = [h0.detach().to(dtype).contiguous()]
    if options.keeps_rotation:
        R = torch.eye(H, dtype=dtype, device=xp.device).expand(B, H, H) if R0 is None else R0.detach()
        start.append(R.to(dtype).contiguous())
    norm = [part.detach() for part in (ln_weight, ln_bias) if part is not None]
    if torch.onnx.is_in_onnx_export():
        given = (start, weight_hh.detach().to(xp.dtype), norm)
        if is_one_step(xp):
            states, R_n = _onnx_form(xp.detach()[0], *given, None, options)
            return states.unsqueeze(0), R_n
        return _onnx_form(xp.detach(), *given, lengths, options)
    fixed = [weight_hh.detach().to(xp.dtype), *norm, *([] if lengths is None else [lengths])]
    # a symbolic batch size must be among the operands, or Inductor cannot allocate the stacked states
    sizes = [size for size in xp.shape[1:2] if isinstance(size, torch.SymInt)]
    step = _make_step(len(start), bool(norm), lengths is not None, options)
    steps = torch.arange(xp.shape[0], device=xp.device)
    _, *memory, states = scan_op(step, start, [xp.detach(), steps], (*fixed, *sizes))
    return states.to(xp.dtype), memory[0] if memory else None


def _make_step(carried: int, norm: bool, masked: bool, options: RumOptions) -> Callable[..., list[Tensor]]:
    def step(*parts: Tensor) -> list[Tensor]:
        # the operator passes the carry, the slices of this step, then the constants
        h, *memory = parts[:carried]
        now, t, weight_hh, *others = parts[carried:]
        R = memory[0] if memory else None
        weights = StepWeights(weight_hh, *(others[:2] if norm else ()))
        new, new_R = rum_step_reference(now, h, R, weights, None, options)
        if masked:
            active = (t < others[2 if norm else 0]).unsqueeze(-1)  # (B, 1)
            new = torch.where(active, new, h)
            new_R = None if R is None or new_R is None else torch.where(active.unsqueeze(-1), new_R, R)
        return [new, *([] if new_R is None else [new_R]), new.clone()]  # carry, then output; they must not alias

    return step


def _onnx_form(
    xp: Tensor, start: list[Tensor], weight_hh: Tensor, norm: list[Tensor], lengths: Tensor | None, options: RumOptions
) -> tuple[Tensor, Tensor | None]:
    """Compute the scan with few nodes per step, as explained in ``onnx_loop.py`` and ``gated_scan/scan_form.py``."""
    H, G, dtype = start[0].shape[1], options.num_gates, start[0].dtype
    gates, eps = [xp[..., i * H : (i + 1) * H] for i in range(G)], xp[..., -H:].to(dtype)
    matrices = [weight_hh[i * H : (i + 1) * H].t() for i in range(G)]
    complement = options.update_gate and not options.layer_norm  # then 1 - u is the sigmoid with the sign flipped
    if complement:
        gates[1], matrices[1] = -gates[1], -matrices[1]
    given = [eps, *gates, *active_steps(xp, lengths), *bisector_operands(eps)]
    fixed = [twos(H, start[0]), *matrices, *norm]

    def step(state: list[Tensor], given: list[Tensor], fixed: list[Tensor]) -> list[Tensor]:
        (h, *memory), (eps, *others), (matrix, *fixed) = state, given, fixed
        weights = StepWeights(matrix, *fixed[G:])
        tau, *update = (torch.addmm(others.pop(0), h.to(xp.dtype), part).to(dtype) for part in fixed[:G])
        active = None if lengths is None else others.pop(0)
        tau = block_norm(tau, 0, weights, options)
        if options.target_activation is not None:
            tau = activate(tau, options.target_activation, "target_activation")
        e, m = others[0], others[0] if H == 1 else bisector(others, tau)  # in one dimension only the identity
        if memory:
            e, m = (e, m) if active is None else (e * active, m * active)  # R does not change after a row's end
            memory = [_rotate_memory(memory[0], e, m)]
            rotated_h = (memory[0] @ h.unsqueeze(-1)).squeeze(-1)
        else:
            rotated_h = reflect(m, reflect(e, h, matrix), matrix)
        new = activate(block_norm(eps + rotated_h, G, weights, options), options.activation, "activation")
        if complement:
            new = h + update[0].sigmoid() * (new - h)
        elif options.update_gate:
            authors = options.ln_order == "authors"
            u = block_norm(update[0].sigmoid() if authors else update[0], 1, weights, options)
            new = h + (1 - (u if authors else u.sigmoid())) * (new - h)
        if options.eta is not None:
            new = options.eta * unit(new)
        if options.zoneout > 0:
            new = h + (1 - options.zoneout) * (new - h)
        if active is not None:
            new = h + active * (new - h)
        return [new, *memory]

    (_, *memory), states = run_steps(step, start, given, fixed)
    return states.to(xp.dtype), memory[0] if memory else None


def _rotate_memory(R: Tensor, e: Tensor, m: Tensor) -> Tensor:
    """Return R H_m H_e for ``R`` ``(B, H, H)``."""
    for x in (m.unsqueeze(-2), e.unsqueeze(-2)):
        R = R - (R @ x.mT) @ (2 * x)
    return R
