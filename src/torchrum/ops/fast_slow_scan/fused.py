"""The Fast-Slow scan on the GPU: a chain of its cells. Imported on first use, since it needs Triton."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrum.ops.fast_slow_scan.reference import FastSlowInputs, FastSlowOptions, State, fast_slow_scan_reference
from torchrum.ops.fast_slow_scan.slow_rum import RumBackward, RumForward
from torchrum.ops.kernels.chain import LstmBackward, LstmForward, Plan, chain_scan
from torchrum.ops.kernels.weights import CellWeights
from torchrum.ops.lstm_scan import LstmOptions


@functools.lru_cache(256)
def fast_slow_plans(H: int, S: int, options: FastSlowOptions) -> tuple[Plan, ...]:
    """The chain F1, S, F2, F3, ... with ``H`` units in the fast cells and ``S`` in the slow one.

    F1's state goes to F2 and, through dropout, to S; that of S to itself and, through dropout, to F2; that of F2 and of
    each later cell to the next one, and from the last cell to F1 and, through dropout, to the caller.
    """
    inputs = [(H,), (H, S), (S, H), *[(H,)] * (len(options.fast) - 2)]
    plans = []
    for number, cell in enumerate(options.cells):
        is_slow, is_lstm = number == 1, isinstance(cell, LstmOptions)
        blocks, norms = (4, 5) if isinstance(cell, LstmOptions) else (cell.num_inputs, cell.num_inputs)
        plan = Plan(
            stages=(LstmForward, LstmBackward) if is_lstm else (RumForward, RumBackward),
            number=number,
            hidden=S if is_slow else H,
            inputs=inputs[number],
            blocks=blocks,
            norms=norms if cell.layer_norm else 0,
            state=((2, 3) if is_lstm else (2,)) if is_slow else (0, 1),
            plain=(2, 1) if number == 0 else (1, 1) if is_slow else ((number + 1) % len(options.cells), 0),
            dropped=(1, 0) if number == 0 else (2, 0) if is_slow else None,
            dropout=options.drops[number],
            flags=tuple(cell.kernel_flags().items()),
        )
        plans.append(plan)
    return tuple(plans)


@torch.compiler.disable  # graphs and kernels of its own: a compiler has nothing to add
def fast_slow_scan_fused(inputs: FastSlowInputs, options: FastSlowOptions) -> tuple[Tensor, State, State]:
    """The arguments and results of ``fast_slow_scan_reference``."""
    xp, fast, slow, weights, seed = inputs

    def reference(xp: Tensor, states: Sequence[Tensor], weights: Sequence[CellWeights]) -> tuple[Tensor, ...]:
        given = FastSlowInputs(xp, tuple(states[:2]), tuple(states[2:]), weights, seed)
        out, fast, slow = fast_slow_scan_reference(given, options)
        return out, *fast, *slow

    plans = fast_slow_plans(fast[0].shape[1], slow[0].shape[1], options)
    out, last = chain_scan(plans, xp, (*fast, *slow), weights, seed, None, options.training, reference)
    return out, tuple(last[:2]), tuple(last[2:])
