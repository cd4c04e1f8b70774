"""Load a run back from its checkpoint: the trained model, or the whole run in any number of processes."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchrum.lab.training.checkpoint import has_checkpoint, load_checkpoint, restore_random_state, seed_process
from torchrum.lab.training.config import TrainConfig, require_one_of, saved_differences
from torchrum.lab.training.distributed import Engine, on_host
from torchrum.lab.training.errors import RunError
from torchrum.lab.training.optim import load_optimizer_state
from torchrum.lab.training.run_folder import CONFIG, RESULT, Mark, Progress, check_metrics, read_config
from torchrum.lab.training.step import Trained, build, initial_state, same_form, to_device
from torchrum.lab.training.typed_data import Reader


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """State of one process."""

    random: dict[str, Any]
    """See ``collect_random_state``."""
    carried: Any
    """State carried from batch to batch, a nested tuple of tensors; None if there is none."""
    sums: dict[str, Tensor]
    """Sums of the loss and the metrics since the last log line, scalars."""

    def __post_init__(self) -> None:
        for name, total in self.sums.items():
            if total.dim() or not total.is_floating_point():
                raise ValueError(f"sums.{name} is {total.dtype} of shape {tuple(total.shape)}, not one real number.")
        if "loss" not in self.sums:
            raise ValueError("the field sums.loss is missing.")


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """State of a run in a checkpoint, beside the weights."""

    config: dict[str, Any]
    """The whole config as plain data; old checkpoints have only the fields of ``identity``."""
    progress: Progress
    optimizer: dict[int, dict[str, Any]]
    """The optimizer's state of each parameter, by number."""
    scaler: dict[str, Any]
    """The loss scaling of 16-mixed; empty otherwise."""
    processes: list[ProcessState]
    trained: dict[str, Tensor] | None = None
    """Trained weights, if the weights of the checkpoint are their average."""
    metrics: Mark | None = None
    """Size and hash of metrics.jsonl; None in old checkpoints."""

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
    """Refuse a config that differs from that of the checkpoint in ``identity`` or, with ``whole``, in any field.

    Args:
        run: the run folder.
        config: that of its ``config.json``.
        state: that of its checkpoint.
        whole: compare also the fields that a resumed run may change.
    """
    changed = saved_differences(state.config, config, whole)
    if changed:
        raise RunError(
            f"{run / CONFIG} is not the config of the run's checkpoint: {'; '.join(changed)}. "
            "Change it back, or restore it from a backup."
        )


def check_ended_run(run: Path, config: TrainConfig) -> None:
    """Refuse a finished run whose config or metrics differ from its last checkpoint."""
    _, state = load_state(run)
    check_config(run, config, state, whole=True)
    if state.metrics is not None:
        check_metrics(run, state.metrics, ended=True)


WEIGHT_TYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}  # other precisions keep float32 weights


def fill(model: nn.Module, weights: dict[str, Any], run: Path) -> None:
    """Load weights into a model; names and shapes must be equal."""
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


@on_host()
def load_model(run: Path | str, which: Literal["last", "best"] = "best") -> nn.Module:
    """Load the trained model of a run folder, on the CPU and in eval mode.

    Args:
        run: the run folder.
        which: the checkpoint to load: the best on validation, or the last.
    """
    require_one_of("load_model", "which", which, ("last", "best"))
    run = Path(run)
    config = read_config(run)
    weights, state = load_state(run, which)
    check_config(run, config, state)
    model = build(config).to(dtype=WEIGHT_TYPES.get(config.precision, torch.float32))
    fill(model, weights, run)
    return model.eval()


class Resumed(NamedTuple):
    """State of a resumed run."""

    progress: Progress
    mark: Mark | None
    notes: list[str]
    """Lines to print."""


class Loaded(NamedTuple):
    """A checkpoint that belongs to the run."""

    weights: dict[str, Tensor]
    state: SavedState


