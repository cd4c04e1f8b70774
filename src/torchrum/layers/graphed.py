"""Any layer under CUDA graphs: its whole loop is recorded once for each signature and replayed from then on."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from torchrum.layers.checks import check_lengths
from torchrum.layers.recording import (
    Lease,
    Recording,
    Recordings,
    UnrecordableError,
    place_of,
    put_together,
    take_apart,
)
from torchrum.layers.recurrent import Hidden, Recurrent
from torchrum.ops._checks import check_positive_int
from torchrum.ops._dispatch import Choice

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def graphed(layer: nn.Module, *, strict: bool = False, max_graphs: int = 8) -> "Graphed":
    """Run a layer's whole loop over time as CUDA graphs, in training and inference, with the same results.

    A layer in plain PyTorch launches tens of kernels per step, and the launches take most of its time. Here the first
    call of each signature (shapes, dtypes, which arguments are given, what requires a gradient, training or evaluation,
    autocast) runs the layer twice, records its forward and its backward, and later calls replay them. A new number of
    steps T is a new signature: pad to a few lengths and pass ``lengths`` if yours vary.

    The layer is called as it is wherever it cannot be recorded: on the CPU, under ``torch.compile`` or ``torch.func``,
    inside another recording, with module hooks, or when it needs the host in between. ``explain()`` says why.

    What a recording bakes in: Python values and tensors that are neither parameters nor buffers. Call ``clear()`` after
    changing one of them, such as a dropout rate. Weights and buffers are read at each replay; update them in place.
    Random numbers of the CUDA generator are drawn anew at each replay. The gradient cannot be differentiated again.
    While a call records, the layer's weights are swapped for aliases: call it from one thread at a time.

    Args:
        layer: any module called as ``layer(input, hx=None)`` or ``layer(input, hx, lengths=lengths)``, such as those of
            ``build_layer`` and any ``CellLayer``. It keeps its parameters, which the result shares by the same names.
        strict: raise the reason instead of calling the layer as it is.
        max_graphs: recordings kept, the least recently used being freed. Calls that wait for their backward need one
            each, as does each signature.

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
    """What :func:`graphed` returns; ``layer`` is the module inside."""

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
        """What ``layer(input, hx, lengths=lengths, reset=reset)`` returns."""
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
                lengths = self._checked_lengths(lengths, input).to(input.device)
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
        """How the last call ran, ``"graphed"`` or ``"eager"``, and why."""
        return self._choice

    def clear(self) -> None:
        """Free all recordings; later calls record anew."""
        self._recordings.clear()

    def _call_layer(self, input: Any, hx: Any, lengths: Tensor | None, reset: Tensor | None) -> Any:
        words = {"lengths": lengths, "reset": reset}
        return self.layer(input, hx, **{word: value for word, value in words.items() if value is not None})

    def _obstacle(self, input: Any, hx: Any, lengths: Any) -> str | None:
        """Why this call cannot be replayed, as far as can be told without recording it, or None."""
        if isinstance(input, PackedSequence):
            if not isinstance(self.layer, Recurrent):
                return f"the input is a PackedSequence, which only {type(self.layer).__name__} itself can read"
            input = input.data
        leaves: list[Tensor] = []
        try:
            take_apart((input, hx, lengths), leaves)
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

    def _checked_lengths(self, lengths: Tensor, input: Tensor) -> Tensor:
        if isinstance(self.layer, Recurrent) and input.dim() == 3:
            x = input.transpose(0, 1) if self.layer.batch_first else input
            check_lengths(type(self.layer).__name__, lengths, x)  # its values can be read on the CPU only
        return lengths

    def _replay(self, arguments: tuple[Any, Any, Any]) -> Any:
        """Outputs of a replay, or the reason that there is none."""
        inputs: list[Tensor] = []
        form = take_apart(arguments, inputs)
        weights = list(self.layer.parameters())
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in [*inputs, *weights])
        modules = tuple(module.training for module in self.layer.modules())
        looks = tuple(_looks(x) for x in inputs)
        key = (form, looks, tuple(p.requires_grad for p in weights), modules, needs_grad, _modes())
        at = tuple((_looks(x), x.data_ptr()) for x in [*weights, *self.layer.buffers()])

        def call(weights: dict[str, Tensor], inputs: list[Tensor]) -> Any:
            input, hx, lengths = put_together(form, inputs)
            more = {} if lengths is None else {"lengths": lengths}
            return torch.func.functional_call(self.layer, weights, (input, hx), more)

        def record() -> Recording:
            return Recording(self.layer, call, inputs, needs_grad, place_of(inputs[0].device))

        recording = self._recordings.take(key, at, record)
        if isinstance(recording, str):
            return recording
        if needs_grad:
            return put_together(recording.form, _Replay.apply(Lease(recording), weights, *inputs, *weights))
        return put_together(recording.form, recording.run(inputs))

    def _run_packed(self, input: PackedSequence, hx: Hidden | None, lengths: Tensor | None) -> tuple[Any, Any]:
        if lengths is not None:
            return self._call_layer(input, hx, lengths, None)  # raises
        batch_first = self.layer.batch_first
        x, sizes = pad_packed_sequence(input, batch_first=batch_first)
        out, hidden = self.forward(x, hx, lengths=sizes)
        if input.sorted_indices is not None:
            out = out.index_select(0 if batch_first else 1, input.sorted_indices)
            sizes = sizes[input.sorted_indices.to(sizes.device)]
        data = pack_padded_sequence(out, sizes, batch_first=batch_first).data
        return PackedSequence(data, input.batch_sizes, input.sorted_indices, input.unsorted_indices), hidden

    # What a module is made of is the layer's: these are the ways in which torch reaches it.

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
        if name == "layer":  # a copy in the making has none yet
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def __repr__(self) -> str:
        return f"graphed({self.layer!r})"


class _Replay(torch.autograd.Function):
    """Forward and backward of a recording; weights are inputs so that their gradients flow as usual."""

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
    """Whether the backward under way was asked to retain the graph; told only by torch's inside."""
    return getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False)()


def device_obstacle(device: torch.device) -> str | None:
    """Why nothing can be recorded on a device at this moment, or None."""
    if device.type != "cuda":
        return f"the input is on {device.type}"
    if torch.cuda.is_current_stream_capturing():
        return "the stream is being recorded already"
    return None


def _looks(x: Tensor) -> Hashable:
    return x.shape, x.dtype, x.device, x.requires_grad


def _modes() -> Hashable:
    """Settings outside the layer that a recording bakes in."""
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    autocast = torch.is_autocast_enabled("cuda")
    return (
        autocast and torch.get_autocast_dtype("cuda"),
        precision,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.enabled,
    )
