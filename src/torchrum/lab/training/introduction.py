"""What a run is, in the lines that come before its first step."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.lab.training.config import ModelConfig, TrainConfig
from torchrum.lab.training.fabric import Engine
from torchrum.layers.registry import LAYERS


def introduction(config: TrainConfig, model: nn.Module, engine: Engine, folder: Path, own: bool) -> list[str]:
    """Model and parameters, device and folder, the data and the loss to beat: three lines.

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
    reading = f"reading {task.source}; " if task.source else ""
    return [
        f"{config.label}: {described}, {parameters:,} parameters",
        f"on {describe_device(engine.device)}{processes}, {config.precision}; run folder {folder}",
        f"{reading}loss in {task.loss_unit}; the {task.baseline_name} baseline is {task.baseline():.4g}",
    ]


def describe_model(model: ModelConfig) -> str:
    """The layer with its sizes and the options that are not its defaults, or not the paper's if all of those stand."""
    layers = f"{model.num_layers} layers of " if model.num_layers > 1 else ""
    words = [f"{layers}{model.layer}, {model.hidden_size} units"]
    entry = LAYERS.get(model.layer)
    usual: dict[str, Any] = {}
    if entry is not None:
        usual = {name: parameter.default for name, parameter in inspect.signature(entry).parameters.items()}
    if PAPER_OPTIONS.keys() <= model.options.keys():
        usual |= PAPER_OPTIONS
        words.append("the paper's options")
    missing = object()
    changed = (f"{name} {value}" for name, value in model.options.items() if usual.get(name, missing) != value)
    return ", ".join([*words, *changed])


def describe_device(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"the {device.type.upper()} ({threads} thread{'s' * (threads > 1)})"
