"""Scan of a Fast-Slow RNN: fast LSTMs that share one state, and a slow LSTM or RUM between the first two."""

from torch import Tensor

from torchrum.ops._dispatch import Backend, Choice, choose_fused
from torchrum.ops.fast_slow_scan.reference import FastSlowInputs, FastSlowOptions, State, fast_slow_scan_reference
from torchrum.ops.gated_scan import LARGEST_HEAD, GatedOptions
from torchrum.ops.kernels.linear import CellWeights
from torchrum.ops.kernels.machine import KERNEL_ACTIVATIONS, row_kernel_obstacle, tracing_obstacle
from torchrum.ops.kernels.masks import draw_seed
from torchrum.ops.rum_scan import RumOptions

__all__ = ["CellWeights", "FastSlowInputs", "FastSlowOptions", "fast_slow_scan", "fast_slow_scan_choice"]


def fused_obstacle(xp: Tensor, slow_size: int, options: FastSlowOptions) -> str | None:
    """Return the reason why the fused backend cannot run, or None."""
    if xp.device.type != "cuda":
        return f"the input is on {xp.device.type}"
    return kernel_obstacle(xp, slow_size, options)


def kernel_obstacle(xp: Tensor, slow_size: int, options: FastSlowOptions) -> str | None:
    """Return the reason why the kernels cannot run, or None; Triton's interpreter also runs them on the CPU."""
    common = tracing_obstacle(xp) or row_kernel_obstacle(xp, max(xp.shape[-1] // options.fast[0].blocks, slow_size))
    slow = options.slow
    if isinstance(slow, GatedOptions) and slow.rotated_units > 0 and slow.head_size > LARGEST_HEAD:
        return f"a head has {slow.head_size} units, and the kernels hold at most {LARGEST_HEAD}"
    if common is not None or not isinstance(slow, RumOptions):
        return common
    if slow.lam != 0:
        return f"the slow cell's lam is {slow.lam}, and a slow RUM's kernels are written for lam 0"
    if slow.activation not in KERNEL_ACTIVATIONS:
        known = ", ".join(KERNEL_ACTIVATIONS)
        return f"the slow cell's activation is {slow.activation!r}, and the kernels know only {known}"
    if slow.target_activation is not None:
        return "the slow cell has a target_activation, and the kernels have none"
    return None


def fast_slow_scan_choice(xp: Tensor, slow_size: int, options: FastSlowOptions, *, backend: Backend = "auto") -> Choice:
    """Return the backend that ``fast_slow_scan`` takes, and the reason; "torch" and "reference" are the same."""
    return choose_fused(backend, lambda: fused_obstacle(xp, slow_size, options))


def fast_slow_scan(
    inputs: FastSlowInputs, options: FastSlowOptions, *, backend: Backend = "auto"
) -> tuple[Tensor, State, State]:
    """Run FS-RNN-k (Mujika et al., 2017) over a sequence whose inputs are projected for the first fast cell.

    Args:
        inputs: the tensors; the seed is drawn if it is needed and None.
        options: the hyper-parameters.
        backend: ``"auto"`` takes the fastest backend that can run; ``"fused"``, ``"torch"`` or ``"reference"`` insists
            on one.

    Returns:
        Outputs ``(T, B, H)`` after dropout, and the last states of the fast cells and of the slow one.
    """
    xp, _, slow, weights, seed, _ = inputs
    if len(weights) != len(options.fast) + 1 or len(weights) < 3:
        raise ValueError(
            f"fast_slow_scan: there are {len(weights)} cells of weights and {len(options.fast)} fast cells in options; "
            "it needs two or more fast cells, and weights for each of them and for the slow one."
        )
    if not options.draws:
        seed = None
    elif seed is None:
        seed = draw_seed(xp.device)
    # under autocast the projected input has the lower precision
    cast = [
        cell._replace(
            weight_ih=None if cell.weight_ih is None else cell.weight_ih.to(xp.dtype),
            weight_hh=cell.weight_hh.to(xp.dtype),
        )
        for cell in weights
    ]
    inputs = inputs._replace(weights=cast, seed=seed)
    if fast_slow_scan_choice(xp, slow[0].shape[1], options, backend=backend).backend == "fused":
        from torchrum.ops.fast_slow_scan.fused import fast_slow_scan_fused  # triton is absent on machines without CUDA

        return fast_slow_scan_fused(inputs, options)
    return fast_slow_scan_reference(inputs, options)
