"""A task, a model and a recipe so small that a run takes a second, and what its runs are compared by."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.lab.tasks.base import Batch, Task
from torchrum.lab.training import ModelConfig, OptimizerConfig, TrainConfig, read_metrics


@dataclass(frozen=True, kw_only=True)
class First(Task):
    """Say at the end which symbol came first."""

    answers: ClassVar = "last"

    length: int = 4
    """Steps of a sequence."""
    symbols: int = 3
    """Alphabet."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"First: length={self.length}; it must be at least 1.")

    @property
    def input_size(self) -> int:
        return self.symbols

    @property
    def num_classes(self) -> int:
        return self.symbols

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        x = torch.randint(self.symbols, (size, self.length), generator=generator, device=generator.device)
        return Batch(x, x[:, 0].clone())

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(logits, batch.y)

    def metrics(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"accuracy": (logits.argmax(-1) == batch.y).float().mean()}

    def validation(self, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed + 12345)
        for size in (16, 8):
            yield self.batch(size, generator)

    def baseline(self) -> float:
        return float(torch.log(torch.tensor(float(self.symbols))))


class Model(nn.Module):
    """One-hot, GRU, dropout (so that the random state matters) and a read-out."""

    def __init__(self, task: First, hidden_size: int = 8) -> None:
        super().__init__()
        self.symbols = task.symbols
        self.layer = nn.GRU(task.symbols, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.readout = nn.Linear(hidden_size, task.symbols)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        output, _ = self.layer(F.one_hot(x, self.symbols).to(self.readout.weight.dtype))
        return self.readout(self.dropout(output[:, -1]))


def tiny() -> TrainConfig:
    """Forty steps with lines, scores and checkpoints at steps that do not coincide."""
    return TrainConfig(
        name="tiny",
        task=First(),
        model=ModelConfig(layer="gru", hidden_size=8),
        optimizer=OptimizerConfig(lr=1e-2, warmup=5, schedule="30:0.5"),
        batch_size=8,
        steps=40,
        log_every=7,
        eval_every=10,
        checkpoint_every=8,
        device="cpu",
    )


def tiny_model(config: TrainConfig) -> Model:
    torch.manual_seed(config.seed)
    return Model(config.task, config.model.hidden_size)


def longer() -> TrainConfig:
    """The same with enough steps to be interrupted."""
    return replace(tiny(), name="longer", steps=100_000, checkpoint_every=50)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """All metrics of a run but the times."""
    return [{name: value for name, value in line.items() if name != "seconds"} for line in read_metrics(folder)]
