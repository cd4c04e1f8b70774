"""The cases of the benchmark, and the layers and training steps that they time; the original RUM is one of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.fast_slow import FastSlowCell
from torchrum.cells.lstm import LSTMCell
from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.lab.models import OneHotModel
from torchrum.lab.tasks.recall import Recall
from torchrum.layers.registry import CellLayer, build_layer
from torchrum.layers.rum import RUM
from torchrum.ops._dispatch import Backend

MODES = ("forward", "forward_backward")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


RUMS = ("authors", "reference", "torch", "native", "fused")
"""Implementations of RUM."""


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


@dataclass(frozen=True)
class Case:
    """Implementations at one shape, timed in turns."""

    name: str
    shape: Shape
    options: dict[str, Any]
    """Options of the RUM."""
    implementations: tuple[str, ...]
    """Names for ``make_layer``; of ``fused graphed`` the whole pass is one CUDA graph."""
    modes: tuple[str, ...] = ("forward_backward",)
    kind: str = "layer"
    """layer, recall or penn_treebank."""
    samples: int | None = None
    """Fewer than usual for slow cases, more for calls so short that the host's noise shows."""
    calls: int = 1
    """Calls in one sample on a CPU; their mean is taken."""
    precision: str = "high"
    """Float32 matmuls on a GPU: ``high`` is TF32, as cuDNN's layers do by default, ``highest`` FP32 (TF32 off)."""
    threads: int | None = None
    """Threads on a CPU; torch's own number if None."""
    peak: bool = False
    """Whether to measure the peak memory on a CPU too, each in a process of its own."""

    def options_of(self, implementation: str) -> dict[str, Any]:
        """Options of the RUM; none for a baseline."""
        return dict(self.options) if implementation.split()[0] in RUMS else {}


class Work:
    """A layer with data, run forward without gradients or forward and backward with fresh gradients.

    Args:
        name, options: as for ``make_layer``.
        shape: sizes of the input ``(T, B, N)``.
    """

    def __init__(self, name: str, shape: Shape, **options: Any) -> None:
        torch.manual_seed(0)
        self.layer = make_layer(name, shape, **options)
        where: dict[str, Any] = {"device": shape.device, "dtype": DTYPES[shape.dtype]}
        self.x = torch.randn(shape.T, shape.B, shape.input_size, **where).requires_grad_()
        self.grad = torch.randn(shape.T, shape.B, cast(int, self.layer.hidden_size), **where)

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

    def run(self, mode: str) -> Callable[[], object]:
        return self.forward if mode == "forward" else self.forward_backward


def make_layer(name: str, shape: Shape, **options: Any) -> nn.Module:
    """Build the layer of an implementation.

    Args:
        name: ``authors``, ``reference``, ``torch``, ``native``, ``fused``; ``gru``, ``lstm``; ``ln_lstm``, in plain
            PyTorch, and ``ln_lstm_fused``, by our kernels.
        shape: sizes, dtype and device.
        options: options of the RUM.
    """
    N, inputs = shape.N, shape.input_size
    where: dict[str, Any] = {"device": shape.device, "dtype": DTYPES[shape.dtype]}
    if name == "authors":
        return AuthorsRUM(RUM(inputs, N, **{**PAPER_OPTIONS, **options}, **where))
    if name in ("reference", "torch", "native", "fused"):
        defaults = {} if options.get("form") == "gated" else PAPER_OPTIONS
        return RUM(inputs, N, backend=name, **{**defaults, **options}, **where)  # type: ignore[arg-type]
    if name in ("ln_lstm", "ln_lstm_fused"):
        backend: Backend = "fused" if name == "ln_lstm_fused" else "reference"
        return CellLayer(lambda size: LSTMCell(size, N, layer_norm=True, backend=backend, **where), inputs, N)
    if name not in ("gru", "lstm"):
        raise ValueError(f"make_layer: there is no implementation {name!r}.")
    return (nn.GRU if name == "gru" else nn.LSTM)(inputs, N, **where)


class AuthorsRUM(nn.Module):
    """One layer as the original implementation computes it, ``forward(x (T, B, I)) -> (output (T, B, H), h_n)``.

    Args:
        rum: a layer whose weights and options it takes; ``lam`` is 0 or 1.
    """

    def __init__(self, rum: RUM) -> None:
        super().__init__()
        self.rum, self.hidden_size = rum, rum.hidden_size

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        B, H, options = x.shape[1], self.hidden_size, self.rum.options
        rows = 2 * H  # tau, u; then eps
        weights = dict(self.rum.named_parameters())
        weight, bias, weight_hh = (weights[f"{name}_l0"] for name in ("weight_ih", "bias_ih", "weight_hh"))
        gates, embed = (weight[:rows], bias[:rows]), (weight[rows:], bias[rows:])
        h = x.new_zeros(B, H)
        R = torch.eye(H, device=x.device, dtype=x.dtype).expand(B, H, H) if options.lam else None
        outputs = []
        for now in x:  # each step has its own matmuls of the input
            tau, u = (F.linear(now, *gates) + F.linear(h, weight_hh)).chunk(2, -1)
            u, eps = torch.sigmoid(u), F.linear(now, *embed)
            if R is None:
                turned = rotate_in_plane(eps, tau, h)
            else:
                R = torch.bmm(R, dense_rotation(eps, tau))
                turned = torch.bmm(R, h.unsqueeze(-1)).squeeze(-1)
            h = u * h + (1 - u) * F.relu(eps + turned)
            if options.eta is not None:
                h = F.normalize(h, dim=-1) * options.eta
            outputs.append(h)
        return torch.stack(outputs), h.unsqueeze(0)


