"""What is trained: model, optimizer, data and step, put together from a config."""

from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchrum.lab.training import random_state
from torchrum.lab.training.average import Average
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.fabric import Engine
from torchrum.lab.training.loading import build
from torchrum.lab.training.memory import check_model, check_weights
from torchrum.lab.training.optim import build_optimizer
from torchrum.lab.training.step import TrainStep
from torchrum.layers.cells import compile_steps


class Trained(NamedTuple):
    """The parts of a run that a checkpoint fills."""

    config: TrainConfig
    engine: Engine
    module: nn.Module
    """The model that is trained."""
    scored: nn.Module
    """The model that is validated and kept; the same, or its average."""
    optimizer: Optimizer
    step: TrainStep
    graph: bool
    """Whether a step is to be captured in a CUDA graph."""


def assemble(config: TrainConfig, engine: Engine, given: nn.Module | None = None) -> Trained:
    """Build what a config describes, on the engine's device; nothing is written.

    Args:
        config: the run.
        engine: its processes.
        given: a model of the caller's own instead of the config's.
    """
    if given is None:
        check_weights(config, engine.device)
    torch.manual_seed(config.seed)  # every process starts from the same weights
    module = engine.place(build(config) if given is None else given)
    graph = config.graph and engine.device.type == "cuda" and engine.world_size == 1
    if given is None:
        check_model(config, module, engine)
    if config.compile and not compile_steps(module):
        raise ConfigError(
            f"compile=true, but the layer {config.model.layer!r} has no steps to compile; leave compile out."
        )
    optimizer = build_optimizer(config.optimizer, module, graph, engine.device)
    model, prepared = engine.setup(module, optimizer)
    generator = torch.Generator(engine.device).manual_seed(config.seed)
    random_state.seed_process(config.seed, engine.rank)
    data = config.task.setup(engine.device, config.seed)
    average = None if config.average is None else Average(module, config.average)
    step = TrainStep(config, engine, model, prepared, generator, data, average)
    return Trained(config, engine, module, module if average is None else average.model, optimizer, step, graph)
