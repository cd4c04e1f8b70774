"""Torch's default device, which must not decide where the tensors of a run are: its config does."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_host() -> Iterator[None]:
    """Make tensors without a device on the CPU, where data and weights are drawn, whatever the default device is."""
    if torch.get_default_device().type == "cpu":  # the usual case; entering a device costs every call of torch time
        yield
    else:
        with torch.device("cpu"):
            yield
