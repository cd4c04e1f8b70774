"""What a layer's call refuses, in words: its input, its initial state, its lengths."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchrum.cells.base import check_fits, check_state_fits
from torchrum.ops._checks import ArgumentTypeError, MismatchError, check_dense

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Integers that torch can hardly compute with."""


def check_input(where: str, input: Tensor, input_size: int, batch_first: bool, weight: Tensor) -> None:
    """``(T, B, I)``, ``(B, T, I)`` or ``(T, I)`` with at least one step, fitting the weights."""
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
    """Packed ``(sum of lengths, I)``, fitting the weights."""
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
    """``(B,)`` integers from 1 to T for ``x`` ``(T, B, ...)``, returned on its device; a GPU's values are not read."""
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
    """Bool, shaped as ``input`` without its features."""
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
    """A tensor on the meta device has no values; it goes only with an input that has none either."""
    if part.is_meta and not like.is_meta:
        raise MismatchError(f"{where}: {name} is on meta and has no values; create it on {like.device}.")


def in_program() -> bool:
    """Whether ``torch.export`` traces, where a check of sizes must become a part of the program; ONNX has none."""
    return torch.compiler.is_exporting() and not torch.onnx.is_in_onnx_export()


def check_part(where: str, name: str, part: Tensor, shape: tuple[int, ...], unbatched: bool, like: Tensor) -> None:
    """``(num_layers * num_directions, B, ...)``; where the user gave no batch, ``part`` has got one of size 1."""
    if tuple(part.shape) != shape:
        given, wanted = ((*s[:1], *s[2:]) if unbatched else tuple(s) for s in (part.shape, shape))
        raise MismatchError(
            f"{where}: {name} in hx has shape {given}; expected {wanted}, (num_layers * num_directions, "
            + ("...)." if unbatched else "B, ...).")
        )
    check_state_fits(where, name, part, like)
