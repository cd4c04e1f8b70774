"""A module's forward and backward recorded as two CUDA graphs, and the bounded store of such recordings.

A recording has memory of its own: buffers for the inputs and the outputs' gradients, weights read where they lie, and
the values that the backward needs, which the next replay of the forward overwrites. So a recording is busy from a
forward to its backward, and a call that comes in between gets another one.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchrum.ops.kernels.cuda import recording

WARM_UP = 2  # eager runs before recording: libraries load, kernels compile and tune, none of which can be recorded
MOST_MOVES = 3  # new places of the weights before recording is given up

_lock = threading.RLock()  # autograd runs the backward in a thread of its own
_recording_now = threading.Lock()  # never waited for: the backward of a warm-up may run in the thread that would wait


class UnrecordableError(Exception):
    """Why a module cannot be recorded, in words."""


class Place:
    """The streams of one device that recordings are made on, and the order of their replays.

    All recordings of a device share cuBLAS's workspace of the recording stream, so two replays must not overlap: each
    waits for the event that the one before it left. On one stream that costs nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        modes = torch.inference_mode(False), torch.enable_grad()
        with torch.cuda.device(device), modes[0], modes[1]:
            self.stream, self.side, self.done = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
            # A graph that is never freed keeps cuBLAS's workspaces, of this thread and of autograd's, in its memory.
            self.anchor, self.pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            x = torch.ones(16, 16, device=device, requires_grad=True)
            with self.aside():
                torch.autograd.grad((x @ x).sum(), x)
            x = x.detach().requires_grad_()
            with recording(self.anchor, self.pool, self.stream, other_threads=True):
                torch.autograd.grad((x @ x).sum(), x)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run on a stream of its own, in order with the current one."""
        current = torch.cuda.current_stream(self.device)
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            yield
        current.wait_stream(self.side)

    def capture(self, pieces: list[Callable[[], list[Any]]]) -> list[tuple[Any, list[Any]]]:
        """Record each piece of work; they share memory, so they are to be replayed in this order."""
        current, pool = torch.cuda.current_stream(self.device), torch.cuda.graph_pool_handle()
        state = torch.cuda.get_rng_state(self.device)
        records = []
        try:
            for piece in pieces:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.device(self.device), recording(graph, pool, self.stream, other_threads=True):
                    results = piece()
                records.append((graph, results))
        except Exception as error:  # whatever a module does that cannot be recorded; none of it was run
            torch.cuda.set_stream(current)  # a recording that breaks off does not leave its stream,
            end = getattr(torch._C, "_cuda_endAllocateToPool", None)
            with contextlib.suppress(Exception):  # nor always its memory
                if end is not None:
                    end(self.device.index, pool)
            self._mend_generator(state)
            raise UnrecordableError(f"recording failed: {_first_cause(error)}") from error
        return records

    def _mend_generator(self, state: Tensor) -> None:
        """Let the generator draw again, if it believes that it is still recorded."""
        try:
            torch.cuda.set_rng_state(state, self.device)
            torch.rand((), device=self.device)
            torch.cuda.set_rng_state(state, self.device)
        except RuntimeError:
            fresh = torch.Generator(self.device)
            fresh.set_state(state)
            torch.cuda.default_generators[self.device.index].graphsafe_set_state(fresh.graphsafe_get_state())

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Replay after all replays so far."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            current.wait_event(self.done)
            yield
            self.done.record(current)

    def finish(self) -> None:
        """Wait until no replay uses its memory any more."""
        self.done.synchronize()

    @contextlib.contextmanager
    def same_random_numbers(self) -> Iterator[None]:
        """Put the device's generator back where it was."""
        state = torch.cuda.get_rng_state(self.device)
        yield
        torch.cuda.set_rng_state(state, self.device)


_places: dict[torch.device, Place] = {}


def place_of(device: torch.device) -> Place:
    """The one place of a device."""
    with _lock:
        if device not in _places:
            _places[device] = Place(device)
        return _places[device]


