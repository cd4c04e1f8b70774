"""Cells made of cells: two cells that read the same input, and a cell that also reads another's output."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrum.cells.base import Cell, State, with_mask


class CompositeCell(Cell):
    """A cell made of cells."""

    @property
    @abstractmethod
    def cells(self) -> Sequence[Cell]:
        """Its cells, in the order in which their masks are drawn."""

    def reset_parameters(self) -> None:
        """Initialise the weights of all cells."""
        for cell in self.cells:
            cell.reset_parameters()  # type: ignore[operator]

    @property
    def mask_size(self) -> int:
        return sum(cell.mask_size for cell in self.cells)

    def draw_mask(self, like: Tensor) -> Tensor | None:
        masks = [mask for mask in self.draw_masks(like) if mask is not None]
        return torch.cat(masks, -1) if masks else None

    def draw_masks(self, like: Tensor) -> list[Tensor | None]:
        """Draw the mask of each cell; None for a cell without one."""
        return [cell.draw_mask(like) for cell in self.cells]

    def split_masks(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Split the input of a step into the projected input and the mask of each cell."""
        x, mask = self.split_mask(x)
        if mask is None:
            return x, (None,) * len(self.cells)
        return x, mask.split([cell.mask_size for cell in self.cells], -1)


class PairCell(CompositeCell):
    """Two cells on one input; the state is the first cell's followed by the second's."""

    def __init__(self, first: Cell, second: Cell, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.first, self.second = first, second
        names = (("first", first.state_names), ("second", second.state_names))
        self.state_names = tuple(f"{which}_{name}" for which, own in names for name in own)

    @property
    def cells(self) -> tuple[Cell, Cell]:
        return self.first, self.second

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        parts = (cell.initial_state(batch_size, device=device, dtype=dtype) for cell in self.cells)
        return tuple(part for state in parts for part in state)

    def _split_state(self, state: State) -> tuple[State, State]:
        count = len(self.first.state_names)
        return state[:count], state[count:]


class SideBySideCell(PairCell):
    """Two cells that read the same input, with their outputs concatenated.

    Shapes: x ``(B, I)`` -> output ``(B, H1 + H2)``.

    Args:
        first, second: cells with the same input size.
    """

    def __init__(self, first: Cell, second: Cell) -> None:
        if first.input_size != second.input_size:
            raise ValueError(
                f"SideBySideCell: the cells read {first.input_size} and {second.input_size} numbers; both must read "
                "the same input."
            )
        super().__init__(first, second, first.input_size, first.hidden_size + second.hidden_size)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        x, masks = self.split_masks(x)
        outputs, states = [], []
        for cell, mask, before in zip(self.cells, masks, self._split_state(state), strict=True):
            output, after = cell.step(with_mask(cell.project(x), mask), before)
            outputs.append(output)
            states.append(after)
        return torch.cat(outputs, -1), (*states[0], *states[1])


class PrecededCell(PairCell):
    """A cell that reads the input and the output of a cell before it.

    The two cells scan a sequence one after the other, each by its kernels if it has any.

    Shapes: x ``(B, I)`` -> output ``(B, H)`` of the second cell.

    Args:
        first: the cell that reads x.
        second: the cell that reads x and the first cell's output, ``I + H1`` numbers.
    """

    def __init__(self, first: Cell, second: Cell) -> None:
        size = first.input_size + first.hidden_size
        if second.input_size != size:
            raise ValueError(f"PrecededCell: the second cell has input_size={second.input_size}; it must be {size}.")
        super().__init__(first, second, first.input_size, second.hidden_size)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        x, masks = self.split_masks(x)
        before = self._split_state(state)
        first_output, first = self.first.step(with_mask(self.first.project(x), masks[0]), before[0])
        read = self.second.project(torch.cat((x, first_output.to(x.dtype)), -1))
        output, second = self.second.step(with_mask(read, masks[1]), before[1])
        return output, (*first, *second)

    def scan(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        before = self._split_state(state)
        first_output, first = self.first.scan(x, before[0], lengths)
        output, second = self.second.scan(torch.cat((x, first_output.to(x.dtype)), -1), before[1], lengths)
        return output, (*first, *second)
