"""Whole training steps, optimizer included, written so that one CUDA graph can hold them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from torchrum.cells.fast_slow import FastSlowCell
from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.lab.models.one_hot import AnsweringModel
from torchrum.lab.tasks.recall import Recall
from torchrum.layers.cells import CellLayer
from torchrum.layers.registry import build_layer
from torchrum.layers.rum import RUM
from torchrum.paper.bench.work import Shape


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
