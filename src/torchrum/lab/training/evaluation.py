"""Score a run: on fixed examples, by dynamic evaluation, and with a log of every look at the test set."""

import datetime
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, TypeGuard

import torch
from torch import Tensor, nn

from torchrum.lab.models import CharModel
from torchrum.lab.tasks.base import Batch, Split, Task
from torchrum.lab.tasks.char_lm import CharLM
from torchrum.lab.training.checkpoint import checkpoint_step, load_model
from torchrum.lab.training.config import TrainConfig, differences, first_of
from torchrum.lab.training.distributed import Engine, on_host
from torchrum.lab.training.errors import ConfigError, DivergedError
from torchrum.lab.training.files import Reader, check_fields, read_json, write_json
from torchrum.lab.training.overrides import assign
from torchrum.lab.training.run_folder import read_config
from torchrum.lab.training.step import detached_copy
from torchrum.layers.cuda_graphs import graphed
from torchrum.layers.registry import takes_steps

Device = Literal["auto", "cpu", "cuda"]
TEMPERATURES = [2 ** (number / 8) for number in range(-8, 17)]
"""Temperatures to try, from 0.5 to 4."""


class _Carrying(nn.Module):
    """A model that carries state, called as a layer is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: Tensor, hx: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.model(input, None, hx)


def _predict(
    task: Task, model: nn.Module, batches: Iterable[Batch], engine: Engine, graph: bool = False
) -> Iterator[tuple[Tensor, Batch]]:
    """Yield the logits of each batch, in float32 at least, and the batch; ``score`` has the arguments."""
    carried = None
    replayed = graphed(_Carrying(model)) if graph and task.carries_state and takes_steps(model) else None
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            batch = batch.to(engine.device)
            with engine.fabric.autocast():
                if replayed is not None and carried is not None:
                    logits, carried = replayed(batch.x, carried)
                elif task.carries_state:
                    logits, carried = model(batch.x, batch.lengths, carried)
                else:
                    logits = model(batch.x, batch.lengths)
            yield logits if logits.dtype == torch.float64 else logits.float(), batch
    finally:
        model.train(was_training)


@torch.no_grad()
def score(
    task: Task, model: nn.Module, batches: Iterable[Batch], engine: Engine, graph: bool = False
) -> dict[str, float]:
    """Loss and metrics of ``model``, each batch weighted by its number of answers; the host waits once, at the end.

    A calibrated model is also scored without its temperature, for comparison with models that have none. Where state
    is carried, ``graph`` records cells that run step by step as a CUDA graph: in one lane, launches would take nearly
    all the time.
    """
    totals: dict[str, Tensor] = {}
    weights = 0
    for logits, batch in _predict(task, model, batches, engine, graph):
        weight = task.weight(batch)
        found = {"loss": task.loss(logits, batch), **task.metrics(logits, batch), **task.details(logits, batch)}
        if is_calibrated(model):
            found[f"uncalibrated_{task.metric}"] = task.metrics(logits * model.temperature, batch)[task.metric]
        for name, value in found.items():
            totals[name] = totals.get(name, torch.zeros((), device=engine.device)) + value * weight
        weights += weight
    values = torch.stack(list(totals.values())).tolist() if totals else []
    scores = task.summarise({name: value / weights for name, value in zip(totals, values, strict=True)})
    return scores | ({"temperature": float(model.temperature)} if is_calibrated(model) else {})


def is_calibrated(model: nn.Module) -> TypeGuard[CharModel]:
    """Whether a model has a temperature."""
    return isinstance(model, CharModel) and model.calibrated


@torch.no_grad()
def calibrate(task: Task, model: CharModel, batches: Iterable[Batch], engine: Engine) -> None:
    """Set the temperature of ``model`` to the one at which it scores best on ``batches``.

    The loss has one minimum: it is read at each of ``TEMPERATURES``, and a parabola through the lowest three, over
    their logarithms, says where between them it lies.
    """
    model.temperature.fill_(1.0)
    totals = torch.zeros(len(TEMPERATURES), device=engine.device, dtype=torch.float64)
    for logits, batch in _predict(task, model, batches, engine):
        totals += torch.stack([task.loss(logits / value, batch) for value in TEMPERATURES]) * task.weight(batch)
    lowest, aside = int(totals.argmin()), 0.0
    if 0 < lowest < len(TEMPERATURES) - 1:
        before, least, after = totals[lowest - 1 : lowest + 2].tolist()
        aside = (before - after) / (before - 2 * least + after) / 2
    model.temperature.fill_(TEMPERATURES[lowest] * (TEMPERATURES[1] / TEMPERATURES[0]) ** aside)


def _run_config(run: Path | str, device: Device, task: Task | None) -> TrainConfig:
    """Return the config to score a run with, in one process; ``task`` may differ in its local fields."""
    config = replace(read_config(run), device=device, devices=1, nodes=1, strategy="ddp")
    if task is None:
        return config
    if changed := differences(config, replace(config, task=task)):
        raise ConfigError(
            f"the data differ from those of the run: {first_of(changed)}. Score the run on the data it was trained on, "
            "or train a new one."
        )
    return replace(config, task=task)


@dataclass(frozen=True, kw_only=True)
class DynamicConfig:
    """Settings of dynamic evaluation; choose them on validation."""

    segment: int = 50
    """Symbols that are scored between two updates."""
    lr: float = 5e-5
    """Step along the gradient, each weight's divided by its root mean square on the training part."""
    decay: float = 0.05
    """Pull towards the trained weights, stronger for weights with larger gradients."""
    eps: float = 2e-5
    """Added to the root mean square."""
    temperature: float = 1.0
    """Divides the logits, beside a temperature that the model has of its own."""
    lanes: int = 100
    """Lanes of the training part when the root mean squares are measured."""

    def __post_init__(self) -> None:
        check_fields("dynamic", self)
        for name in ("segment", "lanes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"dynamic: {name} is {getattr(self, name)}, but it must be at least 1.")
        if not all(0 <= value < math.inf for value in (self.lr, self.decay)):
            raise ConfigError(f"dynamic: lr {self.lr}, decay {self.decay}; they must be at least 0 and finite.")
        if not all(0 < value < math.inf for value in (self.eps, self.temperature)):
            given = f"eps {self.eps}, temperature {self.temperature}"
            raise ConfigError(f"dynamic: {given}; they must be above 0 and finite.")

    @classmethod
    def parse(cls, text: str) -> "DynamicConfig":
        """Read ``lr=1e-4,decay=0.1``; other fields keep their defaults."""
        return assign(cls(), filter(None, text.split(",")), "dynamic.")

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


def gradient_rms(
    task: Task, model: nn.Module, batches: Iterable[Batch], engine: Engine, temperature: float
) -> list[Tensor]:
    """Root mean square over segments of each weight's gradient, dropout off and the state carried."""
    weights = list(model.parameters())
    squares, count, carried = [torch.zeros_like(weight) for weight in weights], 0, None
    for batch in batches:
        _, grads, carried = _learn(task, model, batch, carried, engine, weights, temperature)
        torch._foreach_addcmul_(squares, grads, grads)
        count += 1
    return [(square / count).sqrt() for square in squares]


def _learn(
    task: Task,
    model: nn.Module,
    batch: Batch,
    carried: object,
    engine: Engine,
    weights: Sequence[Tensor],
    temperature: float,
) -> tuple[Tensor, list[Tensor], object]:
    """Loss of a segment, its gradient, and the state after it."""
    batch = batch.to(engine.device)
    # cuDNN's recurrent layers have no backward in eval mode
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        with engine.fabric.autocast():
            logits, state = model(batch.x, batch.lengths, carried)
        loss = task.loss(logits / temperature, batch)
        grads = torch.autograd.grad(loss, weights)
    return loss.detach(), list(grads), detached_copy(state)


@on_host()
def evaluate(
    run: Path | str,
    split: Split = "test",
    which: Literal["last", "best"] = "best",
    device: Device = "auto",
    task: Task | None = None,
    dynamic: DynamicConfig | None = None,
) -> dict[str, float]:
    """Score a finished or interrupted run: ``evaluate("runs/copying-rum")["accuracy"]``.

    Args:
        run: the run folder.
        split: the set to score on, ``"validation"`` or ``"test"``.
        which: the checkpoint to load: the best on validation, or the last.
        device: where to run; "auto" takes CUDA if there is one.
        task: the run's task with its data in another place, for a text that was moved.
        dynamic: how the weights follow a text while it is scored; None keeps them as they are.

    Returns:
        The loss, the metrics of the task, and what its ``summary`` adds, by name.
    """
    Reader("evaluate", ConfigError).value(Literal["validation", "test"], split, "split")
    config = _run_config(run, device, task)
    task = config.task
    model, engine = load_model(run, which), Engine(config)
    if dynamic is None:
        batches = task.evaluation(split, config.seed)
        scores = score(task, engine.place(model), batches, engine, graph=config.graph)
    else:
        scores = _score_following(task, engine.place(model), split, dynamic, engine)
    return scores | task.summary(split, scores)


def _score_following(
    task: Task, model: nn.Module, split: Split, dynamic: DynamicConfig, engine: Engine
) -> dict[str, float]:
    """Score a part of a text while the weights of ``model`` follow it."""
    if not isinstance(task, CharLM):
        raise ConfigError(f"dynamic evaluation reads a text in order, and {type(task).__name__} has none.")
    lanes = task.read_lanes("train", dynamic.lanes, dynamic.segment)
    rms = gradient_rms(task, model, lanes, engine, dynamic.temperature)
    follower = Follower(list(model.parameters()), rms, dynamic)
    total, symbols, carried = torch.zeros((), device=engine.device, dtype=torch.float64), 0, None
    for batch in task.read_lanes(split, 1, dynamic.segment):
        loss, grads, carried = _learn(task, model, batch, carried, engine, follower.weights, dynamic.temperature)
        total += loss * batch.y.numel()  # one lane has no padding
        symbols += batch.y.numel()
        follower.update(grads)
    if not total.isfinite():
        raise DivergedError(f"dynamic evaluation: the loss is {float(total)} with {dynamic}; take a smaller lr.")
    return task.scores(float(total) / symbols)


TESTS = "test.json"


@dataclass(frozen=True, kw_only=True)
class Look:
    """One evaluation on the test set."""

    date: str
    """The day, as 2026-01-31."""
    step: int
    """Steps of training before the checkpoint."""
    scores: dict[str, float]
    """Scores by name."""
    dynamic: str = ""
    """Settings of dynamic evaluation; empty for fixed weights."""


def read_looks(run: Path) -> list[Look]:
    """The looks so far, the oldest first."""
    path = run / TESTS
    if not path.exists():
        return []
    data = read_json(path)
    return [Reader(path).build(Look, item) for item in (data if isinstance(data, list) else [data])]


def write_look(run: Path, step: int, scores: dict[str, float], dynamic: str = "") -> Look:
    """Add a look of today."""
    look = Look(date=datetime.date.today().isoformat(), step=step, scores=scores, dynamic=dynamic)
    write_json(run / TESTS, [asdict(item) for item in (*read_looks(run), look)])
    return look


def best_look(run: Path) -> Look:
    """The look at the best checkpoint with fixed weights; it is made if there was none."""
    step = checkpoint_step(run, "best")
    known = [item for item in read_looks(run) if item.step == step and not item.dynamic]
    return known[-1] if known else write_look(run, step, evaluate(run, "test", "best"))
