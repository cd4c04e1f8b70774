"""Registry of all layers by name, for recipes, the command line and tests; a layer made of any cell."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchrum.cells.base import Cell, GatherableCell, GatheredScan
from torchrum.layers.recurrent import Recurrent, State
from torchrum.ops._checks import (
    ArgumentTypeError,
    check_choice,
    check_finite,
    check_flags,
    check_positive_int,
    check_probability,
)
from torchrum.ops.kernels.machine import autocast_dtype


class CellLayer(Recurrent):
    """A layer of any :class:`~torchrum.cells.base.Cell`, stacked, bidirectional or packed.

    Args:
        make_cell: function from the input size of a layer and direction to its cell.
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
    """Return whether a cell in ``module`` runs step by step, with many launches per step, and not by kernels."""
    return any(isinstance(cell, Cell) and type(cell).scan is Cell.scan for cell in module.modules())


def compile_steps(module: nn.Module) -> int:
    """Compile the step of every cell in ``module`` by ``torch.compile`` and return the number of cells.

    A cell that scans by kernels does not use the compiled step. On a GPU a ``GatherableCell`` computes the gradients of
    its weights after the last step. A copy of ``module`` has compiled steps too, with its own weights.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, CellLayer)]
    cells = [cell for layer in layers for cell in layer.cells]
    for cell in cells:
        assert isinstance(cell, Cell)
        # not the bound method, which would stay bound to this cell in a copy
        cell.step = partial(torch.compile(type(cell).step), cell)  # type: ignore[method-assign]
        if isinstance(cell, GatherableCell) and any(weight.is_cuda for weight, _ in cell.step_weights()):
            cell.scan = GatheredScan(cell)  # type: ignore[method-assign]
    return len(cells)


# The arguments of every layer.
SHARED = ("input_size", "hidden_size", "num_layers", "batch_first", "dropout", "bidirectional")


@dataclass(frozen=True)
class Entry:
    """An entry of the registry, which builds a layer; its ``inspect.signature`` has the options and their defaults."""

    path: str
    """``module:name`` in ``torchrum``, imported on first use."""
    about: str
    """Description in one line."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults that differ from those of the class."""

    def load(self) -> Callable[..., Any]:
        module, name = self.path.split(":")
        return getattr(importlib.import_module(f"torchrum.{module}"), name)

    @property
    def __signature__(self) -> inspect.Signature:
        own = inspect.signature(self.load()).parameters
        options = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=self.defaults.get(name, parameter.default))
            for name, parameter in own.items()
            if name not in SHARED and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        shared = inspect.signature(build_layer).parameters
        return inspect.Signature([*(shared[name] for name in SHARED), *options])

    def __call__(self, *shared: Any, **options: Any) -> nn.Module:
        """Build the layer from the arguments of ``build_layer`` after the name."""
        make, options = self.load(), {**self.defaults, **options}
        sizes = dict(zip(SHARED, shared, strict=True))
        if self.path.startswith("layers."):
            return make(**sizes, **options)
        return CellLayer(lambda inputs: make(inputs, sizes["hidden_size"], **options), **sizes)


