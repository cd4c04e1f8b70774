"""What the unitary cells share: modReLU, complex numbers as real halves, a matrix built once for a sequence."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UnitaryMap(nn.Module, ABC):
    """A square orthogonal matrix made of free parameters.

    The factors of such a matrix are cheap in arithmetic but many in launches, so they are multiplied out once for a
    sequence, inside ``matrices_fixed``; a step is then one matmul.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: Tensor | None = None

    @abstractmethod
    def matrix(self) -> Tensor:
        """The matrix ``(N, N)`` that acts on columns, in at least float32."""

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


def widen(x: Tensor) -> Tensor:
    """16-bit dtypes become float32: angles and phases need more than 8 bits."""
    return x if x.dtype == torch.float64 else x.float()


def real_form(matrix: Tensor) -> Tensor:
    """The real ``(2N, 2N)`` matrix that does to ``[re | im]`` what a complex ``(N, N)`` one does to ``re + i im``."""
    re, im = matrix.real, matrix.imag
    return torch.cat((torch.cat((re, -im), 1), torch.cat((im, re), 1)), 0)


def modrelu(z: Tensor, bias: Tensor) -> Tensor:
    """``relu(|z| + bias) z / |z|`` for real z ``(B, N)``; 0 stays 0."""
    return torch.sign(z) * F.relu(z.abs() + bias.to(z.dtype))


def modrelu_complex(z: Tensor, bias: Tensor) -> Tensor:
    """``relu(|z| + bias) z / |z|`` for complex z held as ``[re | im]`` ``(B, 2N)`` with bias ``(N,)``; 0 stays 0."""
    wide = widen(z)
    re, im = wide.chunk(2, -1)
    square = re * re + im * im
    zero = square == 0
    norm = torch.where(zero, 1, square).sqrt()  # the gradient of sqrt at 0 is infinite
    scale = torch.where(zero, 0, F.relu(norm + bias) / norm)
    return torch.cat((scale * re, scale * im), -1).to(z.dtype)


def check_even(where: str, hidden_size: int) -> None:
    """Complex units come as pairs of real numbers."""
    if hidden_size % 2:
        raise ValueError(
            f"{where}: hidden_size={hidden_size} is odd; complex units take two numbers each, so it must be even."
        )
