"""What takes long to make is made by one of pytest's workers, for all of them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def shared_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder for one run of the tests, the same for all of its workers."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    folder.mkdir(exist_ok=True)
    return folder


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A shared folder that ``make`` has filled, in the first worker that asked for it."""
    folder = shared_folder(tmp_path_factory, name)
    made = folder.with_name(f"{name}.made")
    with FileLock(folder.with_name(f"{name}.lock")):
        if not made.exists():
            make(folder)
            made.touch()
    return folder
