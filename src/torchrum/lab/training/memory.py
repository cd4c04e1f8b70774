"""Runs that cannot work on this machine are refused in words, before anything is written."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchrum.lab.tasks.base import Batch
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.distributed import Engine
from torchrum.lab.training.errors import ConfigError, DivergedError, RunError

TOO_LARGE = re.compile(
    r"can't allocate memory|out of memory|not enough memory|bad_alloc|[Oo]verflow|out of range of int64"
    r"|exceeds? the maximum|too many elements"
)
"""What torch says of sizes that it cannot allocate, or cannot even count."""
NO_NUMBER = "without overflow"
"""What it says of a learning rate beyond the largest number of its type."""
ADVICE = "Choose smaller sizes: --batch_size, --model.hidden_size, or those of the task."
COPIES = 4
"""Of the weights in training: themselves, their gradient, and two of the optimizer."""


@contextmanager
def within_memory() -> Iterator[None]:
    """Sizes that cannot be allocated, and rates beyond the largest number, become an error in words."""
    try:
        yield
    except (MemoryError, OverflowError) as error:
        raise RunError(f"the run does not fit into memory: {str(error) or 'none is left'}. {ADVICE}") from error
    except RuntimeError as error:
        if isinstance(error, RunError):
            raise
        if NO_NUMBER in str(error):
            raise DivergedError(
                "a rate of the optimizer is too large for a float; try a lower --optimizer.lr."
            ) from error
        if not TOO_LARGE.search(str(error)):
            raise
        raise RunError(f"the run does not fit into memory: {str(error).splitlines()[0]:.200}. {ADVICE}") from error


def memory_of(device: torch.device) -> int | None:
    """Bytes of memory that a device has, or this process may have; None where that cannot be told."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else ""
    return min(most, int(text)) if text.isdecimal() else most


@contextmanager
def limited_weights(device: torch.device, most: int | None) -> Iterator[None]:
    """Refuse a model whose weights need more than ``most`` bytes in training, before they are filled."""
    parameters = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal parameters
        parameters += parameter.numel()
        weights = parameters * COPIES * 4
        if most is not None and weights > most:
            raise ConfigError(
                f"model: {parameters:,} parameters take {_size(weights)} in training, but {device.type} has "
                f"{_size(most)}. {ADVICE}"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def check_model(config: TrainConfig, model: nn.Module, engine: Engine) -> None:
    """Refuse a batch that needs more memory than there is and, on a CPU, a model that cannot read one example."""
    row = next(iter(config.task.validation(config.seed))).rows(0, 1)
    _check_batch(config, row, engine.device)
    if engine.device.type != "cpu":  # elsewhere this would compile kernels for a shape that is never used again
        return
    inputs = (row.x, row.lengths, None) if config.task.carries_state else (row.x, row.lengths)
    training = model.training
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), engine.autocast():
            model.eval()(*inputs)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"the model does not fit its task: {error}") from error
    finally:
        model.train(training)


def _check_batch(config: TrainConfig, row: Batch, device: torch.device) -> None:
    most, steps = memory_of(device), row.x.shape[1] if row.x.dim() > 1 else 1
    batch = config.batch_size * (row.x.numel() * 8 + steps * config.model.hidden_size * 4)
    if most is not None and batch > most:
        raise ConfigError(
            f"config: a batch of {config.batch_size:,} sequences of {steps:,} steps takes {_size(batch)} and more, but "
            f"{device.type} has {_size(most)}. {ADVICE}"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"
