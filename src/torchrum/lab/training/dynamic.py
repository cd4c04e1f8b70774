"""Dynamic evaluation (Krause et al., 2018): the weights follow the text that they are scored on, segment by segment.

Each segment is scored first and learnt from after, with a pull back to the trained weights. A score made so is not
comparable with one of fixed weights, and is labelled wherever it stands.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from torchrum.lab.tasks.base import Batch, Split, Task
from torchrum.lab.tasks.char_lm import CharLM
from torchrum.lab.training.carried import detached_copy
from torchrum.lab.training.config import TrainConfig, require_one_of
from torchrum.lab.training.default_device import on_host
from torchrum.lab.training.errors import ConfigError, DivergedError
from torchrum.lab.training.fabric import Engine
from torchrum.lab.training.loading import load_model, read_config
from torchrum.lab.training.scoring import same_task
from torchrum.lab.training.typed_data import check_fields


@dataclass(frozen=True, kw_only=True)
class DynamicConfig:
    """How the weights follow the text; lr and decay are chosen on validation."""

    segment: int = 50
    """Symbols that are scored between two updates."""
    lr: float = 5e-5
    """Step along the gradient, each weight's divided by its root mean square on the training part."""
    decay: float = 0.05
    """Pull towards the trained weights, stronger for weights with larger gradients."""
    eps: float = 2e-5
    """Added to the root mean square."""
    lanes: int = 100
    """Lanes of the training part when the root mean squares are measured."""

    def __post_init__(self) -> None:
        check_fields("dynamic", self, ConfigError)
        for name in ("segment", "lanes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"dynamic: {name} is {getattr(self, name)}, but it must be at least 1.")
        if not (0 <= self.lr < math.inf and 0 <= self.decay < math.inf and 0 < self.eps < math.inf):
            given = f"lr {self.lr}, decay {self.decay}, eps {self.eps}"
            raise ConfigError(f"dynamic: {given}; lr and decay must be at least 0, eps above 0, and all finite.")

    @classmethod
    def parse(cls, text: str) -> "DynamicConfig":
        """Read ``lr=1e-4,decay=0.1``; what is not named keeps its default."""
        kinds = {item.name: int if item.type in (int, "int") else float for item in fields(cls)}
        values: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                values[name.strip()] = kinds[name.strip()](value)
            except KeyError:
                raise ConfigError(
                    f"--dynamic {part!r}: write FIELD=VALUE; the fields are {', '.join(kinds)}."
                ) from None
            except ValueError:
                kind = "whole number" if kinds[name.strip()] is int else "number"
                raise ConfigError(f"--dynamic {part!r}: {name.strip()} must be a {kind}.") from None
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ", ".join(f"{item.name} {getattr(self, item.name):g}" for item in fields(self))


class Follower:
    """The update of one segment: ``w <- w - lr g / (rms + eps) + min(1, decay rms / mean rms) (w_0 - w)``.

    Args:
        weights: the model's, changed in place.
        rms: root mean square of each weight's gradient on the training part.
        config: the rates.
    """

    def __init__(self, weights: Sequence[Tensor], rms: Sequence[Tensor], config: DynamicConfig) -> None:
        self.weights = list(weights)
        self._trained = [weight.detach().clone() for weight in weights]
        scale = torch.stack([value.mean() for value in rms]).mean()  # each matrix counts once, as its authors have it
        self._rates = [config.lr / (value + config.eps) for value in rms]
        self._pulls = [(config.decay * value / scale).clamp(max=1) for value in rms]

    @torch.no_grad()
    def update(self, grads: Sequence[Tensor]) -> None:
        """Follow one segment."""
        change = list(torch._foreach_sub(self._trained, self.weights))
        torch._foreach_mul_(change, self._pulls)
        torch._foreach_addcmul_(change, self._rates, list(grads), value=-1)
        torch._foreach_add_(self.weights, change)


def gradient_rms(task: Task, model: nn.Module, batches: Iterable[Batch], engine: Engine) -> list[Tensor]:
    """Root mean square over segments of each weight's gradient, dropout off and the state carried."""
    weights = list(model.parameters())
    squares, count, carried = [torch.zeros_like(weight) for weight in weights], 0, None
    for batch in batches:
        _, grads, carried = _learn(task, model, batch, carried, engine, weights)
        torch._foreach_addcmul_(squares, grads, grads)
        count += 1
    return [(square / count).sqrt() for square in squares]


def _learn(
    task: Task, model: nn.Module, batch: Batch, carried: object, engine: Engine, weights: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], object]:
    """Loss of a segment, its gradient, and the state after it."""
    batch = batch.to(engine.device)
    # cuDNN's recurrent layers have no backward in eval mode
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        with engine.autocast():
            logits, state = model(batch.x, batch.lengths, carried)
        loss = task.loss(logits, batch)
        grads = torch.autograd.grad(loss, weights)
    return loss.detach(), list(grads), detached_copy(state)


@on_host()
def dynamic_evaluate(
    run: Path | str,
    split: Split = "test",
    which: Literal["last", "best"] = "best",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dynamic: DynamicConfig | None = None,
    task: Task | None = None,
) -> dict[str, float]:
    """Score a run while its weights follow the text; ``evaluate`` has the other arguments."""
    require_one_of("dynamic_evaluate", "split", split, get_args(Split))
    dynamic = dynamic or DynamicConfig()
    config: TrainConfig = replace(read_config(run), device=device, devices=1, nodes=1)
    task = config.task if task is None else same_task(config, task)
    if not isinstance(task, CharLM):
        raise ConfigError(f"dynamic evaluation reads a text in order, and {type(task).__name__} has none.")
    engine = Engine(config)
    model = engine.place(load_model(run, which))
    rms = gradient_rms(task, model, task.read_lanes("train", dynamic.lanes, dynamic.segment), engine)
    follower = Follower(list(model.parameters()), rms, dynamic)
    total, symbols, carried = torch.zeros((), device=engine.device, dtype=torch.float64), 0, None
    for batch in task.read_lanes(split, 1, dynamic.segment):
        loss, grads, carried = _learn(task, model, batch, carried, engine, follower.weights)
        total += loss * batch.y.numel()  # one lane has no padding
        symbols += batch.y.numel()
        follower.update(grads)
    if not total.isfinite():
        raise DivergedError(f"dynamic evaluation: the loss is {float(total)} with {dynamic}; take a smaller lr.")
    scores = task.scores(float(total) / symbols)
    return scores | task.summary(split, scores)
