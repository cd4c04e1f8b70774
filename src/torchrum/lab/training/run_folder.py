"""Whose a run folder is: claimed by one process, begun once, resumed as the run that it holds."""

from pathlib import Path

from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.config_file import first_of, run_differences
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.loading import read_config
from torchrum.lab.training.lock import FolderLock, lock_folder, lock_free_folder
from torchrum.lab.training.records import holds_run


def claim_run(folder: Path, config: TrainConfig, resume: bool, rename: bool) -> FolderLock:
    """Lock the folder of a run: a new one, or with ``resume`` one that holds the run of ``config``.

    Args:
        folder: where the run is to be.
        config: what is to be trained there.
        resume: whether a run is there.
        rename: whether a new run takes the next free name, as ``folder-2``, where ``folder`` is taken.
    """
    if resume:
        _check_same(folder, config)  # before the lock is made: a folder that holds no run stays as it is
        lock = lock_folder(folder)
    elif rename:
        lock = lock_free_folder(folder)
    else:
        _check_new(folder)
        lock = lock_folder(folder)
    try:  # once more: another process may have come and gone before the lock was taken
        if resume:
            _check_same(folder, config)
        else:
            _check_new(lock.folder)
    except Exception:
        lock.release()
        raise
    return lock


def _check_new(folder: Path) -> None:
    if holds_run(folder):
        raise RunError(
            f"{folder} holds a run already; resume it with fit(folder, resume=True) or "
            f"torchrum train --resume {folder}, or choose another folder."
        )


def _check_same(folder: Path, config: TrainConfig) -> None:
    changed = run_differences(read_config(folder), config)
    if changed:
        raise ConfigError(f"a resumed run cannot change {first_of(changed)}. Start a new run for that.")
