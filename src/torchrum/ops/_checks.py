"""Checks of user arguments; each error says what was given, what is allowed and how to proceed."""

import difflib
import math
from collections.abc import Collection, Iterable
from typing import TypeGuard

import torch
from torch import Tensor


class MismatchError(ValueError, RuntimeError):
    """Error for tensors whose shape, dtype or device does not match.

    torch.nn raises ValueError for some mismatches and RuntimeError for others, and callers may catch either.
    """


class ArgumentTypeError(TypeError, ValueError):
    """Error for an argument of a wrong type: a TypeError, as in torch.nn, and also a ValueError."""


def check_broadcast(where: str, **tensors: Tensor) -> None:
    """Raise unless all tensors are ``(..., H)`` with the same H of at least 1 and leading dimensions that broadcast."""
    (first, x), *others = tensors.items()
    for name, y in tensors.items():
        if y.ndim == 0 or y.shape[-1] == 0:
            raise MismatchError(f"{where}: {name} has shape {tuple(y.shape)}; it must be (..., H) with H at least 1.")
    for name, y in others:
        leading = zip(reversed(x.shape[:-1]), reversed(y.shape[:-1]), strict=False)
        if y.shape[-1] != x.shape[-1] or any(m != n and m != 1 and n != 1 for m, n in leading):
            raise MismatchError(
                f"{where}: {name} has shape {tuple(y.shape)}, but {first} has {tuple(x.shape)}; "
                "all inputs must be (..., H) with the same H and leading dimensions that broadcast."
            )


def check_square(where: str, **tensors: Tensor) -> None:
    """Raise unless every tensor is ``(..., N, N)`` with N at least 1."""
    for name, x in tensors.items():
        if x.ndim < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] == 0:
            raise MismatchError(
                f"{where}: {name} has shape {tuple(x.shape)}; it must be (..., N, N), square with N at least 1."
            )


def check_dense(where: str, name: str, x: Tensor) -> None:
    """Raise if a tensor is nested, sparse or in oneDNN's layout."""
    if x.is_nested:
        raise MismatchError(
            f"{where}: {name} is a nested tensor; it must be a dense one. "
            "Pad it with torch.nested.to_padded_tensor; layers take the lengths as lengths=."
        )
    if x.layout is not torch.strided:
        raise MismatchError(f"{where}: {name} has layout {x.layout}; it must be dense. Convert it with .to_dense().")


def check_floating(where: str, **tensors: Tensor) -> None:
    """Raise unless every argument is a dense tensor of real floating point numbers."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(
                f"{where}: {name} is a {type(x).__name__}; it must be a torch.Tensor. Convert it with torch.as_tensor."
            )
        check_dense(where, name, x)
        if not x.dtype.is_floating_point:
            raise MismatchError(
                f"{where}: {name} has dtype {x.dtype}; it must be float64, float32, bfloat16 or float16. "
                "Convert it with .float()."
            )


def check_same_device(where: str, **tensors: Tensor) -> None:
    """Raise unless all tensors are on the device of the first one."""
    (first, x), *others = tensors.items()
    for name, y in others:
        if y.device != x.device:
            raise MismatchError(
                f"{where}: {name} is on {y.device}, but {first} is on {x.device}; move them to one device with .to()."
            )


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the name in ``known`` that is most similar to ``name``; None if all are less similar than ``alike``.

    Similarity is from 0 to 1.
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=alike)), None)


def check_choice(where: str, name: str, value: object, choices: Collection[str]) -> None:
    """Raise unless ``value`` is one of ``choices``; the error names the nearest one."""
    if isinstance(value, str) and value in choices:
        return
    near = nearest(str(value).lower(), choices)
    hint = f" Did you mean {near!r}?" if near else ""
    error = ValueError if isinstance(value, str) else ArgumentTypeError
    raise error(f"{where}: {name}={value!r} is not known; it must be one of {', '.join(map(repr, choices))}.{hint}")


def check_positive_int(where: str, **values: object) -> None:
    """Raise unless every value is an int, not a bool, of at least 1."""
    for name, value in values.items():
        wrong_type = isinstance(value, bool) or not isinstance(value, int | torch.SymInt)
        if wrong_type or value < 1:  # type: ignore[operator]
            error = ArgumentTypeError if wrong_type else ValueError
            raise error(f"{where}: {name}={value!r} is not allowed; it must be an integer of at least 1.")


def check_flags(where: str, **flags: object) -> None:
    """Raise unless every value is a bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ArgumentTypeError(f"{where}: {name}={value!r}; it must be True or False.")


def check_finite(where: str, **values: object) -> None:
    """Raise unless every value is a finite int or float, not a bool."""
    for name, value in values.items():
        if not (_is_number(value) and -math.inf < value < math.inf):
            error = ValueError if _is_number(value) else ArgumentTypeError
            raise error(f"{where}: {name}={value!r} is not allowed; it must be a finite number.")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_not_negative(where: str, **values: object) -> None:
    """Raise unless every value is a finite number of at least 0."""
    check_finite(where, **values)
    for name, value in values.items():
        if value < 0:  # type: ignore[operator]
            raise ValueError(f"{where}: {name}={value!r} is not allowed; it must be 0 or more.")


def check_probability(where: str, **values: object) -> None:
    """Raise unless every value is a number from 0 to 1."""
    for name, value in values.items():
        if not (_is_number(value) and 0 <= value <= 1):
            error = ValueError if _is_number(value) else ArgumentTypeError
            raise error(f"{where}: {name}={value!r} is not allowed; it must be a number from 0 to 1.")
