"""Scores of a model on the fixed examples of a task."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeGuard

import torch
from torch import nn

from torchrum.lab.models import CharModel
from torchrum.lab.tasks.base import Batch, Task
from torchrum.lab.training.config import TrainConfig, require_one_of
from torchrum.lab.training.config_file import first_of, run_differences
from torchrum.lab.training.default_device import on_host
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.fabric import Engine
from torchrum.lab.training.loading import load_model, read_config
from torchrum.layers.cells import takes_steps
from torchrum.layers.graphed import graphed

TEMPERATURES = [2 ** (number / 8) for number in range(-8, 17)]
"""Those that are tried, from 0.5 to 4."""


class _Carrying(nn.Module):
    """A model that carries state, called as a layer is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input: torch.Tensor, hx: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return self.model(input, None, hx)


def _predict(
    task: Task, model: nn.Module, batches: Iterable[Batch], engine: Engine, graph: bool = False
) -> Iterator[tuple[torch.Tensor, Batch]]:
    """Yield the logits of each batch, in float32 at least, and the batch; ``score`` has the arguments."""
    carried = None
    replayed = graphed(_Carrying(model)) if graph and task.carries_state and takes_steps(model) else None
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            batch = batch.to(engine.device)
            with engine.autocast():
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
    totals: dict[str, torch.Tensor] = {}
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


def same_task(config: TrainConfig, task: Task) -> Task:
    """``task``, which may differ from that of ``config`` in what holds for one machine alone."""
    changed = run_differences(config, replace(config, task=task))
    if changed:
        raise ConfigError(
            f"the data differ from those of the run: {first_of(changed)}. Score the run on the data it was trained on, "
            "or train a new one."
        )
    return task


@on_host()
def evaluate(
    run: Path | str,
    split: Literal["validation", "test"] = "test",
    which: Literal["last", "best"] = "best",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    task: Task | None = None,
) -> dict[str, float]:
    """Score a finished or interrupted run: ``evaluate("runs/copying-rum")["accuracy"]``.

    Args:
        run: the run folder.
        split: the set to score on.
        which: the checkpoint to load: the best on validation, or the last.
        device: where to run; "auto" takes CUDA if there is one.
        task: the run's task with its data in another place, for a text that was moved.

    Returns:
        The loss, the metrics of the task, and what its ``summary`` adds, by name.
    """
    require_one_of("evaluate", "split", split, ("validation", "test"))
    config = replace(read_config(run), device=device, devices=1, nodes=1)
    if task is not None:
        config = replace(config, task=same_task(config, task))
    model = load_model(run, which)
    engine = Engine(config)
    batches = config.task.evaluation(split, config.seed)
    scores = score(config.task, engine.place(model), batches, engine, graph=config.graph)
    return scores | config.task.summary(split, scores)
