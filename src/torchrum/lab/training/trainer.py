"""``Trainer``: from a config to a finished run folder."""

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import nn

from torchrum.lab.training.assembly import assemble
from torchrum.lab.training.checkpoint import has_checkpoint
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.default_device import on_host
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.fabric import LOST, Engine
from torchrum.lab.training.introduction import introduction
from torchrum.lab.training.memory import within_memory
from torchrum.lab.training.resume import load_run, restore
from torchrum.lab.training.run import Run
from torchrum.lab.training.run_folder import claim_run
from torchrum.lab.training.run_state import Result
from torchrum.lab.training.signals import Interrupts
from torchrum.lab.training.typed_data import shown


class Trainer:
    """Trains what a config says: ``Trainer(load_recipe("copying-rum")).fit("runs/copying-rum")``.

    Args:
        config: the run.
        model: a model of your own instead of the config's; it is called as ``Task`` describes.
        quiet: show no progress.
        on_end: called with the run folder once a run is complete, in one process; for example
            ``torchrum.paper.plots.curve.draw_curve``, which draws its curve.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module | None = None,
        quiet: bool = False,
        on_end: Callable[[Path], object] | None = None,
    ) -> None:
        if not isinstance(config, TrainConfig):
            raise ConfigError(
                f"Trainer: config is {shown(config)}, but it must be a TrainConfig; try load_recipe(...)."
            )
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(f"Trainer: model is {shown(model)}, but it must be a torch.nn.Module, or None.")
        if on_end is not None and not callable(on_end):
            raise ConfigError(
                f"Trainer: on_end is {shown(on_end)}, but it must be a function of the run folder, or None."
            )
        self.config = config
        self._given, self._quiet, self._on_end = model, quiet, on_end

    @on_host()
    def fit(self, folder: Path | str, resume: bool = False, rename: bool = False) -> Result:
        """Train to the end, to the goal, or to a signal.

        Args:
            folder: the run folder; a new one, or with ``resume`` that of an interrupted run.
            resume: start from the last checkpoint. The config must describe the same run; its length may change.
            rename: give a new run the next free name, as ``folder-2``, where ``folder`` is taken.

        Returns:
            How the run ended, its last step, and its scores on the validation set.
        """
        config, engine, place = self.config, Engine(self.config), Path(folder)
        with Interrupts() as interrupts, ExitStack() as held:

            def claim() -> Path:
                return held.enter_context(claim_run(place, config, resume, rename)).folder

            with advice_on_failure(engine, place):
                place = engine.first(claim)
            with within_memory():
                loaded = load_run(place, config, engine) if resume else None
                trained = assemble(config, engine, self._given)
                resumed = restore(place, trained, loaded) if resume else None
                lines = introduction(config, trained.module, engine, place, own=self._given is not None)
                # nothing was written up to here: a checkpoint that does not fit leaves the folder as it was
                with advice_on_failure(engine, place):
                    run = Run(trained, place, interrupts, resumed, self._quiet)
                    return run.train([*lines, *(resumed.notes if resumed else ())], self._on_end)


@contextmanager
def advice_on_failure(engine: Engine, folder: Path) -> Iterator[None]:
    """What the disk refuses, or a process that was killed, becomes an error that says how to resume."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RunError) or engine.world_size == 1 or not LOST.search(str(error)):
            raise
        again = f"--resume {folder}" if has_checkpoint(folder) else "RECIPE"
        raise RunError(
            f"another process of the run has ended, and this one cannot continue alone; start it again with: "
            f"torchrum train {again}"
        ) from error
    except OSError as error:
        further = (
            f"Earlier checkpoints are intact; free disk space, then: torchrum train --resume {folder}"
            if has_checkpoint(folder)
            else "Free disk space or choose another --out."
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "Choose another --out."
        )
        raise RunError(f"{error.filename or folder} cannot be written: {error.strerror or error}. {further}") from error
