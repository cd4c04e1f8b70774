"""One training step: data, forward, loss, backward, clipping, optimizer, and the sums of what is reported."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrum.cells.base import Cell
from torchrum.lab.training.average import Average
from torchrum.lab.training.carried import copy_into, detached_copy
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.fabric import Engine


class TrainStep:
    """Runs steps and keeps what lasts from one to the next, each in its place. Nothing in ``run`` waits for the device.

    Args:
        config: the run.
        engine: its processes.
        model, optimizer: as ``engine.setup`` returned them.
        generator: makes the data, on the device.
        data: what the task's ``setup`` returned.
        average: of the weights, if there is one.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        model: nn.Module,
        optimizer: Optimizer,
        generator: torch.Generator,
        data: Any,
        average: Average | None = None,
    ) -> None:
        self.config, self.engine, self.model, self.optimizer = config, engine, model, optimizer
        self.generator, self.data, self.average = generator, data, average
        self.position = torch.zeros((), dtype=torch.int64, device=engine.device)
        self._annealed = [m for m in model.modules() if isinstance(m, Cell) and type(m).at_step is not Cell.at_step]
        self.sums: dict[str, Tensor] = {}
        self.carried: Any = None
        self.shape: Hashable = None
        """What the shapes of the next step depend on."""

    def prepare(self, step: int) -> None:
        """Make ready on the host for the step that follows ``step`` finished ones."""
        task = self.config.task
        self.shape = task.plan(self.config.batch_size, step, self.data)
        if task.carries_state and task.starts_over(step):
            self._forget()
        for cell in self._annealed:
            cell.at_step(step)

    def run(self) -> None:
        """Do one step."""
        task, engine = self.config.task, self.engine
        batch = task.train_batch(self.config.batch_size, self.generator, self.position, self.data)
        if engine.world_size > 1:  # every process makes the whole batch: the data do not depend on their number
            batch = batch.rows(*engine.share(self.config.batch_size))
        if task.carries_state:
            logits, carried = self.model(batch.x, batch.lengths, self.carried)
        else:
            logits, carried = self.model(batch.x, batch.lengths), None
        loss = task.loss(logits, batch)
        self.optimizer.zero_grad()
        engine.backward(loss)
        if self.config.optimizer.clip is not None:
            engine.clip(self.model, self.optimizer, self.config.optimizer.clip)
        self.optimizer.step()
        with torch.no_grad():
            for name, value in {"loss": loss, **task.metrics(logits.detach(), batch)}.items():
                if name not in self.sums:
                    self.sums[name] = torch.zeros((), device=engine.device)
                self.sums[name].add_(value.detach())
            # after the backward, which reads the state that the step began with
            self.carried = detached_copy(carried) if self.carried is None else copy_into(self.carried, carried)
            if self.average is not None:
                self.average.update(self.position)
            self.position.add_(1)

    def _forget(self) -> None:
        """Put the initial state in the place of the carried one."""
        initial = initial_state(self.model)
        if self.carried is None or initial is None:
            self.carried = None
            return
        start, stop = self.engine.share(self.config.batch_size)
        dtype = next(self.model.parameters()).dtype
        with torch.no_grad():
            copy_into(self.carried, initial(stop - start, self.engine.device, dtype))


def initial_state(model: nn.Module) -> Any:
    """The method of that name of a model, however wrapped; None if it has none."""
    while not hasattr(type(model), "initial_state") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return getattr(model, "initial_state", None) if hasattr(type(model), "initial_state") else None
