"""Recording CUDA graphs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def recording(
    graph: torch.cuda.CUDAGraph,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    *,
    other_threads: bool = False,
) -> Iterator[None]:
    """``torch.cuda.graph``, with the garbage collector at rest: freeing an older graph would end the recording.

    Args:
        graph: takes what is enqueued inside.
        pool, stream: as in ``torch.cuda.graph``.
        other_threads: whether other threads may use CUDA freely meanwhile, as a data loader's does.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        mode = "thread_local" if other_threads else "global"
        with torch.cuda.graph(graph, pool, stream, capture_error_mode=mode):
            yield
    finally:
        if collecting:
            gc.enable()
