"""What a cell is: one time step with a state, and the only loop over time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchrum.cells.unitary import matrices_fixed
from torchrum.ops._checks import MismatchError

State = tuple[Tensor, ...]
Given = TypeVar("Given")


class Cell(nn.Module, ABC):
    """One time step ``(x, state) -> (output, state)``; ``state`` is always a tuple of ``(B, ...)`` tensors.

    A cell that maps its input linearly overrides ``project``, so that ``scan`` does it for all steps in one
    matmul; ``step`` then gets the projected input.
    """

    state_names: tuple[str, ...] = ("h",)
    """Names of the parts of the state; one name makes a layer's ``hx`` a tensor, several a tuple."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """The state before the first step; zeros ``(B, H)`` for each part, unless a cell has others."""
        return tuple(torch.zeros(batch_size, self.hidden_size, device=device, dtype=dtype) for _ in self.state_names)

    @abstractmethod
    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One step on the projected input ``x`` ``(B, ...)`` -> output ``(B, H)`` and the new state."""

    def project(self, x: Tensor) -> Tensor:
        """The part of a step that needs no state, for ``x`` ``(..., I)``."""
        return x

    def at_step(self, step: int) -> None:
        """Called before the training step that follows ``step`` finished ones.

        A cell that anneals a value sets it here, in place: a captured step then reads the new one.
        """
        return

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """One step on ``x`` ``(B, I)`` or ``(I,)``; no state means ``initial_state``."""
        if x.shape[-1] != self.input_size or x.dim() not in (1, 2):
            expected = f"(B, {self.input_size}) or ({self.input_size},)"
            raise MismatchError(f"{type(self).__name__}: input has shape {tuple(x.shape)}; expected {expected}.")
        if x.dim() == 1:
            batched = None if state is None else tuple(part.unsqueeze(0) for part in state)
            output, new = self.forward(x.unsqueeze(0), batched)
            return output.squeeze(0), tuple(part.squeeze(0) for part in new)
        if state is None:
            state = self.initial_state(x.shape[0], device=x.device, dtype=x.dtype)
        return self.step(self.project(x), state)

    def scan(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """All steps of ``x`` ``(T, B, I)`` -> outputs ``(T, B, H)`` and the last state.

        Rows of the batch past their ``lengths`` ``(B,)`` keep their state.
        """
        # a parametrised weight and a unitary matrix are built once for the sequence, not in every step
        with parametrize.cached(), matrices_fixed(self, state[0].dtype):
            return run_steps(self.step, self.project(x).unbind(0), state, lengths)


def run_steps(
    step: Callable[[Given, State], tuple[Tensor, State]], given: Iterable[Given], state: State, lengths: Tensor | None
) -> tuple[Tensor, State]:
    """The loop over time: ``step`` on what is given for each, and the outputs of all, ``(T, B, ...)``."""
    outputs = []
    for t, given_t in enumerate(given):
        output, new = step(given_t, state)
        state = new if lengths is None else freeze(t < lengths, new, state)
        outputs.append(output)
    return torch.stack(outputs), state


def freeze(going: Tensor, new: State, old: State) -> State:
    """Take ``new`` in the rows where ``going`` ``(B,)`` holds and ``old`` elsewhere."""
    return tuple(
        torch.where(going.view(-1, *[1] * (part.dim() - 1)), part, before)
        for part, before in zip(new, old, strict=True)
    )
