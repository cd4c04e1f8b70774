"""What the unitary cells share: modReLU, complex numbers as real halves, a matrix built once for a sequence."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UnitaryMap(nn.Module, ABC):
    """A square matrix made of free parameters that is orthogonal, or nearly so.

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


SQUARINGS, TERMS = 6, 18


def skew_exponential(A: Tensor) -> Tensor:
    """Compute exp(A) of a skew-symmetric ``(N, N)`` in float64, without a branch on its values.

    exp(A) = exp(A / 2^6)^(2^6), the inner one by 18 terms: exact to rounding while the norm of A is below 64. float64
    is needed, because each squaring doubles the rounding error. A CUDA graph can hold it, unlike torch.matrix_exp.
    """
    A = A.double() / 2**SQUARINGS
    result = identity = torch.eye(A.shape[0], dtype=A.dtype, device=A.device)
    with torch.autocast(A.device.type, enabled=False):
        for term in range(TERMS, 0, -1):
            result = identity + (A @ result) / term
        for _ in range(SQUARINGS):
            result = result @ result
    return result


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