def _first_cause(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


class Recording:
    """One forward, and its backward if ``needs_grad``, of a module at one signature.

    Args:
        module: read for its weights and buffers.
        call: given weights by name and tensors like ``inputs``, runs the module.
        inputs: what it is first called with.
        needs_grad: whether a backward is recorded.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[dict[str, Tensor], list[Tensor]], Any],
        inputs: list[Tensor],
        needs_grad: bool,
        place: Place,
    ) -> None:
        self.place, self.needs_grad = place, needs_grad
        self.busy = False
        self.form: Hashable = None  # of the outputs
        self.grad_outputs: list[Tensor] = []
        self.turn = 0  # counts forwards: a backward of an earlier one finds its values overwritten
        self._call = call
        self._live: list[Tensor] = []  # outputs with their autograd graph, from a forward to its backward
        self._weights = dict(module.named_parameters())
        self._wants_grad = [x.requires_grad for x in inputs]
        with torch.inference_mode(False), torch.set_grad_enabled(needs_grad):  # buffers outlive the mode of this call
            self.inputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
            self._load(inputs)
            # the innermost hooks: those of checkpointing around this call would take what is saved here for theirs
            with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved):
                self._warm_up(module)
                if needs_grad and not self.grad_outputs:
                    raise UnrecordableError("no output depends on what requires a gradient")
                self._renew_leaves()
                torch.clear_autocast_cache()  # a weight cast before the recording would not follow the weight
                records = place.capture([self._forward, self._backward] if needs_grad else [self._forward])
            torch.clear_autocast_cache()
            self._live = []
        self._forward_graph: Any
        self.outputs: list[Tensor]
        self._forward_graph, self.outputs = records[0]
        if needs_grad:
            self._backward_graph, self.grads = records[1]

    def _load(self, inputs: list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, x in zip(self.inputs, inputs, strict=True):
                buffer.copy_(x)

    def _renew_leaves(self) -> None:
        """Aliases of inputs and weights: the user's own carry hooks, and autograd remembers the stream of their use."""
        self._leaves = [
            x.detach().requires_grad_(wants) for x, wants in zip(self.inputs, self._wants_grad, strict=True)
        ]
        self._aliases = {name: p.detach().requires_grad_(p.requires_grad) for name, p in self._weights.items()}
        leaves = [*self._leaves, *self._aliases.values()]
        self.wanted = [x.requires_grad for x in leaves]  # gradients, of the inputs and then the weights
        self._sources = [x for x in leaves if x.requires_grad]

    def _forward(self) -> list[Tensor]:
        self._live = []
        self.form = take_apart(self._call(self._aliases, self._leaves), self._live)
        self.differentiable = [x.requires_grad for x in self._live]
        return [x.detach() for x in self._live]

    def _backward(self) -> list[Tensor | None]:
        live = [x for x in self._live if x.requires_grad]
        # the graph is retained, so that none of its memory is used again and the backward can be replayed twice
        with torch.autocast(self.place.device.type, enabled=False):  # a backward runs outside it, as a rule
            found = torch.autograd.grad(live, self._sources, self.grad_outputs, retain_graph=True, allow_unused=True)
        return [None if grad is None else grad.detach() for grad in found]

    def _warm_up(self, module: nn.Module) -> None:
        buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers()]
        host_numbers = torch.get_rng_state()
        with self.place.same_random_numbers(), self.place.aside():
            for _ in range(WARM_UP):
                torch.clear_autocast_cache()
                self._renew_leaves()
                self._forward()
                live = [x for x in self._live if x.requires_grad]
                if live:
                    self.grad_outputs = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in live]
                    self._backward()
                    strays = [p for p in module.parameters() if p.requires_grad]
                    found = torch.autograd.grad(live, strays, self.grad_outputs, allow_unused=True) if strays else ()
                    if any(grad is not None for grad in found):
                        raise UnrecordableError("the module keeps references to its weights outside its parameters")
                self._live = []
            with torch.no_grad():
                for buffer, version, before in buffers:
                    if buffer._version != version:  # a write, even of the same values, would spoil pending backwards
                        buffer.copy_(before)
        if not torch.equal(host_numbers, torch.get_rng_state()):
            torch.set_rng_state(host_numbers)
            raise UnrecordableError("the module draws random numbers on the CPU, and a recording would repeat them")

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Replay the forward on new inputs; the outputs are fresh tensors."""
        with _lock, self.place.in_order():
            self._load(inputs)
            self._forward_graph.replay()
            return [x.clone() for x in self.outputs]

    def run_backward(self, grad_outputs: list[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward; fresh gradients of the inputs and weights that require them, None for unused ones."""
        with _lock, self.place.in_order():
            given = [grad for grad, wanted in zip(grad_outputs, self.differentiable, strict=True) if wanted]
            for buffer, grad in zip(self.grad_outputs, given, strict=True):
                buffer.zero_() if grad is None else buffer.copy_(grad)
            self._backward_graph.replay()
            return [None if grad is None else grad.clone() for grad in self.grads]


