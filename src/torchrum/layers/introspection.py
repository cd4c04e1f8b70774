"""Observation of a RUM: the angle and plane of every rotation, its states, the accumulated rotation; gradient norms."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import State
from torchrum.cells.rum import RUMCell, Weights, project_rum
from torchrum.layers.rum import RUM
from torchrum.ops._checks import ArgumentTypeError, MismatchError
from torchrum.ops.kernels.linear import working_dtype
from torchrum.ops.rotation import rotation_angle
from torchrum.ops.rum_scan import RumOptions, StepWeights
from torchrum.ops.rum_scan.reference import accumulate, rotation_vectors

Part = tuple[Tensor, Tensor, Tensor]  # the projected input, the states before and the states after each step
Seen = dict[tuple[nn.Module, int], list[Part]]

BLOCKS = {"paper": ("tau", "u"), "gated": ("r", "u", "tau")}
"""Row blocks of ``weight_hh`` in each form, in order: the target's block, which generates tau, and the gates'."""


@dataclass(frozen=True)
class Observation:
    """One recurrence over one batch, T steps of B sequences, in the order in which it read them.

    The other direction of a bidirectional layer reads from the end: its step 0 is the last step of each sequence. Steps
    past a sequence's length are steps over the padding.
    """

    name: str
    """Name in the model, such as ``layer.l0``, or ``layer.l0_reverse`` for the other direction."""
    lam: float
    """Exponent of the accumulated rotation; NaN if it is learnable."""
    eps: Tensor
    """Start of each rotation, ``(T, B, H)``; in the gated form each head rotates from its own part."""
    tau: Tensor
    """End of each rotation, the target, ``(T, B, H)``."""
    state: Tensor
    """The state after each step, ``(T, B, H)``."""
    learnt_lam: Tensor | None = None
    """The parameter, if lam is learnable."""
    head_size: int | None = None
    """Units per head in the gated form; None in the paper's form, where all units rotate in one plane."""
    rotated_units: int = 0
    """Number of units that rotate in the gated form, the first ones."""

    @property
    def theta(self) -> Tensor:
        """The angle of each rotation, ``(T, B)``, or ``(T, B, heads)`` in the gated form, from 0 to pi."""
        return rotation_angle(self._by_head(self.eps), self._by_head(self.tau))

    def planes(self) -> Tensor:
        """Return an orthonormal basis of each rotation's plane, ``(T, B, H, 2)`` or ``(T, B, heads, head_size, 2)``."""
        pairs = torch.stack((self._by_head(self.eps), self._by_head(self.tau)), -1)
        return torch.linalg.qr(pairs.double()).Q

    def _by_head(self, vectors: Tensor) -> Tensor:
        """Reshape ``(T, B, H)`` to ``(T, B, heads, head_size)`` in the gated form, with a shorter last head padded."""
        if self.head_size is None:
            return vectors
        rotated = vectors[..., : self.rotated_units]
        return F.pad(rotated, (0, -self.rotated_units % self.head_size)).unflatten(-1, (-1, self.head_size))

    def rotations(self) -> Iterator[Tensor]:
        """Yield the accumulated rotation R ``(B, H, H)`` after each step, from the identity; nothing if lam is 0."""
        if self.lam == 0:
            return
        B, H = self.eps.shape[1:]
        R = torch.eye(H, dtype=torch.float64, device=self.eps.device).expand(B, H, H)
        for eps, tau in zip(self.eps.double(), self.tau.double(), strict=True):
            R = accumulate(R, eps, tau, self.lam if self.learnt_lam is None else self.learnt_lam)
            yield R


def recurrences(model: nn.Module) -> Iterator[tuple[str, nn.Module, int, Weights, RumOptions]]:
    """Yield the name, module, index in the module, weights and options of every RUM recurrence of a model."""
    for path, module in model.named_modules():
        where = f"{path}." if path else ""
        if isinstance(module, RUM):
            for index, suffix in enumerate(module._suffixes()):
                yield where + suffix.removeprefix("_"), module, index, module._weights(index), module.options
        elif isinstance(module, RUMCell):
            yield path or "cell", module, 0, module._weights(), module.options


