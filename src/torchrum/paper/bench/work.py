"""What is timed: a layer, its input, and the two ways to run it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from torchrum.cells.lstm import LSTMCell
from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.layers.cells import CellLayer
from torchrum.layers.rum import RUM
from torchrum.ops._dispatch import Backend
from torchrum.paper.bench.authors import AuthorsRUM

Mode = Literal["forward", "forward_backward"]
MODES: tuple[Mode, ...] = ("forward", "forward_backward")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Shape:
    """Sizes of one case; the projection of the input is timed too."""

    N: int
    T: int
    B: int = 128
    dtype: str = "float32"
    device: str = "cpu"
    I: int | None = None
    """Features of the input; as many as there are units if None."""

    @property
    def input_size(self) -> int:
        return self.N if self.I is None else self.I


class Work:
    """A layer with data, run forward without gradients or forward and backward with fresh gradients.

    Args:
        make: builds the layer on its device, in its dtype.
        shape: of the input ``(T, B, N)``.
    """

    def __init__(self, make: Callable[[], nn.Module], shape: Shape) -> None:
        torch.manual_seed(0)
        self.layer = make()
        options: dict[str, Any] = {"device": shape.device, "dtype": DTYPES[shape.dtype]}
        self.x = torch.randn(shape.T, shape.B, shape.input_size, **options).requires_grad_()
        self.grad = torch.randn(shape.T, shape.B, cast(int, self.layer.hidden_size), **options)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.layer.parameters())

    @torch.no_grad()
    def forward(self) -> Tensor:
        return self.layer(self.x)[0]

    def forward_backward(self) -> None:
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        self.layer(self.x)[0].backward(self.grad)

    def run(self, mode: Mode) -> Callable[[], object]:
        return self.forward if mode == "forward" else self.forward_backward


def equal_parameters(N: int, gates: int) -> int:
    """Units of an LSTM (4 gates) or GRU (3) that reads N numbers and has about the weights of a RUM of N units.

    gates (n N + n^2) = 3 N N + 2 N^2, rounded to a multiple of 8: an odd size would slow the baseline down.
    """
    n = N * (math.sqrt(1 + 4 * 5 / gates) - 1) / 2
    return max(8, 8 * round(n / 8))


def make_layer(name: str, shape: Shape, **options: Any) -> nn.Module:
    """The layer of an implementation.

    Args:
        name: ``authors``, ``reference``, ``torch``, ``native``, ``fused``; ``gru``, ``lstm``, and ``gru=``, ``lstm=``
            for as many parameters as the RUM has; ``ln_lstm``, in plain PyTorch, and ``ln_lstm_fused``, by our kernels.
        shape: sizes, dtype and device.
        options: of the RUM.
    """
    N, inputs = shape.N, shape.input_size
    where: dict[str, Any] = {"device": shape.device, "dtype": DTYPES[shape.dtype]}
    if name == "authors":
        return AuthorsRUM(inputs, N, **options, **where)
    if name in ("reference", "torch", "native", "fused"):
        return RUM(inputs, N, backend=name, **{**PAPER_OPTIONS, **options}, **where)  # type: ignore[arg-type]
    if name in ("ln_lstm", "ln_lstm_fused"):
        backend: Backend = "fused" if name == "ln_lstm_fused" else "reference"
        return CellLayer(lambda size: LSTMCell(size, N, layer_norm=True, backend=backend, **where), inputs, N)
    baselines: dict[str, tuple[Callable[..., nn.Module], int]] = {
        "gru": (nn.GRU, N),
        "lstm": (nn.LSTM, N),
        "gru=": (nn.GRU, equal_parameters(N, 3)),
        "lstm=": (nn.LSTM, equal_parameters(N, 4)),
    }
    if name not in baselines:
        raise ValueError(f"make_layer: there is no implementation {name!r}.")
    kind, units = baselines[name]
    return kind(inputs, units, **where)
