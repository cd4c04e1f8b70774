"""What a run is, in the lines that come before its first step."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrum.layers.registry import LAYERS
from torchrum.training.config import ModelConfig, TrainConfig
from torchrum.training.fabric import Engine


def introduction(config: TrainConfig, model: nn.Module, engine: Engine, folder: Path, own: bool) -> list[str]:
    """Model and parameters, device and folder, the loss to beat: three lines.

    Args:
        config: the run.
        model: what is trained.
        engine: on what it is trained.
        folder: of the run.
        own: whether the model is the caller's instead of the config's.
    """
    described = type(model).__name__ if own else describe_model(config.model)
    parameters = sum(part.numel() for part in model.parameters() if part.requires_grad)
    processes = f", {engine.world_size} processes" if engine.world_size > 1 else ""
    task = config.task
    return [
        f"{config.label}: {described}, {parameters:,} parameters",
        f"on {describe_device(engine.device)}{processes}, {config.precision}; run folder {folder}",
        f"loss in {task.loss_unit}; the {task.baseline_name} baseline is {task.baseline():.4g}",
    ]


def describe_model(model: ModelConfig) -> str:
    """The layer with its sizes and the options that are not its defaults."""
    layers = f"{model.num_layers} layers of " if model.num_layers > 1 else ""
    entry = LAYERS.get(model.layer)
    usual = {} if entry is None else inspect.signature(entry).parameters
    changed = [f"{name} {value}" for name, value in model.options.items() if _differs(usual.get(name), value)]
    return ", ".join([f"{layers}{model.layer}, {model.hidden_size} units", *changed])


def _differs(parameter: inspect.Parameter | None, value: Any) -> bool:
    return parameter is None or parameter.default != value


def describe_device(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"the {device.type.upper()} ({threads} thread{'s' * (threads > 1)})"