def recurrent_blocks(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the recurrence's name, the block's name and the matrix ``(H, H)`` of every block of ``weight_hh``."""
    for name, _, _, weights, options in recurrences(model):
        weight = weights["weight_hh"]
        assert weight is not None
        matrices = weight.detach().split(weight.shape[1])  # one fewer without update gate
        for block, matrix in zip(BLOCKS[options.form or "paper"], matrices, strict=False):
            yield name, block, matrix


def diagonal_dominance(matrix: Tensor) -> Tensor:
    """Return the mean size of the diagonal entries of ``(H, H)`` divided by that of the others.

    It is 1 for a matrix without structure.
    """
    sizes = matrix.detach().abs().float()
    diagonal, H = sizes.diagonal().mean(), len(sizes)
    others = (sizes.mean() * H - diagonal) / max(H - 1, 1)
    return diagonal / others.clamp_min(torch.finfo(torch.float32).tiny)


@torch.no_grad()
def observe(model: nn.Module, call: Callable[[], Any]) -> list[Observation]:
    """Observe every RUM of ``model`` while ``call()`` runs it once, in evaluation mode.

    Args:
        model: a model that contains a RUM layer or cell.
        call: runs the model without ``reset``, such as ``lambda: model(x)``. If it runs a recurrence several times, as
            in a loop over the steps, each run must start from the state in which the previous one ended.

    Returns:
        An observation of each recurrence, in the model's order; the two directions of a layer are separate.

    Example:
        >>> rum = RUM(3, 8, lam=1)
        >>> (seen,) = observe(rum, lambda: rum(torch.randn(5, 2, 3)))
        >>> seen.theta.shape, seen.state.shape
        (torch.Size([5, 2]), torch.Size([5, 2, 8]))
    """
    if not callable(call):
        raise ArgumentTypeError(
            f"observe: call is a {type(call).__name__}; it must be a function without arguments, such as "
            "lambda: model(x)."
        )
    was_training, found = model.training, list(recurrences(model))
    seen: Seen = {(module, index): [] for _, module, index, _, _ in found}
    model.eval()
    with ExitStack() as stack:
        for module in {module for module, _ in seen}:
            stack.enter_context(_watched(module, seen))
        try:
            call()
        finally:
            model.train(was_training)
    return [
        _observation(name, weights, options, parts)
        for name, module, index, weights, options in found
        if (parts := seen[module, index])
    ]


@contextmanager
def _watched(module: nn.Module, seen: Seen) -> Iterator[None]:
    """Record the projected input, the states before and the states after, ``(T, B, ...)``, of each call."""

    def note(index: int, xp: Tensor, state: State, output: Tensor) -> None:
        start = state[0] if state else torch.zeros_like(output[0])
        before = torch.cat((start.unsqueeze(0).to(output.dtype), output[:-1]))
        seen[module, index].append((xp, before, output))

    watches: dict[str, Callable[..., None]]
    if isinstance(module, RUM):
        # a clone, since the layer may transpose its output in place
        watches = {
            "scan": lambda result, index, x, state, *_: note(
                index, project_rum(x, module._weights(index), module.options), state, result[0].clone()
            )
        }
    else:  # a layer calls scan, a composite cell calls step, and a user's call ends in _advance
        assert isinstance(module, RUMCell)
        watches = {
            "scan": lambda result, x, state, *_: note(0, module.project(x), state, result[0]),
            "step": lambda result, x, state: note(0, x.unsqueeze(0), state, result[0].unsqueeze(0)),
            "_advance": lambda result, x, state: note(0, module.project(x), state, result[0].unsqueeze(0)),
        }
    replaced = {name: _followed(getattr(module, name), watch) for name, watch in watches.items()}
    if isinstance(module, RUMCell):
        replaced["_native_steps"] = lambda *_: None  # a prepared step of C would bypass the watched methods
    else:
        replaced["_like_rows"] = lambda *_: []  # rows of other lengths would run in other calls
    for name, method in replaced.items():
        setattr(module, name, method)
    try:
        yield
    finally:
        for name in replaced:
            delattr(module, name)  # restore the method of the class


def _followed(method: Callable[..., Any], watch: Callable[..., None]) -> Callable[..., Any]:
    """Return ``method`` with a call of ``watch`` on the result and the positional arguments of each call."""

    def watched(*given: Any, **named: Any) -> Any:
        result = method(*given, **named)
        watch(result, *given)
        return result

    return watched


def _check_one_pass(name: str, parts: list[Part]) -> None:
    """Raise unless each of several calls starts from the state in which the previous one ended."""
    for (_, _, old), (_, new, _) in itertools.pairwise(parts):
        if not torch.equal(old[-1], new[0]):
            raise ValueError(
                f"observe: {name} ran {len(parts)} times, and not each time from the state in which it had ended; "
                "call the model once, or pass its state on, and leave out reset=."
            )


def _observation(name: str, weights: Weights, options: RumOptions, parts: list[Part]) -> Observation:
    _check_one_pass(name, parts)
    xp, before, after = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    weight = weights["weight_hh"]
    assert weight is not None
    if options.form == "gated":
        H, bias = weight.shape[1], weights["bias_hh"]
        tau = F.linear(before.to(weight.dtype), weight[2 * H :], None if bias is None else bias[2 * H :])
        units = options.rotated_units(H)
        return Observation(name, 0.0, xp[..., 2 * H :], tau, after, None, options.head_size, units)
    before = before.to(working_dtype(xp.dtype))
    eps, tau, _ = rotation_vectors(xp, before, StepWeights(weight, weights["ln_weight"], weights["ln_bias"]), options)
    lam = weights["lam"] if math.isnan(options.lam) else None
    return Observation(name, options.lam, eps, tau, after, lam)


def gradient_norms(layer: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """Compute how much of a gradient at the last state reaches each earlier state.

    The cost C of a sequence is its last state times a random direction. ``|dC/dh_t| / |dC/dh_T|`` is 1 at every step if
    gradients neither vanish nor explode.

    Args:
        layer: a recurrent layer of one direction, called like :class:`torch.nn.GRU` or :class:`torch.nn.LSTM`.
        x: inputs, ``(T, B, I)``.
        generator: generator of the directions.

    Returns:
        The ratios, ``(T, B)``. For an LSTM the norm is over h and c together. For a RUM with lam other than 0 it is
        over h; the derivative includes h's influence on R.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> gradient_norms(nn.GRU(3, 8), torch.randn(5, 2, 3), generator).shape
        torch.Size([5, 2])
    """
    if getattr(layer, "bidirectional", False):  # read step by step, both directions would run forwards
        raise ValueError("gradient_norms: the layer is bidirectional; give one that reads in one direction.")
    if getattr(layer, "batch_first", False):  # a step of the batch would be read as a sequence
        raise ValueError("gradient_norms: the layer has batch_first=True; give one that reads (T, B, I).")
    if x.dim() != 3:
        raise MismatchError(f"gradient_norms: x has shape {tuple(x.shape)}; it must be (T, B, I).")
    states: list[tuple[Tensor, ...]] = []
    state: Any = None
    for step in x.split(1):
        _, state = layer(step, state)
        parts = state if isinstance(state, tuple) else (state,)
        states.append(parts[:1] if isinstance(layer, RUM) else parts)
    last = states[-1][0]
    directions = torch.randn(last.shape, generator=generator, dtype=last.dtype, device=generator.device)
    cost = (last * directions.to(last.device)).sum()
    flat = [part for parts in states for part in parts]
    found = iter(torch.autograd.grad(cost, flat, materialize_grads=True))
    grads = [torch.stack([next(found) for _ in parts]) for parts in states]  # (parts, 1, B, H) of each step
    norms = torch.stack([torch.linalg.vector_norm(grad, dim=(0, 1, 3)) for grad in grads])
    return norms / norms[-1]
