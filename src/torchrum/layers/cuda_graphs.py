"""Any layer as CUDA graphs: its loop over time is recorded once for each signature, then replayed.

A module's forward and backward are recorded as two CUDA graphs. A recording has its own memory: buffers for the inputs
and the outputs' gradients, and the values saved for the backward, which the next replay of the forward overwrites. The
weights are read in place. So a recording is busy from a forward to its backward, and a call in between uses another.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from torchrum.layers.recurrent import Hidden, Recurrent, check_lengths, pack_like
from torchrum.ops._checks import check_positive_int
from torchrum.ops._dispatch import Choice
from torchrum.ops.kernels.cuda import recording

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
WARM_UP = 2  # eager runs before recording, to load libraries and compile and tune kernels, which cannot be recorded
MOST_MOVES = 3  # changes of the weights' addresses before recording is given up

_lock = threading.RLock()  # autograd runs the backward in its own thread
_recording_now = threading.Lock()  # never waited for: the waiting thread may be the one for a warm-up's backward


class UnrecordableError(Exception):
    """Error with the reason why a module cannot be recorded."""


class Place:
    """The streams of one device for its recordings, and the order of their replays.

    All recordings on a device share cuBLAS's workspace of the recording stream, so two replays must not overlap: each
    waits for the event that the previous one recorded. On a single stream this wait is free.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        modes = torch.inference_mode(False), torch.enable_grad()
        with torch.cuda.device(device), modes[0], modes[1]:
            self.stream, self.side, self.done = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
            # a graph that is never freed keeps cuBLAS's workspaces, of this thread and of autograd's, in its memory
            self.anchor, self.pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            x = torch.ones(16, 16, device=device, requires_grad=True)
            with self.aside():
                torch.autograd.grad((x @ x).sum(), x)
            x = x.detach().requires_grad_()
            with recording(self.anchor, self.pool, self.stream, other_threads=True):
                torch.autograd.grad((x @ x).sum(), x)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run on a side stream, in order with the current one."""
        current = torch.cuda.current_stream(self.device)
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            yield
        current.wait_stream(self.side)

    def capture(self, pieces: list[Callable[[], list[Any]]]) -> list[tuple[Any, list[Any]]]:
        """Record each piece of work. The recordings share memory, so they must be replayed in this order."""
        current, pool = torch.cuda.current_stream(self.device), torch.cuda.graph_pool_handle()
        state = torch.cuda.get_rng_state(self.device)
        records = []
        try:
            for piece in pieces:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.device(self.device), recording(graph, pool, self.stream, other_threads=True):
                    results = piece()
                records.append((graph, results))
        except Exception as error:  # the module did something that cannot be recorded; none of the work was run
            torch.cuda.set_stream(current)  # a failed recording does not restore the stream
            end = getattr(torch._C, "_cuda_endAllocateToPool", None)
            with contextlib.suppress(Exception):  # and not always the memory pool
                if end is not None:
                    end(self.device.index, pool)
            self._mend_generator(state)
            raise UnrecordableError(f"recording failed: {_first_cause(error)}") from error
        return records

    def _mend_generator(self, state: Tensor) -> None:
        """Repair the generator if it is still in capture mode."""
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
        """Replay after all earlier replays."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            current.wait_event(self.done)
            yield
            self.done.record(current)

    @contextlib.contextmanager
    def same_random_numbers(self) -> Iterator[None]:
        """Restore the state of the device's generator on exit."""
        state = torch.cuda.get_rng_state(self.device)
        yield
        torch.cuda.set_rng_state(state, self.device)


_places: dict[torch.device, Place] = {}


def place_of(device: torch.device) -> Place:
    """Return the place of a device, created on first use."""
    with _lock:
        if device not in _places:
            _places[device] = Place(device)
        return _places[device]


