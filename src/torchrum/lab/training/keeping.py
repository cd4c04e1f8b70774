"""When checkpoints are written: those that are due at once, the best ones not more often than the disk likes."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torchrum.lab.training.checkpoint import Packed, pack_checkpoint, write_checkpoint

HOLD = 60.0
"""Seconds between two writes within which a new best model waits in memory: one that improves at every validation
would be written each time. A process that is killed meanwhile loses a minute, and comes to the same model again."""


class Keeper:
    """Writes the checkpoints of a run, in its first process.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._written = run, time.monotonic()
        self._held: Packed | None = None

    def keep(self, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any], best: bool, due: bool) -> None:
        """Keep a checkpoint: on the disk if it is ``due``, else, being the best, for a while in memory.

        Args:
            step: steps done.
            weights: the model's state dict.
            state: everything else that a run needs to be resumed.
            best: whether the model scored better than ever.
            due: whether it must be on the disk now.
        """
        packed = pack_checkpoint(step, weights, state)
        if best:
            self._held = None  # no longer the best
        if best and not due and time.monotonic() - self._written < HOLD:
            self._held = packed
            return
        self.flush()
        write_checkpoint(self._run, packed, best)
        self._written = time.monotonic()

    def flush(self) -> None:
        """Write what waits in memory."""
        if self._held is not None:
            write_checkpoint(self._run, self._held, best=True)
            self._held = None
