"""Fixed sets of generated examples: made once from a name, walked through in order."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from torchrum.lab.tasks.base import Batch, Task

MOST = 10**8
"""Of anything in a sequence or a set: more would take days to draw, and more memory than machines have."""


def check_sizes(task: Task, *names: str, least: int = 1, most: int = MOST) -> None:
    """Refuse a task whose fields ``names`` are not whole numbers from ``least`` to ``most``."""
    for name in names:
        value = getattr(task, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            kind = type(task).__name__
            allowed = f"a whole number of at least {least}, at most {most:,}"
            raise ValueError(f"{kind}: {name}={value!r}; it must be {allowed}.")


def named_generator(name: str) -> torch.Generator:
    """A CPU generator whose stream belongs to ``name``: no other name shares it, nor do the plain seeds of training."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))  # 56 bits: seeds are signed 64-bit


def fixed_set(task: Task, count: int, name: str, device: torch.device) -> Batch:
    """``count`` examples that depend on ``name`` alone, the same on every device."""
    return task.batch(count, named_generator(name)).to(device)


def batches(task: Task, count: int, name: str, size: int) -> Iterator[Batch]:
    """The same examples on the CPU, at most ``size`` at a time."""
    whole = fixed_set(task, count, name, torch.device("cpu"))
    for start in range(0, count, size):
        yield whole.rows(start, min(start + size, count))


def take(whole: Batch, size: int, step: Tensor) -> Batch:
    """Batch number ``step`` (an int64 scalar on the device) of a set walked through in order, again and again."""
    count = whole.x.shape[0]
    index = (step * size + torch.arange(size, device=whole.x.device)) % count
    return Batch(whole.x.index_select(0, index), whole.y.index_select(0, index))
