"""From a checkpoint back into a run, in any number of processes."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from torchrum.lab.training import random_state
from torchrum.lab.training.assembly import Trained
from torchrum.lab.training.carried import same_form, to_device
from torchrum.lab.training.checkpoint import has_checkpoint
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.config_file import saved_differences
from torchrum.lab.training.errors import RunError
from torchrum.lab.training.fabric import Engine
from torchrum.lab.training.loading import fill
from torchrum.lab.training.optim import load_optimizer_state
from torchrum.lab.training.records import RESULT, Mark, check_metrics
from torchrum.lab.training.run_state import Progress
from torchrum.lab.training.saved_state import ProcessState, SavedState, load_state
from torchrum.lab.training.step import initial_state


class Resumed(NamedTuple):
    """Where a run was."""

    progress: Progress
    mark: Mark | None
    notes: list[str]
    """What to tell the user."""


class Loaded(NamedTuple):
    """A checkpoint that belongs to the run."""

    weights: dict[str, Tensor]
    state: SavedState


def load_run(folder: Path, config: TrainConfig, engine: Engine) -> Loaded | None:
    """The last checkpoint in ``folder``, if there is one, compared with ``config`` before anything is built from it."""
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
    """Fill what is trained from a checkpoint; without one, the run starts anew."""
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
    """Fill what each process has of its own, also where there are more or fewer of them than before."""
    config, engine, step = trained.config, trained.engine, trained.step
    processes, notes = state.processes, []
    mine = processes[engine.rank] if len(processes) == engine.world_size else None
    if config.task.carries_state and mine is None:
        raise RunError(f"{folder} carries the state of {len(processes)} processes; resume it with the same number.")
    for name in processes[0].sums:
        # sums are means over rows, so the mean over the processes stands for any number of them
        totals = [process.sums[name] for process in ([mine] if mine else processes)]
        step.sums[name] = (sum(totals[1:], totals[0]) / len(totals)).to(engine.device)
    if mine is not None:
        step.carried = _carried(folder, trained, mine)
    known = mine if mine is not None else processes[0]  # the data come from the same state in every process
    try:
        restored = random_state.restore(known.random, step.generator)
    except (KeyError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise RunError(f"the checkpoint in {folder} has no random state that fits: {error!r:.200}.") from error
    if not restored:
        step.generator.manual_seed(config.seed + state.progress.step)
        notes.append("the run was on another kind of device: its random numbers start anew, results may differ")
    if mine is None:
        random_state.seed_process(config.seed + state.progress.step, engine.rank)
    return notes


def _carried(folder: Path, trained: Trained, mine: ProcessState) -> object:
    """The carried state on the device, compared with the model's initial one, where it has one."""
    engine, initial = trained.engine, initial_state(trained.module)
    if mine.carried is not None and initial is not None:
        start, stop = engine.share(trained.config.batch_size)
        expected = initial(stop - start, engine.device, next(trained.module.parameters()).dtype)
        if not same_form(mine.carried, expected):
            raise RunError(f"the checkpoint in {folder} carries a state that does not fit the model.")
    return to_device(mine.carried, engine.device)
