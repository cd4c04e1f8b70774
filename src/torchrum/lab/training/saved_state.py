"""What a checkpoint holds besides the weights, checked as it is read: a run is what its checkpoint says."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from torchrum.lab.training.checkpoint import load_checkpoint
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.config_file import saved_differences
from torchrum.lab.training.errors import RunError
from torchrum.lab.training.records import CONFIG, Mark, check_metrics
from torchrum.lab.training.run_state import Progress
from torchrum.lab.training.typed_data import Reader


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """What one of the processes remembers."""

    random: dict[str, Any]
    """See ``random_state.collect``."""
    carried: Any
    """The state that is carried from batch to batch, a nested tuple of tensors; None if there is none."""
    sums: dict[str, Tensor]
    """Sums of what is reported since the last line, scalars."""

    def __post_init__(self) -> None:
        for name, total in self.sums.items():
            if total.dim() or not total.is_floating_point():
                raise ValueError(f"sums.{name} is {total.dtype} of shape {tuple(total.shape)}, not one real number.")
        if "loss" not in self.sums:
            raise ValueError("the field sums.loss is missing.")


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a run gives ``pack_checkpoint``, and gets back."""

    config: dict[str, Any]
    """The whole config as plain data; in checkpoints from before, the part that makes the run what it is."""
    progress: Progress
    optimizer: dict[int, dict[str, Any]]
    """The optimizer's state of each parameter, by number."""
    scaler: dict[str, Any]
    """The loss scaling of 16-mixed; empty otherwise."""
    processes: list[ProcessState]
    trained: dict[str, Tensor] | None = None
    """The weights that are trained, where the checkpoint's own are their average."""
    metrics: Mark | None = None
    """How far metrics.jsonl was; None in checkpoints from before."""

    def __post_init__(self) -> None:
        try:
            json.dumps(self.config)
        except TypeError as error:  # a tensor cannot even be compared with a number
            raise ValueError(f"config is not plain data: {error}.") from error
        done = self.progress
        counts = (done.reached, done.waited, done.drops)
        if not (0 <= done.since_log <= done.step and 0 <= done.best_step <= done.step and min(counts) >= 0):
            raise ValueError(f"progress is inconsistent: {done}.")
        if not 0 <= done.seconds < math.inf or (done.best is not None and not math.isfinite(done.best)):
            raise ValueError(f"progress has numbers that are not finite: {done}.")
        if not self.processes or any(one.sums.keys() != self.processes[0].sums.keys() for one in self.processes):
            raise ValueError("processes must hold at least one, each with sums of the same names.")


def load_state(run: Path, which: Literal["last", "best"] = "last") -> tuple[dict[str, Tensor], SavedState]:
    """Weights and state of a checkpoint of a run, see ``load_checkpoint``."""
    weights, state = load_checkpoint(run, which)
    return weights, Reader(f"the state of the {which} checkpoint in {run}").build(SavedState, state)


def check_config(run: Path, config: TrainConfig, state: SavedState, whole: bool = False) -> None:
    """Refuse a config that is not that of the checkpoint: in what makes it another run or, with ``whole``, in anything.

    Args:
        run: the run folder.
        config: that of its ``config.json``.
        state: that of its checkpoint.
        whole: whether also fields must agree that a resumed run may change.
    """
    changed = saved_differences(state.config, config, whole)
    if changed:
        raise RunError(
            f"{run / CONFIG} is not the config of the run's checkpoint: {'; '.join(changed)}. "
            "Change it back, or restore it from a backup."
        )


def check_ended_run(run: Path, config: TrainConfig) -> None:
    """Refuse a run that has ended, but whose config or metrics are not those of its last checkpoint."""
    _, state = load_state(run)
    check_config(run, config, state, whole=True)
    if state.metrics is not None:
        check_metrics(run, state.metrics, ended=True)
