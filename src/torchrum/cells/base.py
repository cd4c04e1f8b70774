"""The base class of cells: one step with a state, the loop over time, and weight gradients after the last step."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.utils import parametrize

from torchrum.ops._checks import ArgumentTypeError, MismatchError, check_dense, check_positive_int
from torchrum.ops.kernels.linear import weight_gradient, working_dtype
from torchrum.ops.kernels.machine import autocast_dtype

State = tuple[Tensor, ...]
Given = TypeVar("Given")


def refuse_script(module: nn.Module) -> nn.Module:
    """Raise under ``torch.jit.script``, which calls a module's ``__prepare_scriptable__`` before it reads any code."""
    raise NotImplementedError(
        f"{type(module).__name__}: torch.jit.script cannot compile it; use torch.compile, torch.export, ONNX or "
        "torch.jit.trace."
    )


def warn_unquantized(module: nn.Module, qconfig: object) -> None:
    """Warn when torch.ao.quantization sets ``qconfig`` on a module, since it converts only kinds that it knows."""
    warnings.warn(
        f"{type(module).__name__}: torch.ao.quantization has no int8 version of it, so its weights stay in floating "
        "point; to(torch.bfloat16) halves them.",
        stacklevel=3,
    )


class Cell(nn.Module, ABC):
    """One time step ``(x, state) -> (output, state)``; ``state`` is always a tuple of ``(B, ...)`` tensors.

    A cell that maps its input linearly overrides ``project``, so that ``scan`` projects all steps in one matmul. The
    input of ``step`` is then the projected input.
    """

    state_names: tuple[str, ...] = ("h",)
    """Names of the parts of the state. With one name a layer's ``hx`` is a tensor, with several it is a tuple."""
    may_read_nothing: ClassVar[bool] = False
    """Whether ``input_size`` may be 0; a step's input is then ``(B, 0)``."""
    state_dropout: float = 0.0
    """Chance that a unit of h is hidden from the recurrent matmul for a whole sequence."""
    shown: tuple[str, ...] = ()
    """Names of the attributes that ``repr`` shows after the sizes."""
    __prepare_scriptable__ = refuse_script

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        if input_size != 0 or not self.may_read_nothing:
            check_positive_int(type(self).__name__, input_size=input_size)
        check_positive_int(type(self).__name__, hidden_size=hidden_size)
        self.input_size = input_size
        self.hidden_size = hidden_size

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """Return the state before the first step; by default, zeros ``(B, H)`` for each part."""
        return tuple(torch.zeros(batch_size, self.hidden_size, device=device, dtype=dtype) for _ in self.state_names)

    @abstractmethod
    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Run one step on ``x`` ``(B, ...)`` from ``prepare`` -> output ``(B, H)`` and the new state."""

    def project(self, x: Tensor) -> Tensor:
        """Compute the part of a step that needs no state, for ``x`` ``(..., I)``."""
        return x

    @property
    def mask_size(self) -> int:
        """Size of the mask that follows a step's projected input; 0 if there is none."""
        return self.hidden_size if self.training and self.state_dropout > 0 else 0

    def draw_mask(self, like: Tensor) -> Tensor | None:
        """Draw the mask of one sequence, ``(B, mask_size)``, for an input ``(..., B, N)``; None if there is none."""
        if self.mask_size == 0:
            return None
        ones = like.new_ones(like.shape[-2], self.hidden_size, dtype=working_dtype(like.dtype))
        return F.dropout(ones, self.state_dropout)

    def prepare(self, x: Tensor) -> Tensor:
        """Return the input of the steps of a sequence: ``project(x)`` followed by one mask for all steps.

        So ``scan``, compiled steps and CUDA graphs need no other way to pass the mask.
        """
        projected = self.project(x)
        return with_mask(projected, self.draw_mask(projected))

    def split_mask(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split the input of a step into the projected input and the mask, None if there is none."""
        size = self.mask_size
        return (x[..., :-size], x[..., -size:]) if size else (x, None)

    def at_step(self, step: int) -> None:
        """Update annealed values before the training step that follows ``step`` completed ones.

        A cell sets such a value in place, so that a captured step reads the new one.
        """
        return

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Run one step on ``x`` ``(B, I)`` or ``(I,)``; without a state, start from ``initial_state``."""
        if x.shape[-1] != self.input_size or x.dim() not in (1, 2):
            expected = f"(B, {self.input_size}) or ({self.input_size},)"
            raise MismatchError(f"{type(self).__name__}: input has shape {tuple(x.shape)}; expected {expected}.")
        if x.dim() == 1:
            batched = None if state is None else tuple(part.unsqueeze(0) for part in state)
            output, new = self.forward(x.unsqueeze(0), batched)
            return output.squeeze(0), tuple(part.squeeze(0) for part in new)
        if state is None:
            state = self.initial_state(x.shape[0], device=x.device, dtype=x.dtype)
        return self.step(self.prepare(x), state)

    def scan(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """Run all steps of ``x`` ``(T, B, I)`` -> outputs ``(T, B, H)`` and the last state.

        Rows of the batch past their ``lengths`` ``(B,)`` keep their state.
        """
        # build parametrised weights and unitary matrices once per sequence, not in every step
        with parametrize.cached(), matrices_fixed(self, state[0].dtype):
            return run_steps(self.step, self.prepare(x).unbind(0), state, lengths)

    def extra_repr(self) -> str:
        words = (f"{name}={getattr(self, name)!r}" for name in self.shown)
        return ", ".join((f"{self.input_size}, {self.hidden_size}", *words))


def with_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """Append the mask ``(B, M)`` to the rows of ``x`` ``(..., B, N)``."""
    return x if mask is None else torch.cat((x, mask.to(x.dtype).expand(*x.shape[:-1], -1)), -1)


def run_steps(
    step: Callable[[Given, State], tuple[Tensor, State]], given: Iterable[Given], state: State, lengths: Tensor | None
) -> tuple[Tensor, State]:
    """Run ``step`` over time on the inputs in ``given`` -> all outputs ``(T, B, ...)`` and the last state."""
    outputs = []
    for t, given_t in enumerate(given):
        output, new = step(given_t, state)
        state = new if lengths is None else freeze(t < lengths, new, state)
        outputs.append(output)
    return torch.stack(outputs), state


def freeze(going: Tensor, new: State, old: State) -> State:
    """Return ``new`` in the rows where ``going`` ``(B,)`` is true, and ``old`` elsewhere."""
    return tuple(
        torch.where(going.view(-1, *[1] * (part.dim() - 1)), part, before)
        for part, before in zip(new, old, strict=True)
    )


class UnitaryMap(nn.Module, ABC):
    """A square matrix with free parameters that is always orthogonal, or nearly orthogonal.

    The factors of such a matrix need little arithmetic but many launches, so they are multiplied once per sequence,
    inside ``matrices_fixed``. A step is then one matmul.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: Tensor | None = None

    @abstractmethod
    def matrix(self) -> Tensor:
        """Return the matrix ``(N, N)`` that acts on columns, in at least float32."""

    def forward(self, h: Tensor) -> Tensor:
        """Apply the matrix to the rows of ``h`` ``(B, N)``."""
        matrix = self.matrix() if self._kept is None else self._kept
        return F.linear(h, matrix.to(h.dtype))


@contextmanager
def matrices_fixed(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Build every unitary matrix in ``module`` once, in ``dtype``, for all steps inside."""
    maps = [part for part in module.modules() if isinstance(part, UnitaryMap)]
    try:
        for part in maps:
            part._kept = part.matrix().to(dtype)
        yield
    finally:
        for part in maps:
            part._kept = None


def call_as_nn(
    cell: Cell,
    input: Tensor,
    hx: Any,
    weight: Tensor,
    shapes: tuple[tuple[int, ...], ...],
    advance: Callable[[Tensor, State], State],
) -> Tensor | State:
    """Run one step of a cell whose output is the first part of its state, with checks.

    Args:
        cell: the cell.
        input: ``(B, I)``, or ``(I,)`` without a batch.
        hx: the state, a tensor if it has one part and a tuple if it has several. None, as a whole or as a part, means
            the cell's initial state.
        weight: a parameter with the cell's device and dtype.
        shapes: shapes of the parts of the state, without the batch.
        advance: maps a sequence of one step ``(1, B, I)`` and the state before it to a new state, which the user may
            modify.

    Returns:
        The new state in the form of ``hx``.
    """
    where = type(cell).__name__
    if not isinstance(input, Tensor):
        raise ArgumentTypeError(f"{where}: input is a {type(input).__name__}; it must be a Tensor.")
    check_dense(where, "input", input)
    if input.dim() not in (1, 2) or input.shape[-1] != cell.input_size:
        expected = f"(B, {cell.input_size}) or ({cell.input_size},)"
        raise MismatchError(f"{where}: input has shape {tuple(input.shape)}; expected {expected}.")
    check_fits(where, input, weight)
    unbatched = input.dim() == 1
    x = input.unsqueeze(0) if unbatched else input
    state = _read_state(cell, hx, x, unbatched, shapes)
    parts = advance(x.unsqueeze(0), state)
    if unbatched:
        parts = tuple(part.squeeze(0) for part in parts)
    return parts if len(parts) > 1 else parts[0]


def _read_state(cell: Cell, hx: Any, x: Tensor, unbatched: bool, shapes: tuple[tuple[int, ...], ...]) -> State:
    """Return the state in ``hx`` for an input ``(B, I)``, after checks; missing parts are the initial state's."""
    where, B = type(cell).__name__, x.shape[0]
    parts = (None,) * len(shapes) if hx is None else state_parts(where, hx, cell.state_names)
    for name, part, shape in zip(cell.state_names, parts, shapes, strict=True):
        if part is None:
            continue
        expected = shape if unbatched else (B, *shape)
        if part.shape != expected:
            raise MismatchError(
                f"{where}: {name} in hx has shape {tuple(part.shape)}; expected {expected} for this input."
            )
        check_state_fits(where, name, part, x)
    if unbatched:
        parts = tuple(None if part is None else part.unsqueeze(0) for part in parts)
    given = tuple(part for part in parts if part is not None)
    if len(given) == len(parts):
        return given
    fresh = cell.initial_state(B, device=x.device, dtype=x.dtype)
    return tuple(start if part is None else part for part, start in zip(parts, fresh, strict=True))


def state_parts(where: str, hx: Any, names: tuple[str, ...]) -> tuple[Tensor | None, ...]:
    """Return the parts of an initial state ``hx``: a tensor is a single part, and parts of a tuple may be None."""
    single = len(names) == 1
    if single and isinstance(hx, Tensor):
        check_dense(where, f"{names[0]} in hx", hx)
        return (hx,)
    parts = (hx,) if single and isinstance(hx, Tensor) else hx
    if not isinstance(parts, tuple | list) or len(parts) != len(names) or single != isinstance(hx, Tensor):
        form = "a tensor" if single else f"a tuple ({', '.join(names)})"
        given = f"a {type(hx).__name__}" + (f" of {len(hx)}" if isinstance(hx, tuple | list) else "")
        raise ArgumentTypeError(f"{where}: hx is {given}; it must be {form}, or None.")
    for name, part in zip(names, parts, strict=True):
        if part is not None and not isinstance(part, Tensor):
            raise ArgumentTypeError(f"{where}: {name} in hx is a {type(part).__name__}; it must be a Tensor, or None.")
        if part is not None:
            check_dense(where, f"{name} in hx", part)
    return tuple(_filled_memory(part) if name == "R" else part for name, part in zip(names, parts, strict=True))


def _filled_memory(R: Tensor | None) -> Tensor | None:
    """Replace zero matrices in R by the identity: code for an LSTM resets the state to zeros, as by ``1 - done``."""
    if R is None or R.dim() < 2 or R.shape[-1] != R.shape[-2] or R.numel() == 0:
        return R  # None means the identity; a wrong shape raises an error later
    empty = (R[..., :1, :] == 0).all(-1, keepdim=True)  # no row of an orthogonal matrix is zero
    return torch.where(empty, torch.eye(R.shape[-1], dtype=R.dtype, device=R.device), R)


def check_fits(where: str, input: Tensor, weight: Tensor) -> None:
    """Raise unless the input is floating-point, on the weights' device and, without autocast, in their dtype."""
    if not input.is_floating_point():
        raise MismatchError(
            f"{where}: input is {input.dtype}; it must be floating-point. Embed or one-hot encode it first."
        )
    if weight.device != input.device:
        raise MismatchError(f"{where}: input is on {input.device}, the weights on {weight.device}; move one of them.")
    if weight.dtype != input.dtype and autocast_dtype(input.device.type) is None:
        raise MismatchError(f"{where}: input is {input.dtype}, the weights {weight.dtype}; convert one of them.")


def check_state_fits(where: str, name: str, part: Tensor, like: Tensor) -> None:
    """Raise unless a part of the state is floating-point and on the device of the input."""
    if part.device != like.device or not part.is_floating_point():
        raise MismatchError(
            f"{where}: {name} in hx is {part.dtype} on {part.device}; it must be floating-point, on {like.device}."
        )


# A scan step by step with one matmul per weight gradient, after the last step. Autograd computes a gradient in every
# step and adds them up: in a small batch each of these moves more numbers than the step itself.

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``F.linear`` or a replacement."""
ALIGNED = 16  # bytes; cuBLAS is several times slower if rows are not aligned to this


class GatherableCell(Cell):
    """A cell whose step may use another function for ``F.linear``."""

    @abstractmethod
    def step_weights(self) -> Sequence[tuple[Tensor, Tensor | None]]:
        """Return the matrix and bias of each call of ``linear`` in ``step_with``, in order."""

    @abstractmethod
    def step_with(self, x: Tensor, state: State, linear: Linear) -> tuple[Tensor, State]:
        """Run ``step`` with ``linear`` in place of ``F.linear``."""

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self.step_with(x, state, F.linear)


class GatheredScan:
    """``Cell.scan`` of a ``GatherableCell``, with a compiled step and one matmul per weight gradient.

    Before the first step each weight is padded for the matmuls. A step adds zeros, its *tap*, to the result of each
    matmul and returns the matmul's input. The tap's gradient is the gradient of the result, so both factors of the
    weight's gradient are known for all steps when it is computed. If no gradient is needed, the cell's own scan runs.
    """

    def __init__(self, cell: GatherableCell) -> None:
        self._cell = cell
        self._step = torch.compile(tapped_step)

    def __call__(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        with parametrize.cached():
            return self._scan(x, state, lengths)

    def _scan(self, x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
        cell = self._cell
        pairs = cell.step_weights()
        if not torch.is_grad_enabled() or not any(weight.requires_grad for weight, _ in pairs):
            return type(cell).scan(cell, x, state, lengths)
        dtype = autocast_dtype(x.device.type)
        packed = [pack(weight.detach(), dtype or weight.dtype) for weight, _ in pairs]
        reads: list[list[Tensor]] = [[] for _ in pairs]
        taps = [
            make_taps(weight, bias, read, x.shape[:2], matrix.dtype)
            for (weight, bias), read, matrix in zip(pairs, reads, packed, strict=True)
        ]

        def step(given: tuple[Tensor, Sequence[Tensor]], state: State) -> tuple[Tensor, State]:
            output, new, read = self._step(cell, *given, state, packed)
            for kept, tensor in zip(reads, read, strict=True):
                kept.append(tensor)
            return output, new

        by_step = zip(*(tap.unbind(0) for tap in taps), strict=True)
        return run_steps(step, zip(cell.prepare(x).unbind(0), by_step, strict=True), state, lengths)


class TappedLinear:
    """Replacement of ``F.linear`` in one step, called in the order of ``step_weights``."""

    def __init__(self, packed: Sequence[Tensor], taps: Sequence[Tensor]) -> None:
        self._packed, self._taps = packed, taps
        self.reads: list[Tensor] = []

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        call = len(self.reads)
        matrix, tap = self._packed[call], self._taps[call]
        x = F.pad(x.to(matrix.dtype), (0, matrix.shape[1] - x.shape[1]))
        self.reads.append(x.detach())
        return F.linear(x, matrix)[:, : weight.shape[0]] + tap


def tapped_step(
    cell: GatherableCell, x: Tensor, taps: Sequence[Tensor], state: State, packed: Sequence[Tensor]
) -> tuple[Tensor, State, list[Tensor]]:
    """Run a step of ``cell`` and return the output, the new state and the input of each matmul."""
    linear = TappedLinear(packed, taps)
    output, new = cell.step_with(x, state, linear)
    return output, new, linear.reads


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``weight`` in the dtype of the matmuls, zero-padded to aligned rows and columns."""
    rows, columns = (-size % (ALIGNED // dtype.itemsize) for size in weight.shape)
    return F.pad(weight.to(dtype), (0, columns, 0, rows))


def make_taps(
    weight: Tensor, bias: Tensor | None, reads: list[Tensor], sizes: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return the term to add to a matmul by ``weight`` in every step, ``(T, B, rows)``: zeros, or the bias."""
    taps: Tensor = _Taps.apply(weight, reads, sizes, dtype)
    return taps if bias is None else taps + bias.to(dtype)


class _Taps(torch.autograd.Function):
    """Zeros whose backward computes the weight's gradient from their gradient and the inputs in ``reads``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, weight: Tensor, reads: list[Tensor], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        ctx.reads, ctx.columns, ctx.dtype = reads, weight.shape[1], weight.dtype  # type: ignore[attr-defined]
        return torch.zeros((), dtype=dtype, device=weight.device).expand(*sizes, weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = weight_gradient(grad.contiguous(), torch.stack(ctx.reads))  # type: ignore[attr-defined]
        return gradient[:, : ctx.columns].to(ctx.dtype), None, None, None  # type: ignore[attr-defined]
