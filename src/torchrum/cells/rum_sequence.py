"""One RUM recurrence over a sequence: the projection, the scan, and what changes where no gradient is recorded."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchrum.cells.base import State
from torchrum.cells.rum_weights import Weights
from torchrum.ops._dispatch import Backend
from torchrum.ops.kernels.precision import autocast_dtype, working_dtype
from torchrum.ops.rum_scan import RumOptions, ScanInputs, operator_obstacle, rum_scan
from torchrum.ops.rum_scan.native.projecting import projects
from torchrum.ops.rum_scan.plain import plain_scan
from torchrum.ops.rum_scan.projection import project
from torchrum.ops.rum_scan.types import LayerInputs

PART_STEPS = 1024
"""Steps, at least, of a part of a sequence that runs without gradients: many enough that its calls cost nothing."""
PART_NUMBERS = 2**18
"""Numbers, about, in the outputs of such a part; what it needs beside them is eight times that."""


def project_rum(x: Tensor, weights: Weights, options: RumOptions) -> Tensor:
    """``x W_ih^T + b`` for any leading dimensions; ``project`` of the scan says in which precision."""
    weight = weights["weight_ih"]
    assert weight is not None
    return project(x, weight, weights["bias_ih"], options)


def run_rum(
    x: Tensor,
    state: State,
    weights: Weights,
    options: RumOptions,
    lengths: Tensor | None,
    training: bool,
    backend: Backend,
    returned: tuple[int, ...] | None = None,
) -> tuple[Tensor, State]:
    """Project and scan ``x`` ``(T, B, I)`` -> outputs ``(T, B, H)`` and the last state.

    An empty state starts from zeros, and one without R from the identity. Where no gradient is recorded only the
    outputs grow with T: the native scan projects step by step, and else a long sequence goes through in parts.
    ``returned`` is not None where both results go to a user, who may write to them: then they share no memory with
    each other or with what the backward reads, and ``returned`` stands before B in the shapes of the last state.
    """
    weight_hh = weights["weight_hh"]
    assert weight_hh is not None
    steps = None if torch.is_grad_enabled() else steps_at_once(x, weight_hh.shape[1], options, training)
    if operator_obstacle(options, weights["lam"] is not None) is None and (
        steps is None or (backend in ("auto", "native") and projects(x))
    ):
        inputs = _layer_inputs(x, state, weights, lengths)
        plain = plain_scan(inputs, options, training, backend, returned)
        if plain is not None:
            output, h, R = plain
            return output, (h,) if R is None else (h, R)
    if not state:
        state = (x.new_zeros(x.shape[1], weight_hh.shape[1]),)
    if steps is None:
        xp = project_rum(x, weights, options)
        output, state = scan_rum(xp, state, weights, options, lengths, training, backend)
    else:  # no compiler comes here, and none could trace this signature

        def run(part: Tensor, state: State, left: Tensor | None) -> tuple[Tensor, State]:
            xp = project_rum(part, weights, options)
            return scan_rum(xp, state, weights, options, left, training, backend)

        output, state = _run_parts(run, steps, x, state, lengths)
    return (output, state) if returned is None else _owned(output, state, returned)


def _layer_inputs(x: Tensor, state: State, weights: Weights, lengths: Tensor | None) -> LayerInputs:
    weight_ih, weight_hh = weights["weight_ih"], weights["weight_hh"]
    assert weight_ih is not None and weight_hh is not None
    R = state[1] if len(state) == 2 else None
    norm = weights["ln_weight"], weights["ln_bias"]
    return LayerInputs(x, weight_ih, weights["bias_ih"], state[0] if state else None, R, weight_hh, *norm, lengths)


def _owned(output: Tensor, state: State, lead: tuple[int, ...]) -> tuple[Tensor, State]:
    """Results that may be written to; ``lead`` stands before B in the shapes of the state."""
    state = tuple((part.view(*lead, *part.shape) if lead else part).clone() for part in state)
    return output.clone() if output.requires_grad else output, state  # the backward reads the states


Run = Callable[[Tensor, State, Tensor | None], tuple[Tensor, State]]
"""From an input, the state before it and lengths to outputs and the last state."""


def _run_parts(run: Run, steps: int, x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
    """``run`` for so many steps at a time."""
    whole: Tensor | None = None
    for start in range(0, x.shape[0], steps):
        left = None if lengths is None else (lengths - start).clamp(min=0)
        output, state = run(x[start : start + steps], state, left)
        if whole is None:  # parts that wait to be joined would take the outputs' memory twice
            whole = output.new_empty(x.shape[0], *output.shape[1:])
        whole[start : start + steps] = output
    assert whole is not None
    return whole, state


def steps_at_once(x: Tensor, hidden: int, options: RumOptions, training: bool) -> int | None:
    """How many steps a part of a long sequence without gradients has; None where it is to run as a whole."""
    if torch.compiler.is_compiling() or x.shape[0] <= 2 * PART_STEPS:
        return None
    if x.dtype != working_dtype(x.dtype) or autocast_dtype(x.device.type) is not None:
        return None  # a scan carries its state in float32, which would be rounded between parts
    if options.zoneout > 0 and training:
        return None  # the masks are one draw for the sequence, which a checkpoint's second run must meet again
    steps = max(PART_STEPS, PART_NUMBERS // max(x.shape[1] * hidden, 1) // PART_STEPS * PART_STEPS)
    return steps if x.shape[0] > 2 * steps else None


def scan_rum(
    xp: Tensor,
    state: State,
    weights: Weights,
    options: RumOptions,
    lengths: Tensor | None,
    training: bool,
    backend: Backend,
) -> tuple[Tensor, State]:
    """Run one recurrence over projected inputs ``(T, B, ...)`` -> outputs and the last state."""
    options = options.with_training(training)
    weight_hh = weights["weight_hh"]
    assert weight_hh is not None
    R = state[1] if len(state) == 2 else None
    inputs = ScanInputs(xp, state[0], R, weight_hh, weights["ln_weight"], weights["ln_bias"], lengths)
    output, R = rum_scan(inputs, options, lam=weights["lam"], backend=backend)
    return output, (output[-1],) if R is None else (output[-1], R)