def _first_cause(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


class Recording:
    """One forward of a module for one signature and, if ``needs_grad``, its backward.

    Args:
        module: the module, for its weights and buffers.
        call: runs the module on weights by name and tensors like ``inputs``.
        inputs: inputs of the first call.
        needs_grad: whether to record a backward.
        place: the place of the device.
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
        self.form: Hashable = None  # form of the outputs
        self.grad_outputs: list[Tensor] = []
        self.turn = 0  # number of forwards: the saved values of earlier ones are overwritten
        self._call = call
        self._live: list[Tensor] = []  # outputs with their autograd graph, from a forward to its backward
        self._weights = dict(module.named_parameters())
        self._wants_grad = [x.requires_grad for x in inputs]
        with torch.inference_mode(False), torch.set_grad_enabled(needs_grad):  # buffers outlive this call and its mode
            self.inputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
            self._load(inputs)
            # the innermost hooks, so that checkpointing around this call does not intercept the tensors saved here
            with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved):
                self._warm_up(module)
                if needs_grad and not self.grad_outputs:
                    raise UnrecordableError("no output depends on what requires a gradient")
                self._renew_leaves()
                torch.clear_autocast_cache()  # a weight that was cast before the recording would not be updated
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
        """Create aliases of inputs and weights: the originals have the user's hooks and a stream of their first use."""
        self._leaves = [
            x.detach().requires_grad_(wants) for x, wants in zip(self.inputs, self._wants_grad, strict=True)
        ]
        self._aliases = {name: p.detach().requires_grad_(p.requires_grad) for name, p in self._weights.items()}
        leaves = [*self._leaves, *self._aliases.values()]
        self.wanted = [x.requires_grad for x in leaves]  # the required gradients: of the inputs, then of the weights
        self._sources = [x for x in leaves if x.requires_grad]

    def _forward(self) -> list[Tensor]:
        self._live = []
        self.form = flatten(self._call(self._aliases, self._leaves), self._live)
        self.differentiable = [x.requires_grad for x in self._live]
        return [x.detach() for x in self._live]

    def _backward(self) -> list[Tensor | None]:
        live = [x for x in self._live if x.requires_grad]
        # retain the graph, so that its memory is not reused and the backward can be replayed more than once
        with torch.autocast(self.place.device.type, enabled=False):  # a backward usually runs outside of autocast
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
                    if buffer._version != version:  # any write, even of equal values, would break pending backwards
                        buffer.copy_(before)
        if not torch.equal(host_numbers, torch.get_rng_state()):
            torch.set_rng_state(host_numbers)
            raise UnrecordableError("the module draws random numbers on the CPU, and a recording would repeat them")

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Replay the forward on new inputs and return new tensors."""
        with _lock, self.place.in_order():
            self._load(inputs)
            self._forward_graph.replay()
            return [x.clone() for x in self.outputs]

    def run_backward(self, grad_outputs: list[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward and return new gradients of the inputs and weights that require them, None if unused."""
        with _lock, self.place.in_order():
            given = [grad for grad, wanted in zip(grad_outputs, self.differentiable, strict=True) if wanted]
            for buffer, grad in zip(self.grad_outputs, given, strict=True):
                buffer.zero_() if grad is None else buffer.copy_(grad)
            self._backward_graph.replay()
            return [None if grad is None else grad.clone() for grad in self.grads]


class Lease:
    """The right to a recording's saved values, from a forward to its backward or until its graph is freed."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.turn = recording, recording.turn

    def valid(self) -> bool:
        return self.recording.turn == self.turn

    def end(self) -> None:
        if self.valid():
            self.recording.busy = False

    __del__ = end


@dataclass
class _Entry:
    copies: list[Recording] = field(default_factory=list)
    weights: Hashable = None
    moves: int = 0
    refusal: str | None = None


class Recordings:
    """The recordings of one module by signature, at most ``limit`` in total; the least recently used are freed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return Recordings, (self.limit,)  # a copy of a module makes its own recordings

    def __len__(self) -> int:
        return sum(len(entry.copies) for entry in self.entries.values())

    def take(self, key: Hashable, weights: Hashable, record: Callable[[], Recording]) -> Recording | str:
        """Return a free recording for this signature, made if needed, or the reason why there is none.

        Args:
            key: everything that is fixed in a recording.
            weights: addresses of the weights; recordings for other addresses are freed.
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
            copy.place.done.synchronize()  # wait until no replay uses its memory
        entry.copies.clear()

    def clear(self) -> None:
        """Free every recording; later calls record again."""
        with _lock:
            while self.entries:
                self._free(self.entries.popitem()[1])


def flatten(value: Any, tensors: list[Tensor]) -> Hashable:
    """Append the tensors of nested tuples and lists to ``tensors`` and return the remaining form."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        tensors.append(value)
        return len(tensors) - 1
    if type(value) in (tuple, list):
        return type(value), tuple(flatten(part, tensors) for part in value)
    raise UnrecordableError(f"a {type(value).__name__} is passed; only tensors, tuples and lists can be recorded")


def unflatten(form: Any, tensors: Sequence[Tensor]) -> Any:
    """Rebuild the value from its form and tensors, the inverse of ``flatten``."""
    if form is None:
        return None
    if isinstance(form, int):
        return tensors[form]
    kind, parts = form
    return kind(unflatten(part, tensors) for part in parts)


def graphed(layer: nn.Module, *, strict: bool = False, max_graphs: int = 8) -> "Graphed":
    """Run a layer's whole loop over time as CUDA graphs, in training and inference, with the same results.

    A layer in plain PyTorch launches tens of kernels per step, and the launches take most of its time. With this
    wrapper, the first call of each signature (shapes, dtypes, given arguments, tensors that require a gradient,
    training or evaluation, autocast) runs the layer twice and records its forward and its backward; later calls replay
    them. A new number of steps T is a new signature: if your lengths vary, pad to a few lengths and pass ``lengths``.

    The layer is called without a recording if it cannot be recorded: on the CPU, under ``torch.compile`` or
    ``torch.func``, inside another recording, with module hooks, or if it synchronises with the host. ``explain()``
    returns the reason.

    Python values and tensors that are neither parameters nor buffers are fixed in a recording: call ``clear()`` after
    changing one of them, such as a dropout rate. Weights and buffers are read at each replay; update them in place.
    Random numbers of the CUDA generator are drawn again at each replay. The gradient cannot be differentiated again.
    During a recording, aliases replace the layer's weights, so call it from one thread at a time.

    Args:
        layer: any module called as ``layer(input, hx=None)`` or ``layer(input, hx, lengths=lengths)``, such as those of
            ``build_layer`` and any ``CellLayer``. It keeps its parameters, and the result shares them under the same
            names.
        strict: raise an error instead of calling the layer without a recording.
        max_graphs: largest number of recordings; the least recently used are freed. Each signature needs one, and so
            does each call whose backward has not run yet.

    Returns:
        A module with the calls, the attributes and the ``state_dict`` of ``layer``.

    Example:
        >>> import torch
        >>> from torchrum import graphed
        >>> from torchrum.layers.registry import build_layer
        >>> layer = graphed(build_layer("goru", 3, 8))
        >>> output, h_n = layer(torch.zeros(5, 2, 3))
        >>> layer.explain()
        Choice(backend='eager', reason='the input is on cpu')
    """
    return Graphed(layer, strict=strict, max_graphs=max_graphs)


class Graphed(nn.Module):
    """The result of :func:`graphed`; ``layer`` is the module inside."""

    def __init__(self, layer: nn.Module, *, strict: bool = False, max_graphs: int = 8) -> None:
        super().__init__()
        if not isinstance(layer, nn.Module) or isinstance(layer, Graphed):
            raise ValueError(
                f"graphed: layer is of type {type(layer).__name__}; it must be a module that is not graphed yet."
            )
        if not isinstance(strict, bool):
            raise ValueError(f"graphed: strict={strict!r}; it must be True or False.")
        check_positive_int("graphed", max_graphs=max_graphs)
        self.__dict__["layer"] = layer  # not a submodule: its parameters keep their names, here and in a larger model
        self._parameters, self._buffers, self._modules = layer._parameters, layer._buffers, layer._modules
        self._non_persistent_buffers_set = layer._non_persistent_buffers_set
        self.training = layer.training
        self.strict = strict
        self._recordings = Recordings(max_graphs)
        self._choice = Choice("eager", "it was not called yet")

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Hidden | None = None,
        *,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Any, Any]:
        """Return the result of ``layer(input, hx, lengths=lengths, reset=reset)``."""
        if torch.compiler.is_compiling():
            return self._call_layer(input, hx, lengths, reset)
        obstacle = self._obstacle(input, hx, lengths)
        if reset is not None:
            obstacle = "reset is given, which the host reads to cut the rows"
        if obstacle is None and isinstance(input, PackedSequence):
            return self._run_packed(input, hx, lengths)
        if obstacle is None:
            assert isinstance(input, Tensor)
            if lengths is not None and lengths.device != input.device:
                if isinstance(self.layer, Recurrent) and input.dim() == 3:  # check values while they are on the CPU
                    x = input.transpose(0, 1) if self.layer.batch_first else input
                    check_lengths(type(self.layer).__name__, lengths, x)
                lengths = lengths.to(input.device)
            results = self._replay((input, hx, lengths))
            if not isinstance(results, str):
                self._choice = Choice("graphed", "a recording of this signature was replayed")
                return results
            obstacle = results
        if self.strict:
            raise ValueError(
                f"graphed: strict=True cannot be met: {obstacle}. Pass strict=False to run without a CUDA graph."
            )
        self._choice = Choice("eager", obstacle)
        return self._call_layer(input, hx, lengths, reset)

    def explain(self) -> Choice:
        """Return how the last call ran, ``"graphed"`` or ``"eager"``, and the reason."""
        return self._choice

    def clear(self) -> None:
        """Free all recordings; later calls record again."""
        self._recordings.clear()

    def _call_layer(self, input: Any, hx: Any, lengths: Tensor | None, reset: Tensor | None) -> Any:
        words = {"lengths": lengths, "reset": reset}
        return self.layer(input, hx, **{word: value for word, value in words.items() if value is not None})

    def _obstacle(self, input: Any, hx: Any, lengths: Any) -> str | None:
        """Return the reason why this call cannot be replayed, if it is known without recording, or None."""
        if isinstance(input, PackedSequence):
            if not isinstance(self.layer, Recurrent):
                return f"the input is a PackedSequence, which only {type(self.layer).__name__} itself can read"
            input = input.data
        leaves: list[Tensor] = []
        try:
            flatten((input, hx, lengths), leaves)
        except UnrecordableError as reason:
            return str(reason)
        if not leaves or leaves[0] is not input:
            return f"the input is a {type(input).__name__}"
        if (obstacle := device_obstacle(input.device)) is not None:
            return obstacle
        for x in [*leaves, *self.layer.parameters(), *self.layer.buffers()]:
            if type(x) not in (Tensor, nn.Parameter, nn.Buffer):
                return f"a tensor is a {type(x).__name__}"
            if x.device != input.device and x is not lengths:
                return f"the input is on {input.device}, and a tensor on {x.device}"
        if input.numel() == 0:
            return "the input is empty"
        if torch._C._are_functorch_transforms_active() or torch.jit.is_tracing():
            return "it is being transformed or traced"
        if parametrize._cache_enabled:
            return "it runs inside parametrize.cached(), whose weights a recording would not follow"
        for name, module in self.layer.named_modules():
            if any(getattr(module, hooks) for hooks in HOOKS):
                return f"{name or 'the layer'} has hooks, which a replay would not call"
        return None

    def _replay(self, arguments: tuple[Any, Any, Any]) -> Any:
        """Return the outputs of a replay, or the reason why there is none."""
        inputs: list[Tensor] = []
        form = flatten(arguments, inputs)
        weights = list(self.layer.parameters())
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in [*inputs, *weights])
        modules = tuple(module.training for module in self.layer.modules())
        looks = tuple(_looks(x) for x in inputs)
        key = (form, looks, tuple(p.requires_grad for p in weights), modules, needs_grad, _modes())
        at = tuple((_looks(x), x.data_ptr()) for x in [*weights, *self.layer.buffers()])

        def call(weights: dict[str, Tensor], inputs: list[Tensor]) -> Any:
            input, hx, lengths = unflatten(form, inputs)
            more = {} if lengths is None else {"lengths": lengths}
            return torch.func.functional_call(self.layer, weights, (input, hx), more)

        def record() -> Recording:
            return Recording(self.layer, call, inputs, needs_grad, place_of(inputs[0].device))

        recording = self._recordings.take(key, at, record)
        if isinstance(recording, str):
            return recording
        if needs_grad:
            return unflatten(recording.form, _Replay.apply(Lease(recording), weights, *inputs, *weights))
        return unflatten(recording.form, recording.run(inputs))

    def _run_packed(self, input: PackedSequence, hx: Hidden | None, lengths: Tensor | None) -> tuple[Any, Any]:
        if lengths is not None:
            return self._call_layer(input, hx, lengths, None)  # raises
        batch_first = self.layer.batch_first
        x, sizes = pad_packed_sequence(input, batch_first=batch_first)
        out, hidden = self.forward(x, hx, lengths=sizes)
        return pack_like(out.transpose(0, 1) if batch_first else out, sizes, input), hidden

    # the parts of the module belong to the layer, so torch's accesses to them are redirected

    def train(self, mode: bool = True) -> "Graphed":
        self.layer.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Graphed":
        self.layer._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.layer._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.layer._load_from_state_dict(*arguments)

    def __getattr__(self, name: str) -> Any:
        if name == "layer":  # missing while a copy is being made
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def __repr__(self) -> str:
        return f"graphed({self.layer!r})"


