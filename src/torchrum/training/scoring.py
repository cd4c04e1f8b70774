"""Scores of a model on the fixed examples of a task."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from torchrum.layers.cells import takes_steps
from torchrum.layers.graphed import graphed
from torchrum.tasks.base import Batch, Task
from torchrum.training.config import TrainConfig, require_one_of
from torchrum.training.config_file import first_of, run_differences
from torchrum.training.default_device import on_host
from torchrum.training.errors import ConfigError
from torchrum.training.fabric import Engine
from torchrum.training.loading import load_model, read_config


class _Carrying(nn.Module):
    """A model that carries state, called as a layer is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input: torch.Tensor, hx: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return self.model(input, None, hx)


@torch.no_grad()
def score(
    task: Task, model: nn.Module, batches: Iterable[Batch], engine: Engine, graph: bool = False
) -> dict[str, float]:
    """Loss and metrics of ``model``, each batch weighted by its number of answers; the host waits once, at the end.

    Where state is carried, ``graph`` records cells that run step by step as a CUDA graph: in one lane, launches would
    take nearly all the time.
    """
    totals: dict[str, torch.Tensor] = {}
    weights, carried = 0, None
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
            logits = logits if logits.dtype == torch.float64 else logits.float()
            weight = task.weight(batch)
            found = {"loss": task.loss(logits, batch), **task.metrics(logits, batch), **task.details(logits, batch)}
            for name, value in found.items():
                totals[name] = totals.get(name, torch.zeros((), device=engine.device)) + value * weight
            weights += weight
    finally:
        model.train(was_training)
    values = torch.stack(list(totals.values())).tolist() if totals else []
    return task.summarise({name: value / weights for name, value in zip(totals, values, strict=True)})


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