class Lease:
    """The right to a recording's saved values, from a forward until its backward or until its graph is dropped."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.turn = recording, recording.turn

    def valid(self) -> bool:
        return self.recording.turn == self.turn

    def end(self) -> None:
        if self.valid():
            self.recording.busy = False

    def __del__(self) -> None:
        self.end()


@dataclass
class _Entry:
    copies: list[Recording] = field(default_factory=list)
    weights: Hashable = None
    moves: int = 0
    refusal: str | None = None


class Recordings:
    """The recordings of one module by signature, at most ``limit`` in all; the least recently used are freed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return Recordings, (self.limit,)  # a copy of a module records for itself

    def __len__(self) -> int:
        return sum(len(entry.copies) for entry in self.entries.values())

    def take(self, key: Hashable, weights: Hashable, record: Callable[[], Recording]) -> Recording | str:
        """A recording for this signature that no backward waits for, made if need be; or why there is none.

        Args:
            key: everything that a recording bakes in.
            weights: where the weights lie; a recording made elsewhere is dropped.
            record: makes a recording.
        """
        with _lock:
            entry = self.entries.setdefault(key, _Entry())
            self.entries.move_to_end(key)
            if entry.weights != weights and entry.refusal is None:
                entry.moves += entry.weights is not None
                self._free(entry)
                entry.weights = weights
                if entry.moves > MOST_MOVES:
                    entry.refusal = f"the weights were at {entry.moves + 1} addresses; update them in place"
            if entry.refusal is not None:
                return entry.refusal
            free = next((recording for recording in entry.copies if not recording.busy), None)
            if free is None and len(entry.copies) >= self.limit:
                return f"{self.limit} recordings, all that max_graphs allows, wait for their backward"
            if free is not None:
                return self._reserve(free)
        if not _recording_now.acquire(blocking=False):
            return "another recording is in progress"
        try:
            made = record()
        except UnrecordableError as reason:
            entry.refusal = str(reason)
            return entry.refusal
        finally:
            _recording_now.release()
        with _lock:
            entry.copies.append(made)
            self._evict(key)
            return self._reserve(made)

    def _reserve(self, recording: Recording) -> Recording:
        recording.busy = recording.needs_grad
        recording.turn += 1
        return recording

    def _evict(self, newest: Hashable) -> None:
        while len(self) > self.limit or len(self.entries) > 16 * self.limit:
            oldest = next(key for key in self.entries if key != newest)
            self._free(self.entries.pop(oldest))

    def _free(self, entry: _Entry) -> None:
        for copy in entry.copies:
            copy.place.finish()
        entry.copies.clear()

    def clear(self) -> None:
        """Free every recording; later calls record anew."""
        with _lock:
            while self.entries:
                self._free(self.entries.popitem()[1])


def take_apart(value: Any, tensors: list[Tensor]) -> Hashable:
    """Put the tensors of nested tuples and lists into ``tensors`` and return the form that is left."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        tensors.append(value)
        return len(tensors) - 1
    if type(value) in (tuple, list):
        return type(value), tuple(take_apart(part, tensors) for part in value)
    raise UnrecordableError(f"a {type(value).__name__} is passed; only tensors, tuples and lists can be recorded")


def put_together(form: Any, tensors: Sequence[Tensor]) -> Any:
    """The opposite of ``take_apart``."""
    if form is None:
        return None
    if isinstance(form, int):
        return tensors[form]
    kind, parts = form
    return kind(put_together(part, tensors) for part in parts)