class _Replay(torch.autograd.Function):
    """Forward and backward of a recording; the weights are inputs, so that autograd accumulates their gradients."""

    @staticmethod
    def forward(ctx: Any, lease: Lease, weights: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        recording = lease.recording
        outputs = recording.run(list(tensors[: len(recording.inputs)]))
        ctx.lease, ctx.weights = lease, weights
        ctx.versions = [weight._version for weight in weights]
        ctx.set_materialize_grads(False)
        fixed = [x for x, wanted in zip(outputs, recording.differentiable, strict=True) if not wanted]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "graphed: the gradient of a recording cannot be differentiated again; "
                "call the module inside, `.layer`, where create_graph=True is needed."
            )
        if ctx.versions != [weight._version for weight in ctx.weights]:
            raise RuntimeError("graphed: a weight was changed in place between the forward and its backward.")
        if not ctx.lease.valid():
            raise RuntimeError(
                "graphed: a later call has overwritten what this second backward needs; "
                "call the module inside, `.layer`, where one forward has several backwards."
            )
        recording = ctx.lease.recording
        grads = iter(recording.run_backward(list(grad_outputs)))
        if not _graph_is_kept():
            ctx.lease.end()
        return None, None, *(next(grads) if wanted else None for wanted in recording.wanted)


def _graph_is_kept() -> bool:
    """Return whether the current backward retains the graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def device_obstacle(device: torch.device) -> str | None:
    """Return the reason why nothing can be recorded on a device now, or None."""
    if device.type != "cuda":
        return f"the input is on {device.type}"
    if torch.cuda.is_current_stream_capturing():
        return "the stream is being recorded already"
    return None


def _looks(x: Tensor) -> Hashable:
    return x.shape, x.dtype, x.device, x.requires_grad


def _modes() -> Hashable:
    """Return the settings outside the layer that are fixed in a recording."""
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    autocast = torch.is_autocast_enabled("cuda")
    return (
        autocast and torch.get_autocast_dtype("cuda"),
        precision,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.enabled,
    )
