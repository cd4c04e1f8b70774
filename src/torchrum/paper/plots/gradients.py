"""How far gradients reach back through time at the start of training: what section 2.1 of the paper argues about."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from torchrum.paper.plots.style import Figure, baseline, look


def gradients_figure(norms: Mapping[str, NDArray[np.float64]], title: str) -> Figure:
    """Norm of the gradient that reaches each earlier state, relative to the last: median and range over sequences.

    Args:
        norms: for each label ``(T, B)``, row t being |dC/dh_t| / |dC/dh_T| of every sequence.
        title: sizes and inputs.
    """
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for label, values in norms.items():
        back = np.arange(len(values) - 1, -1, -1)  # steps back from the last
        axes.plot(back, np.median(values, 1), **look(label), label=label)
        low, high = np.quantile(values, (0.05, 0.95), 1)
        axes.fill_between(back, low, high, color=look(label)["color"], alpha=0.15, linewidth=0)
    baseline(axes, 1, "neither vanishes nor explodes")
    axes.set(yscale="log", xlabel="steps back from the loss", ylabel="$|dC/dh_{T-k}|\\,/\\,|dC/dh_T|$", title=title)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-12))
    axes.legend(loc="lower left")
    return figure