def load_run(folder: Path, config: TrainConfig, engine: Engine) -> Loaded | None:
    """Load the last checkpoint in ``folder``, if there is one, and compare it with ``config``."""
    if not engine.first(lambda: has_checkpoint(folder)):
        return None
    if engine.world_size > 1:
        engine.first(lambda: bool(load_state(folder)))  # one clear failure instead of one from each process
    weights, state = load_state(folder)
    changed = saved_differences(state.config, config)
    if changed:
        raise RunError(f"the checkpoint in {folder} belongs to another run: {'; '.join(changed)}.")
    mark, progress = state.metrics, state.progress
    if mark is not None:
        engine.first(lambda: check_metrics(folder, mark))
    done = progress.step >= config.steps or (config.stop_at is not None and progress.reached >= config.stop_after)
    if done and engine.first(lambda: (folder / RESULT).exists()):
        steps = f"{progress.step} steps are done, {config.steps} are asked for"
        raise RunError(f"{folder} is complete: {steps}. Pass more --steps, or --stop_at none.")
    return Loaded(weights, state)


def restore(folder: Path, trained: Trained, loaded: Loaded | None) -> Resumed:
    """Restore model, optimizer and step from a checkpoint; without one, the run starts from the first step."""
    if loaded is None:
        return Resumed(Progress(), None, [f"{folder} has no checkpoint yet: starting from the first step"])
    engine, config, state = trained.engine, trained.config, loaded.state
    fill(trained.scored, loaded.weights, folder)
    if trained.scored is not trained.module:
        fill(trained.module, state.trained or {}, folder)
    load_optimizer_state(trained.optimizer, config.optimizer, state.optimizer, folder)
    try:
        engine.load_scaler_state(state.scaler)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise RunError(f"the checkpoint in {folder} has no loss scaling state that fits: {error}.") from error
    step = state.progress.step
    trained.step.position.fill_(step)
    notes = [f"resuming {folder} at step {step}", *_share(folder, trained, state)]
    return Resumed(state.progress, state.metrics, notes)


def _share(folder: Path, trained: Trained, state: SavedState) -> list[str]:
    """Restore the state of each process, also if their number has changed."""
    config, engine, step = trained.config, trained.engine, trained.step
    processes, notes = state.processes, []
    mine = processes[engine.rank] if len(processes) == engine.world_size else None
    if config.task.carries_state and mine is None:
        raise RunError(f"{folder} carries the state of {len(processes)} processes; resume it with the same number.")
    for name in processes[0].sums:
        # sums are means over rows, so the mean over processes is right for any number of them
        totals = [process.sums[name] for process in ([mine] if mine else processes)]
        step.sums[name] = (sum(totals[1:], totals[0]) / len(totals)).to(engine.device)
    if mine is not None:
        step.carried = _carried(folder, trained, mine)
    known = mine if mine is not None else processes[0]  # the data come from the same state in every process
    try:
        restored = restore_random_state(known.random, step.generator)
    except (KeyError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise RunError(f"the checkpoint in {folder} has no random state that fits: {error!r:.200}.") from error
    if not restored:
        step.generator.manual_seed(config.seed + state.progress.step)
        notes.append("the run was on another kind of device: its random numbers start anew, results may differ")
    if mine is None:
        seed_process(config.seed + state.progress.step, engine.rank)
    return notes


def _carried(folder: Path, trained: Trained, mine: ProcessState) -> object:
    """Move the carried state to the device; its form must be that of the model's initial state."""
    engine, initial = trained.engine, initial_state(trained.module)
    if mine.carried is not None and initial is not None:
        start, stop = engine.share(trained.config.batch_size)
        expected = initial(stop - start, engine.device, next(trained.module.parameters()).dtype)
        if not same_form(mine.carried, expected):
            raise RunError(f"the checkpoint in {folder} carries a state that does not fit the model.")
    return to_device(mine.carried, engine.device)
