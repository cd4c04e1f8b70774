"""Medians by the package's own timer, for trials of kernels."""

from collections.abc import Callable

from torchrum.paper.bench.measure import time_cuda


def milliseconds(*runs: Callable[[], object], samples: int = 15) -> list[float]:
    """Median time of one call of each on the GPU, in turns; see ``time_cuda``."""
    times = time_cuda({str(place): run for place, run in enumerate(runs)}, samples, warmups=3)
    return [times[str(place)].median for place in range(len(runs))]


def microseconds(*runs: Callable[[], object], samples: int = 15) -> list[float]:
    """The same in microseconds."""
    return [1e3 * time for time in milliseconds(*runs, samples=samples)]
