"""A layer made of cells: any Cell gets the nn.GRU contract."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from torchrum.cells.base import Cell
from torchrum.cells.gathered import GatherableCell, GatheredScan
from torchrum.layers.recurrent import Recurrent, State
from torchrum.ops._checks import ArgumentTypeError
from torchrum.ops.kernels.machine import autocast_dtype


class CellLayer(Recurrent):
    """Stack, reverse and pack any :class:`~torchrum.cells.base.Cell`.

    Args:
        make_cell: called with the input size of each layer and direction, returns its cell.
        input_size, hidden_size, num_layers, batch_first, dropout, bidirectional: as in :class:`torch.nn.GRU`.
    """

    def __init__(
        self,
        make_cell: Callable[[int], Cell],
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, True, batch_first, dropout, bidirectional)
        cells = [
            make_cell(self.layer_input_size(layer)) for layer in range(num_layers) for _ in range(self.num_directions)
        ]
        for cell in cells:
            if not isinstance(cell, Cell):
                raise ArgumentTypeError(
                    f"CellLayer: make_cell returned an object of type {type(cell).__name__}; it must return a Cell, a "
                    "subclass of torchrum.cells.base.Cell."
                )
        self.cells = nn.ModuleList(cells)
        self.state_names = cells[0].state_names

    def initial_state(self, index: int, batch_size: int, like: Tensor) -> State:
        dtype = autocast_dtype(like.device.type) or like.dtype
        return self._cell(index).initial_state(batch_size, device=like.device, dtype=dtype)

    def scan(self, index: int, x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
        return self._cell(index).scan(x, state, lengths)

    def _cell(self, index: int) -> Cell:
        cell = self.cells[index]
        assert isinstance(cell, Cell)
        return cell


def takes_steps(module: nn.Module) -> bool:
    """Whether a cell in ``module`` runs step by step, each of many launches, and not by kernels of its own."""
    return any(isinstance(cell, Cell) and type(cell).scan is Cell.scan for cell in module.modules())


def compile_steps(module: nn.Module) -> int:
    """Let ``torch.compile`` make the step of every cell in ``module``; returns how many there are.

    A cell that scans by kernels takes no steps, and is left as it is. On a GPU a ``GatherableCell`` makes the
    gradients of its weights after the last step. A copy of ``module`` has steps with its own weights, compiled as well.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, CellLayer)]
    cells = [cell for layer in layers for cell in layer.cells]
    for cell in cells:
        assert isinstance(cell, Cell)
        # not of the bound method: it would stay bound to this cell in a copy
        cell.step = partial(torch.compile(type(cell).step), cell)  # type: ignore[method-assign]
        if isinstance(cell, GatherableCell) and any(weight.is_cuda for weight, _ in cell.step_weights()):
            cell.scan = GatheredScan(cell)  # type: ignore[method-assign]
    return len(cells)
