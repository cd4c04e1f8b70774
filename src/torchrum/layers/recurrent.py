"""The interface of nn.GRU for any recurrence: layers, directions, batch_first, packed and unbatched input, hx, resets.

Below the layer are the checks of a call and the scan of rows that are cut at resets.
"""

import warnings
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.proxy import Proxy, TraceError
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from torchrum.cells.base import State, check_fits, check_state_fits, refuse_script, state_parts, warn_unquantized
from torchrum.ops._checks import (
    ArgumentTypeError,
    MismatchError,
    check_dense,
    check_flags,
    check_positive_int,
    check_probability,
)

Hidden = Tensor | tuple[Tensor | None, ...]
Scan = Callable[[Tensor, State, Tensor | None], tuple[Tensor, State]]

MOST_NUMBERS = 2**24
"""Approximate numbers in the states of segments that run in one call: with lam other than 0 each has a matrix."""
WORTH_GROUPING = 2**15
"""Numbers in a layer's states past the ends of rows from which rows may run in groups by length, each with its own
calls."""

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Integer dtypes that torch hardly supports."""


class Segments(NamedTuple):
    """Segments of rows between resets, sorted by row and then by time; every part is ``(S,)``.

    A segment does not depend on the previous one, so segments of one length class run side by side in one call of the
    scan, in every backend, with the gradients of a call. A class holds lengths from 2^k to 2^(k+1) - 1: at most half of
    the steps are padding, and there are at most log2(T) + 1 calls.
    """

    row: Tensor
    start: Tensor
    length: Tensor
    again: Tensor
    """True if the segment starts from the initial state, False if from the given state."""
    first: Tensor
    last: Tensor
    """True for the first and for the last segment of a row."""

    def take(self, which: Tensor) -> "Segments":
        return Segments(*(part[which] for part in self))


class Recurrent(nn.Module, metaclass=ABCMeta):  # ABC as a base would break FSDP2, which changes the class of a module
    """Base class of all layers: ``forward(input, hx=None) -> (output, h_n)`` as in :class:`torch.nn.GRU`.

    A subclass defines the initial state (``initial_state``) and the run (``scan``) of one layer in one direction, and
    the names of the parts of its state. With one name ``hx`` is a tensor, with several it is a tuple, as for an LSTM's
    ``(h, c)``.
    """

    state_names: tuple[str, ...] = ("h",)
    takes_lead: ClassVar[bool] = False
    """Whether ``scan`` takes ``lead``, the dimensions before B in the shape of its last state: with ``(1,)`` the last
    state of a single layer is h_n without a view. The caller may change the results of such a scan in place."""
    least_left_out: ClassVar[float] = 1 / 2
    """Smallest share of all steps that groups of rows by length must leave out: a loop over time is no faster for few
    rows."""
    __prepare_scriptable__ = refuse_script
    qconfig = property(fset=warn_unquantized)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        nn.Module.__init__(self)  # a subclass that is also an nn.RNNBase must not have RNNBase's parameters
        name = self._get_name()
        check_positive_int(name, input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        check_flags(name, bias=bias, batch_first=batch_first, bidirectional=bidirectional)
        check_probability(name, dropout=dropout)
        if dropout > 0 and num_layers == 1:
            why = "it acts between layers, and num_layers is 1"
            warnings.warn(f"{name}: dropout={dropout} has no effect: {why}.", stacklevel=3)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    def layer_input_size(self, layer: int) -> int:
        """Return the number of features that layer number ``layer`` reads."""
        return self.input_size if layer == 0 else self.hidden_size * self.num_directions

    @abstractmethod
    def initial_state(self, index: int, batch_size: int, like: Tensor) -> State:
        """Return the initial state of recurrence ``index`` (``layer * num_directions + direction``)."""

    @abstractmethod
    def scan(self, index: int, x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
        """Run recurrence ``index`` over ``x`` ``(T, B, I)``; rows past their ``lengths`` keep their state."""

    def flatten_parameters(self) -> None:
        """Do nothing; code that loops over recurrent layers calls this."""

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Hidden | None = None,
        *,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Hidden]:
        """Run the layers over a batch of sequences.

        Args:
            input: ``(T, B, I)``, ``(B, T, I)`` with ``batch_first``, ``(T, I)`` unbatched, or a ``PackedSequence``.
            hx: initial state, ``(num_layers * num_directions, B, ...)`` for each part; zeros (identity for R) if None.
            lengths: ``(B,)`` int64, the steps of each padded sequence, instead of packing; outputs past them are zero.
            reset: bool, of the shape of ``input`` without features. Where it is True, a row restarts before that step
                from the initial state (zeros, the identity for R), independently of earlier steps, in both directions.
                Rows are cut at resets and the segments run side by side, so resets save time. Reading them
                synchronises with a GPU once and breaks a graph of ``torch.compile``.

        Returns:
            ``output`` ``(T, B, num_directions * H)`` in the form of ``input``, and ``h_n`` in the form of ``hx``.
        """
        only_input = hx is None and lengths is None and reset is None and type(input) is Tensor
        if not only_input and any(isinstance(part, Proxy) for part in (input, hx, lengths, reset)):
            return self._leaf(input, hx, lengths=lengths, reset=reset)
        if not torch.is_grad_enabled() and torch._C._get_tracing_state() is not None:
            with torch.enable_grad():  # the same graph in both modes, since torch.jit.trace compares them
                return Recurrent.forward(self, input, hx, lengths=lengths, reset=reset)
        if isinstance(input, PackedSequence):
            x, sizes = self._unpack(input, lengths, reset)
            out, state = self._run(x, self._read_state(hx, x), sizes.to(x.device))
            return pack_like(out, sizes, input), self._write_state(state)
        where = self._get_name()
        check_input(where, input, self.input_size, self.batch_first, self._any_weight(input))
        if input.dim() == 2:
            x, reset = self._batch(input, lengths, reset)
            out, state = self._run(x, self._read_state(hx, x, unbatched=True), None, reset)
            return out.squeeze(1), _map(self._write_state(state), lambda part: part.squeeze(1))
        x = input.transpose(0, 1) if self.batch_first else input
        if reset is not None:
            reset = check_reset(where, reset, input)
            reset = reset.T if self.batch_first else reset
        going = None
        if lengths is not None:
            lengths = check_lengths(where, lengths, x)
            going = (torch.arange(x.shape[0], device=x.device).unsqueeze(1) < lengths).unsqueeze(-1)  # (T, B, 1)
            x = torch.where(going, x, 0.0)  # values past a row's end, perhaps NaN, must not reach gradients
        out, state = self._run(x, self._read_state(hx, x), lengths, reset)
        if going is not None:
            out = torch.where(going, out, 0.0)
        if self.batch_first:  # nn.GRU transposes in place too; FSDP2 warns about outputs that are views
            out = out.transpose_(0, 1) if self.takes_lead and reset is None else out.transpose(0, 1)
        return out, self._write_state(state)

    def _batch(self, input: Tensor, lengths: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return an unbatched input and its resets as a batch of one row."""
        where = self._get_name()
        if lengths is not None:
            raise MismatchError(f"{where}: lengths needs batched input; got {tuple(input.shape)}.")
        return input.unsqueeze(1), None if reset is None else check_reset(where, reset, input).unsqueeze(1)

    def _unpack(self, input: PackedSequence, lengths: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a packed input as ``(T, B, I)``, in the user's order, and its lengths, which are on the CPU."""
        where = self._get_name()
        if reset is not None:
            raise ValueError(f"{where}: reset needs padded input; pass it with lengths= instead of packing.")
        if lengths is not None:
            raise ValueError(f"{where}: a PackedSequence carries its own lengths; leave lengths out.")
        check_packed(where, input, self.input_size, self._any_weight(input.data))
        return pad_packed_sequence(input)

    def _leaf(self, input: Any, hx: Any, **words: Any) -> Any:
        """Return the node for a call in ``torch.fx.symbolic_trace``, as for a call of nn.GRU."""
        given = {word: value for word, value in words.items() if value is not None}
        tracer: Any = next(part.tracer for part in (input, hx, *given.values()) if isinstance(part, Proxy))
        path = tracer.path_of_module(self)
        if not path:
            raise TraceError(
                f"{self._get_name()}: torch.fx.symbolic_trace keeps it as one node, like nn.GRU, so it cannot be "
                "the root. Trace a model that contains it."
            )
        return tracer.create_proxy("call_module", path, (input, hx), given)

    def _run(
        self,
        x: Tensor,
        states: list[State],
        lengths: Tensor | None,
        reset: Tensor | None = None,
        grouped: bool = False,
    ) -> tuple[Tensor, list[State]]:
        last: list[State] = []
        segments = None
        if reset is not None:
            segments = find_segments(reset, lengths)
        elif lengths is not None and not grouped and (groups := self._like_rows(x, lengths)):
            return self._run_groups(x, states, lengths, groups)
        whole = self.takes_lead and len(states) == 1 and segments is None and not grouped
        lead: dict[str, Any] = {"lead": (1,)} if whole else {}
        directions = self.num_directions
        for layer in range(self.num_layers):
            if layer > 0 and self.dropout > 0:
                x = F.dropout(x, self.dropout, self.training)
            outs = []
            for direction in range(directions):
                index = layer * directions + direction
                if segments is not None and len(segments.row) > 0:
                    out, state = self._scan_segments(index, x, states[index], segments, bool(direction))
                else:
                    read = reverse(x, lengths) if direction else x
                    out, state = self.scan(index, read, states[index], lengths, **lead)
                    out = reverse(out, lengths) if direction else out
                outs.append(out)
                last.append(state)
            x = torch.cat(outs, -1) if self.bidirectional else outs[0]
        return x, last

    def _like_rows(self, x: Tensor, lengths: Tensor) -> list[Tensor]:
        """Group the rows of ``x`` ``(T, B, I)`` by length, like ``Segments``, on the CPU; a GPU runs all rows at once.

        There are no groups if they would leave out too few steps.
        """
        if x.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return []
        groups, steps = list(by_magnitude(lengths)), x.shape[0] * x.shape[1]
        left_out = steps - sum(len(rows) * int(lengths[rows].max()) for rows in groups)
        least = max(self.least_left_out * steps, WORTH_GROUPING / self.hidden_size)
        return groups if left_out >= least else []

    def _run_groups(
        self, x: Tensor, states: list[State], lengths: Tensor, groups: list[Tensor]
    ) -> tuple[Tensor, list[State]]:
        """Call ``_run`` for one group of rows after the other, each only over its own steps."""
        outs, ends = [], []
        for rows in groups:
            steps, begun = int(lengths[rows].max()), [tuple(part[rows] for part in state) for state in states]
            out, last = self._run(x[:steps].index_select(1, rows), begun, lengths[rows], grouped=True)
            outs.append(F.pad(out, (0, 0, 0, 0, 0, x.shape[0] - steps)))
            ends.append(last)
        order = torch.cat(groups).argsort()
        merged = [
            tuple(torch.cat(parts)[order] for parts in zip(*states, strict=True)) for states in zip(*ends, strict=True)
        ]
        return torch.cat(outs, 1).index_select(1, order), merged

    def _scan_segments(
        self, index: int, x: Tensor, state: State, segments: Segments, backwards: bool
    ) -> tuple[Tensor, State]:
        def scan(x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
            return self.scan(index, x, state, lengths)

        state = (*state, *self.initial_state(index, x.shape[1], x)[len(state) :])
        return scan_segments(scan, lambda rows: self.initial_state(index, rows, x), x, state, segments, backwards)

    def _read_state(self, hx: Hidden | None, x: Tensor, unbatched: bool = False) -> list[State]:
        """Split ``hx`` into one state tuple per recurrence, after checking its form."""
        count = self.num_layers * self.num_directions
        if hx is None:
            return self._starts(count, x)
        where = self._get_name()
        parts = state_parts(where, hx, self.state_names)
        fresh = self._initial_states(count, x) if any(p is None for p in parts) else []
        columns = []
        for place, (name, part, shape) in enumerate(zip(self.state_names, parts, self._state_shapes(x), strict=True)):
            if part is None:
                columns.append(tuple(state[place] for state in fresh))
                continue
            part = part.unsqueeze(1) if unbatched else part
            check_part(where, name, part, (count, *shape), unbatched, x)
            columns.append(tuple(part.unbind(0)))
        return list(zip(*columns, strict=True))

    def _initial_states(self, count: int, x: Tensor) -> list[State]:
        """Return the ``initial_state`` of the first ``count`` recurrences for an input ``(T, B, I)``."""
        return [self.initial_state(index, x.shape[1], x) for index in range(count)]

    def _starts(self, count: int, x: Tensor) -> list[State]:
        """Return ``_initial_states``, or only the leading parts of each that ``scan`` needs."""
        return self._initial_states(count, x)

    def _state_shapes(self, x: Tensor) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the parts of one recurrence's state for an input ``(T, B, I)``."""
        return tuple(tuple(part.shape) for part in self.initial_state(0, x.shape[1], x))

    def _any_weight(self, input: Tensor) -> Tensor:
        """Return a parameter, whose device and dtype ``input`` must have."""
        return next(self.parameters())

    def _write_state(self, states: list[State]) -> Hidden:
        parts = tuple(torch.stack(column) for column in zip(*states, strict=True))
        return parts[0] if len(parts) == 1 else parts

    def extra_repr(self) -> str:
        words = [f"{self.input_size}, {self.hidden_size}"]
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        words += [f"{word}={getattr(self, word)}" for word, usual in defaults.items() if getattr(self, word) != usual]
        return ", ".join(words)


def pack_like(out: Tensor, sizes: Tensor, like: PackedSequence) -> PackedSequence:
    """Pack outputs ``(T, B, H)``, in the user's order, and their lengths in the same way as ``like``."""
    if like.sorted_indices is not None:
        out = out.index_select(1, like.sorted_indices)
        sizes = sizes[like.sorted_indices.to(sizes.device)]
    data = pack_padded_sequence(out, sizes).data
    return PackedSequence(data, like.batch_sizes, like.sorted_indices, like.unsorted_indices)


def reverse(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse ``x`` ``(T, B, ...)`` in time, each sequence within its own length."""
    if lengths is None:
        return x.flip(0)
    steps = torch.arange(x.shape[0], device=x.device).unsqueeze(1)  # (T, 1)
    source = torch.where(steps < lengths, lengths - 1 - steps, steps)  # (T, B)
    place = source * x.shape[1] + torch.arange(x.shape[1], device=x.device)
    return x.flatten(0, 1).index_select(0, place.flatten()).view_as(x)  # copies whole rows, gather single numbers


def _map(hidden: Hidden, change: Callable[[Tensor], Tensor]) -> Hidden:
    if isinstance(hidden, Tensor):
        return change(hidden)
    return tuple(None if part is None else change(part) for part in hidden)


def check_input(where: str, input: Tensor, input_size: int, batch_first: bool, weight: Tensor) -> None:
    """Raise unless the input is ``(T, B, I)``, ``(B, T, I)`` or ``(T, I)`` with a step and matches the weights."""
    if not isinstance(input, Tensor):
        raise ArgumentTypeError(f"{where}: input is a {type(input).__name__}; it must be a Tensor or a PackedSequence.")
    check_dense(where, "input", input)
    if input.dim() not in (2, 3):
        order = "(B, T, I)" if batch_first else "(T, B, I)"
        raise MismatchError(f"{where}: input has shape {tuple(input.shape)}; it must be {order}, or (T, I) unbatched.")
    _check_features(where, input, input_size, weight)
    T = input.shape[1 if input.dim() == 3 and batch_first else 0]
    if in_program():
        steps = torch.scalar_tensor(T, dtype=torch.int64, device="cpu")
        torch.ops.aten._assert_async.msg(steps >= 1, f"{where}: the input has no time step; it needs at least one.")
    elif T == 0:
        raise MismatchError(f"{where}: input has shape {tuple(input.shape)}, with no time step; it needs at least one.")


def check_packed(where: str, input: PackedSequence, input_size: int, weight: Tensor) -> None:
    """Raise unless the packed data are ``(sum of lengths, I)`` and match the weights."""
    if torch.compiler.is_exporting():
        raise RuntimeError(
            f"{where}: torch cannot export a PackedSequence. Pass the padded input and lengths=, which give the same."
        )
    if input.data.dim() != 2:
        raise MismatchError(
            f"{where}: the packed input has data of shape {tuple(input.data.shape)}; "
            "it must be (sum of lengths, I): pack sequences of shape (length, I)."
        )
    _check_features(where, input.data, input_size, weight)


def _check_features(where: str, input: Tensor, input_size: int, weight: Tensor) -> None:
    if input.shape[-1] != input_size:
        raise MismatchError(
            f"{where}: input.size(-1) must be equal to input_size. Expected {input_size}, got {input.shape[-1]}."
        )
    check_fits(where, input, weight)


def check_lengths(where: str, lengths: Tensor, x: Tensor) -> Tensor:
    """Check that ``lengths`` is ``(B,)`` integers from 1 to T for ``x`` ``(T, B, ...)``; return it on x's device.

    Values on a GPU are not read.
    """
    T, B = x.shape[:2]
    if not isinstance(lengths, Tensor):
        raise ArgumentTypeError(
            f"{where}: lengths is a {type(lengths).__name__}; it must be a Tensor ({B},) of integers. "
            "Pass torch.as_tensor(lengths)."
        )
    check_dense(where, "lengths", lengths)
    if lengths.shape != (B,) or lengths.dtype not in INTEGERS:
        hint = " Convert them with .long()." if lengths.dtype in UNSIGNED else ""
        raise MismatchError(
            f"{where}: lengths has shape {tuple(lengths.shape)} and {lengths.dtype}; expected ({B},) integers.{hint}"
        )
    check_values(where, "lengths", lengths, x)
    if lengths.device.type == "cpu":
        _check_range(where, lengths, T)
    return lengths.to(x.device)


def _check_range(where: str, lengths: Tensor, T: int) -> None:
    if not torch.compiler.is_compiling():
        low, high = (int(lengths.min()), int(lengths.max())) if lengths.numel() > 0 else (1, 1)
        if low < 1 or high > T:
            raise ValueError(f"{where}: lengths range from {low} to {high}; allowed are 1 to T={T}.")
    elif in_program():
        inside = ((lengths >= 1) & (lengths <= T)).all()
        torch.ops.aten._assert_async.msg(inside, f"{where}: lengths must run from 1 to T, the steps of the input.")


def check_reset(where: str, reset: Tensor, input: Tensor) -> Tensor:
    """Check that ``reset`` is bool and of the shape of ``input`` without features, and return it."""
    shape = tuple(input.shape[:-1])
    if not isinstance(reset, Tensor):
        raise ArgumentTypeError(
            f"{where}: reset is a {type(reset).__name__}; it must be a bool Tensor of shape {shape}. "
            "Pass torch.as_tensor(reset)."
        )
    check_dense(where, "reset", reset)
    if tuple(reset.shape) != shape or reset.dtype != torch.bool:
        raise MismatchError(
            f"{where}: reset has shape {tuple(reset.shape)} and {reset.dtype}; expected {shape} and torch.bool, a flag "
            "for each step of each row."
        )
    check_values(where, "reset", reset, input)
    if torch.compiler.is_exporting():
        raise RuntimeError(
            f"{where}: reset= cannot be exported, since where rows are cut depends on its values. Pass each stretch "
            "between two resets as a row of its own, with lengths=."
        )
    return reset


def check_values(where: str, name: str, part: Tensor, like: Tensor) -> None:
    """Raise if ``part`` is on the meta device, where it has no values, but ``like`` is not."""
    if part.is_meta and not like.is_meta:
        raise MismatchError(f"{where}: {name} is on meta and has no values; create it on {like.device}.")


def in_program() -> bool:
    """Return whether ``torch.export`` is tracing: then checks of sizes must be part of the program; ONNX has none."""
    return torch.compiler.is_exporting() and not torch.onnx.is_in_onnx_export()


def check_part(where: str, name: str, part: Tensor, shape: tuple[int, ...], unbatched: bool, like: Tensor) -> None:
    """Raise unless ``part`` is ``(num_layers * num_directions, B, ...)``; B is 1 for unbatched input."""
    if tuple(part.shape) != shape:
        given, wanted = ((*s[:1], *s[2:]) if unbatched else tuple(s) for s in (part.shape, shape))
        raise MismatchError(
            f"{where}: {name} in hx has shape {given}; expected {wanted}, (num_layers * num_directions, "
            + ("...)." if unbatched else "B, ...).")
        )
    check_state_fits(where, name, part, like)


def find_segments(reset: Tensor, lengths: Tensor | None) -> Segments:
    """Cut rows before the steps where ``reset`` ``(T, B)`` is True; on the CPU, where sizes can be read."""
    reset, T = reset.cpu(), reset.shape[0]  # torch's default device may not be the CPU
    ends = torch.full((reset.shape[1],), T, device="cpu") if lengths is None else lengths.cpu().long()
    begins = reset.clone()
    begins[0] = True
    begins &= torch.arange(T, device="cpu").unsqueeze(1) < ends
    row, start = begins.T.nonzero().unbind(1)
    changes = row[1:] != row[:-1]
    edge = torch.ones(min(len(row), 1), dtype=torch.bool, device="cpu")
    last, first = torch.cat([changes, edge]), torch.cat([edge, changes])
    end = torch.where(last, ends[row], start.roll(-1))
    return Segments(row, start, end - start, reset[start, row], first, last)


def classes(segments: Segments, most: int) -> Iterator[Segments]:
    """Yield segments of similar lengths, at most ``most`` at a time."""
    for alike in by_magnitude(segments.length):
        for which in alike.split(most):
            yield segments.take(which)


def by_magnitude(lengths: Tensor) -> Iterator[Tensor]:
    """Yield the indices of the lengths from 2^k to 2^(k+1) - 1, for each k with such lengths."""
    exponent = torch.frexp(lengths.double()).exponent
    for value in exponent.unique().tolist():
        yield (exponent == value).nonzero().squeeze(1)


def scan_segments(
    scan: Scan, initial: Callable[[int], State], x: Tensor, state: State, segments: Segments, backwards: bool
) -> tuple[Tensor, State]:
    """Run a recurrence over all segments of ``x`` ``(T, B, I)``.

    Args:
        scan: maps ``x``, state and lengths to outputs and the last state.
        initial: returns the initial state for a number of rows.
        x: ``(T, B, I)``.
        state: parts ``(B, ...)``, the start of rows that are not reset before their first step.
        segments: the segments.
        backwards: whether to read each segment from its end.

    Returns:
        Outputs ``(T, B, H)``, zero past the end of a row, and the state after the last segment of each row.
    """
    T, B = x.shape[:2]
    rows_at_once = max(B, MOST_NUMBERS // max(sum(part[0].numel() for part in state if B > 0), 1))
    outputs, places, ends, rows = [], [], [], []
    for cut in classes(segments, rows_at_once):
        row, start, length, again, first, last = (part.to(x.device, non_blocking=True) for part in cut)
        offset = torch.arange(int(cut.length.max()), device=x.device).unsqueeze(1)  # (L, 1)
        inside = offset < length  # (L, S)
        time = start + torch.where(inside, length - 1 - offset if backwards else offset, 0)
        begun = last if backwards else first  # the segment that follows the given state
        given = begun if backwards else begun & ~again
        start_state = tuple(
            torch.where(given.view(-1, *[1] * (part.dim() - 1)), part[row], fresh)
            for part, fresh in zip(state, initial(len(row)), strict=True)
        )
        out, end = scan(x[time, row], start_state, length)
        outputs.append(out[inside])
        places.append((time * B + row)[inside])
        final = first if backwards else last
        ends.append(tuple(part[final] for part in end))
        rows.append(row[final])
    flat = torch.cat(outputs)
    out = flat.new_zeros(T * B, flat.shape[-1]).index_copy(0, torch.cat(places), flat).view(T, B, -1)
    order = torch.cat(rows).argsort()
    return out, tuple(torch.cat(column)[order] for column in zip(*ends, strict=True))
