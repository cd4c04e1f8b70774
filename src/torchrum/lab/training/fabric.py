"""Processes, devices, precision and trackers: the one module that knows Lightning Fabric."""

import importlib
import logging
import re
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.launch import check_launch
from torchrum.lab.training.signals import Interrupts

T = TypeVar("T")


def preload() -> None:
    """Import Lightning Fabric, the longest import of a run, ahead of the first ``Engine``."""
    importlib.import_module("lightning_fabric")


class Engine:
    """The processes of one run, started and connected; with one process every exchange is a plain call.

    Under torchrun or SLURM the processes are there already. Otherwise, with ``devices`` above one, the same command is
    started once more for each further process.
    """

    def __init__(self, config: TrainConfig) -> None:
        with Interrupts():  # an import might swallow the exception that Ctrl-C raises
            from lightning_fabric import Fabric

        if config.device == "cuda" and not torch.cuda.is_available():
            raise RunError("device='cuda', but torch sees no CUDA device; pass --device cpu, or auto.")
        cuda = config.device != "cpu" and torch.cuda.is_available()
        many = max(check_launch(config), config.devices * config.nodes) > 1
        if config.logger != "none":
            try:
                importlib.import_module(config.logger)  # both trackers are named like their package
            except ModuleNotFoundError as error:
                advice = f'pip install "torchrum[{config.logger}]"'
                raise RunError(f"logger={config.logger!r} needs a package: {advice} ({error}).") from error
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its banner would break the progress bar
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about other accelerators; precision is checked in the config
            self._fabric = Fabric(
                accelerator="cuda" if cuda else "cpu",
                strategy="ddp" if many else "auto",
                devices=config.devices,
                num_nodes=config.nodes,
                precision=config.precision,
            )
            self._fabric.launch()
        self.rank: int = self._fabric.global_rank
        self.world_size: int = self._fabric.world_size
        self.device: torch.device = self._fabric.device
        self._tracker: Any = None
        if config.batch_size % self.world_size:
            raise ConfigError(
                f"batch_size {config.batch_size} cannot be divided among {self.world_size} processes; choose "
                "a multiple of that number."
            )

    def share(self, size: int) -> tuple[int, int]:
        """First and last-but-one row of this process in a batch of ``size`` rows."""
        rows = size // self.world_size
        return self.rank * rows, (self.rank + 1) * rows

    def setup(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Wrap both for the precision and the processes; the optimizer's state stays in the one given."""
        wrapped, stepper = self._fabric.setup(model, optimizer)
        return wrapped, stepper

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, in the precision of the run."""
        return self._fabric.strategy.precision.convert_module(model).to(self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the run, for a model that is called unwrapped."""
        return self._fabric.autocast()

    def backward(self, loss: Tensor) -> None:
        """Backpropagate, and sum the gradients of the processes."""
        self._fabric.backward(loss)

    def clip(self, model: nn.Module, optimizer: Optimizer, max_norm: float) -> None:
        """Limit the norm of the whole gradient; one without a finite norm becomes zero. Nothing is read on the host."""
        norm = self._fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
        assert norm is not None
        lost = ~norm.isfinite()  # over a thousand steps a gradient can outgrow float32
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.masked_fill_(lost, 0.0)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of ``value`` over the processes."""
        return value if self.world_size == 1 else self._fabric.all_reduce(value, reduce_op="mean")  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        """What the first process passes, in all of them."""
        return value if self.world_size == 1 else self._fabric.broadcast(value)

    def gather(self, value: T) -> list[T]:
        """What each process passes, in the order of their ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def first(self, work: Callable[[], T]) -> T:
        """Do ``work`` in the first process alone; its result, or its failure, is that of all processes."""
        outcome: Any = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                outcome = work()
            except Exception as error:
                failure = error
        told = None if failure is None else (type(failure).__name__, str(failure))
        outcome, told = self.broadcast((outcome, told))
        if failure is not None:
            raise failure
        if told is not None:
            raise ConfigError(told[1]) if told[0] == "ConfigError" else RunError(told[1])
        return outcome

    def scaler_state(self) -> dict[str, Any]:
        """State of the loss scaling of 16-mixed; empty otherwise."""
        return self._fabric.strategy.precision.state_dict()

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Put ``scaler_state``'s result back."""
        self._fabric.strategy.precision.load_state_dict(state)

    def start_tracker(self, kind: str, folder: Path, name: str, config: dict[str, Any]) -> None:
        """Open TensorBoard or Weights & Biases in the first process."""
        if kind == "none" or self.rank > 0:
            return
        if kind == "tensorboard":
            from lightning_fabric.loggers import TensorBoardLogger

            self._tracker = TensorBoardLogger(root_dir=folder, name="tensorboard", version="")
        else:
            import wandb

            self._tracker = _Wandb(wandb.init(project="torchrum", name=name, dir=str(folder), config=config))

    def track(self, kind: str, values: dict[str, float], step: int) -> None:
        """Send numbers to the tracker, if there is one."""
        if self._tracker is not None:
            self._tracker.log_metrics({f"{kind}/{name}": value for name, value in values.items()}, step)

    def close(self) -> None:
        """Close the tracker."""
        if self._tracker is not None:
            self._tracker.finalize("success")


LOST = re.compile(r"gloo|NCCL|Connection (?:reset|closed|refused)|Broken pipe|Dist(?:Network|Backend|Store)Error")
"""What torch says of an exchange when another process has ended."""
LET_GO = 0.1  # seconds


def leave_together() -> None:
    """End the processes of a run at once: one that ends while another is still connected can bring that one down."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        # gloo's thread needs the interpreter to let go of the barrier; the group's destructor waits for that thread
        # without giving the interpreter up
        time.sleep(LET_GO)
        torch.distributed.destroy_process_group()


class _Wandb:
    """A W&B run with the two calls of a Fabric logger; Fabric itself has none."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def finalize(self, status: str) -> None:
        self._run.finish()
