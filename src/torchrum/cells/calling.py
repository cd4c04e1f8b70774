"""A cell called as those of torch.nn are, and the checks that a cell's call shares with a layer's."""

from typing import Any

from torch import Tensor

from ..ops._checks import ArgumentTypeError, MismatchError
from ..ops.kernels.precision import autocast_dtype
from .base import Cell, State


def call_as_nn(cell: Cell, input: Tensor, hx: Any, weight: Tensor) -> Tensor | State:
    """One step of a cell whose output is the first part of its state.

    Args:
        cell: takes the step.
        input: ``(B, I)``, or ``(I,)`` without a batch.
        hx: the state, a tensor where it has one part and a tuple where it has several; None, as a whole or as a part,
            means the cell's initial state.
        weight: a parameter that tells the cell's device and dtype.

    Returns:
        The new state in the form of ``hx``.
    """
    where = type(cell).__name__
    if not isinstance(input, Tensor):
        raise ArgumentTypeError(f"{where}: input is a {type(input).__name__}; it must be a Tensor.")
    if input.dim() not in (1, 2) or input.shape[-1] != cell.input_size:
        expected = f"(B, {cell.input_size}) or ({cell.input_size},)"
        raise MismatchError(f"{where}: input has shape {tuple(input.shape)}; expected {expected}.")
    check_fits(where, input, weight)
    unbatched = input.dim() == 1
    x = input.unsqueeze(0) if unbatched else input
    output, state = cell.step(cell.project(x), _read_state(cell, hx, x, unbatched))
    h = output.clone() if output.requires_grad else output  # a backward may read it, and a user may write to it
    parts = tuple(part.squeeze(0) if unbatched else part for part in (h, *state[1:]))
    return parts if len(parts) > 1 else parts[0]


def _read_state(cell: Cell, hx: Any, x: Tensor, unbatched: bool) -> State:
    where, fresh = type(cell).__name__, cell.initial_state(x.shape[0], device=x.device, dtype=x.dtype)
    if hx is None:
        return fresh
    state = []
    for name, part, start in zip(cell.state_names, state_parts(where, hx, cell.state_names), fresh, strict=True):
        if part is None:
            state.append(start)
            continue
        shape = tuple(start.shape[1:] if unbatched else start.shape)
        if tuple(part.shape) != shape:
            raise MismatchError(
                f"{where}: {name} in hx has shape {tuple(part.shape)}; expected {shape} for this input."
            )
        check_state_fits(where, name, part, x)
        state.append(part.unsqueeze(0) if unbatched else part)
    return tuple(state)


def state_parts(where: str, hx: Any, names: tuple[str, ...]) -> tuple[Tensor | None, ...]:
    """The parts of an initial state: a tensor makes one, several come as a tuple in which each may be None."""
    single = len(names) == 1
    parts = (hx,) if single and isinstance(hx, Tensor) else hx
    if not isinstance(parts, tuple | list) or len(parts) != len(names) or single != isinstance(hx, Tensor):
        form = "a tensor" if single else f"a tuple ({', '.join(names)})"
        given = f"a {type(hx).__name__}" + (f" of {len(hx)}" if isinstance(hx, tuple | list) else "")
        raise ArgumentTypeError(f"{where}: hx is {given}; it must be {form}, or None.")
    for name, part in zip(names, parts, strict=True):
        if part is not None and not isinstance(part, Tensor):
            raise ArgumentTypeError(f"{where}: {name} in hx is a {type(part).__name__}; it must be a Tensor, or None.")
    return tuple(parts)


def check_fits(where: str, input: Tensor, weight: Tensor) -> None:
    """Floating, on the device of the weights and, outside of autocast, in their dtype."""
    if not input.is_floating_point():
        raise MismatchError(f"{where}: input is {input.dtype}; it must be floating. Embed or one-hot encode it first.")
    if weight.device != input.device:
        raise MismatchError(f"{where}: input is on {input.device}, the weights on {weight.device}; move one of them.")
    if weight.dtype != input.dtype and autocast_dtype(input.device.type) is None:
        raise MismatchError(f"{where}: input is {input.dtype}, the weights {weight.dtype}; convert one of them.")


def check_state_fits(where: str, name: str, part: Tensor, like: Tensor) -> None:
    """Floating, on the device of the input."""
    if part.device != like.device or not part.is_floating_point():
        raise MismatchError(
            f"{where}: {name} in hx is {part.dtype} on {part.device}; it must be floating, on {like.device}."
        )
