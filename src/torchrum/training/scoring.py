"""Scores of a model on the fixed examples of a task."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchrum.tasks.base import Batch, Task
from torchrum.training.config import TrainConfig
from torchrum.training.config_file import differences, from_json, identity
from torchrum.training.errors import ConfigError, RunError
from torchrum.training.fabric import Engine
from torchrum.training.files import read_json
from torchrum.training.records import CONFIG
from torchrum.training.saved_state import check_config, load_state

WEIGHT_TYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}  # other precisions keep float32 weights


@torch.no_grad()
def score(task: Task, model: nn.Module, batches: Iterable[Batch], engine: Engine) -> dict[str, float]:
    """Loss and metrics of ``model``, each batch weighted by its number of answers; the host waits once, at the end."""
    totals: dict[str, torch.Tensor] = {}
    weights, carried = 0, None
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            batch = batch.to(engine.device)
            with engine.autocast():
                if task.carries_state:
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


def build(config: TrainConfig) -> nn.Module:
    """The model of a config; what it refuses is a ConfigError."""
    from torchrum.models import build_model

    try:
        return build_model(config.model, config.task)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def fill(model: nn.Module, weights: dict[str, Any], run: Path) -> None:
    """Load weights into a model that must have exactly these, in these shapes."""
    own = model.state_dict()
    missing, extra = own.keys() - weights.keys(), weights.keys() - own.keys()
    shapes = [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    if missing or extra or shapes:
        first = sorted((*missing, *extra, *shapes))[0]
        given = {name: tuple(weights[name].shape) if name in weights else "absent" for name in (first,)}
        raise RunError(
            f"the checkpoint of {run} does not fit the model: {first} is {given[first]} there and "
            f"{tuple(own[first].shape) if first in own else 'absent'} in the model."
        )
    model.load_state_dict(weights)


def read_config(run: Path | str) -> TrainConfig:
    """The config of a run folder."""
    path = Path(run) / CONFIG
    return from_json(read_json(path), path, RunError)


def load_model(run: Path | str, which: Literal["last", "best"] = "best") -> nn.Module:
    """The trained model of a run folder, on the CPU, ready to use."""
    run = Path(run)
    config = read_config(run)
    weights, state = load_state(run, which)
    check_config(run, config, state)
    model = build(config).to(dtype=WEIGHT_TYPES.get(config.precision, torch.float32))
    fill(model, weights, run)
    return model.eval()


def same_task(config: TrainConfig, task: Task) -> Task:
    """``task``, which may differ from that of ``config`` in what holds for one machine alone."""
    changed = differences(identity(config), identity(replace(config, task=task)))
    if changed:
        raise ConfigError(f"the data are not those of the run: {'; '.join(changed)}.")
    return task


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
        split: which examples.
        which: which checkpoint.
        device: where.
        task: the run's task with its data in another place, for a text that was moved.
    """
    config = replace(read_config(run), device=device, devices=1, nodes=1)
    if task is not None:
        config = replace(config, task=same_task(config, task))
    model = load_model(run, which)
    engine = Engine(config)
    scores = score(config.task, engine.place(model), config.task.evaluation(split, config.seed), engine)
    return scores | config.task.summary(split, scores)