def plane(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return orthonormal u, v ``(B, H)`` of the plane of a and b, and the rotation inside it ``(B, 2, 2)``."""
    u = F.normalize(a, dim=-1)
    cos = (u * F.normalize(b, dim=-1)).sum(-1)
    sin = torch.sqrt(1 - cos**2)
    v = F.normalize(b - (u * b).sum(-1, keepdim=True) * u, dim=-1)
    turn = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    return u, v, turn


def rotate_in_plane(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Compute h - u u^T h - v v^T h + [u v] turn [u v]^T h; each factor is a batched matmul, as in the original."""
    u, v, turn = plane(a, b)
    basis = torch.stack([u, v], -1)  # (B, H, 2)
    u, v, column = u.unsqueeze(-1), v.unsqueeze(-1), h.unsqueeze(-1)  # (B, H, 1)
    outside = torch.bmm(u, torch.bmm(u.mT, column)) + torch.bmm(v, torch.bmm(v.mT, column))
    inside = torch.bmm(basis, torch.bmm(turn, torch.bmm(basis.mT, column)))
    return h + (inside - outside).squeeze(-1)


def dense_rotation(a: Tensor, b: Tensor) -> Tensor:
    """Compute I - u u^T - v v^T + [u v] turn [u v]^T, ``(B, H, H)``."""
    u, v, turn = plane(a, b)
    basis = torch.stack([u, v], -1)  # (B, H, 2)
    eye = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    outside = eye - torch.bmm(u.unsqueeze(-1), u.unsqueeze(-2)) - torch.bmm(v.unsqueeze(-1), v.unsqueeze(-2))
    return outside + torch.bmm(torch.bmm(basis, turn), basis.mT)


@dataclass(frozen=True)
class TrainingStep:
    """One update of ``model`` per call: forward, backward, clipping and Adam, on data that are on the device."""

    model: nn.Module
    backend: str
    """Backend that its recurrent layer takes."""
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    clip: float = math.inf

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        if self.clip < math.inf:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()


def recall_step(shape: Shape, backend: str) -> TrainingStep:
    """Build a training step of associative recall with lam = 1."""
    task = Recall(length=shape.T - 3, train_size=None)
    layer = build_layer("rum", task.input_size, shape.N, batch_first=True, **PAPER_OPTIONS, lam=1, backend=backend)
    assert isinstance(layer, RUM)
    model = OneHotModel(layer, task.input_size, task.num_classes).to(shape.device)
    batch = task.batch(shape.B, torch.Generator(shape.device).manual_seed(0))
    taken = layer.explain_backend(model.readout.weight.new_empty(shape.B, shape.T, task.input_size)).backend
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=shape.device == "cuda")
    return TrainingStep(model, taken, lambda: task.loss(model(batch.x), batch), adam)


def penn_treebank_step(shape: Shape, backend: str) -> TrainingStep:
    """Build a training step of a Fast-Slow RUM-2 on characters: 700 fast units, ``shape.N`` slow ones, bfloat16."""
    characters, embedded, fast, device = 50, 128, 700, shape.device
    embedding, readout = nn.Embedding(characters, embedded, device=device), nn.Linear(fast, characters, device=device)
    slow: dict[str, Any] = {"slow": "rum", "slow_size": shape.N, "eta": 1.0, "layer_norm": True, "backend": backend}
    noise: dict[str, Any] = {"cell_dropout": 0.35, "zoneout": 0.1, "zoneout_cell": 0.5}
    layer = build_layer("fs", embedded, fast, **slow, **noise).to(device)
    assert isinstance(layer, CellLayer)
    model = nn.ModuleList([embedding, layer, readout])
    x = torch.randint(characters, (shape.T + 1, shape.B), device=device)

    def loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = readout(layer(embedding(x[:-1]))[0])
        return F.cross_entropy(logits.float().flatten(0, 1), x[1:].flatten())

    cell = layer.cells[0]
    assert isinstance(cell, FastSlowCell)
    with torch.autocast(device, torch.bfloat16):  # the choice depends on it
        taken = cell.explain_backend(torch.empty(shape.T, shape.B, embedded, device=device)).backend
    adam = torch.optim.Adam(model.parameters(), lr=2e-3, capturable=device == "cuda")
    return TrainingStep(model, taken, loss, adam, clip=1.0)