LAYERS: dict[str, Entry] = {
    "rum": Entry("layers.rum:RUM", "the Rotational Unit of Memory, as in the paper", {"form": "paper"}),
    "rum-gated": Entry("layers.rum:RUM", "the Rotational Unit of Memory with the weights of a GRU"),
    "lstm": Entry("layers.registry:torch_lstm", "torch.nn.LSTM, cuDNN on a GPU"),
    "gru": Entry("layers.registry:torch_gru", "torch.nn.GRU, cuDNN on a GPU"),
    "ln_lstm": Entry(
        "cells.lstm:LSTMCell", "LSTM with layer norm and zoneout", {"layer_norm": True, "init": "orthogonal"}
    ),
    "rotational_lstm": Entry(
        "cells.lstm:LSTMCell",
        "LSTM with RUM's rotated state in its candidate",
        {"layer_norm": True, "rotational": True, "init": "orthogonal"},
    ),
    "gru_tf": Entry("cells.lstm:GRUCell", "GRU as in TensorFlow: reset gate before the matmul", {"init": "orthogonal"}),
    "urnn": Entry("cells.unitary:URNNCell", "unitary evolution RNN"),
    "full_urnn": Entry("cells.unitary:URNNCell", "unitary evolution RNN of full capacity", {"full_capacity": True}),
    "eunn": Entry("cells.unitary:EUNNCell", "RNN with a unitary matrix of pair rotations"),
    "goru": Entry("cells.unitary:GORUCell", "gated orthogonal recurrent unit"),
    "fast_weights": Entry("cells.memory:FastWeightsCell", "fast weights with layer norm"),
    "delta_net": Entry("cells.memory:DeltaNetCell", "linear recurrence with the delta rule"),
    "ntm": Entry("cells.memory:NTMCell", "Neural Turing Machine"),
    "exprnn": Entry("cells.orthogonal:OrthogonalCell", "RNN with an orthogonal matrix from the matrix exponential"),
    "soft_orthogonal": Entry("cells.orthogonal:SoftOrthogonalCell", "RNN with singular values near 1"),
    "hyper_lstm": Entry("cells.lstm_variants:HyperLSTMCell", "LSTM whose weights a smaller LSTM rescales"),
    "hm_lstm": Entry("cells.lstm_variants:HMLSTMCell", "hierarchical multiscale LSTM with learnt boundaries"),
    "nas": Entry("cells.lstm_variants:NASCell", "NASCell, found by architecture search"),
    "rhn": Entry("cells.rhn:RHNCell", "Recurrent Highway Network"),
    "fs": Entry("cells.fast_slow:fast_slow", "Fast-Slow RNN of LSTMs, the slow cell an LSTM or a RUM"),
}


def build_layer(
    name: str,
    input_size: int,
    hidden_size: int,
    num_layers: int = 1,
    batch_first: bool = False,
    dropout: float = 0.0,
    bidirectional: bool = False,
    **options: Any,
) -> nn.Module:
    """Build the layer called ``name`` in ``LAYERS``, which is called like :class:`torch.nn.GRU`.

    Args:
        name: a key of ``LAYERS``.
        input_size, hidden_size, num_layers, batch_first, dropout, bidirectional: as in :class:`torch.nn.GRU`.
        options: further arguments of this layer, by name.

    Returns:
        The layer, ``forward(input, hx=None) -> (output, h_n)``.

    Example:
        >>> layer = build_layer("goru", 3, 8, capacity=4)
        >>> layer(torch.zeros(5, 2, 3))[0].shape
        torch.Size([5, 2, 8])
    """
    check_choice("build_layer", "name", name, LAYERS)
    known = [option for option in inspect.signature(LAYERS[name]).parameters if option not in SHARED]
    for option in options:
        check_choice(f"build_layer({name!r})", "option", option, known)
    return LAYERS[name](input_size, hidden_size, num_layers, batch_first, dropout, bidirectional, **options)


def torch_lstm(
    *,
    bias: bool = True,
    forget_bias: float = 1.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **shared: Any,
) -> nn.LSTM:
    """Build a :class:`torch.nn.LSTM` and add ``forget_bias`` to the initial bias of its forget gate.

    ``shared`` holds the arguments of every layer.
    """
    _check("lstm", shared, bias, forget_bias=forget_bias)
    layer = nn.LSTM(**shared, bias=bias, device=device, dtype=dtype)
    _raise_bias(layer, slice(layer.hidden_size, 2 * layer.hidden_size), forget_bias)  # rows: i, f, g, o
    return layer


def torch_gru(
    *,
    bias: bool = True,
    gate_bias: float = 1.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **shared: Any,
) -> nn.GRU:
    """Build a :class:`torch.nn.GRU` and add ``gate_bias`` to the initial biases of its gates.

    ``shared`` holds the arguments of every layer.
    """
    _check("gru", shared, bias, gate_bias=gate_bias)
    layer = nn.GRU(**shared, bias=bias, device=device, dtype=dtype)
    _raise_bias(layer, slice(0, 2 * layer.hidden_size), gate_bias)  # rows: r, z, n
    return layer


def _check(where: str, shared: dict[str, Any], bias: object, **numbers: object) -> None:
    """Check the arguments that torch does not check, or rejects with another message."""
    check_positive_int(where, **{name: shared[name] for name in ("input_size", "hidden_size", "num_layers")})
    check_flags(where, bias=bias, batch_first=shared["batch_first"], bidirectional=shared["bidirectional"])
    check_probability(where, dropout=shared["dropout"])
    check_finite(where, **numbers)


@torch.no_grad()
def _raise_bias(layer: nn.RNNBase, rows: slice, by: float) -> None:
    for name, parameter in layer.named_parameters():
        if name.startswith("bias_ih"):
            parameter[rows] += by
