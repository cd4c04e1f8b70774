"""What is timed: layers and whole training steps, RUM as its authors wrote it among them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.fast_slow import FastSlowCell
from torchrum.cells.lstm import LSTMCell
from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.lab.models.one_hot import AnsweringModel
from torchrum.lab.tasks.recall import Recall
from torchrum.layers.registry import CellLayer, build_layer
from torchrum.layers.rum import RUM
from torchrum.ops._dispatch import Backend

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


class AuthorsRUM(nn.Module):
    """One layer, ``forward(x (T, B, I)) -> (output (T, B, H), h_n)``; lam is 0 or 1.

    Args:
        input_size, hidden_size, device, dtype: as in :class:`torch.nn.GRU`.
        lam, eta: as in :class:`torchrum.RUM`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        lam: int = 0,
        eta: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.lam, self.eta = hidden_size, lam, eta
        start = RUM(input_size, hidden_size, lam=lam, **{**PAPER_OPTIONS, "eta": eta}, device=device, dtype=dtype)
        self.gates_x = nn.Linear(input_size, 2 * hidden_size, device=device, dtype=dtype)  # rows: tau, u
        self.gates_h = nn.Linear(hidden_size, 2 * hidden_size, bias=False, device=device, dtype=dtype)
        self.embed = nn.Linear(input_size, hidden_size, device=device, dtype=dtype)
        self.load(start)

    @torch.no_grad()
    def load(self, rum: RUM) -> None:
        """Take the weights of a one-layer RUM."""
        given, rows = dict(rum.named_parameters()), 2 * self.hidden_size
        self.gates_x.weight.copy_(given["weight_ih_l0"][:rows])
        self.gates_x.bias.copy_(given["bias_ih_l0"][:rows])
        self.embed.weight.copy_(given["weight_ih_l0"][rows:])
        self.embed.bias.copy_(given["bias_ih_l0"][rows:])
        self.gates_h.weight.copy_(given["weight_hh_l0"])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        B, H = x.shape[1], self.hidden_size
        h = x.new_zeros(B, H)
        R = torch.eye(H, device=x.device, dtype=x.dtype).expand(B, H, H) if self.lam else None
        outputs = []
        for now in x:
            h, R = self.step(now, h, R)
            outputs.append(h)
        return torch.stack(outputs), h.unsqueeze(0)

    def step(self, x: Tensor, h: Tensor, R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One step, with its own matmuls of the input."""
        tau, u = (self.gates_x(x) + self.gates_h(h)).chunk(2, -1)
        u = torch.sigmoid(u)
        eps = self.embed(x)
        if R is None:
            turned = rotate_in_plane(eps, tau, h)
        else:
            R = torch.bmm(R, dense_rotation(eps, tau))
            turned = torch.bmm(R, h.unsqueeze(-1)).squeeze(-1)
        h = u * h + (1 - u) * F.relu(eps + turned)
        if self.eta is not None:
            h = F.normalize(h, dim=-1) * self.eta
        return h, R


def plane(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Orthonormal u, v ``(B, H)`` of the plane of a and b, and the rotation inside it ``(B, 2, 2)``."""
    u = F.normalize(a, dim=-1)
    cos = (u * F.normalize(b, dim=-1)).sum(-1)
    sin = torch.sqrt(1 - cos**2)
    v = F.normalize(b - (u * b).sum(-1, keepdim=True) * u, dim=-1)
    turn = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    return u, v, turn


def rotate_in_plane(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """h - u u^T h - v v^T h + [u v] turn [u v]^T h, each factor a batched matmul as theirs are."""
    u, v, turn = plane(a, b)
    basis = torch.stack([u, v], -1)  # (B, H, 2)
    u, v, column = u.unsqueeze(-1), v.unsqueeze(-1), h.unsqueeze(-1)  # (B, H, 1)
    outside = torch.bmm(u, torch.bmm(u.mT, column)) + torch.bmm(v, torch.bmm(v.mT, column))
    inside = torch.bmm(basis, torch.bmm(turn, torch.bmm(basis.mT, column)))
    return h + (inside - outside).squeeze(-1)


def dense_rotation(a: Tensor, b: Tensor) -> Tensor:
    """I - u u^T - v v^T + [u v] turn [u v]^T, ``(B, H, H)``."""
    u, v, turn = plane(a, b)
    basis = torch.stack([u, v], -1)  # (B, H, 2)
    eye = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    outside = eye - torch.bmm(u.unsqueeze(-1), u.unsqueeze(-2)) - torch.bmm(v.unsqueeze(-1), v.unsqueeze(-2))
    return outside + torch.bmm(torch.bmm(basis, turn), basis.mT)


@dataclass(frozen=True)
class TrainingStep:
    """A call is one update of ``model``."""

    model: nn.Module
    backend: str
    """That its recurrent layer takes."""
    call: Callable[[], None]

    def __call__(self) -> None:
        self.call()


def recall_step(shape: Shape, backend: str) -> TrainingStep:
    """Associative recall with lam = 1 on a batch that lies on the device: forward, backward and Adam."""
    task = Recall(length=shape.T - 3, train_size=None)
    layer = build_layer("rum", task.input_size, shape.N, batch_first=True, **PAPER_OPTIONS, lam=1, backend=backend)
    assert isinstance(layer, RUM)
    model = AnsweringModel(layer, task.input_size, task.num_classes).to(shape.device)
    batch = task.batch(shape.B, torch.Generator(shape.device).manual_seed(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=shape.device == "cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        task.loss(model(batch.x), batch).backward()
        optimizer.step()

    taken = layer.explain_backend(model.readout.weight.new_empty(shape.B, shape.T, task.input_size))
    return TrainingStep(model, taken.backend, step)


def penn_treebank_step(shape: Shape, backend: str) -> TrainingStep:
    """A Fast-Slow RUM-2 on characters: 700 fast units, ``shape.N`` slow ones, bfloat16 matmuls, clipping and Adam."""
    characters, embedded, fast = 50, 128, 700
    device = shape.device
    embedding = nn.Embedding(characters, embedded, device=device)
    layer = build_layer(
        "fs",
        embedded,
        fast,
        slow_size=shape.N,
        slow="rum",
        cell_dropout=0.35,
        layer_norm=True,
        zoneout=0.1,
        zoneout_cell=0.5,
        eta=1.0,
        backend=backend,
    ).to(device)
    assert isinstance(layer, CellLayer)
    readout = nn.Linear(fast, characters, device=device)
    model = nn.ModuleList([embedding, layer, readout])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, capturable=shape.device == "cuda")
    x = torch.randint(characters, (shape.T + 1, shape.B), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            logits = readout(layer(embedding(x[:-1]))[0])
        F.cross_entropy(logits.float().flatten(0, 1), x[1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    cell = layer.cells[0]
    assert isinstance(cell, FastSlowCell)
    with torch.autocast(device, torch.bfloat16):  # which the choice depends on
        taken = cell.explain_backend(torch.empty(shape.T, shape.B, embedded, device=device))
    return TrainingStep(model, taken.backend, step)
