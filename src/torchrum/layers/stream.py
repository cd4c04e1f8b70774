"""Online use of a trained model: one or a few steps at a time, with the state kept between calls."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchrum.cells.base import Cell, State
from torchrum.layers.cuda_graphs import Graphed, graphed
from torchrum.layers.recurrent import Recurrent
from torchrum.layers.rum import RUM
from torchrum.ops._checks import ArgumentTypeError, MismatchError, check_positive_int
from torchrum.ops.rum_scan.steps import NativeSteps, prepare_steps

States = tuple[State, ...]


class Stream:
    """A trained model that runs step by step and keeps the states of its recurrent layers between calls.

    Calls with one or a few steps return the same outputs as one call with the whole sequence. A step takes less time
    than a call of the layer: on the CPU the call of the C code is prepared once, and on a GPU a step with the same
    shape as the previous one is replayed as a CUDA graph.

    The modules run one after another, as in :class:`torch.nn.Sequential`, except that only the first part of a tuple is
    passed on: ``Stream(window, rum, head)``. A module may also be a whole model that contains recurrent layers: each of
    these must be called once in a forward pass, and starts from the stream's state, whatever ``hx`` the model passes.
    Everything else in the model must act on each step separately, like an embedding or a linear layer.

    The stream runs without gradients, in evaluation mode, on a copy of the modules that shares their weights: if the
    weights change in place, by an optimizer or ``load_state_dict``, the stream uses the new ones. Several streams can
    share a model, even in several threads; a single stream must be used by one thread at a time.

    Args:
        modules: layers of one direction (:class:`torchrum.RUM`, :class:`torchrum.InputWindow`, any other layer of the
            registry, :class:`torch.nn.GRU`, ``nn.LSTM`` or ``nn.RNN``), models that contain such layers, and modules
            that act on each step separately.
        batch_size: number of rows, each with its own state. Default: ``1``.

    Example:
        >>> import torch
        >>> from torchrum import RUM, Stream
        >>> rum, x = RUM(10, 20, num_layers=2), torch.randn(6, 1, 10)
        >>> stream = Stream(rum)
        >>> first = stream(x[0])  # one step, (B, I)
        >>> rest = stream(x[1:])  # several, (T, B, I)
        >>> torch.allclose(torch.cat([first.unsqueeze(0), rest]), rum(x)[0], atol=1e-6)
        True
    """

    def __init__(self, *modules: nn.Module, batch_size: int = 1) -> None:
        check_positive_int("Stream", batch_size=batch_size)
        self.batch_size = batch_size
        self._step = _Step(modules, batch_size)
        self._captured = graphed(self._step)
        self._no_grad = torch.no_grad()
        self._shape: torch.Size | None = None  # of the last input
        self._states: States = self._initial_states(batch_size)

    def __call__(self, x: Tensor) -> Tensor:
        """Run one or more steps.

        Args:
            x: input of the first module. A layer takes one step, ``(B, I)``, or several, ``(T, B, I)``, or
                ``(B, T, I)`` with ``batch_first``.

        Returns:
            The output of the last module, without its state.
        """
        again = isinstance(x, Tensor) and x.is_cuda and x.shape == self._shape
        with self._no_grad:
            output, self._states = (self._captured if again else self._step.forward)(x, self._states)
        self._shape = x.shape
        return output

    def reset(self, rows: int | Sequence[int] | Tensor | None = None) -> None:
        """Reset rows to the initial state.

        Args:
            rows: an index, several indices, or a bool tensor ``(B,)`` that is True for the rows to reset. Default:
                ``None``, all rows.
        """
        if rows is None:
            self._states = self._initial_states(self.batch_size)
            return
        index = self._check_rows(rows)
        fresh = self._initial_states(len(index))
        self._states = tuple(
            tuple(part.index_copy(1, index.to(part.device), new) for part, new in zip(state, start, strict=True))
            for state, start in zip(self._states, fresh, strict=True)
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state, by the names of the layers and of the parts of their states, such as ``0.h``."""
        return {name: part.clone() for name, part in self._named_parts().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state from ``state_dict`` of a stream with the same model and ``batch_size``."""
        named = self._named_parts()
        if state.keys() != named.keys():
            raise ValueError(
                f"Stream.load_state_dict: the state has {', '.join(sorted(state)) or 'nothing'}; this stream has "
                f"{', '.join(sorted(named))}. Use a stream of the same model."
            )
        for name, part in named.items():
            if state[name].shape != part.shape or not state[name].is_floating_point():
                raise MismatchError(
                    f"Stream.load_state_dict: {name} has shape {tuple(state[name].shape)} and {state[name].dtype}; it "
                    f"must be {tuple(part.shape)}, floating-point. Use a stream of the same model and batch_size."
                )
        parts = iter([state[name].detach().to(part, copy=True).contiguous() for name, part in named.items()])
        self._states = tuple(tuple(next(parts) for _ in old) for old in self._states)

    def save(self, path: str | Path) -> None:
        """Write the state as a safetensors file; needs ``pip install safetensors``."""
        from safetensors.torch import save_file

        save_file({name: part.contiguous() for name, part in self.state_dict().items()}, path)

    def load(self, path: str | Path) -> None:
        """Load the state from a file that ``save`` wrote, on any device."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"Stream.load: {path} is not a whole safetensors file ({error}).") from error
        self.load_state_dict(state)

    def _initial_states(self, rows: int) -> States:
        return tuple(kept.initial_state(rows) for kept in self._step.kept)

    def _named_parts(self) -> dict[str, Tensor]:
        return {
            f"{kept.name}.{name}": part
            for kept, state in zip(self._step.kept, self._states, strict=True)
            for name, part in zip(kept.parts, state, strict=True)
        }

    def _check_rows(self, rows: int | Sequence[int] | Tensor) -> Tensor:
        index = torch.as_tensor(rows)
        if index.dtype == torch.bool and index.shape == (self.batch_size,):
            return index.nonzero().squeeze(1)
        index = index.reshape(-1) if index.numel() > 0 else index.long().reshape(-1)
        if index.dtype == torch.bool or index.is_floating_point() or index.is_complex():
            raise ArgumentTypeError(
                f"Stream.reset: rows has shape {tuple(index.shape)} and {index.dtype}; it must be integers, or bool of "
                f"shape ({self.batch_size},)."
            )
        if index.numel() > 0 and not 0 <= int(index.min()) <= int(index.max()) < self.batch_size:
            raise ValueError(f"Stream.reset: rows={rows}; rows run from 0 to {self.batch_size - 1}.")
        return index.long().unique()

    def __repr__(self) -> str:
        return f"Stream({', '.join(map(repr, self._step.chain))}, batch_size={self.batch_size})"


class _Step(nn.Module):
    """The modules one after another, as a function of an input and of the previous states."""

    def __init__(self, modules: tuple[nn.Module, ...], batch_size: int) -> None:
        super().__init__()
        for module in modules:
            if not isinstance(module, nn.Module):
                raise ArgumentTypeError(f"Stream: a {type(module).__name__} is given; it must be an nn.Module.")
            if isinstance(module, Graphed):
                raise ArgumentTypeError("Stream: a graphed layer is given; pass .layer, the layer inside it.")
        given = nn.ModuleList(modules)
        shared = {id(part): part for part in (*given.parameters(), *given.buffers())}
        self.chain: nn.ModuleList = copy.deepcopy(given, shared).eval()
        self.order = list(self.chain)  # iterating over a ModuleList is slow
        weight = next((p for p in given.parameters() if p.is_floating_point()), torch.empty(0))
        self.kept: list[_Kept] = []
        inside: set[nn.Module] = set()  # submodules of recurrent layers, which keep no state of their own
        for name, module in self.chain.named_modules():
            if module in inside:
                continue
            if isinstance(module, Recurrent | nn.RNNBase):
                inside.update(module.modules())
                self.kept.append(_Kept(name, module, batch_size, weight))
            elif isinstance(module, Cell | nn.RNNCellBase):
                raise ValueError(
                    f"Stream: {name} is a {type(module).__name__}, whose state the model keeps itself; use the layer "
                    "instead of the cell, or step the cell without a stream."
                )
        if not self.kept:
            raise ValueError("Stream: the modules contain no recurrent layer, so there is no state to keep.")
        if len({kept.time for kept in self.kept if kept.layer in self.order}) > 1:
            raise ValueError("Stream: the layers differ in batch_first; give all of them the same.")

    def forward(self, x: Tensor, states: States) -> tuple[Any, States]:
        for kept, state in zip(self.kept, states, strict=True):
            kept.state, kept.called = state, False
        for module in self.order:
            x = module(x)
            if type(x) is tuple:
                x = x[0]
        return x, tuple(kept.state for kept in self.kept)


class _Kept:
    """Replacement of a recurrent layer's ``forward`` that reads and updates the state kept here."""

    def __init__(self, name: str, layer: Recurrent | nn.RNNBase, batch_size: int, weight: Tensor) -> None:
        if layer.bidirectional:
            raise ValueError(
                f"Stream: {name} is a bidirectional {type(layer).__name__}, which reads a sequence from its end too; "
                "a stream has no end. Use a layer of one direction."
            )
        self.name, self.layer, self.batch_size = name, layer, batch_size
        self.time = 1 if layer.batch_first else 0
        self.weight = next(layer.parameters(), weight)
        self.state: State = ()
        self.called = False
        self.parts: tuple[str, ...] = ("h", "c") if isinstance(layer, nn.LSTM) else ("h",)
        if isinstance(layer, Recurrent):
            self.parts = layer.state_names
        self.steps: NativeSteps | None = None
        self.addresses: list[int] | None = None  # addresses of the weights when steps were last prepared
        self.run: Callable[..., Any] = layer.forward
        layer.forward = self  # type: ignore[method-assign]  # the layer is the stream's own copy

    def initial_state(self, rows: int) -> State:
        """Return the initial state, with parts ``(num_layers, rows, ...)``."""
        layer, like = self.layer, self.weight.detach()
        if isinstance(layer, Recurrent):
            states = [layer.initial_state(index, rows, like) for index in range(layer.num_layers)]
            return tuple(torch.stack(column).detach() for column in zip(*states, strict=True))
        sizes = (layer.proj_size or layer.hidden_size, layer.hidden_size)
        return tuple(like.new_zeros(layer.num_layers, rows, size) for _, size in zip(self.parts, sizes, strict=False))

    def __call__(self, input: Tensor, hx: Any = None, **words: Any) -> tuple[Tensor, Any]:
        if words or not isinstance(input, Tensor):
            self.refuse(input, words)
        if self.called:
            raise ValueError(f"Stream: {self.name} is called twice in one forward pass, but it has one state.")
        self.called = True
        shape, time = input.shape, self.time
        one = len(shape) == 2
        if not (one or len(shape) == 3) or shape[0 if one else 1 - time] != self.batch_size:
            order = f"(T, {self.batch_size}, I)" if time == 0 else f"({self.batch_size}, T, I)"
            raise MismatchError(
                f"Stream: {self.name} reads an input of shape {tuple(shape)}; it must be ({self.batch_size}, I), one "
                f"step, or {order}. Pass batch_size= for another number of rows."
            )
        h, R = self.state if len(self.state) == 2 else (self.state[0], None)
        steps = self.native_steps() if one or shape[time] == 1 else None
        if steps is not None and steps.accepts(input, h, R):
            output, new_h, new_R = steps(input, h, R)
            self.state = (new_h,) if new_R is None else (new_h, new_R)
        else:
            x = input.unsqueeze(time) if one else input
            output, after = self.run(x, self.state if len(self.state) > 1 else self.state[0])
            output = output.squeeze(time) if one else output
            self.state = after if isinstance(after, tuple) else (after,)
        return output, self.state if len(self.state) > 1 else self.state[0]

    def native_steps(self) -> NativeSteps | None:
        """Return the steps in C, prepared again if the weights have moved; None if the layer must be called."""
        steps, layer = self.steps, self.layer
        if steps is not None and steps.current():
            return steps
        if type(layer) is not RUM:
            return None
        addresses = [part.data_ptr() for part in layer._parameters.values() if part is not None]
        if addresses != self.addresses:
            self.addresses = addresses
            weights = [layer._weights(index) for index in range(layer.num_layers)]
            self.steps = prepare_steps(weights, self.batch_size, layer.options, layer.backend)
        return self.steps

    def refuse(self, input: object, words: Mapping[str, Any]) -> NoReturn:
        given = next((name for name, value in words.items() if value is not None), type(input).__name__)
        if isinstance(input, PackedSequence) or given in ("lengths", "reset"):
            raise ValueError(
                f"Stream: {self.name} is called with {given}, but in a stream every row takes every step. Use "
                "Stream.reset, or a stream for each row."
            )
        raise ArgumentTypeError(f"Stream: {self.name} is called with {given}; it takes a Tensor and hx.")
