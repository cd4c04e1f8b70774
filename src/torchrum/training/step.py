"""One training step: data, forward, loss, backward, clipping, optimizer, and the sums of what is reported."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrum.training.config import TrainConfig
from torchrum.training.fabric import Engine
from torchrum.training.run_state import detach


class TrainStep:
    """Runs steps and keeps what lasts from one to the next. Nothing in ``run`` waits for the device.

    Args:
        config: the run.
        engine: its processes.
        model, optimizer: as ``engine.setup`` returned them.
        generator: makes the data, on the device.
        data: what the task's ``setup`` returned.
        step: steps done before.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        model: nn.Module,
        optimizer: Optimizer,
        generator: torch.Generator,
        data: Any,
        step: int,
    ) -> None:
        self.config, self.engine, self.model, self.optimizer = config, engine, model, optimizer
        self.generator, self.data = generator, data
        self.position = torch.tensor(step, dtype=torch.int64, device=engine.device)
        self.sums: dict[str, Tensor] = {}
        self.carried: Any = None

    def run(self) -> None:
        """Do one step."""
        task, engine = self.config.task, self.engine
        batch = task.train_batch(self.config.batch_size, self.generator, self.position, self.data)
        if engine.world_size > 1:  # every process makes the whole batch: the data do not depend on their number
            batch = batch.rows(*engine.share(self.config.batch_size))
        if task.carries_state:
            logits, carried = self.model(batch.x, batch.lengths, self.carried)
            self.carried = detach(carried)
        else:
            logits = self.model(batch.x, batch.lengths)
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
            self.position.add_(1)
